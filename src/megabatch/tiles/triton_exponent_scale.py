"""The scale of the exponents and their common shift C, from the largest norms of the embeddings: O(N·D), two kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.triton_device import load_embeddings
from megabatch.tiles.triton_launcher import launch

_BLOCK_N, _BLOCK_D = 16, 256

# Exponents up to which weights need no cap. Two roundings of a product differ by about √D · 2⁻²⁴ of the norms, so a weight of
# the warp-specialised kernel is at most 1.001 without one at D = 1024: less than half a unit in the last place of bf16.
CAPPED_ABOVE = 512.0


@triton.jit
def _largest_norm_kernel(
    x,  # (N, D)
    largest,  # (programs,)
    N,
    D,
    row_stride,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The largest finite squared norm of each BLOCK_N rows; 0 if there is none."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        rows = load_embeddings(x, offs_n, offs_d, row_stride, stride, (offs_n < N)[:, None] & (offs_d < D)[None, :], 0)
        squares += tl.sum(rows * rows, 1)
    finite = tl.where(squares < float("inf"), squares, 0.0)  # false for NaN too
    tl.store(largest + tl.program_id(0), tl.max(finite, 0))


@triton.jit
def _exponent_scale_kernel(
    x_largest,  # (x_count,)
    y_largest,  # (y_count,)
    scale,  # ()
    exponent_scale,  # (4,) float32
    shift,  # () float64
    x_count,
    y_count,
    HEADROOM: tl.constexpr,
    CAPPED_ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k in two parts, the whole number that exponents are shifted by, and whether weights need caps. One program."""
    offs = tl.arange(0, BLOCK)
    x, y = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, x_count, BLOCK):
        x = tl.maximum(x, tl.load(x_largest + start + offs, start + offs < x_count, 0.0))
    for start in range(0, y_count, BLOCK):
        y = tl.maximum(y, tl.load(y_largest + start + offs, start + offs < y_count, 0.0))
    k = tl.load(scale).to(tl.float64)
    k = k * 1.44269502162933349609375 + k * 1.925963033500011e-8  # log2 e, in two floats
    high = k.to(tl.float32)
    bound = tl.abs(high) * tl.sqrt(tl.max(x, 0)) * tl.sqrt(tl.max(y, 0))
    whole = tl.where(bound < float("inf"), tl.maximum(tl.ceil(bound) - HEADROOM, 0.0), 0.0)
    tl.store(exponent_scale, high)
    tl.store(exponent_scale + 1, (k - high.to(tl.float64)).to(tl.float32))
    tl.store(exponent_scale + 2, -whole)
    tl.store(exponent_scale + 3, tl.where(bound <= CAPPED_ABOVE, 0.0, 1.0))  # NaN needs them too
    tl.store(shift, whole.to(tl.float64))


def exponent_scale(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    headroom: float,
) -> tuple[Tensor, Tensor]:  # (4,), () float64
    """(k, its rounding error, −C, 1 if weights need caps) with k = scale·log2 e, and C in float64.

    C is the least whole number ≥ 0 that keeps exponents ≤ `headroom`. The bound is |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are
    not finite are ignored: their rows are found later, by their sums.
    """
    largest: list[Tensor] = []
    for side in (x,) if y is x else (x, y):
        part = torch.empty(triton.cdiv(len(side), _BLOCK_N), dtype=torch.float32, device=x.device)
        numbers = *side.shape, *side.stride()
        launch(_largest_norm_kernel, (len(part),), (side, part), numbers, BLOCK_N=_BLOCK_N, BLOCK_D=_BLOCK_D)
        largest.append(part)
    constants = torch.empty(4, dtype=torch.float32, device=x.device)
    shift = torch.empty((), dtype=torch.float64, device=x.device)
    of_x, of_y = largest[0], largest[-1]
    tensors = of_x, of_y, scale, constants, shift
    launch(
        _exponent_scale_kernel, (1,), tensors, (len(of_x), len(of_y)), HEADROOM=headroom, CAPPED_ABOVE=CAPPED_ABOVE, BLOCK=1024
    )
    return constants, shift
