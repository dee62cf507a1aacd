"""The last step of the gradients of small batches, and the launches of all kernels for small batches."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.device import load_embeddings, sum_all_parts
from megabatch.kernels.launch import Launcher
from megabatch.kernels.small import (
    DSCALE,
    FIRST_SUM,
    LABELS,
    MATCH_WEIGHT,
    MATCHES,
    PLANES,
    PULL,
    ROWS,
    SIGMOID,
    SOLE_POSITIVE,
    SUMS,
    THIRD,
    VIEWS,
    combine_kernel,
    partial_sums_kernel,
    partner_of,
    rows_kernel,
    sigmoid_kernel,
    softmax_weights_kernel,
)
from megabatch.tiles import plan
from megabatch.tiles.block import FLOAT16, HALF_DTYPE, TF32, matmul

# ----------------------------------------------------------------------------------------------------------------------
# The last step of the gradients of a loss whose similarities are all in memory, and their product with the loss's gradient.
#
# `kernels.small` has the kernels before it and describes `work` and `sums`. The last step follows
# two cuBLAS matmuls of the weights with the embeddings, or forms these itself, in batches so small that the host takes
# longer to launch a product than the device to compute it (`plan.KERNEL_MATMUL_ROWS`).

_ADDED = kernel_plan.KernelTile(rows=16, columns=1, width=256, warps=4, stages=1)  # of a gradient to which matches are added
_BLOCK = 2048  # partial sums that are added at once


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
    weight = tl.load(stats + MATCH_WEIGHT * N + offs_n, mask_n, 0.0)
    partner = offs_n
    if KIND == LABELS:
        partner = tl.load(stats + SOLE_POSITIVE * N + offs_n, mask_n, 0.0).to(tl.int32)
        is_apart = tl.load(stats + PULL * N + offs_n, mask_n, 0.0) < 0.0
        weight += tl.where(is_apart, tl.load(stats + MATCH_WEIGHT * N + partner, mask_n, 0.0), 0.0)
    if KIND == VIEWS:
        partner = partner_of(offs_n, N)
        weight += tl.load(stats + MATCH_WEIGHT * N + partner, mask_n, 0.0)
    if KIND == MATCHES:
        weight += tl.load(stats + (PLANES + MATCH_WEIGHT) * N + offs_n, mask_n, 0.0)
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
        rows = tl.maximum(sum_all_parts(row_sums + THIRD * row_programs, row_programs, BLOCK), 1.0)
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
            total = sum_all_parts(tile_sums + DSCALE * tiles, tiles, BLOCK)
            if KIND != SIGMOID:
                total += sum_all_parts(row_sums + DSCALE * row_programs, row_programs, BLOCK)
            tl.store(sums, total * share)
            if KIND == SIGMOID:
                tl.store(sums + 1, sum_all_parts(tile_sums + THIRD * tiles, tiles, BLOCK) * share)


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


# ----------------------------------------------------------------------------------------------------------------------
# The launches of a loss whose similarities are all in memory: grids, tiles and room, found once for each form of a call.


class _LaunchTile(NamedTuple):
    """The similarities of one program. Unlike `kernels.plan.KernelTile` it has no width: few of these kernels form products."""

    rows: int
    columns: int
    warps: int

    def grid(self, N: int) -> tuple[int, int]:
        """Tiles of columns, tiles of rows."""
        return plan.tiles(N, self.columns), plan.tiles(N, self.rows)

    @property
    def options(self) -> dict[str, Any]:
        """The tile as arguments of a launch."""
        return {"BLOCK_N": self.rows, "BLOCK_M": self.columns, "num_warps": self.warps, **_EXACT}


_EXACT = {"enable_fp_fusion": False}  # similarities are rounded before a shift is subtracted
_PRODUCT_WIDTH = 64  # of the embeddings, in each step of a product

# Where the kernel forms the products. H200, bf16, D = 512, µs at 1,024 and 4,096 rows. Sums: these 22 and 75; with eight warps
# 33 and 78, 128×128 22 and 67, but with every register. Sigmoids: these 23 and 106; with four warps 30 and 137, 64×64 24 and
# 113.
_FORMED_SUMS = _LaunchTile(rows=64, columns=128, warps=4)
_FORMED_LABEL_SUMS = _LaunchTile(rows=64, columns=128, warps=8)
_FORMED_SIGMOIDS = _LaunchTile(rows=64, columns=128, warps=8)
# Where the products are given. H200, µs at 8,192 rows, whose products take 64 µs to read. Sums: these 85; 32×64 81, but twice
# as many sums of columns; 64×128 107 with four warps and 204 with eight. Weights: these 111; 32×64 111, 64×128 with eight warps
# 137. Sigmoids: these 236; 32×64 245, 32×128 490, 64×128 with eight warps 523.
_SUMS = _LaunchTile(rows=64, columns=64, warps=2)
_LABEL_SUMS = _LaunchTile(rows=32, columns=64, warps=2)
_WEIGHTS = _LaunchTile(rows=32, columns=128, warps=4)
_SIGMOIDS = _LaunchTile(rows=16, columns=128, warps=4)
# Whole rows, of which at most so many columns are loaded at once: this one 148, 2×2048 with eight warps 162, 4×1024 202.
_WHOLE = _LaunchTile(rows=1, columns=2048, warps=4)
_ROWS = 32  # rows that a program combines


class Form(NamedTuple):
    """What decides how the kernels of a loss are compiled and launched."""

    kind: int
    divisor: int  # of the loss; 0 for the number of rows with a positive
    ids_are_positives: bool  # of SIGMOID
    precision: str
    needs: tuple[bool, ...]  # whether there are gradients of x, y, scale and bias
    shape: tuple[int, ...]  # N, D
    row_strides: tuple[int, ...]
    col_strides: tuple[int, ...]
    device: torch.device
    kinds: tuple[Any, ...]  # of rows, columns, scale, bias and ids


class Launches:
    """The launches of one form."""

    def __init__(self, form: Form) -> None:
        (N, D), kind, self.shape, self.device = form.shape, form.kind, form.shape, form.device
        self.learns = any(form.needs)  # weights or d scale
        of_x, of_y = form.needs[:2]
        self.sides = (of_x or of_y, False) if kind in (VIEWS.value, LABELS.value) else (of_x, of_y)
        self.half = HALF_DTYPE.get(form.precision)
        unit, tf32 = 2.0**14 if form.precision == FLOAT16 else 1.0, form.precision == TF32  # weights are stored times `unit`
        self.multiplies = self.half is not None and plan.kernels_compute_matmuls(N, D)
        self.forms_products = self.multiplies and kind not in (ROWS.value, VIEWS.value)  # whose kernel reads rows twice
        self.is_sigmoid = kind == SIGMOID.value
        layout, product_width = (N, D, *form.row_strides, *form.col_strides), {"BLOCK_D": _PRODUCT_WIDTH}
        self.work, programs, tiles = PLANES.value * N, 0, math.prod(_WEIGHTS.grid(N))
        if kind == SIGMOID.value:
            tile = _FORMED_SIGMOIDS if self.forms_products else _SIGMOIDS
            tiles = math.prod(tile.grid(N))
            constants = {"IDS_ARE_POSITIVES": form.ids_are_positives, "TF32": tf32, **product_width}
            self.sigmoid_weights = Launcher(sigmoid_kernel, tile.grid(N), (*layout, unit), **constants, **tile.options)
        elif kind in (ROWS.value, VIEWS.value):
            tile = _WHOLE._replace(columns=min(_WHOLE.columns, triton.next_power_of_2(N)))
            programs = plan.tiles(N, tile.rows)
            tiles = programs if kind == ROWS.value else tiles
            with_weights = kind == ROWS.value and self.learns
            constants = {"IS_VIEWS": kind == VIEWS.value, "WITH_WEIGHTS": with_weights, "TF32": tf32}
            self.rows = Launcher(rows_kernel, (programs,), (N, unit), **constants, **tile.options)
        else:
            tile = _tile_of_sums(kind, formed=self.forms_products)
            row_parts, col_parts = tile.grid(N)
            row_planes, col_planes, sides = (7, 0, 1) if kind == LABELS.value else (2, 2, 2)
            programs = plan.tiles(N, _ROWS) * sides
            self.work = N * (2 * PLANES.value + row_planes * row_parts + col_planes * col_parts)
            parts = {"ROW_PARTS": triton.next_power_of_2(row_parts), "COL_PARTS": triton.next_power_of_2(col_parts)}
            self.partial_sums = Launcher(partial_sums_kernel, tile.grid(N), layout, KIND=kind, **product_width, **tile.options)
            self.combine = Launcher(
                combine_kernel, (programs,), (N, row_parts, col_parts), KIND=kind, BLOCK_N=_ROWS, **parts, **_EXACT
            )
        if kind not in (SIGMOID.value, ROWS.value):
            first = N, FIRST_SUM.value + SUMS.value * programs, unit
            constants = {"KIND": kind, "TF32": tf32}
            self.softmax_weights = Launcher(softmax_weights_kernel, _WEIGHTS.grid(N), first, **constants, **_WEIGHTS.options)
        self.sums = FIRST_SUM.value + SUMS.value * (programs + tiles)
        last = *layout, programs, tiles, float(form.divisor), unit
        self.finish = finish(kind, self.sides, last, learns=self.learns, multiplies=self.multiplies)

    def operands(self, rows: Tensor, columns: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What the first kernel gets: the products alone, or rows, columns and room for the products if others need them."""
        if not self.forms_products:
            return None, None, matmul(rows, columns.T)
        return rows, columns, None if self.is_sigmoid else self._matrix(torch.float32)

    def weights(self, products: Tensor | None) -> Tensor | None:  # (N, N)
        """Uninitialised, or the products themselves, which weights of the same type overwrite; None if no side is learned."""
        if not any(self.sides):
            return None
        return products if self.half is None else self._matrix(self.half)

    def gradients(self, weights: Tensor | None, rows: Tensor, columns: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of both sides, without the matches: products with the weights, uninitialised if the last kernel forms these."""
        of_rows, of_columns = self.sides
        if weights is None:
            return None, None
        if self.multiplies:
            return self._gradient() if of_rows else None, self._gradient() if of_columns else None
        return matmul(weights, columns) if of_rows else None, matmul(weights.T, rows) if of_columns else None

    def _matrix(self, dtype: torch.dtype) -> Tensor:  # (N, N)
        return torch.empty(self.shape[0], self.shape[0], dtype=dtype, device=self.device)

    def _gradient(self) -> Tensor:  # (N, D)
        return torch.empty(self.shape, dtype=torch.float32, device=self.device)

    def room(self) -> tuple[Tensor, Tensor, Tensor]:
        """`work`, `sums` and the loss, uninitialised."""
        return (
            torch.empty(self.work, dtype=torch.float32, device=self.device),
            torch.empty(self.sums, dtype=torch.float64, device=self.device),
            torch.empty((), dtype=torch.float32, device=self.device),
        )


def _tile_of_sums(kind: int, *, formed: bool) -> _LaunchTile:
    """Sums of labels are seven instead of four, and would not fit the registers with the other tiles; not timed alone."""
    if kind == LABELS.value:
        return _FORMED_LABEL_SUMS if formed else _LABEL_SUMS
    return _FORMED_SUMS if formed else _SUMS


@lru_cache(maxsize=256)
def launches_of(form: Form) -> Launches:
    """The same object for the same form."""
    return Launches(form)
