"""Sums of softplus over the logits: row sums with a second pass for the gradient, and the sigmoid loss with only one pass."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.operators.autograd import (
    TWICE,
    choose_grad_scale,
    column_sums,
    define,
    derivative,
    differentiable,
    empty_gradients,
    finish,
    passes_for,
    statistic,
)
from megabatch.tiles.block import FLOAT16, Block, Needs, matching_logits

# ----------------------------------------------------------------------------------------------------------------------
# Row sums of softplus over the logits. Backward needs a second pass, because the rows may have different weights.


class SoftplusInputs(NamedTuple):
    """The embeddings and ids. Pairs with equal ids are excluded, or they are positives and are summed as softplus(−s_ij)."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor  # (N,)
    ids: Tensor | None  # (N,) the ids of both rows and columns
    ids_are_positives: bool
    separate: bool  # whether the pairs (i, i) are excluded from the sums and returned as a separate vector
    precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """Returns the description of the logits."""
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            row_ids=self.ids,
            col_ids=self.ids,
            skip_diagonal=self.separate,
            ids_are_positives=self.ids_are_positives and self.ids is not None,
        )


def _softplus_shapes(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0] if given.separate else 0)


@define(SoftplusInputs, results=2, fake=_softplus_shapes)
def softplus(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    """Returns (Σ_j log(1 + exp s_ij), s_ii). The second result is empty if the diagonal is not separate."""
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "softplus", mean=given.separate)
    match = matching_logits(block, passes.local.matching_products(block)) if given.separate else block.zeros(0)
    return passes.tiles.softplus_sums(block), match


def _gradient_shapes(given: SoftplusInputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:4]


@define(SoftplusInputs, "Tensor dtotal, Tensor dmatch, bool[] needs", results=4, fake=_gradient_shapes)
def softplus_backward(
    given: SoftplusInputs,
    dtotal: Tensor,  # (N,)
    dmatch: Tensor,  # (N,) or (0,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Returns (dx, dy, dscale, drow_bias)."""
    block, needed = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "softplus backward", needs=needed)
    grad_scale = choose_grad_scale(block.scale, block.precision, dtotal, largest=passes.largest)
    sums = column_sums(block, needed)
    strips = passes.tiles.softplus_gradients(block, dtotal / grad_scale, sums, needed)
    own = dmatch / grad_scale if given.separate else None
    return finish(passes.local, block, strips, sums, needed, scale=given.scale, grad_scale=grad_scale, dmatch=own)[:4]


derivative(softplus, softplus_backward, SoftplusInputs, learned=4, results=2)


# ----------------------------------------------------------------------------------------------------------------------
# The sigmoid loss, with its gradient computed in the forward pass.
#
# Every pair has the same weight in a mean, so the gradient is known up to one factor before backward is called. If it is
# computed while the tile exists, the logits need not be computed twice, which takes 6·N²·D operations in total instead of 8.
# Until backward multiplies the gradients by the factor, they are stored in the dtype of the inputs, or in float32 if the inputs
# are float16. A factor that is not a power of two causes one more rounding.


def _dtype_to_save(given: SoftplusInputs) -> torch.dtype | None:
    """Returns the dtype of gradients until backward, where None means their own dtype.

    Float16 gradients are stored in float32. They do not contain the loss scale yet, so 1/N would underflow in float16.
    """
    return torch.float32 if torch.float16 in (given.x.dtype, given.y.dtype) else None


def _shapes(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    gradients = empty_gradients(given.x, given.y, given.scale, Needs(*needs), _dtype_to_save(given))
    return statistic(given.x), *gradients[:4]


@define(SoftplusInputs, "bool mean, bool[] needs", results=5, fake=_shapes)
def sigmoid_loss(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns the loss Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] · mean_weight, then dx, dy, dscale and drow_bias.

    The diagonal has to be separate. The `mean_weight` of a mean is 1/N for one process. Over R ranks with a total of B pairs,
    it is R/B, so that the mean over ranks is the loss. The `mean_weight` of a sum is 1.
    """
    block, needed = given.block(), Needs(*needs)
    terms = {"the reduction": "mean" if mean else "sum"}
    passes = passes_for(given.group, given.backend, block, "sigmoid loss", needs=needed, mean=True, terms=terms)
    mean_weight = passes.mean_weight if mean else 1.0
    match = matching_logits(block, passes.local.matching_products(block))
    if any(needed):
        total = block.zeros(block.N)
        sums = column_sums(block, needed)
        grad_scale = choose_grad_scale(block.scale, block.precision, torch.ones_like(block.scale))
        weight = torch.ones_like(total) / grad_scale if block.precision == FLOAT16 else None
        strips = passes.tiles.softplus_gradients(block, weight, sums, needed, total=total)
        dmatch = -torch.sigmoid(-match) / grad_scale
        gradients = finish(
            passes.local,
            block,
            strips,
            sums,
            needed,
            scale=given.scale,
            grad_scale=grad_scale * mean_weight,
            dmatch=dmatch,
            dtype=_dtype_to_save(given),
        )
    else:
        total = passes.tiles.softplus_sums(block)
        gradients = empty_gradients(given.x, given.y, given.scale, needed, _dtype_to_save(given))
    total -= F.logsigmoid(match)
    loss = total.sum(dtype=torch.float64) * mean_weight
    return loss.to(block.dtype), *gradients[:4]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [tensor.dtype for tensor in inputs[:4]]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *dgradients: Tensor | None) -> tuple[Any, ...]:
    if any(d is not None for d in dgradients):
        raise RuntimeError(TWICE)
    nothing = (None,) * 8
    if dloss is None:
        return None, None, None, None, *nothing
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:4], strict=True)
    return *((dloss * gradient).to(dtype) if need else None for gradient, dtype, need in saved), *nothing


differentiable(sigmoid_loss, _backward, _save)
