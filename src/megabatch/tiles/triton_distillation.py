"""Cross-entropy of a student's softmax under a teacher's: sums and gradients from a tile of each, in one pass over both.

The tile of a second product would not fit in a kernel's registers. So library products form both tiles in memory
(`in_memory`), and the kernels here read them: once for rows, once for columns, once for the gradient. The same work in PyTorch
operations reads and writes them some thirty times.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.in_memory import Tiles, gradient_tiles, tile_gradients
from megabatch.tiles.softsum import SoftSum
from megabatch.tiles.triton_device import finite_or_zero

# (BLOCK_N, BLOCK_M). A program for sums loops over its whole row or column: small blocks make many programs.
_ROW_BLOCKS, _COLUMN_BLOCKS, _GRADIENT_BLOCKS = (8, 512), (32, 64), (16, 256)


@triton.jit
def _soft_sums_kernel(
    s,  # (rows, columns) the student's similarities, or their transpose
    t,  # (rows, columns) the teacher's
    student_shift,  # (rows,) updated, as are the next four
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
    """`SoftSum.add_tile_` for rows. For columns, rows and columns and their strides are exchanged."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    s_peak, t_peak = tl.load(student_shift + offs_n, mask_n, 0.0), tl.load(teacher_shift + offs_n, mask_n, 0.0)
    s_sum, t_sum = tl.load(student + offs_n, mask_n, 0.0), tl.load(teacher + offs_n, mask_n, 0.0)
    gap_sum = tl.load(gap + offs_n, mask_n, 0.0)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        mask = mask_n[:, None] & (offs_m < columns)[None, :]
        offs = offs_n.to(tl.int64)[:, None] * row_stride + offs_m.to(tl.int64)[None, :] * stride
        s_tile, t_tile = tl.load(s + offs, mask, -float("inf")), tl.load(t + offs, mask, -float("inf"))
        new_s_peak, new_t_peak = tl.maximum(s_peak, tl.max(s_tile, 1)), tl.maximum(t_peak, tl.max(t_tile, 1))
        s_base, t_base = finite_or_zero(new_s_peak), finite_or_zero(new_t_peak)
        gap_sum += t_sum * tl.where(s_peak == -float("inf"), 0.0, s_base - finite_or_zero(s_peak))
        s_sum = s_sum * tl.exp(s_peak - s_base) + tl.sum(tl.exp(s_tile - s_base[:, None]), 1)
        rescale, e = tl.exp(t_peak - t_base), tl.exp(t_tile - t_base[:, None])
        t_sum = t_sum * rescale + tl.sum(e, 1)
        gap_sum = gap_sum * rescale + tl.sum(e * tl.where(mask, s_base[:, None] - s_tile, 0.0), 1)
        s_peak, t_peak = new_s_peak, new_t_peak
    tl.store(student_shift + offs_n, s_peak, mask_n)
    tl.store(student + offs_n, s_sum, mask_n)
    tl.store(teacher_shift + offs_n, t_peak, mask_n)
    tl.store(teacher + offs_n, t_sum, mask_n)
    tl.store(gap + offs_n, gap_sum, mask_n)


@triton.jit
def _weighted_softmax(values, shift, total, per_unit, offs, mask, axis: tl.constexpr):
    """`logsum.weighted_softmax` of a tile, with the factors of its rows (axis 1) or columns (axis 0)."""
    base = tl.expand_dims(tl.load(shift + offs, mask, 0.0), axis)
    cap = tl.expand_dims(tl.load(total + offs, mask, 0.0), axis)
    return tl.minimum(tl.exp(values - base), cap) * tl.expand_dims(tl.load(per_unit + offs, mask, 0.0), axis)


@triton.jit
def _soft_gradient_kernel(
    s,  # (rows, columns) overwritten by the gradient: weighted softmax of the student minus the teacher's
    t,  # (rows, columns)
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
    offs = offs_n.to(tl.int64)[:, None] * columns + offs_m[None, :]
    s_tile, t_tile = tl.load(s + offs, mask, 0.0), tl.load(t + offs, mask, 0.0)
    g = _weighted_softmax(s_tile, row_shift, row_total, row_per_unit, offs_n, mask_n, 1)
    g += _weighted_softmax(s_tile, col_shift, col_total, col_per_unit, offs_m, mask_m, 0)
    g -= _weighted_softmax(t_tile, teacher_row_shift, teacher_row_total, teacher_row_per_unit, offs_n, mask_n, 1)
    g -= _weighted_softmax(t_tile, teacher_col_shift, teacher_col_total, teacher_col_per_unit, offs_m, mask_m, 0)
    tl.store(s + offs, g, mask)


def soft_statistics(block: Block) -> tuple[SoftSum, SoftSum]:  # (N,), (M,)
    """Sums for the cross-entropies of rows and columns under the teacher's softmax, from one pass."""
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
    row: SoftSum,  # (N,) sums over all columns, of which the block may hold a part
    col: SoftSum,  # (M,)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of the cross-entropies: g_ij = drow_i·(softmax(s) − softmax(t))_ij + dcol_j·(the same over columns)_ij."""
    tiles = gradient_tiles(block)
    row_factors = [factor for log_sum in row[:2] for factor in log_sum.softmax_factors(drow)]
    col_factors = [factor for log_sum in col[:2] for factor in log_sum.softmax_factors(dcol)]

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        t = tiles.teacher(rows, columns)
        block_n, block_m = _GRADIENT_BLOCKS
        grid = (triton.cdiv(s.shape[0], block_n), triton.cdiv(s.shape[1], block_m))
        by_row, by_column = (factor[rows] for factor in row_factors), (factor[columns] for factor in col_factors)
        _soft_gradient_kernel[grid](s, t, *by_row, *by_column, *s.shape, BLOCK_N=block_n, BLOCK_M=block_m)
        return s

    return tile_gradients(tiles, weigh, sums, needs)


def _add_tile(sums: SoftSum, s: Tensor, t: Tensor, dim: int) -> None:
    """`SoftSum.add_tile_`."""
    kept = 1 - dim
    block_n, block_m = _ROW_BLOCKS if dim == 1 else _COLUMN_BLOCKS
    shape, strides = (s.shape[kept], s.shape[dim]), (s.stride(kept), s.stride(dim))
    vectors = (*sums.student, *sums.teacher, sums.gap)
    _soft_sums_kernel[(triton.cdiv(shape[0], block_n),)](s, t, *vectors, *shape, *strides, BLOCK_N=block_n, BLOCK_M=block_m)
