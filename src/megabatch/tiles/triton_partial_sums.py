"""Adds the partial row sums that the programs of a launch stored, in a fixed order: one launch for up to three vectors."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.triton_device import sum_parts
from megabatch.tiles.triton_launcher import launch


@triton.jit
def _add_partial_sums_kernel(
    softplus_part,  # (parts, rows) or None
    row_part,  # (parts, rows) or None
    scale_part,  # (parts, rows) or None
    softplus,  # (rows,) or None
    row,  # (rows,) or None
    scale,  # (rows,) or None
    parts,
    rows,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    if softplus is not None:
        sums = sum_parts(softplus_part, offs_n, parts, rows, True, BLOCK_P)
        tl.store(softplus + offs_n, tl.load(softplus + offs_n, mask_n) + sums, mask_n)
    if row is not None:
        sums = sum_parts(row_part, offs_n, parts, rows, False, BLOCK_P)
        tl.store(row + offs_n, tl.load(row + offs_n, mask_n) + sums, mask_n)
    if scale is not None:
        sums = sum_parts(scale_part, offs_n, parts, rows, False, BLOCK_P)
        tl.store(scale + offs_n, tl.load(scale + offs_n, mask_n) + sums, mask_n)


def add_partial_sums(parts: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
    """Adds partial row sums, (parts, n) each, to row sums, (n,) each: of softplus, of g, and of g times product."""
    present = [part for part in parts if part is not None]
    if present:
        count, rows = present[0].shape
        grid = (-(-rows // 32),)
        launch(_add_partial_sums_kernel, grid, (*parts, *sums), (count, rows), BLOCK_P=64, BLOCK_N=32)
