"""Gradients by strips: one kernel turns tiles of similarities into a strip of weights g, two library products use it.

A strip lives in one bounded workspace, in the type of the inputs: dx = g·y leaves strip by strip, dy += gᵀ·x accumulates in
fp32. The kernel is a persistent product whose tile is turned into weights on the way out; it is stored in two halves, because
half the shared memory for the store leaves room for one more stage of loads.

With the shift of `triton_operands` both softmax weights share one exponential: g = 2^t · (row weight + column weight). Tiles
that touch a row or column whose sum has a shift of its own are formed again by a second launch, with two exponentials; where
there are none, as nearly always, it returns at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan, tuning
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients, pieces
from megabatch.tiles.logsum import LogSum, finite_or_zero
from megabatch.tiles.precision import FLOAT32, TF32, add_product, multiply_into
from megabatch.tiles.triton_forward import dot_precision, equal_ids, exact, exponents, offsets
from megabatch.tiles.triton_operands import LOG2E, Operands, descriptor, exponent_operands, similarity_operands, whole_rows
from megabatch.tiles.triton_rows import add_parts
from megabatch.tiles.triton_softplus import joint, log1p

# What a tile of exponents becomes.
SOFTMAX, ODD_SOFTMAX, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Differences between C and the logarithm of a sum that its weight absorbs: beyond the first, terms that matter are lost in 2^t,
# as in forward; below the second, a weight as small as 2⁻²⁶ would be lost itself.
LARGEST_DELTA, SMALLEST_DELTA = 80.0, -100.0


@triton.jit
def _strip(
    x_desc,
    y_desc,
    g_desc,  # (rows of the strip, columns of the strip), or None
    exponent_scale,
    row_offset,
    col_offset,
    row_plain,
    col_plain,
    row_ids,
    col_ids,
    limit,  # (N,) or None
    row_weight,  # (N,), or None for 1
    col_weight,  # (M,)
    row_cap,  # (N,) the sum itself: no term of it is larger
    col_cap,  # (M,)
    row_shift,  # (N,) of a row's own, or −inf
    col_shift,  # (M,)
    odd,  # () whether any tile is
    row_odd,  # (tiles of N,) whether any row of the tile has a shift of its own
    col_odd,  # (tiles of M,)
    softplus_part,  # (2 · tiles of M, rows) row sums of softplus, negated, or None
    row_part,  # (2 · tiles of M, rows) row sums of g, or None
    scale_part,  # (2 · tiles of M, rows) row sums of g times product, or None
    col_part,  # (tiles of N, columns) column sums of g, or None
    first_row,
    last_row,
    first_column,
    last_column,
    N,
    M,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    POSITIVES: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_M // 2
    if KIND == ODD_SOFTMAX:
        if tl.load(odd) == 0:
            return
    rows, columns = last_row - first_row, last_column - first_column
    tiles_n, tiles_m = tl.cdiv(rows, BLOCK_N), tl.cdiv(columns, BLOCK_M)
    HAS_ROW: tl.constexpr = row_offset is not None
    k, k_rest, base = tl.load(exponent_scale), tl.load(exponent_scale + 1), tl.load(exponent_scale + 2)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_m, PROGRAMS, flatten=KIND != ODD_SOFTMAX):
        # GROUP tiles of rows at a time, so that what the programs read at once stays in the cache.
        group = tile // (GROUP * tiles_m)
        within = tile % (GROUP * tiles_m)
        size = tl.minimum(tiles_n - group * GROUP, GROUP)
        tile_n = group * GROUP + within % size
        tile_m = within // size
        n, m = first_row + tile_n * BLOCK_N, first_column + tile_m * BLOCK_M
        wanted = True
        if KIND == ODD_SOFTMAX:
            wanted = (tl.load(row_odd + n // BLOCK_N) + tl.load(col_odd + m // BLOCK_M)) > 0
        if wanted:
            s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for d in range(0, D, BLOCK_D):
                s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
            offs_n = n + tl.arange(0, BLOCK_N)
            if row_weight is not None:
                a = tl.load(row_weight + offs_n, mask=offs_n < N, other=0.0)
            left, right = s.reshape(BLOCK_N, 2, HALF).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                part = left if half == 0 else right
                mh = m + half * HALF
                offs_m = mh + tl.arange(0, HALF)
                column, row = offsets(col_offset, base, offs_m, M, 0), offsets(row_offset, 0.0, offs_n, N, 1)
                t = exponents(
                    part, k, k_rest, column, row, row_ids, col_ids, limit, n, mh, N, M, HAS_ROW, EXACT, SKIP_DIAGONAL, POSITIVES
                )
                if KIND == SIGMOID:
                    small = tl.exp2(-1.4426950408889634 * tl.abs(t))  # of the two exponentials the one that cannot overflow
                    g = tl.where(t >= 0, 1.0, small) / (1.0 + small)
                    if row_weight is not None:
                        g = a[:, None] * g
                    if POSITIVES:
                        g = tl.where(equal_ids(row_ids, col_ids, offs_n, offs_m, N, M), -g, g)
                else:
                    b = tl.load(col_weight + offs_m, mask=offs_m < M, other=0.0)
                    most_a = tl.load(row_cap + offs_n, mask=offs_n < N, other=0.0)[:, None]
                    most_b = tl.load(col_cap + offs_m, mask=offs_m < M, other=0.0)[None, :]
                    if KIND == SOFTMAX:
                        g = tl.minimum(tl.minimum(tl.exp2(t), most_a), most_b) * (a[:, None] + b[None, :])
                    else:
                        column, row = offsets(col_plain, 0.0, offs_m, M, 0), offsets(row_plain, 0.0, offs_n, N, 1)
                        plain = exponents(
                            part, k, k_rest, column, row, row_ids, col_ids, limit, n, mh, N, M, HAS_ROW, EXACT, SKIP_DIAGONAL
                        )
                        rs, cs = offsets(row_shift, 0.0, offs_n, N, 1), offsets(col_shift, 0.0, offs_m, M, 0)
                        none = -float("inf")
                        g = a[:, None] * tl.minimum(tl.exp2(tl.where(rs == none, t, plain - rs)), most_a)
                        g += b[None, :] * tl.minimum(tl.exp2(tl.where(cs == none, t, plain - cs)), most_b)
                mask_n, mask_m = offs_n < last_row, offs_m < last_column
                place = (2 * tile_m + half).to(tl.int64) * rows + (offs_n - first_row)
                if softplus_part is not None:
                    tl.static_assert(HALF <= 64, "joint holds 64 terms")
                    above_zero = tl.sum(tl.where(mask_m[None, :], tl.maximum(t, 0.0), 0.0), 1)
                    product = tl.reduce(tl.where(mask_m[None, :], small, 0.0), 1, joint)
                    tl.store(softplus_part + place, -(above_zero + log1p(product)), mask=mask_n)
                if row_part is not None:
                    tl.store(row_part + place, tl.sum(tl.where(mask_m[None, :], g, 0.0), 1), mask=mask_n)
                if scale_part is not None:
                    tl.store(scale_part + place, tl.sum(tl.where(mask_m[None, :], g * part, 0.0), 1), mask=mask_n)
                if col_part is not None:
                    place = tile_n.to(tl.int64) * columns + (offs_m - first_column)
                    tl.store(col_part + place, tl.sum(tl.where(mask_n[:, None], g, 0.0), 0), mask=mask_m)
                if g_desc is not None:
                    if TF32:
                        nearest = (g.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
                        g = tl.where(g == g, nearest.to(tl.float32, bitcast=True), g)
                    g_desc.store([n - first_row, mh - first_column], g.to(g_desc.dtype))


@dataclass(frozen=True)
class Weights:
    """Of a softmax drow_i / row_i and dcol_j / col_j, relative to the shift of the block or, where `odd`, to one of their own;
    of a sigmoid dtotal_i alone, or 1.
    """

    row_weight: Tensor | None  # (N,)
    col_weight: Tensor | None = None  # (M,)
    row_cap: Tensor | None = None  # (N,) row_i, relative to the same shift
    col_cap: Tensor | None = None  # (M,)
    row_shift: Tensor | None = None  # (N,)
    col_shift: Tensor | None = None  # (M,)
    odd: Tensor | None = None  # () int32
    row_odd: Tensor | None = None  # (tiles of N,) int32
    col_odd: Tensor | None = None  # (tiles of M,) int32


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,) the whole sums, of which the block may be a part
    col: LogSum | None,  # (M,) None where dcol is
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
    given = exponent_operands(block)
    size = strip_tile(given, block, SOFTMAX)
    row_weight, row_cap, row_shift = relative(row, drow, given.shift, block.N)
    col_weight, col_cap, col_shift = relative(col, dcol, given.shift, block.M)
    row_odd, col_odd = any_in_tile(row_shift, size.rows), any_in_tile(col_shift, size.columns)
    odd = row_odd.amax() + col_odd.amax()
    weights = Weights(row_weight, col_weight, row_cap, col_cap, row_shift, col_shift, odd, row_odd, col_odd)
    return walk(given, block, size, (SOFTMAX, ODD_SOFTMAX), weights, sums, needs)


def softplus_gradients(
    block: Block,
    dtotal: Tensor | None,  # (N,), or 1
    sums: ColumnGradients,
    needs: Needs,
    *,
    total: Tensor | None = None,  # (N,)
) -> Iterator[RowGradients]:
    """Gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij). Adds the row sums to `total` if given."""
    given = similarity_operands(block)
    size = strip_tile(given, block, SIGMOID)
    return walk(given, block, size, (SIGMOID,), Weights(None if dtotal is None else dtotal.contiguous()), sums, needs, total)


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Row sums of softplus(s) = log(1 + exp(s))."""
    total = block.zeros(block.N)
    nobody, nothing = ColumnGradients(None, None), Needs(False, False, False)
    for _ in softplus_gradients(block, None, nobody, nothing, total=total):
        pass
    return total


def strip_tile(given: Operands, block: Block, kind: tl.constexpr) -> plan.KernelTile:
    """The tile of `_strip` here, measured if the user asked for it."""
    default = plan.strip_tile(block.precision, block.x.device)
    if _panel(block, kind) is not None:
        return default
    rows, columns = slice(0, min(block.N, 8192)), slice(0, min(block.M, 8192))

    def trial(size: plan.KernelTile) -> None:
        rows_of_nothing, columns_of_nothing = block.zeros(block.N), block.zeros(block.M)
        weights = Weights(rows_of_nothing, columns_of_nothing, rows_of_nothing, columns_of_nothing)
        _form((kind,), size, given, block, weights, rows, columns, g, (None, None, None), None)

    g = whole_rows(given.x, rows.stop, columns.stop) if tuning.ENABLED else None
    widest = 128 if kind == SIGMOID else 256  # `joint` holds 64 terms, those of half a tile
    return tuning.tile(f"strip {kind.value}", block, default, trial, widest)


def _panel(block: Block, kind: tl.constexpr) -> plan.Panel | None:
    return plan.panel(block, "sigmoid" if kind == SIGMOID else "softmax")


def relative(
    sums: LogSum | None,  # float64
    gradient: Tensor | None,
    shift: Tensor,  # () C
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:  # (K,) each
    """(gradient / sum, sum, shift): both at the shift C, or where that leaves fp32's range at their own; −inf stands for C.

    The sum caps its terms. Backward forms similarities anew and may round them differently: without the cap a softmax weight
    could be larger than 1, by a factor of exp(1) for every nat between the two roundings.
    """
    if gradient is None or sums is None:
        nothing = torch.zeros(length, dtype=torch.float32, device=shift.device)
        return nothing, nothing + torch.inf, nothing - torch.inf
    exponent = finite_or_zero(sums.shift) * LOG2E
    above = shift - exponent
    # What counts is how far C is from the sum itself. From the sum's shift it may be near where C is not that of this block:
    # a sum over several blocks has the largest of their shifts.
    from_sum = above - sums.total.log2()
    at_block_shift = (sums.total == 0) | ((from_sum <= LARGEST_DELTA) & (from_sum >= SMALLEST_DELTA))
    own = exponent.float()
    difference = torch.where(at_block_shift, above, own - exponent)
    # A sum of nothing has weight 0, which C alone, where it is large, would make 0 times infinity.
    difference = torch.where(sums.total == 0, 0.0, difference)
    weight, cap = sums.per_unit(gradient) * difference.exp2(), sums.total * (-difference).exp2()
    return weight.float(), cap.float(), torch.where(at_block_shift, -torch.inf, own)


def any_in_tile(own: Tensor, tile: int) -> Tensor:  # (tiles,) int32
    """Which tiles have a shift of their own, somewhere."""
    padding = -len(own) % tile
    return torch.nn.functional.pad(own != -torch.inf, (0, padding)).view(-1, tile).any(1).int()


def walk(
    given: Operands,
    block: Block,
    size: plan.KernelTile,
    kinds: tuple[tl.constexpr, ...],  # one launch each
    weights: Weights,
    sums: ColumnGradients,
    needs: Needs,
    total: Tensor | None = None,  # (N,)
    within: tuple[slice, slice] | None = None,
) -> Iterator[RowGradients]:
    """Over all of the block, or over rows and columns of it that begin and end with tiles or at its edges."""
    all_rows, all_columns = within or (slice(0, block.N), slice(0, block.M))
    height, width = (window.stop - window.start for window in (all_rows, all_columns))
    strip = plan.strip_size(height, width, block.D, given.x.element_size())
    # Summing the scale's gradient in the kernel costs a tenth of it. Half precision takes it from dx instead, where the
    # roundings of g enter but the dense computation's are larger still; unless they nearly cancel against what is added later.
    scale_in_kernel = needs.dscale and (block.positives_within or block.precision in (FLOAT32, TF32))
    want_dx = needs.dx or (needs.dscale and not scale_in_kernel)
    workspace = None
    if want_dx or needs.dy:
        workspace = whole_rows(given.x, min(strip.rows, height), min(strip.columns, width))
    for rows in pieces(all_rows, strip.rows):
        n = rows.stop - rows.start
        dx = torch.empty(n, block.D, dtype=block.dtype, device=block.x.device) if want_dx else None
        dscale = block.zeros(n) if scale_in_kernel else None
        drow_bias = block.zeros(n) if needs.drow_bias else None
        by_row = (None if total is None else total[rows], drow_bias, dscale)
        for columns in pieces(all_columns, strip.columns):
            g = None if workspace is None else workspace[:n, : columns.stop - columns.start]
            by_column = None if sums.dcol_bias is None else sums.dcol_bias[columns]
            _form(kinds, size, given, block, weights, rows, columns, g, by_row, by_column)
            if g is not None and dx is not None:
                if columns.start == all_columns.start:
                    multiply_into(dx, g, given.y[columns])
                else:
                    add_product(dx, g, given.y[columns])
            if g is not None and sums.dy is not None:
                add_product(sums.dy[columns], g.T, given.x[rows])
        yield RowGradients(rows, dx, dscale, drow_bias)


def _form(
    kinds: tuple[tl.constexpr, ...],
    size: plan.KernelTile,
    given: Operands,
    block: Block,
    weights: Weights,
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) written
    by_row: tuple[Tensor | None, Tensor | None, Tensor | None],  # (n,) each: sums of softplus, of g, of g times product
    by_column: Tensor | None,  # (m,) sums of g
) -> None:
    """A strip of weights and what is summed over it."""
    panel = _panel(block, kinds[0])
    n, m = rows.stop - rows.start, columns.stop - columns.start
    tiles_m = 2 * triton.cdiv(m, size.columns) if panel is None else triton.cdiv(m, panel.columns)
    row_parts = [None if whole is None else _part(block, tiles_m, n) for whole in by_row]
    col_part = None if by_column is None else _part(block, triton.cdiv(n, size.rows), m)
    programs = plan.multiprocessors(block.x.device) * size.per_multiprocessor
    if panel is not None:
        from megabatch.tiles import gluon_panels

        if SIGMOID in kinds:
            parts = row_parts[0], row_parts[1]
            gluon_panels.sigmoid_weights(panel, given, weights.row_weight, rows, columns, g, parts, block.skip_diagonal)
        else:
            of_rows, of_columns = (weights.row_weight, weights.row_cap), (weights.col_weight, weights.col_cap)
            gluon_panels.softmax_weights(panel, given, of_rows, of_columns, rows, columns, g, block.skip_diagonal)
        kinds = kinds[1:]
    for kind in kinds:
        _strip[(programs,)](
            descriptor(given.x, size.rows, size.width),
            descriptor(given.y, size.columns, size.width),
            None if g is None else descriptor(g, size.rows, size.columns // 2),
            given.exponent_scale,
            given.row_offset,
            given.col_offset,
            given.row_plain,
            given.col_plain,
            given.row_ids,
            given.col_ids,
            given.limit,
            weights.row_weight,
            weights.col_weight,
            weights.row_cap,
            weights.col_cap,
            weights.row_shift,
            weights.col_shift,
            weights.odd,
            weights.row_odd,
            weights.col_odd,
            *row_parts,
            col_part,
            rows.start,
            rows.stop,
            columns.start,
            columns.stop,
            block.N,
            block.M,
            D=block.D,
            KIND=kind,
            SKIP_DIAGONAL=block.skip_diagonal,
            POSITIVES=block.ids_are_positives,
            PRECISION=dot_precision(block),
            EXACT=exact(block),
            TF32=block.precision == TF32,
            GROUP=size.group,
            PROGRAMS=programs,
            **size.options,
        )
    add_parts(row_parts, by_row)
    if by_column is not None and col_part is not None:
        by_column += col_part.sum(0)


def _part(block: Block, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=block.dtype, device=block.x.device)
