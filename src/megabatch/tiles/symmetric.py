"""Logits of rows with the same rows, which are symmetric: each rectangle above the diagonal is computed once.

If only pairs with equal labels count, rows are sorted by label, and only rectangles near the diagonal are computed.
"""

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
from megabatch.tiles.sums import LogSum, to_exact

# ----------------------------------------------------------------------------------------------------------------------
# Symmetric logits: s_ij = s_ji, so every rectangle above the diagonal is computed once, for its rows and its columns.
#
# The passes of an engine compute the row sums and the column sums of a rectangle in one pass, so rectangles above the diagonal
# need no kernel for symmetric logits. In the backward pass, one recomputed rectangle of
# g_ij = drow_i·exp(s_ij)/row_i + drow_j·exp(s_ij)/row_j gives both dz_i += Σ_j g_ij·z_j and dz_j += Σ_i g_ij·z_i. Both halves
# of a square on the diagonal are computed. Its g is symmetric, so it needs only the first of the two matmuls. docs/method.md
# counts the operations. `kernels.logsumexp` computes the same with less host work for each launch.

Rectangle = tuple[slice, slice]  # rows and columns of a block


class TriangleSide(NamedTuple):
    """The sums, the gradients and the accumulator of the rows, or of the columns, of a rectangle in the backward pass."""

    sums: LogSum  # (K,) sums over all columns, which may be more than the columns of the rectangle
    dsums: Tensor  # (K,) the gradients of the logarithms of the sums
    dz: Tensor  # (K, D) the accumulator, not yet multiplied by the scale

    def part(self, window: slice) -> "TriangleSide":
        """Returns a view of the entries in `window`."""
        return TriangleSide(self.sums.part(window), self.dsums[window], self.dz[window])


@dataclass(frozen=True)
class Triangle:
    """The passes of an engine over the upper triangle of a block whose columns are its rows."""

    backend: str

    def statistics(self, block: Block) -> LogSum:
        """Returns the sum of exp(s) over each row, (N,)."""
        row = LogSum.empty(block.N, dtype=sums_dtype(self.backend, block.dtype), device=block.x.device)
        for rows, columns in self.upper_triangle(block):
            col = None if rows == columns else row.part(columns)
            self.add_statistics(part_of(block, rows, columns), row.part(rows), col)
        return row

    def add_statistics(self, part: Block, row: LogSum, col: LogSum | None) -> None:
        """Adds the row and column sums of a rectangle. `col` is None for a square on the diagonal, where both are equal."""
        for whole, sums in zip((row, col), backend_for(self.backend, part).logsumexp_statistics(part), strict=True):
            if whole is not None:
                whole.add_(LogSum(*(values.to(whole.shift.dtype) for values in sums)))

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩ to `side.dz` and `dscale`."""
        for rows, columns in self.upper_triangle(block):
            others = None if rows == columns else side.part(columns)
            self.add_gradients(part_of(block, rows, columns), side.part(rows), others, dscale)

    def add_gradients(self, part: Block, own: TriangleSide, others: TriangleSide | None, dscale: Tensor | None) -> None:
        """Adds the gradients of a rectangle to its rows and columns. `others` is None for a square on the diagonal."""
        col, dcol, dy = others or own
        needs = Needs(dx=True, dy=others is not None, dscale=dscale is not None)
        columns = ColumnGradients(dy if needs.dy else None, None)
        strips = backend_for(self.backend, part).logsumexp_gradients(part, own.sums, col, own.dsums, dcol, columns, needs)
        self.take(strips, part, own.dz, dscale, share=1.0 if needs.dy else 0.5)

    def take(self, strips: Iterator[RowGradients], part: Block, dz: Tensor, dscale: Tensor | None, *, share: float) -> None:
        """Adds the gradients of rows that a pass yields. `share` is 0.5 for a square, which contains every pair twice."""
        for rows, dx, dscale_rows, _ in strips:
            assert dx is not None
            dz[rows] += dx
            if dscale is not None:
                if dscale_rows is None:
                    dscale_rows = (dx * round_to_precision(part.x[rows], part.precision)).sum(1)
                dscale.add_(dscale_rows.sum(dtype=dscale.dtype), alpha=share)

    def upper_triangle(self, block: Block) -> Iterator[Rectangle]:
        """Yields the rectangles to compute for a block whose columns are its rows."""
        return rectangles(slice(0, block.N), plan.symmetric_square(block.x.device, block.dtype, self.backend == EAGER))

    def bands(self, block: Block, rows: slice, columns: slice) -> Iterator[Rectangle]:
        """Yields the parts of a rectangle above the diagonal that are computed, which is the whole rectangle here."""
        yield rows, columns


class SameLabel(Triangle):
    """The passes over a block that is sorted by ids and contains only pairs with equal ids, which are near the diagonal.

    It uses PyTorch operations. The host reads the first and last positions of the ids once per block.
    """

    def __init__(self) -> None:
        super().__init__(EAGER)

    def upper_triangle(self, block: Block) -> Iterator[Rectangle]:
        """Yields squares on the diagonal, each followed by the columns to its right that share the id of its last row."""
        for rows, columns in self.bands(block, slice(0, block.N), slice(0, block.M)):
            yield rows, rows
            if rows.stop < columns.stop:
                yield rows, slice(rows.stop, columns.stop)

    def bands(self, block: Block, rows: slice, columns: slice) -> Iterator[Rectangle]:
        """Yields a few rows at a time, with the columns that have one of their ids."""
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
    """Yields (rows, columns) that cover the upper triangle of a square. Squares on the diagonal have at most `most` rows."""
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
    """Returns a rectangle of `block`. It contains a part of the block's diagonal if rows and columns are equal."""
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
# Several positives: sums over all rows with the same id, by sorting, in O(N·D). No logits are computed.
#
# Σ_{j∈P(i)} ⟨z_i, z_j⟩ = ⟨z_i, Σ_{j∈P(i)} z_j⟩. Sums over a label are in float64. The row itself is subtracted before the sums
# are rounded, so the sum of a label with two rows is bitwise identical to the other row. Rows are added in their order, without
# atomics, so results are deterministic. No length is read back to the host.


# Float64 numbers of one tensor of sums. Five such tensors exist at once. On a CPU they stay in the cache, and on other devices
# a large size means few launches.
_ON_CPU, _ON_ACCELERATOR, _MIN_DIM = 2**18, 2**23, 16


class SameId:
    """The columns that have the id of each row."""

    def __init__(self, row_ids: Tensor, col_ids: Tensor) -> None:
        self._order = torch.argsort(col_ids, stable=True)
        ids = col_ids[self._order]
        self._first = torch.searchsorted(ids, row_ids)  # (N,) into the sorted columns
        self.count = torch.searchsorted(ids, row_ids, right=True) - self._first  # (N,) number of columns with the row's id
        # Every column begins a segment. The first column of an id begins a segment with all columns of the id. The segments of
        # other columns are empty.
        position = torch.arange(len(ids), device=ids.device)
        begins, ends = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
        end = torch.full((1,), len(ids), device=ids.device)
        self._segments = torch.cat((torch.where(begins == position, position, ends), end))

    def sums(
        self,
        values: Tensor,  # (M, K)
        weights: Tensor | None = None,  # (M, 1) float64
    ) -> Iterator[tuple[slice, Tensor]]:  # (N, k) float64
        """Yields sums of `values`, or of values · weights, over the columns with a row's id, some of the K dims at a time."""
        M, K = values.shape
        N = len(self._first)
        if N == 0 or M == 0:
            return
        first, has_any = self._first.clamp_max(M - 1), (self.count > 0)[:, None]
        elements = _ON_CPU if values.device.type == "cpu" else _ON_ACCELERATOR
        for part in windows(K, max(_MIN_DIM, elements // max(N, M))):
            ordered = to_exact(values[self._order, part])
            if weights is not None:
                ordered *= weights[self._order]
            sums = torch.segment_reduce(ordered, "sum", offsets=self._segments, axis=0, initial=0, unsafe=True)
            yield part, torch.where(has_any, sums[first], 0.0)

    def integer_sums(self, values: Tensor) -> Tensor:  # (M,) int64 → (N,)
        """Returns exact sums of integers over the columns with a row's id."""
        before = torch.nn.functional.pad(values[self._order].cumsum(0), (1, 0))
        return before[self._first + self.count] - before[self._first]
