"""Ranks for rows with several matching columns: the rank of the best match, in linear memory.

`mb.pairwise_rank` has one matching column per row. Here a row may have several; its rank is the number of other columns before
its best match. Ties and NaN are as in `pairwise_rank`: similarities within rounding error are equal, the smaller index comes
first, and NaN ranks last. With one match per row both agree.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.primitives import execution
from megabatch.tiles import plan
from megabatch.tiles.block import windows
from megabatch.tiles.precision import accumulator_dtype, rounded
from megabatch.world import World


class Best(NamedTuple):
    """The best match of each row: its similarity and its column."""

    similarity: Tensor  # (N,)
    column: Tensor  # (N,) int64


@torch.no_grad()
def ranks_of_best(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    rows: Tensor,  # (P,) int64
    columns: Tensor,  # (P,) int64
    *,
    group: Any = None,
) -> Tensor:  # (N,) int64
    """The rank of each row's best match among the columns that do not match it; 0 is best.

    Same as the smallest position of a matching column in `(x @ y.T)[i]` sorted in descending order, without the matrix.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        rows: (P,) row numbers of the matching pairs; every row occurs at least once. Either a column matches one row, or a
            row matches one column.
        columns: (P,) column numbers of the matching pairs.
        group: process group that x and y are sharded over (default: no sharding); both members of a pair are on one rank.
    """
    precision = execution(x, y, group=group).precision
    _check_pairs(x, y, rows, columns)
    world = World.of(group, y.device)
    offset = world.row_offset(len(y))
    with torch.autocast(x.device.type, enabled=False):  # the precision has settled it
        x, y = (rounded(side, precision).to(accumulator_dtype(side.dtype)) for side in (x, y))
        best = _best(x, y, rows, columns)
        count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for first, block in world.blocks(y):
            own = (rows, columns) if first == offset else (rows[:0], columns[:0])
            count += count_before(x, block, Best(best.similarity, best.column + offset), own, first)
    return count


def count_before(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    best: Best,
    own: tuple[Tensor, Tensor],  # (P,), (P,) rows and columns of y that are not counted
    first: int = 0,
) -> Tensor:  # (N,) int64
    """The number of columns before each row's best match; y's first column has the index `first`."""
    eps = 4 * x.shape[1] ** 0.5 * torch.finfo(x.dtype).eps
    row_noise, col_noise = torch.linalg.vector_norm(x, dim=1) * eps, torch.linalg.vector_norm(y, dim=1)
    size = plan.eager_tile(x.device, x.dtype).fitted(len(x), len(y))
    count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for across in windows(len(x), size.rows):
        match, index = best.similarity[across, None], best.column[across, None]
        mine = (own[0] >= across.start) & (own[0] < across.stop)
        own_rows, own_columns = own[0][mine] - across.start, own[1][mine]
        for along in windows(len(y), size.columns):
            s = x[across] @ y[along].T  # (n, m)
            near = row_noise[across, None] * col_noise[along]
            later = torch.arange(first + along.start, first + along.stop, device=x.device) > index
            before = ~((s < match - near) | ((s <= match + near) & later))
            here = (own_columns >= along.start) & (own_columns < along.stop)
            before[own_rows[here], own_columns[here] - along.start] = False
            count[across] += before.sum(1)
    return count


def _best(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Best:
    """The best match of each row: the first of equal ones; NaN only if all its matches are NaN."""
    found = []
    for part in windows(len(rows), plan.rows_at_once(x.device, x.shape[1])):
        found.append((x[rows[part]] * y[columns[part]]).sum(1))
    similarity = torch.cat(found) if found else x.new_zeros(0)  # (P,)
    known = similarity.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=torch.finfo(x.dtype).min)
    best = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, rows, known, "amax")
    among = torch.where(known == best[rows], columns, len(y))
    index = torch.full((len(x),), len(y), dtype=torch.int64, device=x.device).scatter_reduce(0, rows, among, "amin")
    return Best(torch.where(best == -torch.inf, torch.nan, best), index)


def _check_pairs(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> None:
    for name, value, side, length in (("rows", rows, "x", len(x)), ("columns", columns, "y", len(y))):
        if value.dtype != torch.int64 or value.dim() != 1 or len(value) != len(rows):
            raise ValueError(
                f"{name} must be a vector of int64, as long as its partner, got {value.dtype}, {tuple(value.shape)}"
            )
        if len(value) and not (int(value.min()) >= 0 and int(value.max()) < length):
            raise ValueError(
                f"{name} must be row numbers of {side}, from 0 to {length - 1}, got {int(value.min())} to {int(value.max())}"
            )
    without = (torch.bincount(rows, minlength=len(x)) == 0).nonzero().flatten()
    if len(without):
        raise ValueError(f"rows must name every row of x at least once, got none for row {int(without[0])} of {len(x)}")
