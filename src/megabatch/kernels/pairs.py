"""Kernels of the fused path (`operators.one_gpu`), which computes the loss of N pairs together with its gradients."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.device import (
    cross_entropy,
    finish_tile,
    finite_or_zero,
    load_embeddings,
    logarithm,
    softplus_and_sigmoid,
    sum_all_parts,
)
from megabatch.kernels.gradient import GradientSums, Weights
from megabatch.kernels.launch import launch
from megabatch.kernels.logsumexp import OnlineSums
from megabatch.kernels.operands import Operands
from megabatch.tiles import plan
from megabatch.tiles.block import FLOAT16, FLOAT32, TF32, Block, Needs

# ----------------------------------------------------------------------------------------------------------------------
# The last step of a loss of pairs. One launch computes dx and dy from their sums, the loss, dscale in parts, and dbias.
#
# `kernels.operands` contains the last step of other losses, which has one launch for some rows of one side.

# Gradient weights are multiplied by a unit, which is `HALF_UNIT` in float16 and 1 in other dtypes. The unit keeps the weights
# of a softmax over a million columns in the range of float16.
HALF_UNIT = 2.0**14

_BLOCK_N, _BLOCK_D = 16, 256
_BLOCK = 1024  # partial sums that are added at once


@triton.jit
def _finish_pairs_kernel(
    x,  # (N, D)
    y,  # (N, D)
    dx_sums,  # (N, D) or None
    dy_sums,  # (N, D) or None
    dx,  # (N, D) or None; may be `dx_sums`
    dy,  # (N, D) or None; may be `dy_sums`
    row_dscale,  # (N,) without the matching pairs, or None if dscale is computed from dx
    products,  # (N,) ⟨x_i, y_i⟩
    dmatch,  # (N,)
    losses,  # (losses_count,)
    row_dbias,  # (N,) with the matching pairs, or None
    scale,  # ()
    loss,  # ()
    numbers,  # (tiles of N + 1,) float64: dscale in parts, then dbias; None if neither is needed
    N,
    D,
    x_stride,
    y_stride,
    row_tiles,  # number of programs for dx and dscale, which come before the programs for dy
    losses_count,
    divisor,
    unit,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    factor = (tl.load(scale).to(tl.float64) / divisor / unit).to(tl.float32)
    if program < row_tiles:
        terms = tl.zeros((BLOCK_N,), tl.float64)
        if dx_sums is not None:
            terms = finish_tile(
                program, dx_sums, dx, x, y, dmatch, factor, N, D, x_stride, 1, y_stride, 1, 0, BLOCK_N, BLOCK_D
            ).to(tl.float64)
        if row_dscale is not None:
            offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            of_match = tl.load(dmatch + offs_n, mask_n, 0.0).to(tl.float64) * tl.load(products + offs_n, mask_n, 0.0)
            terms = tl.load(row_dscale + offs_n, mask_n, 0.0) + of_match
        if numbers is not None:
            tl.store(numbers + program, tl.sum(terms, 0) / divisor / unit)
    elif dy_sums is not None:
        finish_tile(program - row_tiles, dy_sums, dy, None, x, dmatch, factor, N, D, 0, 0, x_stride, 1, 0, BLOCK_N, BLOCK_D)
    if program == 0:
        tl.store(loss, (sum_all_parts(losses, losses_count, BLOCK) / divisor).to(tl.float32))
        if row_dbias is not None:
            tl.store(numbers + tl.cdiv(N, BLOCK_N), sum_all_parts(row_dbias, N, BLOCK) / divisor / unit)


class MatchGradients(NamedTuple):
    """The dot products of the matching pairs, and the gradients of their logits."""

    products: Tensor  # (N,) or longer: ⟨x_i, y_i⟩
    dmatch: Tensor  # (N,) or longer: the gradient of s_ii, multiplied by `unit`
    unit: float


def finish_pairs(
    operands: Operands,
    block: Block,
    sums: GradientSums,
    needs: Needs,
    matches: MatchGradients,
    losses: Tensor,  # (any number,) their sum, divided by `divisor`, is the loss
    divisor: int,
    *,
    row_dbias: Tensor | None = None,  # (N,) multiplied by the unit
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # (), (N, D), (N, D), (parts + 1,) float64
    """Returns the loss, dx, dy, and a tensor (dscale in parts, then dbias). All are divided by `divisor`. May overwrite `sums`.

    Gradients that are not needed are None. Gradients have the dtype of the inputs. If an input is float16, they are float32,
    because they may be outside the range of float16 until backward multiplies them by the gradient of the loss.
    """
    (N, D), device = operands.x.shape, operands.x.device
    input_dtypes = block.x.dtype, block.y.dtype
    dtypes = (torch.float32, torch.float32) if torch.float16 in input_dtypes else input_dtypes
    dx, dy = (
        None if total is None or not need else total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, need, dtype in zip(sums[:2], needs[:2], dtypes, strict=True)
    )
    loss = torch.empty((), dtype=torch.float32, device=device)
    tiles = plan.tiles(N, _BLOCK_N)
    has_numbers = needs.dscale or row_dbias is not None
    numbers = torch.empty(tiles + 1, dtype=torch.float64, device=device) if has_numbers else None
    row_tiles = 0 if sums.dx is None and sums.dscale is None else tiles
    launch(
        _finish_pairs_kernel,
        (max(1, row_tiles + (0 if sums.dy is None else tiles)),),
        (
            operands.x,
            operands.y,
            *sums[:2],
            dx,
            dy,
            sums.dscale,
            matches.products,
            matches.dmatch,
            losses,
            row_dbias,
            block.scale,
            loss,
            numbers,
        ),
        (N, D, operands.x.stride(0), operands.y.stride(0), row_tiles, len(losses), float(divisor), matches.unit),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
        BLOCK=_BLOCK,
    )
    return loss, dx, dy, numbers


# ----------------------------------------------------------------------------------------------------------------------
# One launch computes the cross-entropies of the matching pairs from sums of 2^t, and the row and column weights for strips.
#
# Up to 32k pairs on an H200, the host would need more time to launch PyTorch operations on vectors than the GPU needs for all
# matmuls. Row i and column i have the same matching pair, so one program computes both. Sums have the shift C or their own
# shift (`kernels.logsumexp`).


# Planes of `PairVectors`. The first four names are planes of rows. The plane after each of them is the same plane of columns.
WEIGHT, CAP, SHIFT, OWN_SHIFT, DMATCH, PRODUCT = (tl.constexpr(number) for number in (0, 2, 4, 6, 8, 9))


@triton.jit
def _side(common, match, count, offs, N, unit, weights, stride, TILE: tl.constexpr):
    """Returns the losses of a program's rows or columns, and their derivatives with respect to the logarithms of the sums.

    Stores the weights, and for each tile whether it contains a sum with its own shift (0 or 1). If `count` is given, the match
    is the mean logit of this many positives. Several positives are part of the sum, and a sole positive is not.
    """
    mask = offs < N
    total = tl.load(weights + CAP * stride + offs, mask, 0.0)
    own = tl.load(weights + SHIFT * stride + offs, mask, -float("inf"))
    has_own = own != -float("inf")
    shift = tl.where(has_own, own.to(tl.float64), common)
    shift = shift * 0.693147182464599609375 - shift * 1.9046542999577e-9  # log 2, in two floats
    loss, weight = cross_entropy(shift, total.to(tl.float64), match)
    if count is not None:
        positives = tl.load(count + offs, mask, 0)
        less_match = (finite_or_zero(shift).to(tl.float64) - match) + logarithm(total.to(tl.float64))
        loss = tl.where(positives == 0, 0.0, tl.where(positives == 1, loss, less_match))
        all_of_sum = tl.where(less_match == less_match, 1.0, less_match)  # NaN stays NaN
        weight = tl.where(positives == 0, 0.0, tl.where(positives == 1, weight, all_of_sum))
    per_unit = tl.where(total == 0.0, 0.0, unit * weight / tl.where(total == 0.0, 1.0, total).to(tl.float64))
    tl.store(weights + WEIGHT * stride + offs, per_unit.to(tl.float32), mask)
    TILES: tl.constexpr = offs.shape[0] // TILE
    found = tl.max(tl.reshape(has_own.to(tl.int32), (TILES, TILE)), 1)
    offs_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tl.store(weights + OWN_SHIFT * stride + offs_tile, found.to(tl.float32), offs_tile * TILE < N)
    return tl.where(mask, loss, 0.0), weight


@triton.jit
def _match(product, factor, EXACT: tl.constexpr):
    """Returns s_ii in float64, given ⟨x_i, y_i⟩. The scale has the same digits as in the exponents (`kernel_options`).

    So at any scale, equal dot products have equal logits in the sums and here. A logit beyond the range of float32 is infinite.
    """
    scale = factor.to(tl.float64)
    if not EXACT:
        k = scale * 1.44269502162933349609375 + scale * 1.925963033500011e-8  # as in `kernels.operands`
        k = k.to(tl.float32).to(tl.float64)
        scale = k * 0.693147182464599609375 - k * 1.9046542999577e-9  # log 2, in two floats
    rounded = product * factor
    return tl.where(tl.abs(rounded) < float("inf"), product.to(tl.float64) * scale, rounded.to(tl.float64))


@triton.jit
def _pair_statistics_kernel(
    scale,  # ()
    common,  # () C, float64
    vectors,  # (10, stride) `PairVectors`; the kernel reads caps, shifts and products, and writes the others
    losses,  # (programs,) float64
    count,  # (N,) number of positives of each row, or None
    N,
    stride,
    unit,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    product, factor = tl.load(vectors + PRODUCT * stride + offs, mask, 0.0), tl.load(scale).to(tl.float32)
    match = _match(product, factor, EXACT)
    C = tl.load(common)
    loss, weight = _side(C, match, count, offs, N, unit, vectors, stride, TILE_N)
    of_columns = vectors + stride
    if COLUMNS:
        col_loss, col_weight = _side(C, match, count, offs, N, unit, of_columns, stride, TILE_M)
        loss += col_loss
        weight += col_weight
    else:
        zero = tl.zeros((BLOCK,), tl.float32)
        tl.store(of_columns + WEIGHT * stride + offs, zero, mask)
        tl.store(of_columns + CAP * stride + offs, zero + float("inf"), mask)
        tl.store(of_columns + SHIFT * stride + offs, zero - float("inf"), mask)
        tl.store(of_columns + OWN_SHIFT * stride + offs, zero, mask)  # one value per tile; `mask` covers all tiles
    tl.store(vectors + DMATCH * stride + offs, (-unit * weight).to(tl.float32), mask)
    tl.store(losses + tl.program_id(0), tl.sum(loss, 0))


class PairVectors(NamedTuple):
    """All vectors of the pairs, in one allocation. Dot products and sums are written first, and then the weights."""

    buffer: Tensor  # (10, stride) the eight vectors of `Weights`, then dmatch and products
    row: OnlineSums  # the same memory as the caps and shifts of `weights`
    col: OnlineSums
    weights: Weights  # multiplied by the unit
    matches: MatchGradients

    @classmethod
    def empty(cls, block: Block) -> "PairVectors":
        """Returns uninitialized vectors."""
        # Each vector extends to the end of a tile, and its address is a multiple of 16 bytes.
        stride = plan.tiles(block.N + kernel_plan.HOPPER_BLOCK, 64) * 64
        buffer = torch.empty((10, stride), dtype=torch.float32, device=block.x.device)
        *weights, dmatch, products = buffer.unbind(0)
        _, _, row_cap, col_cap, row_shift, col_shift, *_ = weights
        row, col = OnlineSums(row_cap, row_shift), OnlineSums(col_cap, col_shift)
        unit = HALF_UNIT if block.precision == FLOAT16 else 1.0
        return cls(buffer, row, col, Weights(*weights), MatchGradients(products, dmatch, unit))


def pair_statistics(
    operands: Operands,
    block: Block,
    tile: kernel_plan.KernelTile,
    pairs: PairVectors,
    *,
    columns: bool,
    count: Tensor | None = None,  # (N,)
) -> Tensor:  # (programs,) float64
    """Returns partial sums of the cross-entropies of the pairs (i, i) in row i, and with `columns` also in column i.

    Writes the weights of the rows and columns to `pairs`. `tile` is the tile of the gradient-strip kernel. If `count` is given,
    the products of the pairs are means over this many positives, and a row without positives has no loss.
    """
    size = max(tile.rows, tile.columns)
    losses = torch.empty(plan.tiles(block.N, size), dtype=torch.float64, device=block.x.device)
    launch(
        _pair_statistics_kernel,
        (len(losses),),
        (block.scale, operands.shift, pairs.buffer, losses, count),
        (block.N, pairs.buffer.shape[1], pairs.matches.unit),
        COLUMNS=columns,
        EXACT=block.precision in (FLOAT32, TF32),
        TILE_N=tile.rows,
        TILE_M=tile.columns,
        BLOCK=size,
    )
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# One launch computes the losses and weights of the matching pairs of a sigmoid loss. Strips then add all other pairs.
#
# Up to 32k pairs on an H200, the host would need more time to launch PyTorch operations on vectors than the GPU needs for all
# matmuls.


# Planes of `SigmoidVectors`.
BIAS, UNIT, LOSS, DBIAS, DMATCH_OF_SIGMOID, PRODUCT_OF_SIGMOID, CONSTANTS = (tl.constexpr(number) for number in range(7))


@triton.jit
def _sigmoid_matches_kernel(
    x,  # (N, D)
    y,  # (N, D)
    scale,  # ()
    bias,  # ()
    vectors,  # (7, stride) `SigmoidVectors`
    N,
    D,
    x_stride,
    y_stride,
    stride,
    unit,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    product = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = mask_n[:, None] & (offs_d < D)[None, :]
        a = load_embeddings(x, offs_n, offs_d, x_stride, 1, mask, 0)
        b = load_embeddings(y, offs_n, offs_d, y_stride, 1, mask, 0)
        product += tl.sum(a * b, 1)
    k, offset = tl.load(scale).to(tl.float32), tl.load(bias).to(tl.float32)
    loss, weight = softplus_and_sigmoid(-(product * k + offset))
    to, ones = vectors + offs_n, tl.full((BLOCK_N,), 1.0, tl.float32)
    tl.store(to + BIAS * stride, ones * offset, mask_n)
    tl.store(to + UNIT * stride, ones * unit, mask_n)
    tl.store(to + LOSS * stride, loss, mask_n)
    tl.store(to + DBIAS * stride, -unit * weight, mask_n)
    tl.store(to + DMATCH_OF_SIGMOID * stride, -unit * weight, mask_n)
    tl.store(to + PRODUCT_OF_SIGMOID * stride, product, mask_n)
    if tl.program_id(0) == 0:
        offs = tl.arange(0, 4)
        tl.store(vectors + CONSTANTS * stride + offs, tl.where(offs == 0, k, 0.0))


class SigmoidVectors(NamedTuple):
    """All vectors of the pairs, in one allocation. Weights and gradients are multiplied by the unit."""

    buffer: Tensor  # (7, stride) the memory of the vectors below
    offset: Tensor  # (N,) the bias
    weight: Tensor  # (N,) the weight of the loss of each row: 1, multiplied by the unit
    losses: Tensor  # (N,) softplus(−s_ii), to which strips add the softplus of the other pairs of the row
    dbias: Tensor  # (N,) the gradient of the bias from s_ii, to which strips add the gradient from the other pairs of the row
    constants: Tensor  # (stride,) its first four numbers are `Operands.exponent_scale`
    matches: MatchGradients

    @classmethod
    def empty(cls, x: Tensor, precision: str) -> "SigmoidVectors":
        """Returns uninitialized vectors for the rows of x."""
        N = len(x)
        buffer = torch.empty((7, plan.tiles(N, 64) * 64), dtype=torch.float32, device=x.device)  # aligns each vector
        offset, weight, losses, dbias, dmatch, products = buffer[:6, :N].unbind(0)
        matches = MatchGradients(products, dmatch, HALF_UNIT if precision == FLOAT16 else 1.0)
        return cls(buffer, offset, weight, losses, dbias, buffer[6], matches)


def write_matches(operands: Operands, block: Block, bias: Tensor, vectors: SigmoidVectors) -> None:
    """Writes the vectors of a sigmoid loss."""
    launch(
        _sigmoid_matches_kernel,
        (plan.tiles(block.N, _BLOCK_N),),
        (operands.x, operands.y, block.scale, bias, vectors.buffer),
        (block.N, block.D, operands.x.stride(0), operands.y.stride(0), vectors.buffer.shape[1], vectors.matches.unit),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
