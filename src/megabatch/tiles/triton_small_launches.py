"""The launches of a loss whose similarities are all in memory: grids, tiles and room, found once for each form of a call."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.precision import FLOAT16, HALF_DTYPE, TF32, product
from megabatch.tiles.triton_launcher import Launcher
from megabatch.tiles.triton_small import (
    combine_kernel,
    partial_sums_kernel,
    rows_kernel,
    sigmoid_kernel,
    softmax_weights_kernel,
)
from megabatch.tiles.triton_small_device import FIRST_SUM, LABELS, PLANES, ROWS, SIGMOID, SUMS, VIEWS
from megabatch.tiles.triton_small_gradients import finish


class _Tile(NamedTuple):
    """The similarities of one program. Unlike `kernel_plan.KernelTile` it has no width: few of these kernels form products."""

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
_FORMED_SUMS = _Tile(rows=64, columns=128, warps=4)
_FORMED_LABEL_SUMS = _Tile(rows=64, columns=128, warps=8)
_FORMED_SIGMOIDS = _Tile(rows=64, columns=128, warps=8)
# Where the products are given. H200, µs at 8,192 rows, whose products take 64 µs to read. Sums: these 85; 32×64 81, but twice
# as many sums of columns; 64×128 107 with four warps and 204 with eight. Weights: these 111; 32×64 111, 64×128 with eight warps
# 137. Sigmoids: these 236; 32×64 245, 32×128 490, 64×128 with eight warps 523.
_SUMS = _Tile(rows=64, columns=64, warps=2)
_LABEL_SUMS = _Tile(rows=32, columns=64, warps=2)
_WEIGHTS = _Tile(rows=32, columns=128, warps=4)
_SIGMOIDS = _Tile(rows=16, columns=128, warps=4)
# Whole rows, of which at most so many columns are loaded at once: this one 148, 2×2048 with eight warps 162, 4×1024 202.
_WHOLE = _Tile(rows=1, columns=2048, warps=4)
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
        self.multiplies = self.half is not None and plan.small_products(N, D)
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
            return None, None, product(rows, columns.T)
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
        return product(weights, columns) if of_rows else None, product(weights.T, rows) if of_columns else None

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


def _tile_of_sums(kind: int, *, formed: bool) -> _Tile:
    """Sums of labels are seven instead of four, and would not fit the registers with the other tiles; not timed alone."""
    if kind == LABELS.value:
        return _FORMED_LABEL_SUMS if formed else _LABEL_SUMS
    return _FORMED_SUMS if formed else _SUMS


@lru_cache(maxsize=256)
def launches_of(form: Form) -> Launches:
    """The same object for the same form."""
    return Launches(form)
