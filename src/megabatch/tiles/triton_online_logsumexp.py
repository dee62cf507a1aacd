"""Online softmax for the few sums of exp(s) that fp32 cannot hold at the block's common shift.

The kernel is always launched. A program whose sums are all in range returns at once, so the host never reads a value back. A
program with a sum out of range computes its rows again, with a running maximum each and without the common shift C: next to an
outlier C is so large that k·s − C has no digits left for the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block
from megabatch.tiles.triton_device import exponents, finite_or_zero, offsets
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_operands import Operands, kernel_options

SMALLEST, LARGEST = 2.0**-80, 2.0**126  # a smaller sum may have lost terms that matter, a larger one has overflowed


@triton.jit
def _online_logsumexp_kernel(
    x,  # (N, D)
    y,  # (M, D)
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None; (M,) if TRANSPOSED, where the kernel's rows are the block's columns
    col_offset,  # (M,) or None; (N,) if TRANSPOSED
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None; None if TRANSPOSED
    total,  # (N,) read, and overwritten where out of range
    shift,  # (N,) written where total is: the row's own maximum
    smallest,
    largest,
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
):
    n = tl.program_id(0) * BLOCK_N
    offs_n = n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    before = tl.load(total + offs_n, mask=mask_n, other=1.0)
    out_of_range = ~((before >= smallest) & (before <= largest))
    if tl.max(out_of_range.to(tl.int32), 0) == 0:
        return
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
    peak = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for m in range(0, M, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_d = offs_d < D
            a = tl.load(x + offs_n.to(tl.int64)[:, None] * x_stride + offs_d[None, :], mask_n[:, None] & mask_d[None, :], 0.0)
            b = tl.load(
                y + offs_m.to(tl.int64)[:, None] * y_stride + offs_d[None, :], (offs_m < M)[:, None] & mask_d[None, :], 0.0
            )
            s = tl.dot(a, b.T, s, input_precision=PRECISION)
        if TRANSPOSED:
            column, row = offsets(col_offset, 0.0, offs_n, N, 1), offsets(row_offset, 0.0, offs_m, M, 0)
        else:
            column, row = offsets(col_offset, 0.0, offs_m, M, 0), offsets(row_offset, 0.0, offs_n, N, 1)
        t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
        t = tl.where((offs_m < M)[None, :], t, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(t, 1))  # ignores NaN; the sum keeps it
        base = finite_or_zero(new_peak)
        sums = sums * tl.exp2(peak - base) + tl.sum(tl.exp2(t - base[:, None]), 1)
        peak = new_peak
    base = finite_or_zero(peak)
    tl.store(total + offs_n, sums, mask=mask_n & out_of_range)
    tl.store(shift + offs_n, base, mask=mask_n & out_of_range)


def recompute_out_of_range(
    operands: Operands, block: Block, total: Tensor, *, transposed: bool
) -> Tensor:  # (N,), or (M,) if transposed
    """Recomputes the sums in `total` that are out of fp32's range, in place. Returns their own shifts, and elsewhere +inf.

    `total` holds row sums, or column sums if `transposed`.
    """
    tile = plan.ONLINE
    sides = [(operands.x, operands.row_ids), (operands.y, operands.col_ids)]
    (own, own_ids), (other, other_ids) = reversed(sides) if transposed else sides
    shift = torch.full_like(total, torch.inf)
    offsets_and_ids = operands.row_offset_unshifted, operands.col_offset_unshifted, own_ids, other_ids, operands.limit
    launch(
        _online_logsumexp_kernel,
        (triton.cdiv(len(own), tile.rows),),
        (own, other, operands.exponent_scale, *offsets_and_ids, total, shift),
        (SMALLEST, LARGEST, len(own), len(other), own.stride(0), other.stride(0)),
        TRANSPOSED=transposed,
        **kernel_options(block, tile),
    )
    return shift
