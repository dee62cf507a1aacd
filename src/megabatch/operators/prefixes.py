"""Row and column logsumexps at several widths of the embeddings, all from one pass, the matching pairs kept apart."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import gradient_unit, on_its_device, refuse_second_derivative, statistic
from megabatch.operators.team import assemble
from megabatch.ring import prefixes as around
from megabatch.ring.walks import RingWalks
from megabatch.tiles import prefixes as here
from megabatch.tiles.backends import EAGER
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting
from megabatch.tiles.prefixes import Prefixes, PrefixSums, add_matching, matching_products, subtract_along


@torch.library.custom_op("megabatch::prefix_logsumexp", mutates_args=())
def prefix_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    widths: list[int],
    precision: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log Σ_{j≠i} exp s_ij, log Σ_{j≠i} exp s_ji, s_ii, share, and for backward the two sums, packed); (N, W) each.

    s_ij = scale · ⟨x_i, y_j⟩ / (‖x_i‖·‖y_j‖), everything of the first columns alone, as many as a width has.
    """
    given = _given(x, y, scale, ids, widths, precision)
    with on_its_device(x):
        team = assemble(group, EAGER, given.block, "prefix logsumexp", mean=True, terms={"the widths": widths})
        statistics = partial(around.statistics, team.walks) if isinstance(team.walks, RingWalks) else here.statistics
        row, col = statistics(given)
        match = matching_products(given) * given.row_factor * given.col_factor * scale
        return row.value(), col.value(), match, torch.full_like(scale, team.share), row.pack(), col.pack()


@prefix_logsumexp.register_fake
def _(
    x: Tensor, y: Tensor, scale: Tensor, ids: Tensor | None, widths: list[int], *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, W = x.shape[0], len(widths)
    row, col, match = (statistic(x, N, W) for _ in range(3))
    sums = [x.new_empty(2, N, W, dtype=accumulator_dtype(x.dtype)) for _ in range(2)]
    return row, col, match, torch.empty_like(scale), sums[0], sums[1]


@torch.library.custom_op("megabatch::prefix_logsumexp_backward", mutates_args=())
def prefix_logsumexp_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    widths: list[int],
    precision: str,
    group: str,
    row: Tensor,  # (2, N, W)
    col: Tensor,  # (2, N, W)
    drow: Tensor,  # (N, W)
    dcol: Tensor,  # (N, W)
    dmatch: Tensor,  # (N, W)
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dy, dscale)."""
    given = _given(x, y, scale, ids, widths, precision)
    block, W = given.block, len(widths)
    with on_its_device(x):
        needs = Needs(dx=True, dy=True, dscale=True)
        terms = {"the widths": widths}
        team = assemble(group, EAGER, block, "prefix logsumexp backward", needs=needs, terms=terms)
        unit = gradient_unit(block, drow, dcol, dmatch, largest=team.largest)
        by_row, by_column = (PrefixSums.zeros(block, size, W) for size in (block.N, block.M))
        gradients = partial(around.gradients, team.walks) if isinstance(team.walks, RingWalks) else here.gradients
        gradients(given, LogSum.unpack(row), LogSum.unpack(col), drow / unit, dcol / unit, by_row, by_column)
        add_matching(given, dmatch / unit * given.row_factor * given.col_factor, by_row, by_column)
        subtract_along(given, by_row, given.block.x, given.row_factor)
        subtract_along(given, by_column, given.block.y, given.col_factor)
        dx, dy = ((sums.d * (scale * unit)).to(side.dtype) for sums, side in ((by_row, x), (by_column, y)))
        return dx, dy, by_row.products.sum() * unit


@prefix_logsumexp_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y), torch.empty_like(scale)


def _given(x: Tensor, y: Tensor, scale: Tensor, ids: Tensor | None, widths: list[int], precision: str) -> Prefixes:
    settled = by_matmul_setting(precision, x.device.type)
    block = Block(x, y, scale, settled, row_ids=ids, col_ids=ids, skip_diagonal=True)
    return Prefixes.of_unit_length(block, tuple(widths))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:4], inputs[4:]
    *_, row, col = output
    ctx.save_for_backward(*tensors, row, col)


def _backward(ctx: Any, drow: Tensor, dcol: Tensor, dmatch: Tensor, *others: Tensor) -> tuple[Any, ...]:
    *tensors, row, col = ctx.saved_tensors
    gradients = prefix_logsumexp_backward(*tensors, *ctx.options, row, col, drow, dcol, dmatch)
    asked = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if need else None for gradient, need in asked), None, None, None, None


prefix_logsumexp.register_autograd(_backward, setup_context=_save)
prefix_logsumexp_backward.register_autograd(refuse_second_derivative)
