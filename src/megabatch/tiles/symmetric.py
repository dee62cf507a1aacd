"""Rows against themselves: each pair of tiles is computed once, and positives of one label form tiles near the diagonal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import (
    EAGER,
    Block,
    ColumnGradients,
    Needs,
    RowGradients,
    backend_for,
    round_to_precision,
    sums_dtype,
    windows,
)
from megabatch.tiles.sums import LogSum

# ----------------------------------------------------------------------------------------------------------------------
# Rows against themselves: s_ij = s_ji, so every rectangle above the diagonal is computed once, for its rows and its
# columns.
#
# The passes of a backend already give both directions of a rectangle from one pass; cut along the diagonal, they need no
# kernel of their own. In backward one recomputed rectangle of g_ij = drow_i·exp(s_ij)/row_i + drow_j·exp(s_ij)/row_j gives
# both dz_i += Σ_j g_ij·z_j and dz_j += Σ_i g_ij·z_i. Squares on the diagonal are computed whole; g is symmetric there too,
# and the first of the two products is all they need. docs/kernels.md counts the operations. `kernels.logsumexp` does the same
# with less around every launch.

Rectangle = tuple[slice, slice]  # rows and columns of a block


class TriangleSide(NamedTuple):
    """The rows or the columns of a rectangle in backward: whole sums, their gradients, and what is added to."""

    sums: LogSum  # (K,)
    dsums: Tensor  # (K,)
    dz: Tensor  # (K, D), not yet multiplied by the scale

    def part(self, window: slice) -> "TriangleSide":
        """Some of them; adding to these adds to all."""
        return TriangleSide(self.sums.part(window), self.dsums[window], self.dz[window])


@dataclass(frozen=True)
class Triangle:
    """A backend's passes over the upper half of a block whose columns are its rows."""

    backend: str

    def statistics(self, block: Block) -> LogSum:
        """Sums of exp(s) over each row, (N,)."""
        row = LogSum.empty(block.N, dtype=sums_dtype(self.backend, block.dtype), device=block.x.device)
        for rows, columns in self.upper_triangle(block):
            col = None if rows == columns else row.part(columns)
            self.add_statistics(part_of(block, rows, columns), row.part(rows), col)
        return row

    def add_statistics(self, part: Block, row: LogSum, col: LogSum | None) -> None:
        """Adds the row and the column sums of a rectangle; `col` is None for a square on the diagonal, where they are one."""
        for whole, sums in zip((row, col), backend_for(self.backend, part).logsumexp_statistics(part), strict=True):
            if whole is not None:
                whole.add_(LogSum(*(values.to(whole.shift.dtype) for values in sums)))

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        for rows, columns in self.upper_triangle(block):
            others = None if rows == columns else side.part(columns)
            self.add_gradients(part_of(block, rows, columns), side.part(rows), others, dscale)

    def add_gradients(self, part: Block, own: TriangleSide, others: TriangleSide | None, dscale: Tensor | None) -> None:
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
                    dscale_rows = (dx * round_to_precision(part.x[rows], part.precision)).sum(1)
                dscale.add_(dscale_rows.sum(dtype=dscale.dtype), alpha=share)

    def upper_triangle(self, block: Block) -> Iterator[Rectangle]:
        """What is to be computed of a block whose columns are its rows."""
        return rectangles(slice(0, block.N), plan.symmetric_square(block.x.device, block.dtype, self.backend == EAGER))

    def bands(self, block: Block, rows: slice, columns: slice) -> Iterator[Rectangle]:
        """What is to be computed of a rectangle whose columns are others: all of it."""
        yield rows, columns


class SameLabel(Triangle):
    """The same for a block that is sorted by ids and keeps pairs of equal ids alone: all of them are near the diagonal.

    In PyTorch operations. Where an id begins and ends is read back to the host, once for a block.
    """

    def __init__(self) -> None:
        super().__init__(EAGER)

    def upper_triangle(self, block: Block) -> Iterator[Rectangle]:
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


# ----------------------------------------------------------------------------------------------------------------------
# Several positives: sums over all rows of the same id, by sorting, in O(N·D). No similarity is formed.
#
# Σ_{j∈P(i)} ⟨z_i, z_j⟩ = ⟨z_i, Σ_{j∈P(i)} z_j⟩. Sums over a label are float64 and leave out the row itself before they are
# rounded: of a label with two rows, what is left is the other one to the last bit. Rows are added in their order, never by
# atomics, so results are the same every time; and no length is read back to the host.


# Float64 numbers of a tensor of sums, of which five are held at once: the cache on a CPU, few launches elsewhere.
_ON_CPU, _ON_ACCELERATOR, _LEAST_WIDTH = 2**18, 2**23, 16


class SameId:
    """Which of some columns have the id of each row."""

    def __init__(self, row_ids: Tensor, col_ids: Tensor) -> None:
        self._order = torch.argsort(col_ids, stable=True)
        ids = col_ids[self._order]
        self._first = torch.searchsorted(ids, row_ids)  # (N,) into the sorted columns
        self.count = torch.searchsorted(ids, row_ids, right=True) - self._first  # (N,) how many columns
        # Every column begins a segment: those that are the first of their id begin one of all its columns, others an empty one.
        place = torch.arange(len(ids), device=ids.device)
        begins, ends = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
        end = torch.full((1,), len(ids), device=ids.device)
        self._segments = torch.cat((torch.where(begins == place, place, ends), end))

    def sums(
        self,
        values: Tensor,  # (M, K)
        weights: Tensor | None = None,  # (M, 1) float64
    ) -> Iterator[tuple[slice, Tensor]]:  # (N, k) float64
        """Sums of `values`, or of them times `weights`, over the columns of a row's id, some of their width at a time."""
        M, K = values.shape
        N = len(self._first)
        if N == 0 or M == 0:
            return
        first, found = self._first.clamp_max(M - 1), (self.count > 0)[:, None]
        at_once = _ON_CPU if values.device.type == "cpu" else _ON_ACCELERATOR
        for part in windows(K, max(_LEAST_WIDTH, at_once // max(N, M))):
            ordered = values[self._order, part].double()
            if weights is not None:
                ordered *= weights[self._order]
            sums = torch.segment_reduce(ordered, "sum", offsets=self._segments, axis=0, initial=0, unsafe=True)
            yield part, torch.where(found, sums[first], 0.0)

    def whole_numbers(self, values: Tensor) -> Tensor:  # (M,) int64 → (N,)
        """The same for integers, exact."""
        before = torch.nn.functional.pad(values[self._order].cumsum(0), (1, 0))
        return before[self._first + self.count] - before[self._first]
