"""The launches of a loss whose similarities are all in memory: grids, tiles and room, found once for each form of a call."""

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

_BLOCK_N, _BLOCK_M, _BLOCK_D = 64, 128, 64  # a tile of similarities, and the width of a step of their product
_ROWS = 32  # rows that a program combines
_WHOLE_ROWS, _WIDTH = 4, 1024  # rows of a program that computes them whole, and columns that it loads at once
_EXACT = {"enable_fp_fusion": False}  # similarities are rounded before a shift is subtracted


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
        grid = -(-N // _BLOCK_M), -(-N // _BLOCK_N)  # tiles of columns, tiles of rows
        tile = {"BLOCK_N": _BLOCK_N, "BLOCK_M": _BLOCK_M}
        eight_warps = {"num_warps": 8, **_EXACT}
        self.learns = any(form.needs)  # weights or d scale
        of_x, of_y = form.needs[:2]
        self.sides = (of_x or of_y, False) if kind in (VIEWS.value, LABELS.value) else (of_x, of_y)
        self.half = HALF_DTYPE.get(form.precision)
        unit, tf32 = 2.0**14 if form.precision == FLOAT16 else 1.0, form.precision == TF32  # weights are stored times `unit`
        self.multiplies = self.half is not None and plan.small_products(N, D)
        self.forms_products = self.multiplies and kind not in (ROWS.value, VIEWS.value)  # whose kernel reads rows twice
        self.is_sigmoid = kind == SIGMOID.value
        layout, formed = (N, D, *form.row_strides, *form.col_strides), {**tile, "BLOCK_D": _BLOCK_D}
        self.work, tiles = PLANES.value * N, grid[0] * grid[1]
        if kind == SIGMOID.value:
            programs = 0
            constants = {"IDS_ARE_POSITIVES": form.ids_are_positives, "TF32": tf32}
            self.sigmoid_weights = Launcher(sigmoid_kernel, grid, (*layout, unit), **constants, **formed, **eight_warps)
        elif kind in (ROWS.value, VIEWS.value):
            programs = -(-N // _WHOLE_ROWS)
            tiles = programs if kind == ROWS.value else tiles
            blocks = {"BLOCK_N": _WHOLE_ROWS, "BLOCK_M": min(_WIDTH, triton.next_power_of_2(N))}
            with_weights = kind == ROWS.value and self.learns
            constants = {"IS_VIEWS": kind == VIEWS.value, "WITH_WEIGHTS": with_weights, "TF32": tf32}
            self.rows = Launcher(rows_kernel, (programs,), (N, unit), **constants, **blocks, **_EXACT)
        else:
            row_planes, col_planes, sides = (7, 0, 1) if kind == LABELS.value else (2, 2, 2)
            programs = -(-N // _ROWS) * sides
            self.work = N * (2 * PLANES.value + row_planes * grid[0] + col_planes * grid[1])
            parts = {"ROW_PARTS": triton.next_power_of_2(grid[0]), "COL_PARTS": triton.next_power_of_2(grid[1])}
            self.partial_sums = Launcher(partial_sums_kernel, grid, layout, KIND=kind, **formed, **eight_warps)
            self.combine = Launcher(combine_kernel, (programs,), (N, *grid), KIND=kind, BLOCK_N=_ROWS, **parts, **_EXACT)
        if kind not in (SIGMOID.value, ROWS.value):
            first = N, FIRST_SUM.value + SUMS.value * programs, unit
            self.softmax_weights = Launcher(softmax_weights_kernel, grid, first, KIND=kind, TF32=tf32, **tile, **eight_warps)
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


@lru_cache(maxsize=256)
def launches_of(form: Form) -> Launches:
    """The same object for the same form."""
    return Launches(form)
