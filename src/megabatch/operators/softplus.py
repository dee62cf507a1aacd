"""Sums of softplus over the logits: per row with a second pass for the gradient, and the sigmoid loss, which needs no
second pass.
"""

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
# Row sums of softplus over the similarities; backward is a second pass, because every row may have a weight of its own.


class SoftplusInputs(NamedTuple):
    """Pairs with equal ids are left out of the sums; or they are positives, and enter them as softplus(−s_ij)."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor  # (N,)
    ids: Tensor | None  # (N,) of rows and of columns
    ids_are_positives: bool
    apart: bool  # the pairs (i, i) are left out of the sums
    precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """The similarities."""
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            row_ids=self.ids,
            col_ids=self.ids,
            skip_diagonal=self.apart,
            ids_are_positives=self.ids_are_positives and self.ids is not None,
        )


def _softplus_shapes(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0] if given.apart else 0)


@define(SoftplusInputs, results=2, fake=_softplus_shapes)
def softplus(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    """(Σ_j log(1 + exp s_ij), s_ii). The second is empty unless the pairs (i, i) are kept apart."""
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "softplus", mean=given.apart)
    match = matching_logits(block, passes.local.matching_products(block)) if given.apart else block.zeros(0)
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
    """(dx, dy, dscale, drow_bias)."""
    block, wanted = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "softplus backward", needs=wanted)
    grad_scale = choose_grad_scale(block.scale, block.precision, dtotal, largest=passes.largest)
    sums = column_sums(block, wanted)
    strips = passes.tiles.softplus_gradients(block, dtotal / grad_scale, sums, wanted)
    own = dmatch / grad_scale if given.apart else None
    return finish(passes.local, block, strips, sums, wanted, scale=given.scale, grad_scale=grad_scale, dmatch=own)[:4]


derivative(softplus, softplus_backward, SoftplusInputs, learned=4, results=2)


# ----------------------------------------------------------------------------------------------------------------------
# The sigmoid loss, with its gradient computed in the forward pass.
#
# Every pair has the same weight in a mean, so the gradient is known up to one factor before backward is called. Computing
# it while the tile exists saves the second product of similarities: 6·N²·D operations in all instead of 8. Until backward
# multiplies them by the factor, gradients are kept in the type of the inputs, or in float32 for float16. A factor that is
# not a power of two costs one more rounding.


def _dtype_to_save(given: SoftplusInputs) -> torch.dtype | None:
    """The gradients wait for their factor in their own type, except fp16, which could not hold 1/N without its loss scale."""
    return torch.float32 if torch.float16 in (given.x.dtype, given.y.dtype) else None


def _shapes(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    gradients = empty_gradients(given.x, given.y, given.scale, Needs(*needs), _dtype_to_save(given))
    return statistic(given.x), *gradients[:4]


@define(SoftplusInputs, "bool mean, bool[] needs", results=5, fake=_shapes)
def sigmoid_loss(given: SoftplusInputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    """(Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] · mean_weight, dx, dy, dscale, drow_bias): the loss and its gradients.

    The pairs (i, i) have to be kept apart. The `mean_weight` of a mean is 1/N for one process. Over R ranks with B pairs
    together it is R/B, so that the mean over ranks is the loss. The `mean_weight` of a sum is 1.
    """
    block, wanted = given.block(), Needs(*needs)
    terms = {"the reduction": "mean" if mean else "sum"}
    passes = passes_for(given.group, given.backend, block, "sigmoid loss", needs=wanted, mean=True, terms=terms)
    mean_weight = passes.mean_weight if mean else 1.0
    match = matching_logits(block, passes.local.matching_products(block))
    if any(wanted):
        total = block.zeros(block.N)
        sums = column_sums(block, wanted)
        grad_scale = choose_grad_scale(block.scale, block.precision, torch.ones_like(block.scale))
        weight = torch.ones_like(total) / grad_scale if block.precision == FLOAT16 else None
        strips = passes.tiles.softplus_gradients(block, weight, sums, wanted, total=total)
        dmatch = -torch.sigmoid(-match) / grad_scale
        gradients = finish(
            passes.local,
            block,
            strips,
            sums,
            wanted,
            scale=given.scale,
            grad_scale=grad_scale * mean_weight,
            dmatch=dmatch,
            dtype=_dtype_to_save(given),
        )
    else:
        total = passes.tiles.softplus_sums(block)
        gradients = empty_gradients(given.x, given.y, given.scale, wanted, _dtype_to_save(given))
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
    asked = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:4], strict=True)
    return *((dloss * gradient).to(dtype) if need else None for gradient, dtype, need in asked), *nothing


differentiable(sigmoid_loss, _backward, _save)
