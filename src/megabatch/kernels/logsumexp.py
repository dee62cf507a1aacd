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
# One kernel adds the partial sums of exp(s). It also recomputes, by online softmax, the few sums that leave the range of fp32
# at the common shift C of the block.
#
# The host never reads a value back. A program stores its sums if all of them are in the range. Otherwise it recomputes the
# sums of its rows, with a running maximum for each row. It does not use C, because an outlier makes C so large that k·s − C has
# no correct digits for other rows. Rows and columns share one launch.

# A sum below SMALLEST may have lost terms that matter, and a sum above LARGEST may have overflowed.
SMALLEST, LARGEST = 2.0**-80, 2.0**126
_PARTS = 64  # partial sums of a row that are loaded at once


@triton.jit
def _complete(
    tile,
    x,  # (N, D)
    y,  # (M, D)
    exponent_scale,
    row_offset,  # (N,) or None; if TRANSPOSED, (M,), because the rows of this function are then the columns of the block
    col_offset,  # (M,) or None; if TRANSPOSED, (N,)
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None; None if TRANSPOSED
    part,  # (parts, N)
    total,  # (N,) receives the sums
    shift,  # (N,) receives the row's own shift if its sum was recomputed, otherwise −inf
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
    """Stores the sums of one tile of rows."""
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
            new_peak = tl.maximum(peak, tl.max(t, 1))  # the maximum ignores NaN, but the sum becomes NaN
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
    row_total,  # (N,) receives the row sums
    row_shift,  # (N,) receives their shifts
    col_part,  # (col_parts, M), or None
    col_total,  # (M,) receives the column sums, or None
    col_shift,  # (M,) receives their shifts, or None
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
    shift: Tensor  # (K,) the sum's own shift, or −inf if the shift is C


def complete_sums(
    operands: Operands,
    block: Block,
    row_part: Tensor,  # (parts, N)
    row: OnlineSums,
    col_part: Tensor | None = None,  # (parts, M)
    col: OnlineSums | None = None,
) -> None:
    """Writes the row sums, and the column sums if `col` is given, given partial sums. The only part may be `total` itself."""
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
# Row and column sums of exp(s) in one pass over the tiles. The pass takes about as long as the matmul.
#
# A program owns a panel of BLOCK_M columns and loops over the rows, BLOCK_N at a time. One exponential per logit serves its row
# sum and its column sum. The row sums of a tile are stored as partial sums. The column sums stay in registers: each thread adds
# the rows that it owns, and the sums of the threads are reduced once, after the loop. There are no atomics, and partial sums
# are added in a fixed order.
#
# All sums share one shift (`kernels.operands`). If a sum leaves the range of fp32 at this shift, the kernel above detects this
# from the value of the sum and recomputes the sum. With embeddings of unit length, this does not happen at scales below 48. At
# a scale of 100, it happens only for rows in which no cosine is above 0.035.


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
            # One thread holds the rows r and r + 8 of a fragment, in both halves of the tile.
            pairs = tl.sum(e.reshape(BLOCK_N // 16, 2, 8, BLOCK_M), 1)
            col += tl.sum(pairs.reshape(2, BLOCK_N // 32, 8, BLOCK_M), 0)
    if col_part is not None:
        offs_part = split.to(tl.int64) * (last_column - first_column) + (offs_m - first_column)
        tl.store(col_part + offs_part, tl.sum(tl.sum(col, 0), 0), mask=offs_m < last_column)


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:  # (N,), (M,) or (0,)
    """Returns row sums and column sums of exp(s) from one pass over the tiles. Without `columns`, the column sums are empty."""
    if block.second_model is not None:
        assert not columns, "a guide excludes pairs from row sums only"
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
    """Returns the sums in float64 as exp(shift) · total, given 2^shift · total.

    An empty sum has the shift −inf and the total 0.
    """
    shift = torch.where(sums.shift.isinf(), operands.shift, sums.shift.double())
    return LogSum(torch.where(sums.total == 0, -torch.inf, shift * math.log(2)), sums.total.double())


def add_sums(
    operands: Operands,
    block: Block,
    rows: slice,
    columns: slice,
    row_total: Tensor,  # (N,) accumulator
    col_total: Tensor | None,  # (M,) accumulator
) -> None:
    """Adds the row and column sums of 2^t over a rectangle.

    The rectangle starts and ends at tile boundaries or at edges of the block.
    """
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
    """Yields the launches whose partial sums add up to the sums of a rectangle."""
    hopper = kernel_plan.hopper_tile(block, "sums")
    tile = kernel_plan.logsumexp_tile(block.precision, block.x.device)
    panel_columns = tile.columns if hopper is None else hopper.columns
    for row_range in _row_ranges(rows, tile, hopper):
        for col_range in windows(columns, kernel_plan.LAUNCH_PANELS * panel_columns):
            yield _Launch(row_range, col_range, tile, hopper)


def _partial_sums(
    operands: Operands, block: Block, task: _Launch, *, with_columns: bool
) -> tuple[Tensor, Tensor | None]:  # (panels, n), (partial sums, m)
    """Returns the partial row sums of 2^t, and the partial column sums if `with_columns` is set."""
    rows, columns, tile, hopper = task
    panels = plan.tiles(columns.stop - columns.start, tile.columns if hopper is None else hopper.columns)
    row_part = torch.empty(panels, rows.stop - rows.start, dtype=block.dtype, device=block.x.device)
    if hopper is None:
        return row_part, _launch(operands, block, tile, rows, columns, row_part, with_columns=with_columns)
    from megabatch.kernels import hopper as gluon

    return row_part, gluon.sums(hopper, operands, rows, columns, row_part, block.skip_diagonal)


def _row_ranges(rows: slice, tile: kernel_plan.KernelTile, hopper: kernel_plan.HopperTile | None) -> Iterator[slice]:
    """Yields the rows of each launch.

    If the last tile of rows is incomplete, it has its own launch, because it needs row offsets. In one launch with the other
    tiles, the offsets would slow down all tiles of `_logsumexp_kernel`.
    """
    last_full_row = rows.stop if hopper is not None else rows.stop - (rows.stop - rows.start) % tile.rows
    yield from windows(slice(rows.start, last_full_row), kernel_plan.LAUNCH_ROWS)
    if last_full_row < rows.stop:
        yield slice(last_full_row, rows.stop)


def _launch(
    operands: Operands,
    block: Block,
    tile: kernel_plan.KernelTile,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) receives the partial row sums
    *,
    with_columns: bool,
) -> Tensor | None:  # (splits, m)
    """Writes the partial row sums. Returns the partial column sums if `with_columns` is set."""
    n, m = rows.stop - rows.start, columns.stop - columns.start
    row_offset = operands.row_offset
    if row_offset is None and n % tile.rows and with_columns:
        # The copy engine reads zeros beyond the last row. With row offsets, such rows have an offset of −inf, so they do not
        # change the column sums.
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
# The upper triangle of a symmetric block by the Triton kernels. The operands are prepared once, and not for every rectangle.
#
# The sums of all rectangles share the shift C of the block. So row sums and column sums are added without conversion, and their
# logarithms are computed at the end. The row weights and the column weights of the gradient are the same vector.


class KernelTriangle(Triangle):
    """The `Triangle` of the Triton engine."""

    def __init__(self) -> None:
        super().__init__(TRITON)

    def statistics(self, block: Block) -> LogSum:  # (N,)
        """Returns the row sums of exp(s)."""
        if block.is_empty:
            return super().statistics(block)
        operands = exponent_operands(block)
        total, shift = block.zeros(2, block.N)
        for rows, columns in self.upper_triangle(block):
            add_sums(operands, block, rows, columns, total, None if rows == columns else total)
        complete_sums(operands, block, total[None], sums := OnlineSums(total, shift))
        return log_sum(sums, operands)

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩ to `side.dz` and `dscale`."""
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
