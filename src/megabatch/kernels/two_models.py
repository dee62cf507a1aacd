"""Kernels that read the logits of two models: distillation from a teacher, and negatives that a guide excludes."""

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels.device import equal_ids, finite_or_zero
from megabatch.kernels.operands import pack_ids
from megabatch.tiles.block import HALF_DTYPE, Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.eager import (
    Tiles,
    gradient_rounding,
    gradient_tiles,
    half_buffer,
    multiply_tiles,
    rounds_gradients,
    tile_gradients,
)
from megabatch.tiles.sums import LogSum, SoftSum

# ----------------------------------------------------------------------------------------------------------------------
# The cross-entropy of a student's softmax under a teacher's softmax. Sums take one pass over the tiles of both models, and
# gradients take another one.
#
# The tiles of both models would not fit in the registers of a kernel. So cuBLAS matmuls compute both tiles in memory
# (`tiles.eager`), and the kernels here read them once for the rows, once for the columns, and once for the gradient. PyTorch
# operations would read and write them about thirty times.

# (BLOCK_N, BLOCK_M). A program for sums loops over all entries of its rows or columns, so small blocks give many programs.
_ROW_BLOCKS, _COLUMN_BLOCKS, _GRADIENT_BLOCKS = (8, 512), (32, 64), (16, 256)


@triton.jit
def _soft_sums_kernel(
    s,  # (rows, columns) logits of the student, or their transpose
    t,  # (rows, columns) logits of the teacher, or their transpose
    student_shift,  # (rows,) updated
    student,  # (rows,) updated
    teacher_shift,  # (rows,) updated
    teacher,  # (rows,) updated
    gap,  # (rows,) updated
    rows,
    columns,
    row_stride,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Computes `SoftSum.add_tile_` for rows. For columns, the caller exchanges rows and columns, and also their strides."""
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
    """Computes `tiles.sums.weighted_softmax` of a tile, with the factors of its rows (axis 1) or columns (axis 0)."""
    base = tl.expand_dims(tl.load(shift + offs, mask, 0.0), axis)
    cap = tl.expand_dims(tl.load(total + offs, mask, 0.0), axis)
    return tl.minimum(tl.exp(values - base), cap) * tl.expand_dims(tl.load(per_unit + offs, mask, 0.0), axis)


@triton.jit
def _soft_gradient_kernel(
    s,  # (rows, columns) overwritten by the gradient, the student's weighted softmax minus the teacher's
    t,  # (rows, columns)
    row_shift,  # (rows,) this and the next five are the factors of `LogSum.softmax_factors`
    row_total,
    row_per_unit,
    teacher_row_shift,
    teacher_row_total,
    teacher_row_per_unit,
    col_shift,  # (columns,) this and the next five are the factors of `LogSum.softmax_factors`
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
    """Returns the sums for the cross-entropies of rows and columns under the teacher's softmax, from one pass."""
    tiles = Tiles(block)
    row, col = (SoftSum.empty(size, dtype=block.dtype, device=block.x.device) for size in (block.N, block.M))
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s, t = tiles.logits(rows, columns, x, tiles.y(columns)), tiles.teacher(rows, columns)
            _add_tile(row.part(rows), s, t, dim=1)
            _add_tile(col.part(columns), s, t, dim=0)
    return row, col


def soft_gradients(
    block: Block,
    row: SoftSum,  # (N,) sums over all columns, which may be more than the columns of the block
    col: SoftSum,  # (M,)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Yields the gradients of the cross-entropies.

    g_ij = drow_i·(softmax(s) − softmax(t))_ij + dcol_j·(softmax(s) − softmax(t))_ij. The softmaxes of the first term are over
    rows, and the softmaxes of the second term are over columns.
    """
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
    """Computes `SoftSum.add_tile_`."""
    other_dim = 1 - dim
    block_n, block_m = _ROW_BLOCKS if dim == 1 else _COLUMN_BLOCKS
    shape, strides = (s.shape[other_dim], s.shape[dim]), (s.stride(other_dim), s.stride(dim))
    vectors = (*sums.student, *sums.teacher, sums.gap)
    _soft_sums_kernel[(triton.cdiv(shape[0], block_n),)](s, t, *vectors, *shape, *strides, BLOCK_N=block_n, BLOCK_M=block_m)


# ----------------------------------------------------------------------------------------------------------------------
# Row sums of exp(s) without the pairs that a guide model excludes, and the gradients of these sums. Each takes one pass over
# the tiles of both models.
#
# As in distillation, cuBLAS matmuls compute both tiles in memory. A program owns BLOCK_N rows and loops over their columns, so
# row sums need no second pass. A gradient tile is written in the dtype of the matmul that reads it.


_BLOCK_N, _BLOCK_M = 4, 1024


@triton.jit
def _guided_tile(
    products,
    guide,
    limit,
    scale,
    row_bias,
    col_bias,
    row_ids,
    col_ids,
    offs_n,
    offs_m,
    rows,
    columns,
    diagonal,  # the column of the diagonal in row 0 of the tile; it may lie outside of the tile
    SKIP_DIAGONAL: tl.constexpr,
):
    """Returns dot products, logits (−inf for excluded pairs), offsets and mask of a part of the tile."""
    mask_n, mask_m = offs_n < rows, offs_m < columns
    mask = mask_n[:, None] & mask_m[None, :]
    offs = offs_n.to(tl.int64)[:, None] * columns + offs_m[None, :]
    p, guided = tl.load(products + offs, mask, 0.0), tl.load(guide + offs, mask, 0.0)
    s = p * tl.load(scale)
    if row_bias is not None:
        s += tl.load(row_bias + offs_n, mask_n, 0.0)[:, None]
    if col_bias is not None:
        s += tl.load(col_bias + offs_m, mask_m, 0.0)[None, :]
    excluded = (guided > tl.load(limit + offs_n, mask_n, 0.0)[:, None]) | (mask == 0)
    if row_ids is not None:
        excluded |= equal_ids(row_ids, col_ids, offs_n, offs_m, rows, columns)
    if SKIP_DIAGONAL:
        excluded |= (offs_n + diagonal)[:, None] == offs_m[None, :]
    return p, tl.where(excluded, -float("inf"), s), offs, mask


@triton.jit(do_not_specialize=["diagonal"])
def _guided_logsumexp_kernel(
    products,  # (rows, columns) ⟨x_i, y_j⟩
    guide,  # (rows, columns) dot products of the guide
    limit,  # (rows,) pairs with a larger dot product of the guide are excluded
    scale,  # ()
    row_bias,  # (rows,) or None
    col_bias,  # (columns,) or None
    row_ids,  # (rows,) or None
    col_ids,  # (columns,) or None
    rows,
    columns,
    diagonal,
    shift,  # (rows,) updated
    total,  # (rows,) updated
    SKIP_DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Computes `LogSum.add_exponentials_` for rows, by online softmax."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    peak, sums = tl.load(shift + offs_n, mask_n, 0.0), tl.load(total + offs_n, mask_n, 0.0)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        _, s, _, _ = _guided_tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            SKIP_DIAGONAL,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(s, 1))
        base = finite_or_zero(new_peak)
        sums = sums * tl.exp(peak - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        peak = new_peak
    tl.store(shift + offs_n, peak, mask_n)
    tl.store(total + offs_n, sums, mask_n)


@triton.jit(do_not_specialize=["diagonal"])
def _guided_gradient_kernel(
    products,  # this and all parameters up to `diagonal` are the same as in `_guided_logsumexp_kernel`
    guide,
    limit,
    scale,
    row_bias,
    col_bias,
    row_ids,
    col_ids,
    rows,
    columns,
    diagonal,
    shift,  # (rows,) this and the next two are the factors of `LogSum.softmax_factors`
    total,
    per_unit,
    out,  # (rows, columns) receives the gradient weights; may be the memory of `products`
    scale_sums,  # (rows,) accumulator of Σ_j g_ij·⟨x_i, y_j⟩, or None
    row_sums,  # (rows,) accumulator of Σ_j g_ij, or None
    SKIP_DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores g_ij = drow_i · softmax(s)_ij."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    base, factor = tl.load(shift + offs_n, mask_n, 0.0), tl.load(per_unit + offs_n, mask_n, 0.0)
    cap = tl.load(total + offs_n, mask_n, 0.0)
    g_products, g_sums = tl.zeros_like(base), tl.zeros_like(base)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        p, s, offs, mask = _guided_tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            SKIP_DIAGONAL,
        )  # fmt: skip
        g = tl.minimum(tl.exp(s - base[:, None]), cap[:, None]) * factor[:, None]
        if scale_sums is not None:
            g_products += tl.sum(g * p, 1)
        if row_sums is not None:
            g_sums += tl.sum(g, 1)
        tl.store(out + offs, g.to(out.dtype.element_ty), mask)
    if scale_sums is not None:
        tl.store(scale_sums + offs_n, tl.load(scale_sums + offs_n, mask_n, 0.0) + g_products, mask_n)
    if row_sums is not None:
        tl.store(row_sums + offs_n, tl.load(row_sums + offs_n, mask_n, 0.0) + g_sums, mask_n)


def row_statistics(block: Block) -> LogSum:  # (N,)
    """Returns the row sums of exp(s)."""
    block = _pack(block)
    tiles = Tiles(block)
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            arguments, options = _arguments(tiles, rows, columns, x, tiles.y(columns))
            _guided_logsumexp_kernel[_grid(x)](*arguments, *row.part(rows), **options)
    return row


def row_gradients(
    block: Block,
    row: LogSum,  # (N,) sums over all columns, which may be more than the columns of the block
    drow: Tensor | None,  # (N,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Yields the gradients of ⟨drow, log row⟩: g_ij = drow_i·exp(s_ij)/row_i."""
    block = _pack(block)
    # The kernel writes half precision directly, except if dcol_bias needs sums of unrounded gradients.
    half = rounds_gradients(block) and block.precision in HALF_DTYPE and sums.dcol_bias is None
    tiles = Tiles(block) if half else gradient_tiles(block)
    buffer = half_buffer(tiles) if half else tiles.logits_buffer
    round_gradient = None if half else gradient_rounding(tiles)
    drow = block.zeros(block.N) if drow is None else drow
    factors = [factor.to(block.dtype) for factor in row.softmax_factors(drow)]

    def gradient_tile(
        rows: slice, columns: slice, x: Tensor, y: Tensor, dscale: Tensor | None, drow_bias: Tensor | None
    ) -> Tensor:
        arguments, options = _arguments(tiles, rows, columns, x, y)
        g = buffer(len(x), len(y))
        _guided_gradient_kernel[_grid(x)](
            *arguments,
            *(factor[rows] for factor in factors),
            g,
            dscale,
            drow_bias,
            **options,
        )
        if sums.dcol_bias is not None:
            sums.dcol_bias[columns] += g.sum(0)
        return g if round_gradient is None else round_gradient(g)

    return multiply_tiles(tiles, gradient_tile, sums, needs)


def _pack(block: Block) -> Block:
    """Returns the block with contiguous vectors and with ids of one dtype, which the kernels need."""
    vectors = {name: getattr(block, name) for name in ("limit", "row_bias", "col_bias")}
    vectors = {name: None if vector is None else vector.contiguous() for name, vector in vectors.items()}
    return replace(block, **vectors, row_ids=pack_ids(block.row_ids), col_ids=pack_ids(block.col_ids))


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _BLOCK_N),)


def _arguments(
    tiles: Tiles, rows: slice, columns: slice, x: Tensor, y: Tensor
) -> tuple[list[Tensor | int | None], dict[str, int]]:
    """Returns the arguments that both kernels take: the first eleven, and the compile-time arguments."""
    block = tiles.block
    assert tiles.second_model is not None
    assert block.limit is not None
    limit, row_bias, row_ids = (None if part is None else part[rows] for part in (block.limit, block.row_bias, block.row_ids))
    col_bias, col_ids = (None if part is None else part[columns] for part in (block.col_bias, block.col_ids))
    products, guide = tiles.form_products(x, y), tiles.second_model.products(rows, columns)
    options = {"SKIP_DIAGONAL": block.skip_diagonal, "BLOCK_N": _BLOCK_N, "BLOCK_M": _BLOCK_M}
    vectors = (limit, block.scale, row_bias, col_bias, row_ids, col_ids)
    return [products, guide, *vectors, len(x), len(y), rows.start - columns.start], options
