"""From sums of 2^t to the cross-entropies of matching pairs, and to the weights of their gradients in a strip: one launch.

PyTorch operations over vectors would take the host longer than all products take the GPU, up to 32k pairs on an H200. Row i and
column i share their match, so one program serves both. Sums have the shift C, or one of their own (`triton_online_logsumexp`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block
from megabatch.tiles.precision import FLOAT16
from megabatch.tiles.triton_device import cross_entropy
from megabatch.tiles.triton_gradient import Weights
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_operands import Operands

HALF_UNIT = 2.0**14  # of weights in float16: a softmax over a million columns stays within its range


@triton.jit
def _side(
    totals, own_shifts, common, match, offs, N, unit, weights, stride, flags, any_own_shift, TILE: tl.constexpr
):  # fmt: skip
    """(losses, their derivatives by the logarithms of the sums) of a program's rows or columns; stores what a strip needs."""
    mask = offs < N
    total = tl.load(totals + offs, mask, 0.0)
    own = tl.load(own_shifts + offs, mask, float("inf"))
    has_own = (tl.abs(own) != float("inf")) & (total != 0.0)
    shift = tl.where(has_own, own.to(tl.float64), common)
    shift = shift * 0.693147182464599609375 - shift * 1.9046542999577e-9  # log 2, in two floats
    loss, weight = cross_entropy(shift, total.to(tl.float64), match)
    per_unit = tl.where(total == 0.0, 0.0, unit * weight / tl.where(total == 0.0, 1.0, total).to(tl.float64))
    tl.store(weights + offs, per_unit.to(tl.float32), mask)
    tl.store(weights + stride + offs, total, mask)
    tl.store(weights + 2 * stride + offs, tl.where(has_own, own, -float("inf")), mask)
    TILES: tl.constexpr = offs.shape[0] // TILE
    found = tl.max(tl.reshape(has_own.to(tl.int32), (TILES, TILE)), 1)
    offs_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tl.store(flags + offs_tile, found, offs_tile * TILE < N)
    if tl.max(found, 0) > 0:
        tl.atomic_max(any_own_shift, 1)
    return tl.where(mask, loss, 0.0), weight


@triton.jit
def _pair_statistics_kernel(
    products,  # (N,) of the matching pairs
    scale,  # ()
    common,  # () C, float64
    row_total,  # (N,)
    row_own_shift,  # (N,) +inf for C
    col_total,  # (N,) or None
    col_own_shift,  # (N,) or None
    vectors,  # (7, stride): weight, cap and own shift of rows and of columns, derivative by the match
    flags,  # int32 zeros: whether any has an own shift, then by tiles of rows, then by tiles of columns
    losses,  # (programs,) float64
    N,
    stride,
    first_row_flag,
    first_col_flag,
    unit,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    match = tl.load(products + offs, mask, 0.0) * tl.load(scale).to(tl.float32)
    C = tl.load(common)
    loss, weight = _side(
        row_total, row_own_shift, C, match, offs, N, unit, vectors, stride, flags + first_row_flag, flags, TILE_N
    )
    if col_total is not None:
        col_loss, col_weight = _side(
            col_total, col_own_shift, C, match, offs, N, unit, vectors + 3 * stride, stride, flags + first_col_flag, flags,
            TILE_M,
        )  # fmt: skip
        loss += col_loss
        weight += col_weight
    else:
        tl.store(vectors + 3 * stride + offs, tl.zeros((BLOCK,), tl.float32), mask)
        tl.store(vectors + 4 * stride + offs, tl.full((BLOCK,), float("inf"), tl.float32), mask)
        tl.store(vectors + 5 * stride + offs, tl.full((BLOCK,), -float("inf"), tl.float32), mask)
    tl.store(vectors + 6 * stride + offs, (-unit * weight).to(tl.float32), mask)
    tl.store(losses + tl.program_id(0), tl.sum(loss, 0))


class PairStatistics(NamedTuple):
    """Of the matching pairs."""

    loss: Tensor  # () float64, the sum of all cross-entropies
    weights: Weights  # of their gradients, in units
    dmatch: Tensor  # (N,) or longer: their derivative by s_ii, in units
    unit: float


def pair_statistics(
    operands: Operands,
    block: Block,
    tile: plan.KernelTile,
    products: Tensor,  # (N,)
    row: tuple[Tensor, Tensor],  # (N,) totals and own shifts
    col: tuple[Tensor, Tensor] | None,  # (N,) or None
) -> PairStatistics:
    """The cross-entropies of pairs (i, i) among those of row i, and of column i if `col` is given; `tile` is the kernel's."""
    N, device = block.N, block.x.device
    size = max(tile.rows, tile.columns)
    programs = triton.cdiv(N, size)
    stride = triton.cdiv(N + plan.HOPPER_BLOCK, 64) * 64  # to the end of a tile, and each vector aligned
    first_col_flag = 4 + triton.cdiv(programs * (size // tile.rows), 4) * 4  # flags of each kind start at 16 bytes
    vectors = torch.empty((7, stride), dtype=torch.float32, device=device)
    flags = torch.zeros(first_col_flag + programs * (size // tile.columns), dtype=torch.int32, device=device)
    losses = torch.empty(programs, dtype=torch.float64, device=device)
    unit = HALF_UNIT if block.precision == FLOAT16 else 1.0
    launch(
        _pair_statistics_kernel,
        (programs,),
        (products, block.scale, operands.shift, *row, *(col or (None, None)), vectors, flags, losses),
        (N, stride, 4, first_col_flag, unit),
        TILE_N=tile.rows,
        TILE_M=tile.columns,
        BLOCK=size,
    )
    row_weight, row_cap, row_shift, col_weight, col_cap, col_shift, dmatch = vectors.unbind(0)
    by_tile = flags[0], flags[4:], flags[first_col_flag:]
    weights = Weights(row_weight, col_weight, row_cap, col_cap, row_shift, col_shift, *by_tile)
    return PairStatistics(losses.sum(), weights, dmatch, unit)
