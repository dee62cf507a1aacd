"""The sigmoid loss, with its gradient computed in the forward pass.

Every pair has the same weight in a mean, so the gradient is known up to one factor before backward is called. Computing it
while the tile exists saves the second product of similarities: 6·N²·D operations in all instead of 8. Until backward multiplies
them by the factor, gradients are kept in the type of the inputs, or in float32 for float16. A factor that is not a power of two
costs one more rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.operators.definition import TWICE, define
from megabatch.operators.gradients import column_sums, empty_gradients, finish, gradient_unit, statistic
from megabatch.operators.softplus import Inputs
from megabatch.operators.team import assemble
from megabatch.operators.transforms import differentiable
from megabatch.tiles.block import Needs
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import FLOAT16


def _saved_dtype(given: Inputs) -> torch.dtype | None:
    """The gradients wait for their factor in their own type, except fp16, which could not hold 1/N without its loss scale."""
    return torch.float32 if torch.float16 in (given.x.dtype, given.y.dtype) else None


def _shapes(given: Inputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    gradients = empty_gradients(given.x, given.y, given.scale, Needs(*needs), _saved_dtype(given))
    return statistic(given.x), *gradients[:4]


@define(Inputs, "bool mean, bool[] needs", results=5, fake=_shapes)
def sigmoid_loss(given: Inputs, mean: bool, needs: list[bool]) -> tuple[Tensor, ...]:
    """(Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] · share, dx, dy, dscale, drow_bias): the loss and its own gradients.

    The pairs (i, i) have to be kept apart. The share of a mean is 1/N for one process; over R ranks with B pairs in all it is
    R/B, so that the mean over ranks is the loss. The share of a sum is 1.
    """
    block, wanted = given.block(), Needs(*needs)
    terms = {"the reduction": "mean" if mean else "sum"}
    team = assemble(given.group, given.backend, block, "sigmoid loss", needs=wanted, mean=True, terms=terms)
    share = team.share if mean else 1.0
    match = matching_similarities(block, team.local.matching_products(block))
    if any(wanted):
        total = block.zeros(block.N)
        sums = column_sums(block, wanted)
        unit = gradient_unit(block, torch.ones_like(block.scale))
        weight = torch.ones_like(total) / unit if block.precision == FLOAT16 else None
        strips = team.passes.softplus_gradients(block, weight, sums, wanted, total=total)
        dmatch = -torch.sigmoid(-match) / unit
        gradients = finish(
            team.local,
            block,
            strips,
            sums,
            wanted,
            scale=given.scale,
            unit=unit * share,
            dmatch=dmatch,
            dtype=_saved_dtype(given),
        )
    else:
        total = team.passes.softplus_sums(block)
        gradients = empty_gradients(given.x, given.y, given.scale, wanted, _saved_dtype(given))
    total -= F.logsigmoid(match)
    loss = total.sum(dtype=torch.float64) * share
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
