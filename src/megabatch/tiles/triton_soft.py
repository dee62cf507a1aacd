"""Cross-entropies under a teacher's softmax: what a student's and a teacher's tile become, in one pass over both.

No kernel forms two products at once: libraries form them in memory, as for `eager`. There, turning two tiles into sums or
weights reads and writes them some thirty times; here once for rows, once for columns and once for weights.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.in_memory import Tiles, gradient_tiles, tile_gradients
from megabatch.tiles.softsum import SoftSum

# Rows and columns that a program has at once. For sums it marches along the others, so that few at once make many programs.
_ALONG_ROWS, _ALONG_COLUMNS, _WEIGHTS = (8, 512), (32, 64), (16, 256)


@triton.jit
def _finite_or_zero(shift):
    return tl.where(tl.abs(shift) == float("inf"), 0.0, shift)


@triton.jit
def _sums(
    s,
    t,
    student_shift,  # (rows,) added to, as are the next four
    student,
    teacher_shift,
    teacher,
    gap,
    rows,
    columns,
    row_stride,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`SoftSum.add_tile_` for rows; for columns with the strides exchanged."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    high, low = tl.load(student_shift + offs_n, mask_n, 0.0), tl.load(teacher_shift + offs_n, mask_n, 0.0)
    exponentials, weights = tl.load(student + offs_n, mask_n, 0.0), tl.load(teacher + offs_n, mask_n, 0.0)
    below = tl.load(gap + offs_n, mask_n, 0.0)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        mask = mask_n[:, None] & (offs_m < columns)[None, :]
        place = offs_n.to(tl.int64)[:, None] * row_stride + offs_m.to(tl.int64)[None, :] * stride
        own, others = tl.load(s + place, mask, -float("inf")), tl.load(t + place, mask, -float("inf"))
        higher, lower = tl.maximum(high, tl.max(own, 1)), tl.maximum(low, tl.max(others, 1))
        top, base = _finite_or_zero(higher), _finite_or_zero(lower)
        below += weights * tl.where(high == -float("inf"), 0.0, top - _finite_or_zero(high))
        exponentials = exponentials * tl.exp(high - top) + tl.sum(tl.exp(own - top[:, None]), 1)
        moved, e = tl.exp(low - base), tl.exp(others - base[:, None])
        weights = weights * moved + tl.sum(e, 1)
        below = below * moved + tl.sum(e * tl.where(mask, top[:, None] - own, 0.0), 1)
        high, low = higher, lower
    tl.store(student_shift + offs_n, high, mask_n)
    tl.store(student + offs_n, exponentials, mask_n)
    tl.store(teacher_shift + offs_n, low, mask_n)
    tl.store(teacher + offs_n, weights, mask_n)
    tl.store(gap + offs_n, below, mask_n)


@triton.jit
def _weighted_softmax(values, shift, total, per_unit, offs, mask, axis: tl.constexpr):
    """`logsum.weighted_softmax` of a tile; the factors are those of its rows (axis 1) or columns (axis 0)."""
    base = tl.expand_dims(tl.load(shift + offs, mask, 0.0), axis)
    most = tl.expand_dims(tl.load(total + offs, mask, 0.0), axis)
    return tl.minimum(tl.exp(values - base), most) * tl.expand_dims(tl.load(per_unit + offs, mask, 0.0), axis)


@triton.jit
def _weights(
    s,  # becomes the student's weighted softmaxes less the teacher's
    t,
    row_shift,  # (rows,) `LogSum.softmax_factors`
    row_total,
    row_per_unit,
    teacher_row_shift,
    teacher_row_total,
    teacher_row_per_unit,
    col_shift,  # (columns,)
    col_total,
    col_per_unit,
    teacher_col_shift,
    teacher_col_total,
    teacher_col_per_unit,
    rows,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n, mask_m = offs_n < rows, offs_m < columns
    mask = mask_n[:, None] & mask_m[None, :]
    place = offs_n.to(tl.int64)[:, None] * columns + offs_m[None, :]
    own, others = tl.load(s + place, mask, 0.0), tl.load(t + place, mask, 0.0)
    g = _weighted_softmax(own, row_shift, row_total, row_per_unit, offs_n, mask_n, 1)
    g += _weighted_softmax(own, col_shift, col_total, col_per_unit, offs_m, mask_m, 0)
    g -= _weighted_softmax(others, teacher_row_shift, teacher_row_total, teacher_row_per_unit, offs_n, mask_n, 1)
    g -= _weighted_softmax(others, teacher_col_shift, teacher_col_total, teacher_col_per_unit, offs_m, mask_m, 0)
    tl.store(s + place, g, mask)


def soft_statistics(block: Block) -> tuple[SoftSum, SoftSum]:
    """Sums for the cross-entropies of rows (N,) and columns (M,) under the companion's softmax, from one pass."""
    tiles = Tiles(block)
    row, col = (SoftSum.empty(size, dtype=block.dtype, device=block.x.device) for size in (block.N, block.M))
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s, t = tiles.similarities(rows, columns, x, tiles.y(columns)), tiles.teacher(rows, columns)
            _add_tile(row.part(rows), s, t, dim=1)
            _add_tile(col.part(columns), s, t, dim=0)
    return row, col


def soft_gradients(
    block: Block,
    row: SoftSum,  # (N,) the whole sums, of which the block may be a part
    col: SoftSum,  # (M,)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of the cross-entropies: g_ij = drow_i·(softmax(s) − softmax(t))_ij + dcol_j·(the same over columns)_ij."""
    tiles = gradient_tiles(block)
    by_row = [factor for log_sum in row[:2] for factor in log_sum.softmax_factors(drow)]
    by_column = [factor for log_sum in col[:2] for factor in log_sum.softmax_factors(dcol)]

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        t = tiles.teacher(rows, columns)
        block_n, block_m = _WEIGHTS
        grid = (triton.cdiv(s.shape[0], block_n), triton.cdiv(s.shape[1], block_m))
        of_rows, of_columns = (part[rows] for part in by_row), (part[columns] for part in by_column)
        _weights[grid](s, t, *of_rows, *of_columns, *s.shape, BLOCK_N=block_n, BLOCK_M=block_m)
        return s

    return tile_gradients(tiles, weigh, sums, needs)


def _add_tile(sums: SoftSum, s: Tensor, t: Tensor, dim: int) -> None:
    """`SoftSum.add_tile_`."""
    kept = 1 - dim
    block_n, block_m = _ALONG_ROWS if dim == 1 else _ALONG_COLUMNS
    _sums[(triton.cdiv(s.shape[kept], block_n),)](
        s,
        t,
        *sums.student,
        *sums.teacher,
        sums.gap,
        s.shape[kept],
        s.shape[dim],
        s.stride(kept),
        s.stride(dim),
        BLOCK_N=block_n,
        BLOCK_M=block_m,
    )
