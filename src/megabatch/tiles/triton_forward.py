"""Row and column sums of exp(s) in one pass over the tiles, at the speed of the bare product.

A program owns a panel of BLOCK_M columns and marches down the rows. One exponential per element serves both directions. Row
sums of a tile leave as private partials; column sums stay unreduced in registers, folded only along rows that one thread
owns, and are reduced across threads once, after the march. No atomics: partials are added in a fixed order.

The sums share one shift (`triton_operands`). Those that fp32 cannot hold at that shift are found by their values and computed
again by `_online_rows`, each with a maximum of its own. Unit-length embeddings have none at scales below 48, and at 100 only
where no cosine of a row is above 0.035.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan, tuning
from megabatch.tiles.block import Block, pieces
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import FLOAT32, TF32
from megabatch.tiles.triton_operands import Operands, descriptor, exponent_operands

SMALLEST, LARGEST = 2.0**-80, 2.0**126  # a sum below may have lost terms that matter, one above has overflowed


@triton.jit
def equal_ids(row_ids, col_ids, offs_n, offs_m, N, M):
    """Which pairs of a tile have equal ids; some beyond the edge do."""
    own = tl.load(row_ids + offs_n, mask=offs_n < N, other=0)
    others = tl.load(col_ids + offs_m, mask=offs_m < M, other=0)
    return own[:, None] == others[None, :]


@triton.jit
def exponents(
    s,  # (BLOCK_N, BLOCK_M) products
    k,
    k_rest,  # what rounding took from k
    col_offset,  # (1, BLOCK_M)
    row_offset,  # (BLOCK_N, 1)
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    n,
    m,
    N,
    M,
    HAS_ROW_OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    IDS_ARE_POSITIVES: tl.constexpr = False,
):
    """t, with −inf where a pair is left out. Always in this order: forward and backward have to round alike."""
    t = s * k + col_offset
    if EXACT:
        t += s * k_rest  # rounded alike in every entry, k would not average out
    if HAS_ROW_OFFSET:
        t += row_offset
    offs_n, offs_m = n + tl.arange(0, s.shape[0]), m + tl.arange(0, s.shape[1])
    if row_ids is not None:
        same = equal_ids(row_ids, col_ids, offs_n, offs_m, N, M)
        t = tl.where(same, -t if IDS_ARE_POSITIVES else -float("inf"), t)
    if limit is not None:
        highest = tl.load(limit + offs_n, mask=offs_n < N, other=0.0)
        t = tl.where(s > highest[:, None], -float("inf"), t)
    if SKIP_DIAGONAL:
        if (n < m + s.shape[1]) & (m < n + s.shape[0]):
            t = tl.where(offs_n[:, None] == offs_m[None, :], -float("inf"), t)
    return t


@triton.jit
def offsets(pointer, otherwise, offs, size, axis: tl.constexpr):
    """Offsets of some rows or columns, to be added to a tile; −inf beyond the last."""
    if pointer is None:
        values = tl.where(offs < size, otherwise, -float("inf"))
    else:
        values = tl.load(pointer + offs, mask=offs < size, other=-float("inf"))
    return tl.expand_dims(values, axis)


@triton.jit
def _march(
    x_desc,
    y_desc,
    exponent_scale,  # (3,)
    row_offset,  # (N,) or None
    col_offset,  # (M,) or None
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    row_part,  # (panels, rows of this launch)
    col_part,  # (strips, columns of this launch), or None
    first_row,
    last_row,
    first_column,
    last_column,
    strip_rows,
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
    panel, strip = tl.program_id(0), tl.program_id(1)
    m = first_column + panel * BLOCK_M
    offs_m = m + tl.arange(0, BLOCK_M)
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
    column = offsets(col_offset, tl.load(exponent_scale + 2), offs_m, M, 0)
    if col_part is not None:
        col = tl.zeros((BLOCK_N // 32, 8, BLOCK_M), tl.float32)
    begin = first_row + strip * strip_rows
    for n in tl.range(begin, tl.minimum(begin + strip_rows, last_row), BLOCK_N, flatten=True):
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        row = offsets(row_offset, 0.0, offs_n, N, 1)
        t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
        e = tl.exp2(t)
        place = panel.to(tl.int64) * (last_row - first_row) + (offs_n - first_row)
        tl.store(row_part + place, tl.sum(e, 1), mask=offs_n < last_row)
        if col_part is not None:
            pairs = tl.sum(e.reshape(BLOCK_N // 16, 2, 8, BLOCK_M), 1)  # rows r and r + 8 of a fragment: one thread
            col += tl.sum(pairs.reshape(2, BLOCK_N // 32, 8, BLOCK_M), 0)  # the two halves of the tile: one thread
    if col_part is not None:
        place = strip.to(tl.int64) * (last_column - first_column) + (offs_m - first_column)
        tl.store(col_part + place, tl.sum(tl.sum(col, 0), 0), mask=offs_m < last_column)


@triton.jit
def _online_rows(
    x,
    y,
    exponent_scale,
    row_offset,
    col_offset,
    row_ids,
    col_ids,
    limit,  # (N,) or None; never where transposed
    total,  # (N,) read, and where it is out of range written
    shift,  # (N,) written where total is: a shift of its own
    smallest,
    largest,
    N,
    M,
    x_stride,
    y_stride,
    D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N
    offs_n = n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    before = tl.load(total + offs_n, mask=mask_n, other=1.0)
    lost = ~((before >= smallest) & (before <= largest))
    if tl.max(lost.to(tl.int32), 0) == 0:
        return
    HAS_ROW_OFFSET: tl.constexpr = row_offset is not None
    k, k_rest = tl.load(exponent_scale), tl.load(exponent_scale + 1)
    peak = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for m in range(0, M, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_d = offs_d < D
            a = tl.load(x + offs_n.to(tl.int64)[:, None] * x_stride + offs_d[None, :], mask_n[:, None] & mask_d[None, :], 0.0)
            b = tl.load(
                y + offs_m.to(tl.int64)[:, None] * y_stride + offs_d[None, :], (offs_m < M)[:, None] & mask_d[None, :], 0.0
            )
            s = tl.dot(a, b.T, s, input_precision=PRECISION)
        if TRANSPOSED:  # what are rows here are columns everywhere else
            column, row = offsets(col_offset, 0.0, offs_n, N, 1), offsets(row_offset, 0.0, offs_m, M, 0)
        else:
            column, row = offsets(col_offset, 0.0, offs_m, M, 0), offsets(row_offset, 0.0, offs_n, N, 1)
        t = exponents(s, k, k_rest, column, row, row_ids, col_ids, limit, n, m, N, M, HAS_ROW_OFFSET, EXACT, SKIP_DIAGONAL)
        t = tl.where((offs_m < M)[None, :], t, -float("inf"))
        higher = tl.maximum(peak, tl.max(t, 1))  # passes over NaN, which the sum keeps
        base = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        sums = sums * tl.exp2(peak - base) + tl.sum(tl.exp2(t - base[:, None]), 1)
        peak = higher
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    tl.store(total + offs_n, sums, mask=mask_n & lost)
    tl.store(shift + offs_n, base, mask=mask_n & lost)


def logsumexp_statistics(block: Block) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s), from one pass over the tiles."""
    assert block.limit is None, "limits are of rows, whose sums alone they come with"
    given = exponent_operands(block)
    col_total = block.zeros(block.M)
    row_total = _totals(given, block, col_total)
    row_shift = recompute_lost(given, block, row_total, transposed=False)
    col_shift = recompute_lost(given, block, col_total, transposed=True)
    return log_sum(row_total, row_shift), log_sum(col_total, col_shift)


def row_statistics(block: Block) -> LogSum:
    """Row sums (N,) of exp(s)."""
    given = exponent_operands(block)
    row_total = _totals(given, block, None)
    return log_sum(row_total, recompute_lost(given, block, row_total, transposed=False))


def log_sum(total: Tensor, shift: Tensor) -> LogSum:
    """2^shift · total in natural units, float64; nothing summed is −inf and 0."""
    return LogSum(torch.where(total == 0, -torch.inf, shift * math.log(2)), total.double())


def _totals(given: Operands, block: Block, col_total: Tensor | None) -> Tensor:  # (N,)
    """Row sums; column sums (M,) are added to `col_total` if given."""
    row_total = block.zeros(block.N)
    add_totals(given, block, slice(0, block.N), slice(0, block.M), row_total, col_total)
    return row_total


def add_totals(
    given: Operands,
    block: Block,
    rows: slice,
    columns: slice,
    row_total: Tensor,  # (N,) added to
    col_total: Tensor | None,  # (M,) added to
) -> None:
    """Adds the sums of a rectangle, which begins and ends with tiles, or at the edges of the block."""
    panel = plan.panel(block, "sums")
    size = plan.march_tile(block.precision, block.x.device) if panel is not None else _march_tile(given, block)
    width = size.columns if panel is None else panel.columns
    for these in _row_ranges(rows, size, panel):
        for those in pieces(columns, plan.MARCH_PANELS * width):
            panels = triton.cdiv(those.stop - those.start, width)
            row_part = torch.empty(panels, these.stop - these.start, dtype=block.dtype, device=block.x.device)
            if panel is None:
                col_part = _march_down(given, block, size, these, those, row_part, by_column=col_total is not None)
            else:
                from megabatch.tiles import gluon_panels

                col_part = gluon_panels.sums(panel, given, these, those, row_part, block.skip_diagonal)
            row_total[these] += row_part.sum(0)
            if col_total is not None and col_part is not None:
                col_total[those] += col_part.sum(0)


def _march_tile(given: Operands, block: Block) -> plan.KernelTile:
    """The tile of `_march` here, measured if the user asked for it."""
    rows, columns = slice(0, min(block.N, 16384)), slice(0, min(block.M, 8192))

    def trial(size: plan.KernelTile) -> None:
        panels = triton.cdiv(columns.stop, size.columns)
        row_part = torch.empty(panels, rows.stop, dtype=block.dtype, device=block.x.device)
        _march_down(given, block, size, rows, columns, row_part, by_column=True)

    return tuning.tile("march", block, plan.march_tile(block.precision, block.x.device), trial)


def _row_ranges(rows: slice, size: plan.KernelTile, panel: plan.Panel | None) -> Iterator[slice]:
    """Rows of one launch each. Ragged rows at the end cost `_march` an offset in every row, and get a launch of their own."""
    whole = rows.stop if panel is not None else rows.stop - (rows.stop - rows.start) % size.rows
    yield from pieces(slice(rows.start, whole), plan.MARCH_ROWS)
    if whole < rows.stop:
        yield slice(whole, rows.stop)


def _march_down(
    given: Operands,
    block: Block,
    size: plan.KernelTile,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) written
    *,
    by_column: bool,
) -> Tensor | None:  # (strips, m)
    """Partial row sums, and if asked for partial column sums, which are returned."""
    n, m = rows.stop - rows.start, columns.stop - columns.start
    row_offset = given.row_offset
    if row_offset is None and n % size.rows and by_column:
        # Beyond the last row the copy engine reads zeros, which an offset of −inf keeps out of the column sums.
        row_offset = block.zeros(block.N)
    strips, strip_rows = plan.march_strips(len(row_part), n, size.rows, plan.multiprocessors(block.x.device))
    col_part = torch.empty(strips, m, dtype=block.dtype, device=block.x.device) if by_column else None
    _march[(len(row_part), strips)](
        descriptor(given.x, size.rows, size.width),
        descriptor(given.y, size.columns, size.width),
        given.exponent_scale,
        row_offset,
        given.col_offset,
        given.row_ids,
        given.col_ids,
        given.limit,
        row_part,
        col_part,
        rows.start,
        rows.stop,
        columns.start,
        columns.stop,
        strip_rows,
        block.N,
        block.M,
        D=block.D,
        SKIP_DIAGONAL=block.skip_diagonal,
        PRECISION=dot_precision(block),
        EXACT=exact(block),
        **size.options,
    )
    return col_part


def recompute_lost(given: Operands, block: Block, total: Tensor, *, transposed: bool) -> Tensor:  # (N,) or (M,) float64
    """Row sums, or column sums, that are out of range, computed again without C; returns the shifts of all."""
    size = plan.ONLINE
    sides = [(given.x, given.row_ids), (given.y, given.col_ids)]
    (own, own_ids), (other, other_ids) = reversed(sides) if transposed else sides
    shift = torch.full_like(total, torch.inf)
    _online_rows[(triton.cdiv(len(own), size.rows),)](
        own,
        other,
        given.exponent_scale,
        given.row_plain,
        given.col_plain,
        own_ids,
        other_ids,
        given.limit,
        total,
        shift,
        SMALLEST,
        LARGEST,
        len(own),
        len(other),
        own.stride(0),
        other.stride(0),
        D=block.D,
        TRANSPOSED=transposed,
        SKIP_DIAGONAL=block.skip_diagonal,
        PRECISION=dot_precision(block),
        EXACT=exact(block),
        **size.options,
    )
    return torch.where(shift.isinf(), given.shift, shift.double())


def exact(block: Block) -> bool:
    """Whether exponents use all digits of k; those of half-precision inputs are rougher than its rounding."""
    return block.precision in (FLOAT32, TF32)


def dot_precision(block: Block) -> str:
    """How `tl.dot` treats float32; TF32 inputs are rounded already, so that what it cuts off is zero."""
    return "ieee" if block.precision == FLOAT32 else "tf32"
