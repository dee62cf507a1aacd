"""Row and column sums of exp(s) in one pass over the tiles, at the speed of the bare product.

A program owns a panel of BLOCK_M columns and loops over the rows, BLOCK_N at a time. One exponential per element serves both
directions. Row sums of a tile are stored as partial sums. Column sums stay in registers: each thread adds up the rows it owns,
and the threads' sums are reduced once, after the loop. There are no atomics; partial sums are added in a fixed order.

All sums share one shift (`triton_operands`). Sums that fp32 cannot hold at that shift are recognised by their values, and
`triton_online_logsumexp` recomputes them. Unit-length embeddings have none at scales below 48, and at 100 only in rows where
no cosine is above 0.035.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan, plan, tuning
from megabatch.tiles.block import Block, windows
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.triton_device import exponents, offsets
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_online_logsumexp import Sums, complete_sums
from megabatch.tiles.triton_operands import Operands, exponent_operands, kernel_options


@triton.jit
def _logsumexp_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None
    col_offset,  # (M,) or None
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    row_part,  # (panels, rows of this launch)
    col_part,  # (splits, columns of this launch), or None
    first_row,
    last_row,
    first_column,
    last_column,
    split_rows,
    N,
    M,
    D: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    panel, split = tl.program_id(0), tl.program_id(1)
    m = first_column + panel * BLOCK_M
    offs_m = m + tl.arange(0, BLOCK_M)
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
    column = offsets(col_offset, tl.load(exponent_scale + 2), offs_m, M, 0)
    if col_part is not None:
        col = tl.zeros((BLOCK_N // 32, 8, BLOCK_M), tl.float32)
    begin = first_row + split * split_rows
    for n in tl.range(begin, tl.minimum(begin + split_rows, last_row), BLOCK_N, flatten=True):
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        row = offsets(row_offset, 0.0, offs_n, N, 1)
        t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
        e = tl.exp2(t)
        offs_part = panel.to(tl.int64) * (last_row - first_row) + (offs_n - first_row)
        tl.store(row_part + offs_part, tl.sum(e, 1), mask=offs_n < last_row)
        if col_part is not None:
            pairs = tl.sum(e.reshape(BLOCK_N // 16, 2, 8, BLOCK_M), 1)  # one thread holds rows r and r + 8 of a fragment
            col += tl.sum(pairs.reshape(2, BLOCK_N // 32, 8, BLOCK_M), 0)  # and the same rows of both halves of the tile
    if col_part is not None:
        offs_part = split.to(tl.int64) * (last_column - first_column) + (offs_m - first_column)
        tl.store(col_part + offs_part, tl.sum(tl.sum(col, 0), 0), mask=offs_m < last_column)


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:  # (N,), (M,) or (0,)
    """Row sums and column sums of exp(s), from one pass over the tiles; without `columns` the column sums are empty."""
    operands = exponent_operands(block)
    row, col = (Sums(*torch.empty(2, length, dtype=block.dtype, device=block.x.device)) for length in (block.N, block.M))
    write_sums(operands, block, row, col if columns else None)
    if columns:
        return log_sum(row, operands), log_sum(col, operands)
    return log_sum(row, operands), LogSum.empty(0, dtype=torch.float64, device=block.x.device)


def write_sums(operands: Operands, block: Block, row: Sums, col: Sums | None) -> None:
    """Writes the row sums of 2^t, (N,) each, and the column sums, (M,) each, if `col` is given."""
    rows, columns = slice(0, block.N), slice(0, block.M)
    launches = list(_launches(operands, block, rows, columns))
    if len(launches) == 1:
        parts = _partial_sums(operands, block, launches[0], with_columns=col is not None)
        complete_sums(operands, block, parts[0], row, None if col is None else parts[1], col)
        return
    row.total.zero_()
    if col is not None:
        col.total.zero_()
    add_sums(operands, block, rows, columns, row.total, None if col is None else col.total)
    complete_sums(operands, block, row.total[None], row, None if col is None else col.total[None], col)


def log_sum(sums: Sums, operands: Operands) -> LogSum:
    """The sums 2^shift · total with the shift in natural units, float64. An empty sum has shift −inf and total 0."""
    shift = torch.where(sums.shift.isinf(), operands.shift, sums.shift.double())
    return LogSum(torch.where(sums.total == 0, -torch.inf, shift * math.log(2)), sums.total.double())


def add_sums(
    operands: Operands,
    block: Block,
    rows: slice,
    columns: slice,
    row_total: Tensor,  # (N,) added to
    col_total: Tensor | None,  # (M,) added to
) -> None:
    """Adds the row and column sums of 2^t of a rectangle, which starts and ends at tile boundaries or edges of the block."""
    for task in _launches(operands, block, rows, columns):
        row_part, col_part = _partial_sums(operands, block, task, with_columns=col_total is not None)
        row_total[task.rows].add_(row_part.sum(0))
        if col_total is not None and col_part is not None:
            col_total[task.columns].add_(col_part.sum(0))


class _Launch(NamedTuple):
    rows: slice
    columns: slice
    tile: kernel_plan.KernelTile
    hopper: kernel_plan.HopperTile | None


def _launches(operands: Operands, block: Block, rows: slice, columns: slice) -> Iterator[_Launch]:
    """The launches whose partial sums add up to the sums of a rectangle."""
    hopper = kernel_plan.hopper_tile(block, "sums")
    tile = kernel_plan.logsumexp_tile(block.precision, block.x.device) if hopper is not None else _tuned_tile(operands, block)
    width = tile.columns if hopper is None else hopper.columns
    for row_range in _row_ranges(rows, tile, hopper):
        for col_range in windows(columns, kernel_plan.LAUNCH_PANELS * width):
            yield _Launch(row_range, col_range, tile, hopper)


def _partial_sums(
    operands: Operands, block: Block, task: _Launch, *, with_columns: bool
) -> tuple[Tensor, Tensor | None]:  # (panels, n), (partial sums, m)
    """Partial row sums of 2^t, and partial column sums if `with_columns`."""
    rows, columns, tile, hopper = task
    panels = plan.tiles(columns.stop - columns.start, tile.columns if hopper is None else hopper.columns)
    row_part = torch.empty(panels, rows.stop - rows.start, dtype=block.dtype, device=block.x.device)
    if hopper is None:
        return row_part, _launch(operands, block, tile, rows, columns, row_part, with_columns=with_columns)
    from megabatch.tiles import gluon_warp_specialized

    return row_part, gluon_warp_specialized.sums(hopper, operands, rows, columns, row_part, block.skip_diagonal)


def _tuned_tile(operands: Operands, block: Block) -> kernel_plan.KernelTile:
    """The kernel's tile: the default of `kernel_plan`, or a measured one if autotuning is on."""
    rows, columns = slice(0, min(block.N, 16384)), slice(0, min(block.M, 8192))

    def trial(tile: kernel_plan.KernelTile) -> None:
        panels = plan.tiles(columns.stop, tile.columns)
        row_part = torch.empty(panels, rows.stop, dtype=block.dtype, device=block.x.device)
        _launch(operands, block, tile, rows, columns, row_part, with_columns=True)

    return tuning.tile("logsumexp", block, kernel_plan.logsumexp_tile(block.precision, block.x.device), trial)


def _row_ranges(rows: slice, tile: kernel_plan.KernelTile, hopper: kernel_plan.HopperTile | None) -> Iterator[slice]:
    """The rows of each launch.

    A last, incomplete tile of rows gets its own launch: it needs row offsets, which would slow down all other tiles
    of `_logsumexp_kernel`.
    """
    whole = rows.stop if hopper is not None else rows.stop - (rows.stop - rows.start) % tile.rows
    yield from windows(slice(rows.start, whole), kernel_plan.LAUNCH_ROWS)
    if whole < rows.stop:
        yield slice(whole, rows.stop)


def _launch(
    operands: Operands,
    block: Block,
    tile: kernel_plan.KernelTile,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) written
    *,
    with_columns: bool,
) -> Tensor | None:  # (splits, m)
    """Writes partial row sums. Returns partial column sums if `with_columns`."""
    n, m = rows.stop - rows.start, columns.stop - columns.start
    row_offset = operands.row_offset
    if row_offset is None and n % tile.rows and with_columns:
        # The copy engine reads zeros beyond the last row. An offset of −inf keeps them out of the column sums.
        row_offset = block.zeros(block.N)
    splits, split_rows = kernel_plan.row_splits(len(row_part), n, tile.rows, kernel_plan.multiprocessors(block.x.device))
    col_part = torch.empty(splits, m, dtype=block.dtype, device=block.x.device) if with_columns else None
    launch(
        _logsumexp_kernel,
        (len(row_part), splits),
        (
            *operands.descriptors(tile),
            operands.exponent_scale,
            row_offset,
            operands.col_offset,
            operands.row_ids,
            operands.col_ids,
            operands.limit,
            row_part,
            col_part,
        ),
        (rows.start, rows.stop, columns.start, columns.stop, split_rows, block.N, block.M),
        **kernel_options(block, tile),
    )
    return col_part
