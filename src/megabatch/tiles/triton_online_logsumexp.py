"""Adds partial sums of exp(s), and recomputes by online softmax the few that fp32 cannot hold at the block's common shift.

The host never reads a value back: a program whose sums are all in range is done. A program with a sum out of range computes its
rows again, with a running maximum each and without the common shift C: next to an outlier C is so large that k·s − C has no
digits left for the other rows. Rows and columns share one launch.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan, plan
from megabatch.tiles.block import Block
from megabatch.tiles.triton_device import exponents, finite_or_zero, offsets, sum_parts
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_operands import Operands, kernel_options

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


class Sums(NamedTuple):
    """Sums of 2^t over rows or over columns."""

    total: Tensor  # (K,)
    shift: Tensor  # (K,) −inf for C, otherwise a shift of its own


def complete_sums(
    operands: Operands,
    block: Block,
    row_part: Tensor,  # (parts, N)
    row: Sums,
    col_part: Tensor | None = None,  # (parts, M)
    col: Sums | None = None,
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
