"""Rows against themselves: s_ij = s_ji, so every rectangle above the diagonal is computed once, for its rows and its columns.

The passes of a backend already give both directions of a rectangle from one pass; cut along the diagonal, they need no kernel
of their own. In backward one recomputed rectangle of g_ij = drow_i·exp(s_ij)/row_i + drow_j·exp(s_ij)/row_j gives both
dz_i += Σ_j g_ij·z_j and dz_j += Σ_i g_ij·z_i. Squares on the diagonal are computed whole; g is symmetric there too, and the
first of the two products is all they need. docs/losses.md counts the operations. `triton_symmetric` does the same with less
around every launch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.backends import EAGER, backend_for, sums_dtype
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients, windows
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import rounded

Rectangle = tuple[slice, slice]  # rows and columns of a block


class Side(NamedTuple):
    """The rows or the columns of a rectangle in backward: whole sums, their gradients, and what is added to."""

    sums: LogSum  # (K,)
    dsums: Tensor  # (K,)
    dz: Tensor  # (K, D), not yet multiplied by the scale

    def part(self, window: slice) -> "Side":
        """Some of them; adding to these adds to all."""
        return Side(self.sums.part(window), self.dsums[window], self.dz[window])


@dataclass(frozen=True)
class Half:
    """A backend's passes over the upper half of a block whose columns are its rows."""

    backend: str

    def statistics(self, block: Block) -> LogSum:
        """Sums of exp(s) over each row, (N,)."""
        row = LogSum.empty(block.N, dtype=sums_dtype(self.backend, block.dtype), device=block.x.device)
        for rows, columns in self.upper_half(block):
            col = None if rows == columns else row.part(columns)
            self.add_statistics(part_of(block, rows, columns), row.part(rows), col)
        return row

    def add_statistics(self, part: Block, row: LogSum, col: LogSum | None) -> None:
        """Adds the row and the column sums of a rectangle; `col` is None for a square on the diagonal, where they are one."""
        for whole, sums in zip((row, col), backend_for(self.backend, part).logsumexp_statistics(part), strict=True):
            if whole is not None:
                whole.add_(LogSum(*(values.to(whole.shift.dtype) for values in sums)))

    def gradients(self, block: Block, side: Side, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        for rows, columns in self.upper_half(block):
            others = None if rows == columns else side.part(columns)
            self.add_gradients(part_of(block, rows, columns), side.part(rows), others, dscale)

    def add_gradients(self, part: Block, own: Side, others: Side | None, dscale: Tensor | None) -> None:
        """Adds those of a rectangle to both of its sides; `others` is None for a square on the diagonal."""
        col, dcol, dy = others or own
        needs = Needs(dx=True, dy=others is not None, dscale=dscale is not None)
        columns = ColumnGradients(dy if needs.dy else None, None)
        strips = backend_for(self.backend, part).logsumexp_gradients(part, own.sums, col, own.dsums, dcol, columns, needs)
        self.take(strips, part, own.dz, dscale, share=1.0 if needs.dy else 0.5)

    def take(self, strips: Iterator[RowGradients], part: Block, dz: Tensor, dscale: Tensor | None, *, share: float) -> None:
        """Adds what a pass has finished; `share` is half for a whole square, which has every pair twice."""
        for rows, dx, dscale_rows, _ in strips:
            assert dx is not None
            dz[rows] += dx
            if dscale is not None:
                if dscale_rows is None:
                    dscale_rows = (dx * rounded(part.x[rows], part.precision)).sum(1)
                dscale.add_(dscale_rows.sum(dtype=dscale.dtype), alpha=share)

    def upper_half(self, block: Block) -> Iterator[Rectangle]:
        """What is to be computed of a block whose columns are its rows."""
        return rectangles(slice(0, block.N), plan.symmetric_square(block.x.device, block.dtype, self.backend == EAGER))

    def bands(self, block: Block, rows: slice, columns: slice) -> Iterator[Rectangle]:
        """What is to be computed of a rectangle whose columns are others: all of it."""
        yield rows, columns


class SameLabel(Half):
    """The same for a block that is sorted by ids and keeps pairs of equal ids alone: all of them are near the diagonal.

    In PyTorch operations. Where an id begins and ends is read back to the host, once for a block.
    """

    def __init__(self) -> None:
        super().__init__(EAGER)

    def upper_half(self, block: Block) -> Iterator[Rectangle]:
        """Squares on the diagonal, and beside each what the ids of its last row reach beyond it."""
        for rows, columns in self.bands(block, slice(0, block.N), slice(0, block.M)):
            yield rows, rows
            if rows.stop < columns.stop:
                yield rows, slice(rows.stop, columns.stop)

    def bands(self, block: Block, rows: slice, columns: slice) -> Iterator[Rectangle]:
        """Some rows at a time, with the columns that have one of their ids."""
        assert block.row_ids is not None
        assert block.col_ids is not None
        row_ids, col_ids = block.row_ids[rows], block.col_ids[columns]
        if len(row_ids) == 0:
            return
        cuts = list(windows(len(row_ids), plan.eager_tile(block.x.device, block.dtype).rows))
        ends = torch.tensor([(cut.start, cut.stop - 1) for cut in cuts], device=row_ids.device)
        first = torch.searchsorted(col_ids, row_ids[ends[:, 0]]).tolist()
        last = torch.searchsorted(col_ids, row_ids[ends[:, 1]], right=True).tolist()
        for cut, begin, end in zip(cuts, first, last, strict=True):
            if begin < end:
                yield (
                    slice(rows.start + cut.start, rows.start + cut.stop),
                    slice(columns.start + begin, columns.start + end),
                )


def rectangles(rows: slice, most: int) -> Iterator[Rectangle]:
    """The upper half of a square: (rows, columns) of squares on the diagonal, of at most `most`, and all that is above them."""
    size = rows.stop - rows.start
    if size <= most:
        yield rows, rows
        return
    middle = rows.start + -(-size // most) // 2 * most
    upper, lower = slice(rows.start, middle), slice(middle, rows.stop)
    yield from rectangles(upper, most)
    yield upper, lower
    yield from rectangles(lower, most)


def part_of(block: Block, rows: slice, columns: slice) -> Block:
    """A rectangle of `block`, which has a part of its diagonal if rows and columns are the same."""
    ids = [None if ids is None else ids[window] for ids, window in ((block.row_ids, rows), (block.col_ids, columns))]
    return replace(
        block,
        x=block.x[rows],
        y=block.y[columns],
        row_ids=ids[0],
        col_ids=ids[1],
        skip_diagonal=block.skip_diagonal and rows == columns,
    )
