"""The Triton engine, which has the same functions as `tiles.eager`, and its kernels for row and column sums of exp(s)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels import two_models
from megabatch.kernels.device import exponents, finite_or_zero, offsets, sum_parts
from megabatch.kernels.gradient import (
    gradient_strips,
    logsumexp_gradients,
    side_weights,
    softmax_task,
    softplus_gradients,
    softplus_sums,
)
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import Operands, exponent_operands, finish_rows, kernel_options, matching_products
from megabatch.kernels.ranking import rank_counts, topk
from megabatch.kernels.two_models import soft_gradients, soft_statistics
from megabatch.tiles import plan
from megabatch.tiles.block import TRITON, Block, ColumnGradients, Needs, windows
from megabatch.tiles.sums import LogSum
from megabatch.tiles.symmetric import Triangle, TriangleSide

__all__ = [
    "finish_rows",
    "logsumexp_gradients",
    "logsumexp_statistics",
    "matching_products",
    "rank_counts",
    "soft_gradients",
    "soft_statistics",
    "softplus_gradients",
    "softplus_sums",
    "topk",
]

# ----------------------------------------------------------------------------------------------------------------------
# Adds partial sums of exp(s), and recomputes by online softmax the few that fp32 cannot hold at the block's common shift.
#
# The host never reads a value back: a program whose sums are all in range is done. A program with a sum out of range
# computes its rows again, with a running maximum each and without the common shift C: next to an outlier C is so large that
# k·s − C has no digits left for the other rows. Rows and columns share one launch.

SMALLEST, LARGEST = 2.0**-80, 2.0**126  # a smaller sum may have lost terms that matter, a larger one has overflowed
_PARTS = 64  # partial sums of a row that are loaded at once


@triton.jit
def _complete(
    tile,
    x,  # (N, D)
    y,  # (M, D)
    exponent_scale,
    row_offset,  # (N,) or None; (M,) if TRANSPOSED, where the rows here are the block's columns
    col_offset,  # (M,) or None; (N,) if TRANSPOSED
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None; None if TRANSPOSED
    part,  # (parts, N)
    total,  # (N,) written
    shift,  # (N,) written: the row's own shift where it was recomputed, elsewhere −inf
    smallest,
    largest,
    parts,
    N,
    M,
    x_stride,
    y_stride,
    D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The sums of one tile of rows."""
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    n = tile * BLOCK_N
    offs_n = n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    sums = sum_parts(part, offs_n, parts, N, False, BLOCK_P)
    out_of_range = mask_n & ~((sums >= smallest) & (sums <= largest))
    if tl.max(out_of_range.to(tl.int32), 0) == 0:
        tl.store(total + offs_n, sums, mask_n)
        tl.store(shift + offs_n, tl.full((BLOCK_N,), -float("inf"), tl.float32), mask_n)
    else:
        k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
        peak = tl.full((BLOCK_N,), -float("inf"), tl.float32)
        again = tl.zeros((BLOCK_N,), tl.float32)
        for m in range(0, M, BLOCK_M):
            offs_m = m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < M
            s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for d in range(0, D, BLOCK_D):
                offs_d = d + tl.arange(0, BLOCK_D)
                mask_d = (offs_d < D)[None, :]
                a = tl.load(x + offs_n.to(tl.int64)[:, None] * x_stride + offs_d[None, :], mask_n[:, None] & mask_d, 0.0)
                b = tl.load(y + offs_m.to(tl.int64)[:, None] * y_stride + offs_d[None, :], mask_m[:, None] & mask_d, 0.0)
                s = tl.dot(a, b.T, s, input_precision=PRECISION)
            if TRANSPOSED:
                column, row = offsets(col_offset, 0.0, offs_n, N, 1), offsets(row_offset, 0.0, offs_m, M, 0)
            else:
                column, row = offsets(col_offset, 0.0, offs_m, M, 0), offsets(row_offset, 0.0, offs_n, N, 1)
            t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
            t = tl.where(mask_m[None, :], t, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(t, 1))  # ignores NaN; the sum keeps it
            base = finite_or_zero(new_peak)
            again = again * tl.exp2(peak - base) + tl.sum(tl.exp2(t - base[:, None]), 1)
            peak = new_peak
        tl.store(total + offs_n, tl.where(out_of_range, again, sums), mask_n)
        has_own = out_of_range & (again != 0.0)  # an empty sum needs no shift
        tl.store(shift + offs_n, tl.where(has_own, finite_or_zero(peak), -float("inf")), mask_n)


@triton.jit
def _online_logsumexp_kernel(
    x,  # (N, D)
    y,  # (M, D)
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None
    col_offset,  # (M,) or None
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    row_part,  # (row_parts, N)
    row_total,  # (N,) written
    row_shift,  # (N,) written
    col_part,  # (col_parts, M), or None
    col_total,  # (M,) written, or None
    col_shift,  # (M,) written, or None
    smallest,
    largest,
    row_parts,
    col_parts,
    N,
    M,
    x_stride,
    y_stride,
    D: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    program, tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    if program < tiles:
        _complete(
            program, x, y, exponent_scale, row_offset, col_offset, row_ids, col_ids, limit, row_part, row_total, row_shift,
            smallest, largest, row_parts, N, M, x_stride, y_stride,
            D, False, SKIP_DIAGONAL, PRECISION, EXACT, BLOCK_N, BLOCK_M, BLOCK_D, BLOCK_P,
        )  # fmt: skip
    elif col_part is not None:
        _complete(
            program - tiles, y, x, exponent_scale, row_offset, col_offset, col_ids, row_ids, None, col_part, col_total,
            col_shift, smallest, largest, col_parts, M, N, y_stride, x_stride,
            D, True, SKIP_DIAGONAL, PRECISION, EXACT, BLOCK_N, BLOCK_M, BLOCK_D, BLOCK_P,
        )  # fmt: skip


class OnlineSums(NamedTuple):
    """Sums of 2^t over rows or over columns."""

    total: Tensor  # (K,)
    shift: Tensor  # (K,) −inf for C, otherwise a shift of its own


def complete_sums(
    operands: Operands,
    block: Block,
    row_part: Tensor,  # (parts, N)
    row: OnlineSums,
    col_part: Tensor | None = None,  # (parts, M)
    col: OnlineSums | None = None,
) -> None:
    """Writes the sums of rows, and of columns if given, from partial sums; `total` itself may be the only part of it."""
    assert col is None or operands.limit is None, "a limit applies to row sums only"
    tile = kernel_plan.ONLINE
    programs = plan.tiles(block.N, tile.rows) + (0 if col is None else plan.tiles(block.M, tile.rows))
    launch(
        _online_logsumexp_kernel,
        (programs,),
        (
            operands.x,
            operands.y,
            operands.exponent_scale,
            operands.row_offset_unshifted,
            operands.col_offset_unshifted,
            operands.row_ids,
            operands.col_ids,
            operands.limit,
            row_part,
            *row,
            col_part,
            *(col or (None, None)),
        ),
        (
            SMALLEST,
            LARGEST,
            len(row_part),
            0 if col_part is None else len(col_part),
            block.N,
            block.M,
            operands.x.stride(0),
            operands.y.stride(0),
        ),
        BLOCK_P=_PARTS,
        **kernel_options(block, tile),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Row and column sums of exp(s) in one pass over the tiles, at the speed of the bare product.
#
# A program owns a panel of BLOCK_M columns and loops over the rows, BLOCK_N at a time. One exponential per element serves
# both directions. Row sums of a tile are stored as partial sums. Column sums stay in registers: each thread adds up the
# rows it owns, and the threads' sums are reduced once, after the loop. There are no atomics; partial sums are added in a
# fixed order.
#
# All sums share one shift (`kernels.operands`). Sums that fp32 cannot hold at that shift are recognised by their values, and
# the online kernel above recomputes them. Unit-length embeddings have none at scales below 48, and at 100 only in rows
# where no cosine is above 0.035.


@triton.jit
def _logsumexp_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None
    col_offset,  # (M,) or None
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    row_part,  # (panels, rows of this launch)
    col_part,  # (splits, columns of this launch), or None
    first_row,
    last_row,
    first_column,
    last_column,
    split_rows,
    N,
    M,
    D: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    panel, split = tl.program_id(0), tl.program_id(1)
    m = first_column + panel * BLOCK_M
    offs_m = m + tl.arange(0, BLOCK_M)
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
    column = offsets(col_offset, tl.load(exponent_scale + 2), offs_m, M, 0)
    if col_part is not None:
        col = tl.zeros((BLOCK_N // 32, 8, BLOCK_M), tl.float32)
    begin = first_row + split * split_rows
    for n in tl.range(begin, tl.minimum(begin + split_rows, last_row), BLOCK_N, flatten=True):
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        row = offsets(row_offset, 0.0, offs_n, N, 1)
        t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
        e = tl.exp2(t)
        offs_part = panel.to(tl.int64) * (last_row - first_row) + (offs_n - first_row)
        tl.store(row_part + offs_part, tl.sum(e, 1), mask=offs_n < last_row)
        if col_part is not None:
            pairs = tl.sum(e.reshape(BLOCK_N // 16, 2, 8, BLOCK_M), 1)  # one thread holds rows r and r + 8 of a fragment
            col += tl.sum(pairs.reshape(2, BLOCK_N // 32, 8, BLOCK_M), 0)  # and the same rows of both halves of the tile
    if col_part is not None:
        offs_part = split.to(tl.int64) * (last_column - first_column) + (offs_m - first_column)
        tl.store(col_part + offs_part, tl.sum(tl.sum(col, 0), 0), mask=offs_m < last_column)


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:  # (N,), (M,) or (0,)
    """Computes row sums and column sums of exp(s) in one pass over the tiles. Without `columns` the column sums are empty."""
    if block.second_model is not None:
        assert not columns, "a guide excludes pairs of rows"
        row_sums = two_models.row_statistics(block)
        return row_sums, LogSum.empty(0, dtype=row_sums.shift.dtype, device=block.x.device)
    operands = exponent_operands(block)
    row, col = (OnlineSums(*torch.empty(2, length, dtype=block.dtype, device=block.x.device)) for length in (block.N, block.M))
    write_sums(operands, block, row, col if columns else None)
    if columns:
        return log_sum(row, operands), log_sum(col, operands)
    return log_sum(row, operands), LogSum.empty(0, dtype=torch.float64, device=block.x.device)


def write_sums(operands: Operands, block: Block, row: OnlineSums, col: OnlineSums | None) -> None:
    """Writes the row sums of 2^t, (N,) each, and the column sums, (M,) each, if `col` is given."""
    rows, columns = slice(0, block.N), slice(0, block.M)
    launches = list(_launches(operands, block, rows, columns))
    if len(launches) == 1:
        parts = _partial_sums(operands, block, launches[0], with_columns=col is not None)
        complete_sums(operands, block, parts[0], row, None if col is None else parts[1], col)
        return
    row.total.zero_()
    if col is not None:
        col.total.zero_()
    add_sums(operands, block, rows, columns, row.total, None if col is None else col.total)
    complete_sums(operands, block, row.total[None], row, None if col is None else col.total[None], col)


def log_sum(sums: OnlineSums, operands: Operands) -> LogSum:
    """The sums 2^shift · total with the shift in natural units, float64. An empty sum has shift −inf and total 0."""
    shift = torch.where(sums.shift.isinf(), operands.shift, sums.shift.double())
    return LogSum(torch.where(sums.total == 0, -torch.inf, shift * math.log(2)), sums.total.double())


def add_sums(
    operands: Operands,
    block: Block,
    rows: slice,
    columns: slice,
    row_total: Tensor,  # (N,) added to
    col_total: Tensor | None,  # (M,) added to
) -> None:
    """Adds the row and column sums of 2^t of a rectangle, which starts and ends at tile boundaries or edges of the block."""
    for task in _launches(operands, block, rows, columns):
        row_part, col_part = _partial_sums(operands, block, task, with_columns=col_total is not None)
        row_total[task.rows].add_(row_part.sum(0))
        if col_total is not None and col_part is not None:
            col_total[task.columns].add_(col_part.sum(0))


class _Launch(NamedTuple):
    rows: slice
    columns: slice
    tile: kernel_plan.KernelTile
    hopper: kernel_plan.HopperTile | None


def _launches(operands: Operands, block: Block, rows: slice, columns: slice) -> Iterator[_Launch]:
    """The launches whose partial sums add up to the sums of a rectangle."""
    hopper = kernel_plan.hopper_tile(block, "sums")
    tile = kernel_plan.logsumexp_tile(block.precision, block.x.device)
    width = tile.columns if hopper is None else hopper.columns
    for row_range in _row_ranges(rows, tile, hopper):
        for col_range in windows(columns, kernel_plan.LAUNCH_PANELS * width):
            yield _Launch(row_range, col_range, tile, hopper)


def _partial_sums(
    operands: Operands, block: Block, task: _Launch, *, with_columns: bool
) -> tuple[Tensor, Tensor | None]:  # (panels, n), (partial sums, m)
    """Partial row sums of 2^t, and partial column sums if `with_columns`."""
    rows, columns, tile, hopper = task
    panels = plan.tiles(columns.stop - columns.start, tile.columns if hopper is None else hopper.columns)
    row_part = torch.empty(panels, rows.stop - rows.start, dtype=block.dtype, device=block.x.device)
    if hopper is None:
        return row_part, _launch(operands, block, tile, rows, columns, row_part, with_columns=with_columns)
    from megabatch.kernels import hopper as gluon

    return row_part, gluon.sums(hopper, operands, rows, columns, row_part, block.skip_diagonal)


def _row_ranges(rows: slice, tile: kernel_plan.KernelTile, hopper: kernel_plan.HopperTile | None) -> Iterator[slice]:
    """The rows of each launch.

    A last, incomplete tile of rows gets its own launch: it needs row offsets, which would slow down all other tiles
    of `_logsumexp_kernel`.
    """
    whole = rows.stop if hopper is not None else rows.stop - (rows.stop - rows.start) % tile.rows
    yield from windows(slice(rows.start, whole), kernel_plan.LAUNCH_ROWS)
    if whole < rows.stop:
        yield slice(whole, rows.stop)


def _launch(
    operands: Operands,
    block: Block,
    tile: kernel_plan.KernelTile,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) written
    *,
    with_columns: bool,
) -> Tensor | None:  # (splits, m)
    """Writes partial row sums. Returns partial column sums if `with_columns`."""
    n, m = rows.stop - rows.start, columns.stop - columns.start
    row_offset = operands.row_offset
    if row_offset is None and n % tile.rows and with_columns:
        # The copy engine reads zeros beyond the last row. An offset of −inf keeps them out of the column sums.
        row_offset = block.zeros(block.N)
    splits, split_rows = kernel_plan.row_splits(len(row_part), n, tile.rows, kernel_plan.multiprocessors(block.x.device))
    col_part = torch.empty(splits, m, dtype=block.dtype, device=block.x.device) if with_columns else None
    launch(
        _logsumexp_kernel,
        (len(row_part), splits),
        (
            *operands.descriptors(tile),
            operands.exponent_scale,
            row_offset,
            operands.col_offset,
            operands.row_ids,
            operands.col_ids,
            operands.limit,
            row_part,
            col_part,
        ),
        (rows.start, rows.stop, columns.start, columns.stop, split_rows, block.N, block.M),
        **kernel_options(block, tile),
    )
    return col_part


# ----------------------------------------------------------------------------------------------------------------------
# The upper half of a symmetric block by the Triton kernels; operands are prepared once and not for every rectangle.
#
# The sums of all rectangles share the block's shift C. So row sums and column sums are simply added, and become logarithms
# at the end. Row weights and column weights of the gradient are the same vector.


class KernelTriangle(Triangle):
    """`Triangle` of a block by the Triton backend."""

    def __init__(self) -> None:
        super().__init__(TRITON)

    def statistics(self, block: Block) -> LogSum:  # (N,)
        """Row sums of exp(s)."""
        if block.is_empty:
            return super().statistics(block)
        operands = exponent_operands(block)
        total, shift = block.zeros(2, block.N)
        for rows, columns in self.upper_triangle(block):
            add_sums(operands, block, rows, columns, total, None if rows == columns else total)
        complete_sums(operands, block, total[None], sums := OnlineSums(total, shift))
        return log_sum(sums, operands)

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        if block.is_empty:
            return
        operands = exponent_operands(block)
        weights = side_weights(side.sums, side.dsums, operands.shift, block.N)
        task = softmax_task(operands, block, weights, weights)
        for rows, columns in self.upper_triangle(block):
            needs = Needs(dx=True, dy=rows != columns, dscale=dscale is not None)
            sums = ColumnGradients(side.dz if needs.dy else None, None)
            strips = gradient_strips(task, sums, needs, within=(rows, columns))
            self.take(strips, block, side.dz, dscale, share=1.0 if needs.dy else 0.5)
