"""From sums of 2^t to the cross-entropies of matching pairs, and to the weights of their gradients in a strip: one launch.

PyTorch operations over vectors would take the host longer than all products take the GPU, up to 32k pairs on an H200. Row i and
column i share their match, so one program serves both. Sums have the shift C, or one of their own (`triton_online_logsumexp`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan, plan
from megabatch.tiles.block import Block
from megabatch.tiles.precision import FLOAT16
from megabatch.tiles.triton_device import cross_entropy
from megabatch.tiles.triton_gradient import Weights
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_online_logsumexp import Sums
from megabatch.tiles.triton_operands import Operands
from megabatch.tiles.triton_pair_gradients import HALF_UNIT, Matches


@triton.jit
def _side(common, match, offs, N, unit, weights, stride, TILE: tl.constexpr):
    """(losses, their derivatives by the logarithms of the sums) of a program's rows or columns; stores weights and flags."""
    mask = offs < N
    total = tl.load(weights + 2 * stride + offs, mask, 0.0)
    own = tl.load(weights + 4 * stride + offs, mask, -float("inf"))
    has_own = own != -float("inf")
    shift = tl.where(has_own, own.to(tl.float64), common)
    shift = shift * 0.693147182464599609375 - shift * 1.9046542999577e-9  # log 2, in two floats
    loss, weight = cross_entropy(shift, total.to(tl.float64), match)
    per_unit = tl.where(total == 0.0, 0.0, unit * weight / tl.where(total == 0.0, 1.0, total).to(tl.float64))
    tl.store(weights + offs, per_unit.to(tl.float32), mask)
    TILES: tl.constexpr = offs.shape[0] // TILE
    found = tl.max(tl.reshape(has_own.to(tl.int32), (TILES, TILE)), 1)
    offs_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tl.store(weights + 6 * stride + offs_tile, found.to(tl.float32), offs_tile * TILE < N)
    return tl.where(mask, loss, 0.0), weight


@triton.jit
def _pair_statistics_kernel(
    scale,  # ()
    common,  # () C, float64
    vectors,  # (10, stride), `PairVectors`: reads caps, shifts and products, writes the others
    losses,  # (programs,) float64
    N,
    stride,
    unit,
    COLUMNS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    match = tl.load(vectors + 9 * stride + offs, mask, 0.0) * tl.load(scale).to(tl.float32)
    C = tl.load(common)
    loss, weight = _side(C, match, offs, N, unit, vectors, stride, TILE_N)
    of_columns = vectors + stride
    if COLUMNS:
        col_loss, col_weight = _side(C, match, offs, N, unit, of_columns, stride, TILE_M)
        loss += col_loss
        weight += col_weight
    else:
        zero = tl.zeros((BLOCK,), tl.float32)
        tl.store(of_columns + offs, zero, mask)
        tl.store(of_columns + 2 * stride + offs, zero + float("inf"), mask)
        tl.store(of_columns + 4 * stride + offs, zero - float("inf"), mask)
        tl.store(of_columns + 6 * stride + offs, zero, mask)  # tiles are fewer than columns
    tl.store(vectors + 8 * stride + offs, (-unit * weight).to(tl.float32), mask)
    tl.store(losses + tl.program_id(0), tl.sum(loss, 0))


class PairVectors(NamedTuple):
    """All vectors of the pairs, in one allocation: products and sums are written first, then the weights made of them."""

    vectors: Tensor  # (10, stride): the eight `Weights`, then dmatch and products
    row: Sums  # which are the caps and shifts of `weights`
    col: Sums
    weights: Weights  # in units
    matches: Matches

    @classmethod
    def empty(cls, block: Block) -> "PairVectors":
        """Uninitialised vectors."""
        stride = plan.tiles(block.N + kernel_plan.HOPPER_BLOCK, 64) * 64  # to the end of a tile, and each vector aligned
        vectors = torch.empty((10, stride), dtype=torch.float32, device=block.x.device)
        *weights, dmatch, products = vectors.unbind(0)
        _, _, row_cap, col_cap, row_shift, col_shift, *_ = weights
        row, col = Sums(row_cap, row_shift), Sums(col_cap, col_shift)
        unit = HALF_UNIT if block.precision == FLOAT16 else 1.0
        return cls(vectors, row, col, Weights(*weights), Matches(products, dmatch, unit))


def pair_statistics(
    operands: Operands,
    block: Block,
    tile: kernel_plan.KernelTile,
    pairs: PairVectors,
    *,
    columns: bool,
) -> Tensor:  # (programs,) float64
    """Partial sums of the cross-entropies of pairs (i, i) in row i, and with `columns` in column i; writes their weights.

    `tile` is the kernel's that forms strips.
    """
    size = max(tile.rows, tile.columns)
    losses = torch.empty(plan.tiles(block.N, size), dtype=torch.float64, device=block.x.device)
    launch(
        _pair_statistics_kernel,
        (len(losses),),
        (block.scale, operands.shift, pairs.vectors, losses),
        (block.N, pairs.vectors.shape[1], pairs.matches.unit),
        COLUMNS=columns,
        TILE_N=tile.rows,
        TILE_M=tile.columns,
        BLOCK=size,
    )
    return losses
