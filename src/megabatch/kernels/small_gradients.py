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
# The last step of the gradients of a loss whose logits are all in memory.
#
# `kernels.small` contains the kernels of the previous steps, and describes `work` and `sums`. Two cuBLAS matmuls of the
# gradient weights with the embeddings come before the last step. If a batch is so small that the host takes longer to launch a
# matmul than the GPU takes to compute it (`tiles.plan.KERNEL_MATMUL_ROWS`), the kernel of the last step computes both matmuls.

# The tile of a gradient to which the kernel only adds the matches.
_MATCHES_TILE = kernel_plan.KernelTile(rows=16, columns=1, dims=256, warps=4, stages=1)
_BLOCK = 2048  # partial sums that are added at once


@triton.jit
def _finish_tile(
    tile, tile_d, gradient, weights, partners, row_stride, stride, stats, factor, unit, N, D,
    TRANSPOSED: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes gradient = (weights · partners − unit · match weight · matching row) · factor, for a tile of the gradient.

    If `weights` is None, `gradient` already contains weights · partners.
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
    weights,  # (N, N); None if dx and dy already contain the matmuls
    dx,  # (N, D) float32: weights · y, or uninitialized if the kernel computes the matmul; None if not needed
    dy,  # (N, D) float32: weightsᵀ · x, or uninitialized if the kernel computes the matmul; None if not needed
    work,
    sums,  # receives dscale and dbias
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
    divisor,  # the divisor of the loss; 0 stands for the number of rows with a positive
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
    """Returns the launcher of the last step.

    It adds the matches to the gradients, and multiplies the gradients by the scale and by 1 / divisor. It also sums the loss,
    dscale and dbias.

    Args:
        kind: the kind of the loss.
        sides: whether there is a gradient of x, and of y.
        numbers: N, D and the other numbers that the kernel takes.
        learns: whether dscale or dbias may be needed.
        multiplies: whether the kernel gets the gradient weights in half precision and computes the matmuls with x and y.
    """
    N, D = (int(number) for number in numbers[:2])
    tile = kernel_plan.SMALL_MATMUL if multiplies else _MATCHES_TILE
    grid = (-(-D // tile.dims), -(-N // tile.rows) * sum(sides)) if any(sides) else (1, 1)
    blocks = {"BLOCK_N": tile.rows, "BLOCK_M": tile.columns, "BLOCK_D": tile.dims, "BLOCK": _BLOCK}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launcher(_finish_kernel, grid, numbers, KIND=kind, LEARNS=learns, **blocks, **options)


# ----------------------------------------------------------------------------------------------------------------------
# The launches of a loss whose logits are all in memory. Grids, tiles and sizes of buffers are computed once for each form of
# call.


class _LaunchTile(NamedTuple):
    """The tile of logits that one program processes. It has no dims, because only a few of the kernels compute matmuls."""

    rows: int
    columns: int
    warps: int

    def grid(self, N: int) -> tuple[int, int]:
        """Returns the number of tiles of columns and of rows."""
        return plan.tiles(N, self.columns), plan.tiles(N, self.rows)

    @property
    def options(self) -> dict[str, Any]:
        """The tile as arguments of a launch."""
        return {"BLOCK_N": self.rows, "BLOCK_M": self.columns, "num_warps": self.warps, **_EXACT}


_EXACT = {"enable_fp_fusion": False}  # a fused multiply-add would not round a logit before a shift is subtracted
_MATMUL_DIMS = 64  # dims of the embeddings in each step of the matmul of the logits

# Tiles of the kernels that compute the matmul of the logits. H200, bf16, D = 512, µs at 1,024 / 4,096 rows. Sums: 64×128 with
# four warps 22 / 75, with eight warps 33 / 78, and 128×128 22 / 67, but that tile needs all registers. Sigmoids: 64×128 with
# eight warps 23 / 106, with four warps 30 / 137, and 64×64 24 / 113.
_MATMUL_SUMS = _LaunchTile(rows=64, columns=128, warps=4)
_MATMUL_LABEL_SUMS = _LaunchTile(rows=64, columns=128, warps=8)
_MATMUL_SIGMOIDS = _LaunchTile(rows=64, columns=128, warps=8)
# Tiles of the kernels that read the dot products. H200, µs at 8,192 rows, where it takes 64 µs to read the dot products. Sums:
# 64×64 85, 32×64 81 (with twice as many partial sums of columns), 64×128 with four warps 107, with eight warps 204.
# Weights: 32×128 111, 32×64 111, and 64×128 with eight warps 137. Sigmoids: 16×128 236, 32×64 245, 32×128 490, and 64×128 with
# eight warps 523.
_SUMS = _LaunchTile(rows=64, columns=64, warps=2)
_LABEL_SUMS = _LaunchTile(rows=32, columns=64, warps=2)
_WEIGHTS = _LaunchTile(rows=32, columns=128, warps=4)
_SIGMOIDS = _LaunchTile(rows=16, columns=128, warps=4)
# The tile of the kernel that loops over full rows. Its columns are the largest number of columns in each step. Measured in µs:
# 1×2048 148, 2×2048 with eight warps 162, 4×1024 202.
_FULL_ROWS = _LaunchTile(rows=1, columns=2048, warps=4)
_COMBINED_ROWS = 32  # rows whose partial sums one program of `combine_kernel` adds


class Form(NamedTuple):
    """The properties of a call that decide how its kernels are compiled and launched."""

    kind: int  # the kind of the loss
    divisor: int  # the divisor of the loss; 0 stands for the number of rows with a positive
    ids_are_positives: bool  # only for SIGMOID
    precision: str
    needs: tuple[bool, ...]  # whether gradients of x, y, scale and bias are needed
    shape: tuple[int, ...]  # N, D
    row_strides: tuple[int, ...]
    col_strides: tuple[int, ...]
    device: torch.device
    kinds: tuple[Any, ...]  # `kernels.launch.kinds` of rows, columns, scale, bias and ids


class Launches:
    """The launches of the calls with one form."""

    def __init__(self, form: Form) -> None:
        (N, D), kind, self.shape, self.device = form.shape, form.kind, form.shape, form.device
        self.learns = any(form.needs)  # whether any gradient is needed
        of_x, of_y = form.needs[:2]
        self.sides = (of_x or of_y, False) if kind in (VIEWS.value, LABELS.value) else (of_x, of_y)
        self.half = HALF_DTYPE.get(form.precision)
        unit, tf32 = 2.0**14 if form.precision == FLOAT16 else 1.0, form.precision == TF32  # weights are multiplied by `unit`
        self.multiplies = self.half is not None and plan.kernels_compute_matmuls(N, D)
        # The kernel of ROWS and VIEWS reads every row twice, so it cannot compute the matmul of the logits.
        self.forms_products = self.multiplies and kind not in (ROWS.value, VIEWS.value)
        self.is_sigmoid = kind == SIGMOID.value
        layout, matmul_dims = (N, D, *form.row_strides, *form.col_strides), {"BLOCK_D": _MATMUL_DIMS}
        self.work, programs, tiles = PLANES.value * N, 0, math.prod(_WEIGHTS.grid(N))
        if kind == SIGMOID.value:
            tile = _MATMUL_SIGMOIDS if self.forms_products else _SIGMOIDS
            tiles = math.prod(tile.grid(N))
            constants = {"IDS_ARE_POSITIVES": form.ids_are_positives, "TF32": tf32, **matmul_dims}
            self.sigmoid_weights = Launcher(sigmoid_kernel, tile.grid(N), (*layout, unit), **constants, **tile.options)
        elif kind in (ROWS.value, VIEWS.value):
            tile = _FULL_ROWS._replace(columns=min(_FULL_ROWS.columns, triton.next_power_of_2(N)))
            programs = plan.tiles(N, tile.rows)
            tiles = programs if kind == ROWS.value else tiles
            with_weights = kind == ROWS.value and self.learns
            constants = {"IS_VIEWS": kind == VIEWS.value, "WITH_WEIGHTS": with_weights, "TF32": tf32}
            self.rows = Launcher(rows_kernel, (programs,), (N, unit), **constants, **tile.options)
        else:
            tile = _tile_of_sums(kind, computes_matmul=self.forms_products)
            row_parts, col_parts = tile.grid(N)
            row_planes, col_planes, sides = (7, 0, 1) if kind == LABELS.value else (2, 2, 2)
            programs = plan.tiles(N, _COMBINED_ROWS) * sides
            self.work = N * (2 * PLANES.value + row_planes * row_parts + col_planes * col_parts)
            parts = {"ROW_PARTS": triton.next_power_of_2(row_parts), "COL_PARTS": triton.next_power_of_2(col_parts)}
            self.partial_sums = Launcher(partial_sums_kernel, tile.grid(N), layout, KIND=kind, **matmul_dims, **tile.options)
            self.combine = Launcher(
                combine_kernel, (programs,), (N, row_parts, col_parts), KIND=kind, BLOCK_N=_COMBINED_ROWS, **parts, **_EXACT
            )
        if kind not in (SIGMOID.value, ROWS.value):
            first = N, FIRST_SUM.value + SUMS.value * programs, unit
            constants = {"KIND": kind, "TF32": tf32}
            self.softmax_weights = Launcher(softmax_weights_kernel, _WEIGHTS.grid(N), first, **constants, **_WEIGHTS.options)
        self.sums = FIRST_SUM.value + SUMS.value * (programs + tiles)
        last = *layout, programs, tiles, float(form.divisor), unit
        self.finish = finish(kind, self.sides, last, learns=self.learns, multiplies=self.multiplies)

    def operands(self, rows: Tensor, columns: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the first three arguments of the first kernel.

        They are (None, None, the dot products), or rows, columns and an uninitialized matrix for the dot products. The matrix
        is None if no other kernel needs the dot products.
        """
        if not self.forms_products:
            return None, None, matmul(rows, columns.T)
        return rows, columns, None if self.is_sigmoid else self._matrix(torch.float32)

    def weights(self, products: Tensor | None) -> Tensor | None:  # (N, N)
        """Returns the matrix for the gradient weights, or None if neither x nor y needs a gradient.

        If weights and dot products have the same dtype, the weights overwrite the dot products. Otherwise the matrix is
        uninitialized.
        """
        if not any(self.sides):
            return None
        return products if self.half is None else self._matrix(self.half)

    def gradients(self, weights: Tensor | None, rows: Tensor, columns: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns dx and dy without the matches, or None for a gradient that is not needed.

        They are uninitialized if the last kernel computes the matmuls.
        """
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

    def allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `work`, `sums` and the loss, uninitialized."""
        return (
            torch.empty(self.work, dtype=torch.float32, device=self.device),
            torch.empty(self.sums, dtype=torch.float64, device=self.device),
            torch.empty((), dtype=torch.float32, device=self.device),
        )


def _tile_of_sums(kind: int, *, computes_matmul: bool) -> _LaunchTile:
    """Returns the tile of `partial_sums_kernel`.

    LABELS has seven sums instead of four, which would not fit in the registers with the tiles of the other kinds. Its tiles
    were not measured separately.
    """
    if kind == LABELS.value:
        return _MATMUL_LABEL_SUMS if computes_matmul else _LABEL_SUMS
    return _MATMUL_SUMS if computes_matmul else _SUMS


@lru_cache(maxsize=256)
def launches_of(form: Form) -> Launches:
    """Returns the launches of a form. Calls with the same form get the same object."""
    return Launches(form)
