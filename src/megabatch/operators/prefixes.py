"""Row and column logsumexps at several widths of the embeddings, the matching pairs kept apart.

In PyTorch operations all widths come from one pass; kernels walk once for each of them (`width_by_width`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabatch.operators import width_by_width
from megabatch.operators.gradients import (
    empty_gradients,
    gradient_unit,
    on_its_device,
    refuse_second_derivative,
    share_of_mean,
    statistic,
)
from megabatch.operators.team import Team, assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.ring import prefixes as around
from megabatch.ring.walks import RingWalks
from megabatch.tiles import prefixes as here
from megabatch.tiles.backends import EAGER, sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import FLOAT32, accumulator_dtype, by_matmul_setting
from megabatch.tiles.prefixes import Prefixes, PrefixSums, add_matching, matching_products, subtract_along


@torch.library.custom_op("megabatch::prefix_logsumexp", mutates_args=())
def prefix_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    widths: list[int],
    precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log Σ_{j≠i} exp s_ij, log Σ_{j≠i} exp s_ji, s_ii, share, and for backward the two sums, packed); (N, W) each.

    s_ij = scale · ⟨x_i, y_j⟩ / (‖x_i‖·‖y_j‖), everything of the first columns alone, as many as a width has.
    """
    precision = by_matmul_setting(precision, x.device.type)
    given = _given(x, y, scale, ids, widths, precision, backend)
    with on_its_device(x):
        terms = {"the widths": widths, "the precision": precision}
        team = assemble(group, backend, given.block, "prefix logsumexp", mean=True, terms=terms)
        if backend == EAGER:
            statistics = partial(around.statistics, team.walks) if isinstance(team.walks, RingWalks) else here.statistics
            row, col = statistics(given)
            match = matching_products(given) * given.row_factor * given.col_factor * given.block.scale
        else:
            row, col, match = width_by_width.statistics(team, given, precision)
        dtype, packed = given.block.dtype, sums_dtype(backend, given.block.dtype)
        values = row.value().to(dtype), col.value().to(dtype)
        return *values, match, share_of_mean(x, team.share), row.pack().to(packed), col.pack().to(packed)


@prefix_logsumexp.register_fake
def _(
    x: Tensor, y: Tensor, scale: Tensor, ids: Tensor | None, widths: list[int], *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _precision, backend, _group = options
    N, W = x.shape[0], len(widths)
    row, col, match = (statistic(x, N, W) for _ in range(3))
    sums = [x.new_empty(2, N, W, dtype=sums_dtype(backend, accumulator_dtype(x.dtype))) for _ in range(2)]
    return row, col, match, share_of_mean(x, 1.0), sums[0], sums[1]


@torch.library.custom_op("megabatch::prefix_logsumexp_backward", mutates_args=())
def prefix_logsumexp_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    widths: list[int],
    precision: str,
    backend: str,
    group: str,
    row: Tensor,  # (2, N, W)
    col: Tensor,  # (2, N, W)
    drow: Tensor | None,  # (N, W)
    dcol: Tensor | None,  # (N, W)
    dmatch: Tensor | None,  # (N, W)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dy, dscale)."""
    precision = by_matmul_setting(precision, x.device.type)
    given, wanted = _given(x, y, scale, ids, widths, precision, backend), Needs(*needs)
    sums = LogSum.unpack(row), LogSum.unpack(col)
    with on_its_device(x):
        has = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "nothing"
        terms = {"the widths": widths, "the precision": precision, "what has a gradient": has}
        team = assemble(group, backend, given.block, "prefix logsumexp backward", needs=wanted, terms=terms)
        found: tuple[Tensor | None, Tensor | None, Tensor]
        if backend == EAGER:
            found = _gradients_in_one_pass(team, given, *sums, (drow, dcol, dmatch))
        else:
            found = width_by_width.gradients(team, given, precision, *sums, (drow, dcol, dmatch), wanted)
        dx, dy = (
            d.to(side.dtype) if d is not None and asked else side.new_empty(0)
            for d, side, asked in zip(found, (x, y), needs, strict=False)
        )
        return dx, dy, found[2].to(scale.dtype)


@prefix_logsumexp_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dy, dscale, *_ = empty_gradients(x, y, scale, Needs(*options[-1]))
    return dx, dy, dscale


def _given(
    x: Tensor, y: Tensor, scale: Tensor, ids: Tensor | None, widths: list[int], precision: str, backend: str
) -> Prefixes:
    """One pass over all widths rounds the inputs and scales their products; kernels see what has unit length, rounded."""
    scale = scale.to(accumulator_dtype(x.dtype))
    block = Block(x, y, scale, precision if backend == EAGER else FLOAT32, row_ids=ids, col_ids=ids, skip_diagonal=True)
    return Prefixes.of_unit_length(block, tuple(widths))


def _gradients_in_one_pass(
    team: Team, given: Prefixes, row: LogSum, col: LogSum, upstream: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    block, W = given.block, len(given.widths)
    drow, dcol, dmatch = (block.zeros(block.N, W) if d is None else d for d in upstream)
    unit = gradient_unit(block, drow, dcol, dmatch, largest=team.largest)
    by_row, by_column = (PrefixSums.zeros(block, size, W) for size in (block.N, block.M))
    gradients = partial(around.gradients, team.walks) if isinstance(team.walks, RingWalks) else here.gradients
    gradients(given, row, col, drow / unit, dcol / unit, by_row, by_column)
    add_matching(given, dmatch / unit * given.row_factor * given.col_factor, by_row, by_column)
    subtract_along(given, by_row, block.x, given.row_factor)
    subtract_along(given, by_column, block.y, given.col_factor)
    dx, dy = (sums.d * (block.scale * unit) for sums in (by_row, by_column))
    return dx, dy, by_row.products.sum(dtype=torch.float64) * unit


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:4], inputs[4:]
    *_, row, col = output
    ctx.save_for_backward(*tensors, row, col)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, drow: Tensor | None, dcol: Tensor | None, dmatch: Tensor | None, *dothers: Tensor | None
) -> tuple[Any, ...]:
    *tensors, row, col = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    gradients = apply(prefix_logsumexp_backward, *tensors, *ctx.options, row, col, drow, dcol, dmatch, needs)
    asked = zip(gradients, needs, strict=True)
    return *(gradient if need else None for gradient, need in asked), None, *(None for _ in ctx.options)


differentiable(prefix_logsumexp, _backward, _save)
differentiable(prefix_logsumexp_backward, refuse_second_derivative)
