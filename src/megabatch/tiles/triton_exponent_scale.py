"""The scale of the exponents and their common shift C, from the largest norms of the embeddings: O(N·D), two kernels.

The first reads all embeddings. So it can also give the products of the matching pairs, which a loss of pairs needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.triton_device import load_embeddings
from megabatch.tiles.triton_launcher import launch

_BLOCK_N, _BLOCK_D = 16, 256
_CONSTANTS = 4  # before the largest norms, in the same tensor

# Exponents up to which weights need no cap. Two roundings of a product differ by about √D · 2⁻²⁴ of the norms, so a weight of
# the warp-specialised kernel is at most 1.001 without one at D = 1024: less than half a unit in the last place of bf16.
CAPPED_ABOVE = 512.0


@triton.jit
def _largest_finite(squares):
    return tl.max(tl.where(squares < float("inf"), squares, 0.0), 0)  # false for NaN too


@triton.jit
def _largest_norms_kernel(
    x,  # (N, D)
    y,  # (M, D), or None if it is x
    work,  # constants, then the results: (1 or 2, programs)
    products,  # (N,) of the pairs (i, i), or None
    N,
    M,
    D,
    x_stride,
    y_stride,
    CONSTANTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The largest finite squared norm of each BLOCK_N rows of x and of y; 0 if there is none."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_squares = tl.zeros((BLOCK_N,), tl.float32)
    y_squares, sums = x_squares, x_squares
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask_d = (offs_d < D)[None, :]
        a = load_embeddings(x, offs_n, offs_d, x_stride, 1, (offs_n < N)[:, None] & mask_d, 0)
        x_squares += tl.sum(a * a, 1)
        if y is not None:
            b = load_embeddings(y, offs_n, offs_d, y_stride, 1, (offs_n < M)[:, None] & mask_d, 0)
            y_squares += tl.sum(b * b, 1)
            if products is not None:
                sums += tl.sum(a * b, 1)
    to = work + CONSTANTS + tl.program_id(0)
    tl.store(to, _largest_finite(x_squares))
    if y is not None:
        tl.store(to + tl.num_programs(0), _largest_finite(y_squares))
    if products is not None:
        tl.store(products + offs_n, sums, offs_n < N)


@triton.jit
def _largest(values, count, BLOCK: tl.constexpr):
    """The largest of values[:count] ≥ 0."""
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        largest = tl.maximum(largest, tl.load(values + start + offs, start + offs < count, 0.0))
    return tl.max(largest, 0)


@triton.jit
def _exponent_scale_kernel(
    work,  # constants, written, then the largest norms: (1 or 2, count)
    scale,  # ()
    shift,  # () float64
    count,
    TWO_SIDES: tl.constexpr,
    HEADROOM: tl.constexpr,
    CAPPED_ABOVE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k in two parts, the whole number that exponents are shifted by, and whether weights need caps. One program."""
    x = _largest(work + CONSTANTS, count, BLOCK)
    y = x
    if TWO_SIDES:
        y = _largest(work + CONSTANTS + count, count, BLOCK)
    k = tl.load(scale).to(tl.float64)
    k = k * 1.44269502162933349609375 + k * 1.925963033500011e-8  # log2 e, in two floats
    high = k.to(tl.float32)
    bound = tl.abs(high) * tl.sqrt(x) * tl.sqrt(y)
    whole = tl.where(bound < float("inf"), tl.maximum(tl.ceil(bound) - HEADROOM, 0.0), 0.0)
    tl.store(work, high)
    tl.store(work + 1, (k - high.to(tl.float64)).to(tl.float32))
    tl.store(work + 2, -whole)
    tl.store(work + 3, tl.where(bound <= CAPPED_ABOVE, 0.0, 1.0))  # NaN needs them too
    tl.store(shift, whole.to(tl.float64))


def exponent_scale(
    x: Tensor,  # (N, D), each row contiguous
    y: Tensor,  # (M, D), each row contiguous
    scale: Tensor,  # ()
    headroom: float,
    products: Tensor | None = None,  # (N,) of the pairs (i, i), written; then N = M
) -> tuple[Tensor, Tensor]:  # (4,) or longer, () float64
    """(k, its rounding error, −C, 1 if weights need caps, …) with k = scale·log2 e, and C in float64.

    C is the least whole number ≥ 0 that keeps exponents ≤ `headroom`. The bound is |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are
    not finite are ignored: their rows are found later, by their sums.
    """
    other = None if y is x and products is None else y
    programs = plan.tiles(max(len(x), len(y)), _BLOCK_N)
    work = torch.empty(_CONSTANTS + (1 if other is None else 2) * programs, dtype=torch.float32, device=x.device)
    shift = torch.empty((), dtype=torch.float64, device=x.device)
    launch(
        _largest_norms_kernel,
        (programs,),
        (x, other, work, products),
        (len(x), len(y), x.shape[1], x.stride(0), y.stride(0)),
        CONSTANTS=_CONSTANTS,
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
    launch(
        _exponent_scale_kernel,
        (1,),
        (work, scale, shift),
        (programs,),
        TWO_SIDES=other is not None,
        HEADROOM=headroom,
        CAPPED_ABOVE=CAPPED_ABOVE,
        CONSTANTS=_CONSTANTS,
        BLOCK=1024,
    )
    return work, shift
