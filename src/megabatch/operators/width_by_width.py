"""Several widths with kernels: one walk for each of them, over prefixes that were brought to unit length.

That takes the products of all widths, where one pass over them (`tiles.prefixes`) takes those of the largest; but a tile is
finished where it is formed, and the pass of PyTorch operations reads and writes each one many times.

A unit prefix is made in float32, rounded once to what the products see, and not kept for backward. Gradients are float32 until
those of all widths are added.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.operators.gradients import column_sums, finish, gradient_unit, in_units
from megabatch.operators.team import Team
from megabatch.tiles import plan
from megabatch.tiles.block import Block, Needs, windows
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.prefixes import Prefixes, PrefixSums, subtract_along


def statistics(team: Team, given: Prefixes, precision: str) -> tuple[LogSum, LogSum, Tensor]:  # (N, W) each
    """Row sums and column sums of exp(s) at every width, and s_ii."""
    found = []
    for k in range(len(given.widths)):
        block = _unit_block(given, k, precision)
        row, col = team.walks.logsumexp_statistics(block)
        found.append((*row, *col, matching_similarities(block, team.local.matching_products(block))))
    *sums, match = (torch.stack(at_all_widths, dim=1) for at_all_widths in zip(*found, strict=True))
    return LogSum(*sums[:2]), LogSum(*sums[2:]), match


def gradients(
    team: Team,
    given: Prefixes,
    precision: str,
    row: LogSum,  # (N, W)
    col: LogSum,  # (N, W)
    upstream: Sequence[Tensor | None],  # drow, dcol, dmatch, (N, W) each
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # (N, D), (N, D), ()
    """(dx, dy, dscale), not yet rounded to the type of the inputs; None where nobody asked."""
    block = given.block
    sides = [(block.x, given.row_factor, needs.dx), (block.y, given.col_factor, needs.dy)]
    sums = [PrefixSums.zeros(block, len(side), len(given.widths)) if asked else None for side, _, asked in sides]
    dscale = torch.zeros_like(block.scale, dtype=torch.float64)
    for k in range(len(given.widths)):
        dunit = _gradients_at_one_width(team, given, k, precision, row, col, upstream, needs, dscale)
        for total, d, (side, factor, _) in zip(sums, dunit, sides, strict=True):
            if total is not None:
                _add(total, k, d, side, factor)
    for total, (side, factor, _) in zip(sums, sides, strict=True):
        if total is not None:
            subtract_along(given, total, side, factor)
    dx, dy = (None if total is None else total.d for total in sums)
    return dx, dy, dscale


def _gradients_at_one_width(
    team: Team,
    given: Prefixes,
    k: int,
    precision: str,
    row: LogSum,
    col: LogSum,
    upstream: Sequence[Tensor | None],
    needs: Needs,
    dscale: Tensor,  # () added to
) -> tuple[Tensor, Tensor]:  # (N, d), (N, d)
    """With respect to unit prefixes; that of the scale is added to `dscale`."""
    block = _unit_block(given, k, precision)
    drow, dcol, dmatch = (None if d is None else d[:, k].contiguous() for d in upstream)
    row, col = (LogSum(*(part[:, k].contiguous() for part in sums)) for sums in (row, col))
    unit = gradient_unit(block, drow, dcol, largest=team.largest)
    columns = column_sums(block, needs)
    strips = team.walks.logsumexp_gradients(block, row, col, in_units(drow, unit), in_units(dcol, unit), columns, needs)
    dmatch = in_units(dmatch, unit)
    dx, dy, *_ = finish(
        team.local,
        block,
        strips,
        columns,
        needs,
        scale=block.scale,
        unit=unit,
        dmatch=dmatch,
        dtype=block.dtype,
        for_scale=dscale,
    )
    return dx, dy


def _unit_block(given: Prefixes, k: int, precision: str) -> Block:
    block, width = given.block, given.widths[k]
    dtype = HALF_DTYPE.get(precision, block.dtype)

    def unit_prefix(side: Tensor, factor: Tensor) -> Tensor:  # (K, d)
        return torch.mul(side[:, :width], factor[:, k, None], out=side.new_empty(len(side), width, dtype=dtype))

    x, y = unit_prefix(block.x, given.row_factor), unit_prefix(block.y, given.col_factor)
    return Block(x, y, block.scale, precision, row_ids=block.row_ids, col_ids=block.col_ids, skip_diagonal=True)


def _add(sums: PrefixSums, k: int, dunit: Tensor, side: Tensor, factor: Tensor) -> None:
    """From gradients of unit prefixes, which are overwritten, to sums; what a change of length alone does is still in them."""
    width = dunit.shape[1]
    for rows in windows(len(side), plan.rows_at_once(side.device, side.shape[1])):
        d = dunit[rows].mul_(factor[rows, k, None])
        sums.products[rows, k] = (d * side[rows, :width]).sum(1)
        sums.d[rows, :width] += d
