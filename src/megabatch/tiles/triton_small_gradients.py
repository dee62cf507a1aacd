"""The last step of the gradients of a loss whose similarities are all in memory, and their product with the loss's gradient.

`triton_small` has the kernels before it, and `triton_small_device` says what is in `work` and `sums`. The last step follows two
library products of the weights with the embeddings, or forms these itself, in batches so small that the host takes longer to
launch a product than the device to compute it (`plan.SMALL_PRODUCT_ROWS`).
"""

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from megabatch.tiles import kernel_plan
from megabatch.tiles.triton_device import load_embeddings, sum_all_parts
from megabatch.tiles.triton_launcher import Launcher
from megabatch.tiles.triton_small_device import FIRST_SUM, LABELS, MATCHES, PLANES, SIGMOID, SUMS, VIEWS, partner_of

_ADDED = kernel_plan.KernelTile(rows=16, columns=1, width=256, warps=4, stages=1)  # of a gradient to which matches are added
_BLOCK = 2048  # partial sums that are added at once
_ELEMENTS = 4096  # of a gradient that a program multiplies


@triton.jit
def _finish_tile(
    tile, tile_d, gradient, weights, partners, row_stride, stride, stats, factor, unit, N, D,
    TRANSPOSED: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """gradient = (weights · partners − unit · weight of the match · its partner) · factor, for a tile of the gradient.

    Without weights, the gradient is the product already.
    """
    offs_n, offs_d = tile * BLOCK_N + tl.arange(0, BLOCK_N), tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_n, mask_d = offs_n < N, offs_d < D
    mask = mask_n[:, None] & mask_d[None, :]
    offs = offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
    if weights is None:
        total = tl.load(gradient + offs, mask, 0.0)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for m in range(0, N, BLOCK_M):
            offs_m = m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < N
            place = offs_m[None, :] * N + offs_n[:, None] if TRANSPOSED else offs_n[:, None] * N + offs_m[None, :]
            source = partners + offs_m.to(tl.int64)[:, None] * row_stride + offs_d.to(tl.int64)[None, :] * stride
            values = tl.load(source, mask_m[:, None] & mask_d[None, :], 0.0)
            w = tl.load(weights + place, mask_n[:, None] & mask_m[None, :], 0.0)
            total = tl.dot(w.to(values.dtype), values, total)
    weight = tl.load(stats + 3 * N + offs_n, mask_n, 0.0)
    partner = offs_n
    if KIND == LABELS:
        partner = tl.load(stats + 5 * N + offs_n, mask_n, 0.0).to(tl.int32)
        is_apart = tl.load(stats + 4 * N + offs_n, mask_n, 0.0) < 0.0
        weight += tl.where(is_apart, tl.load(stats + 3 * N + partner, mask_n, 0.0), 0.0)
    if KIND == VIEWS:
        partner = partner_of(offs_n, N)
        weight += tl.load(stats + 3 * N + partner, mask_n, 0.0)
    if KIND == MATCHES:
        weight += tl.load(stats + (PLANES + 3) * N + offs_n, mask_n, 0.0)
    weight = (weight * unit)[:, None]
    match = load_embeddings(partners, partner, offs_d, row_stride, stride, mask, 0)
    total -= tl.where(weight == 0.0, 0.0, weight * match)
    tl.store(gradient + offs, total * factor, mask)


@triton.jit
def _finish_kernel(
    x,  # (N, D)
    y,  # (N, D)
    weights,  # (N, N); None if dx and dy are products already
    dx,  # (N, D) float32: weights · y, or uninitialised if the kernel multiplies; None if not needed
    dy,  # (N, D) float32: weightsᵀ · x, or the same
    work,
    sums,  # d scale and d bias are written
    scale,  # ()
    loss,  # ()
    N,
    D,
    x_row_stride,
    x_stride,
    y_row_stride,
    y_stride,
    row_programs,
    tiles,
    divisor,  # of the loss, or 0 for the number of rows with a positive
    unit,
    KIND: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_sums = sums + FIRST_SUM
    tile_sums = row_sums + SUMS * row_programs
    share = 1.0 / tl.maximum(divisor, 1.0).to(tl.float64)
    if KIND == LABELS:
        rows = tl.maximum(sum_all_parts(row_sums + 2 * row_programs, row_programs, BLOCK), 1.0)
        share = tl.where(divisor == 0.0, 1.0 / rows, share)
    factor = (tl.load(scale).to(tl.float64) * share / unit).to(tl.float32)
    tile, tile_d = tl.program_id(1), tl.program_id(0)
    first_of_y = 0
    if dx is not None:
        first_of_y = tl.cdiv(N, BLOCK_N)
        if tile < first_of_y:
            _finish_tile(
                tile, tile_d, dx, weights, y, y_row_stride, y_stride, work, factor, unit, N, D,
                False, KIND, BLOCK_N, BLOCK_M, BLOCK_D,
            )  # fmt: skip
    if dy is not None:
        if tile >= first_of_y:
            _finish_tile(
                tile - first_of_y, tile_d, dy, weights, x, x_row_stride, x_stride, work, factor, unit, N, D,
                True, KIND, BLOCK_N, BLOCK_M, BLOCK_D,
            )  # fmt: skip
    if (tile == 0) & (tile_d == 0):
        total = sum_all_parts(tile_sums, tiles, BLOCK) if KIND == SIGMOID else sum_all_parts(row_sums, row_programs, BLOCK)
        tl.store(loss, (total * share).to(tl.float32))
        if LEARNS:
            total = sum_all_parts(tile_sums + tiles, tiles, BLOCK)
            if KIND != SIGMOID:
                total += sum_all_parts(row_sums + row_programs, row_programs, BLOCK)
            tl.store(sums, total * share)
            if KIND == SIGMOID:
                tl.store(sums + 1, sum_all_parts(tile_sums + 2 * tiles, tiles, BLOCK) * share)


@triton.jit
def _multiply_kernel(
    dx,  # or None
    dy,  # or None
    sums,  # d scale in scale_parts parts, d bias, …
    dloss,  # ()
    dx_out,  # x_count numbers, or None
    dy_out,  # y_count numbers, or None
    dscale_out,  # () or None
    dbias_out,  # () or None
    x_count,
    y_count,
    y_first,  # of dy
    scale_parts,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """All gradients times the gradient of the loss."""
    program, factor = tl.program_id(0), tl.load(dloss)
    blocks = 0
    if dx_out is not None:
        blocks = tl.cdiv(x_count, BLOCK)
        if program < blocks:
            offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(dx + offs, offs < x_count, 0.0).to(tl.float32) * factor
            tl.store(dx_out + offs, values.to(dx_out.dtype.element_ty), offs < x_count)
    if dy_out is not None:
        if program >= blocks:
            offs = (program - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(dy + y_first + offs, offs < y_count, 0.0).to(tl.float32) * factor
            tl.store(dy_out + offs, values.to(dy_out.dtype.element_ty), offs < y_count)
    if program == 0:
        if dscale_out is not None:
            tl.store(dscale_out, (sum_all_parts(sums, scale_parts, BLOCK_P) * factor).to(dscale_out.dtype.element_ty))
        if dbias_out is not None:
            tl.store(dbias_out, (tl.load(sums + scale_parts) * factor).to(dbias_out.dtype.element_ty))


def finish(kind: int, sides: tuple[bool, bool], numbers: tuple[float, ...], *, learns: bool, multiplies: bool) -> Launcher:
    """Adds the matches to the gradients and multiplies them by scale and share; adds up loss, d scale and d bias.

    Args:
        kind: of the loss.
        sides: whether there are gradients of x and of y.
        numbers: N, D and the other numbers that the kernel takes.
        learns: whether d scale and d bias are needed.
        multiplies: whether the kernel gets the weights, in half precision, and multiplies them with x and y.
    """
    N, D = (int(number) for number in numbers[:2])
    tile = kernel_plan.SMALL_PRODUCT if multiplies else _ADDED
    grid = (-(-D // tile.width), -(-N // tile.rows) * sum(sides)) if any(sides) else (1, 1)
    blocks = {"BLOCK_N": tile.rows, "BLOCK_M": tile.columns, "BLOCK_D": tile.width, "BLOCK": _BLOCK}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launcher(_finish_kernel, grid, numbers, KIND=kind, LEARNS=learns, **blocks, **options)


@lru_cache(maxsize=256)
def multiply(x_count: int, y_count: int, y_first: int, scale_parts: int, given: tuple[Any, ...]) -> Launcher:
    """Multiplies all gradients by the gradient of the loss; counts are 0 where there is none. Adds up the parts of d scale.

    `given` decides how the kernel is compiled: the device, and the kinds of all tensors.
    """
    programs = max(1, -(-x_count // _ELEMENTS) + -(-y_count // _ELEMENTS))
    numbers = x_count, y_count, y_first, scale_parts
    return Launcher(_multiply_kernel, (programs,), numbers, BLOCK=_ELEMENTS, BLOCK_P=_BLOCK, num_warps=8)
