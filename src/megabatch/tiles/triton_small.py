"""Kernels for a loss whose similarities are all in memory: partial sums, their combination, weights, the gradients' last step.

A library product forms the products ⟨x_i, y_j⟩ in float32, and s_ij = scale·⟨x_i, y_j⟩ is rounded once, the same way in every
kernel (no fused multiply-add). Sums are exp(shift) · total, as in `logsum`; what is one number per row is computed in float64.
No atomics: programs store partial sums, and the next launch adds them in a fixed order.

The kind of a loss says which pairs count:
    MATCHES  row i belongs to column i; pairs of equal ids are left out of the sums
    LABELS   rows against themselves; rows of equal labels are positives. A row's only positive is kept apart, like a match
    SIGMOID  every pair counts for itself; pair (i, i) is a match, and pairs of equal ids are left out or are matches too
A match is kept apart: its weight reaches the gradients unrounded, in the last step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.triton_device import equal_ids, finite_or_zero, load_embeddings, log1p, round_to_tf32

MATCHES, LABELS, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_BLOCK_N, _BLOCK_M = 64, 128  # a tile of similarities
_ROWS = 32  # rows that a program combines
_FINISH_N, _FINISH_D = 16, 256
_EXACT = {"enable_fp_fusion": False}  # similarities are rounded before a shift is subtracted
_PLANES = 6  # of row statistics: shift, total, weight of a unit, weight of the match, pull of a positive, the sole positive
_SUMS = 3  # of a program: loss, d scale, rows with a positive; of a tile: loss, d scale, d bias


@triton.jit
def _tile(products, ids, offs_n, offs_m, N, period):
    """(products, inside, on the diagonal, other pairs of equal ids).

    Without ids, a row's id is its number modulo `period`; without both, no pairs have equal ids.
    """
    inside = (offs_n < N)[:, None] & (offs_m < N)[None, :]
    own = offs_n[:, None] == offs_m[None, :]
    s = tl.load(products + offs_n[:, None] * N + offs_m[None, :], inside, 0.0)
    if ids is not None:
        same = equal_ids(ids, ids, offs_n, offs_m, N, N)
    elif period is not None:
        same = (offs_n % period)[:, None] == (offs_m % period)[None, :]
    else:
        same = own
    return s, inside, own, inside & same & ~own


@triton.jit
def _store_sum(to, plane, t, axis: tl.constexpr, mask):
    """Stores Σ exp(t) along an axis as (largest t, total)."""
    peak = tl.max(t, axis)
    tl.store(to, peak, mask)
    tl.store(to + plane, tl.sum(tl.exp(t - tl.expand_dims(finite_or_zero(peak), axis)), axis), mask)


@triton.jit
def _partial_sums_kernel(
    products,  # (N, N)
    scale,  # ()
    ids,  # (N,) or None
    row_parts,  # (2 or 7, tiles of columns, N)
    col_parts,  # (2, tiles of rows, N) or None
    N,
    period,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = _tile(products, ids, offs_n, offs_m, N, period)
    t = s * tl.load(scale).to(tl.float32)
    negatives = tl.where(inside & ~own & ~same, t, -float("inf"))
    mask_n = offs_n < N
    to, plane = row_parts + tl.program_id(0) * N + offs_n, tl.num_programs(0) * N
    _store_sum(to, plane, negatives, 1, mask_n)
    if KIND == LABELS:
        _store_sum(to + 2 * plane, plane, tl.where(same, t, -float("inf")), 1, mask_n)
        tl.store(to + 4 * plane, tl.sum(tl.where(same, t, 0.0), 1), mask_n)
        tl.store(to + 5 * plane, tl.sum(same.to(tl.float32), 1), mask_n)
        tl.store(to + 6 * plane, tl.max(tl.where(same, offs_m[None, :], 0), 1).to(tl.float32), mask_n)
    if col_parts is not None:
        to, plane = col_parts + tl.program_id(1) * N + offs_m, tl.num_programs(1) * N
        _store_sum(to, plane, negatives, 0, offs_m < N)


@triton.jit
def _load_parts(parts, number, count, offs_n, N, other, PARTS: tl.constexpr):
    """Plane `number` of the partial sums of some rows, (PARTS, rows)."""
    offs_p = tl.arange(0, PARTS)
    mask = (offs_p < count)[:, None] & (offs_n < N)[None, :]
    return tl.load(parts + (number * count + offs_p)[:, None] * N + offs_n[None, :], mask, other)


@triton.jit
def _add_parts(parts, number, count, offs_n, N, PARTS: tl.constexpr):
    """(shift, total in float64) of planes `number` and `number + 1`; the shift of an empty sum is −inf."""
    peaks = _load_parts(parts, number, count, offs_n, N, -float("inf"), PARTS)
    totals = _load_parts(parts, number + 1, count, offs_n, N, 0.0, PARTS)
    peak = tl.max(peaks, 0)
    return peak, tl.sum(totals.to(tl.float64) * tl.exp(peaks - finite_or_zero(peak)[None, :]), 0)


@triton.jit
def _logarithm(total):
    """log(total), and −inf for an empty sum."""
    return tl.where(total == 0.0, -float("inf"), tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _cross_entropy(shift, total, match):
    """(log(1 + exp(odds)), its derivative) for odds = log(exp(shift) · total) − match, in float64; NaN for a match of +inf."""
    match = tl.where(match == float("inf"), float("nan"), match)
    odds = (finite_or_zero(shift).to(tl.float64) - match) + _logarithm(total)
    small = tl.exp(-tl.abs(odds))
    above = 1.0 + small
    # log(above) · small / (above − 1) has the digits of a small exponential, which 1 + small has lost.
    rest = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    loss = tl.where(odds > 0, odds, 0.0) + rest
    weight = tl.where(odds > 0, 1.0, small) / above
    return tl.where(odds == odds, loss, odds), tl.where(odds == odds, weight, odds)


@triton.jit
def _combine(
    program, tile, products, scale, parts, count, stats, sums, programs, N,
    KIND: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Statistics of the rows (or columns) of one program, and the sums over them."""
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    factor = tl.load(scale).to(tl.float32)
    shift, total = _add_parts(parts, 0, count, offs_n, N, PARTS)
    if KIND == LABELS:
        others_shift, others_total = _add_parts(parts, 2, count, offs_n, N, PARTS)
        positives = tl.sum(_load_parts(parts, 5, count, offs_n, N, 0.0, PARTS), 0)
        mean = tl.sum(_load_parts(parts, 4, count, offs_n, N, 0.0, PARTS).to(tl.float64), 0) / tl.maximum(positives, 1.0)
        partner = tl.max(_load_parts(parts, 6, count, offs_n, N, 0.0, PARTS), 0).to(tl.int32)
        sole, several = positives == 1.0, positives > 1.0
        both = tl.maximum(shift, others_shift)
        base = finite_or_zero(both)
        all_total = total * tl.exp(shift - base) + others_total * tl.exp(others_shift - base)
    else:
        partner = offs_n
    product = tl.load(products + offs_n * N + partner, mask, 0.0)
    loss, weight = _cross_entropy(shift, total, product * factor)
    per_unit = tl.where(total == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))
    if KIND == LABELS:
        loss = tl.where(sole, loss, tl.where(several, base.to(tl.float64) + _logarithm(all_total) - mean, 0.0))
        shift, total = tl.where(several, both, shift), tl.where(several, all_total, total)
        per_unit = tl.where(sole, per_unit, tl.where(several, 1.0 / tl.where(all_total == 0.0, 1.0, all_total), 0.0))
        weight = tl.where(sole, weight, 0.0)
        pull = tl.where(sole, -1.0, tl.where(several, 1.0 / tl.maximum(positives, 1.0), 0.0))
        tl.store(stats + 4 * N + offs_n, pull, mask)
        tl.store(stats + 5 * N + offs_n, tl.where(sole, partner, 0).to(tl.float32), mask)
        tl.store(sums + 2 * programs + program, tl.sum((mask & (positives > 0.0)).to(tl.float64), 0))
    tl.store(stats + offs_n, finite_or_zero(shift), mask)
    tl.store(stats + N + offs_n, total.to(tl.float32), mask)
    tl.store(stats + 2 * N + offs_n, per_unit.to(tl.float32), mask)
    tl.store(stats + 3 * N + offs_n, weight.to(tl.float32), mask)
    tl.store(sums + program, tl.sum(tl.where(mask, loss, 0.0), 0))
    tl.store(sums + programs + program, -tl.sum(tl.where(mask & (weight != 0.0), weight * product, 0.0), 0))


@triton.jit
def _combine_kernel(
    products,  # (N, N)
    scale,  # ()
    row_parts,  # (2 or 7, row_count, N)
    col_parts,  # (2, col_count, N) or None
    row_stats,  # (6, N)
    col_stats,  # (6, N) or None
    sums,  # (3, programs) float64
    N,
    row_count,
    col_count,
    KIND: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    COL_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program, programs, tiles = tl.program_id(0), tl.num_programs(0), tl.cdiv(N, BLOCK_N)
    if program < tiles:
        _combine(
            program, program, products, scale, row_parts, row_count, row_stats, sums, programs, N, KIND, ROW_PARTS, BLOCK_N
        )
    elif col_parts is not None:
        _combine(
            program, program - tiles, products, scale, col_parts, col_count, col_stats, sums, programs, N,
            KIND, COL_PARTS, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _softmax(t, stats, offs, N, axis: tl.constexpr):
    """weight · softmax(t) along rows (axis 1) or columns (axis 0); each term is capped by its sum."""
    mask = offs < N
    shift, total = tl.load(stats + offs, mask, 0.0), tl.load(stats + N + offs, mask, 0.0)
    per_unit = tl.load(stats + 2 * N + offs, mask, 0.0)
    e = tl.minimum(tl.exp(t - tl.expand_dims(shift, axis)), tl.expand_dims(total, axis))
    return e * tl.expand_dims(per_unit, axis)


@triton.jit
def _label_weights(t, inside, own, same, stats, offs, N, axis: tl.constexpr):
    """d loss / d t of the rows (axis 1), or of the same rows as columns (axis 0). A sole positive is left out."""
    pull = tl.expand_dims(tl.load(stats + 4 * N + offs, offs < N, 0.0), axis)
    left_out = ~inside | own | (same & (pull < 0.0))
    g = _softmax(tl.where(left_out, -float("inf"), t), stats, offs, N, axis)
    return g - tl.where(same & (pull > 0.0), pull, 0.0)


@triton.jit
def _sum_all(tile):
    """Rows in float32, and their sums in float64: the terms of d scale nearly cancel."""
    return tl.sum(tl.sum(tile, 1).to(tl.float64), 0)


@triton.jit
def _store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32: tl.constexpr):
    g = g * unit
    if TF32:
        g = round_to_tf32(g)
    tl.store(weights + offs_n[:, None] * N + offs_m[None, :], g.to(weights.dtype.element_ty), inside)


@triton.jit
def _softmax_weights_kernel(
    products,  # (N, N)
    weights,  # (N, N), which may be `products` itself, or None
    scale,  # ()
    ids,  # (N,) or None
    row_stats,  # (6, N)
    col_stats,  # (6, N) or None
    sums,  # (3, tiles) float64
    N,
    period,
    unit,
    KIND: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = _tile(products, ids, offs_n, offs_m, N, period)
    t = s * tl.load(scale).to(tl.float32)
    if KIND == LABELS:
        g = _label_weights(t, inside, own, same, row_stats, offs_n, N, 1)
        of_scale = g
        g += _label_weights(t, inside, own, same, row_stats, offs_m, N, 0)
    else:
        t = tl.where(inside & ~own & ~same, t, -float("inf"))
        g = _softmax(t, row_stats, offs_n, N, 1)
        if col_stats is not None:
            g += _softmax(t, col_stats, offs_m, N, 0)
        of_scale = g
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(sums + programs + program, _sum_all(tl.where(of_scale == 0.0, 0.0, of_scale * s)))
    if weights is not None:
        _store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32)


@triton.jit
def _sigmoid_kernel(
    products,  # (N, N)
    weights,  # (N, N), which may be `products` itself, or None
    scale,  # ()
    bias,  # ()
    ids,  # (N,) or None
    stats,  # (6, N): the weight of the match alone
    sums,  # (3, tiles) float64
    N,
    unit,
    IDS_ARE_POSITIVES: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = _tile(products, ids, offs_n, offs_m, N, None)
    positive = inside & own
    counted = inside
    if IDS_ARE_POSITIVES:
        positive = positive | same
    else:
        counted = counted & ~same
    t = s * tl.load(scale).to(tl.float32) + tl.load(bias).to(tl.float32)
    t = tl.where(counted, tl.where(positive, -t, t), -float("inf"))
    small = tl.exp(-tl.abs(t))
    small = tl.where(t == t, small, t)
    g = tl.where(t >= 0, 1.0, small) / (1.0 + small)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(sums + program, _sum_all(tl.where(t > 0, t, 0.0) + log1p(small)))
    g = tl.where(positive, -g, g)
    tl.store(sums + programs + program, _sum_all(tl.where(g == 0.0, 0.0, g * s)))
    tl.store(sums + 2 * programs + program, _sum_all(g))
    first_n, first_m = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_M
    if (first_n >= first_m) & (first_n < first_m + BLOCK_M):  # BLOCK_N divides BLOCK_M: this tile has all matches of its rows
        tl.store(stats + 3 * N + offs_n, -tl.sum(tl.where(own, g, 0.0), 1), offs_n < N)
    if weights is not None:
        _store_weights(weights, tl.where(own, 0.0, g), offs_n, offs_m, inside, N, unit, TF32)


@triton.jit
def _add(values, count, BLOCK: tl.constexpr):
    """Σ values[:count] of float64."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        sums += tl.load(values + offs, offs < count, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _finish_rows(
    tile, sums, out, partners, row_stride, stride, stats, col_stats, factor, unit, N, D,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = (sums − unit · weight of the match · its partner) · factor, for the rows of a tile."""
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    weight = tl.load(stats + 3 * N + offs_n, mask_n, 0.0)
    partner = offs_n
    if KIND == LABELS:
        partner = tl.load(stats + 5 * N + offs_n, mask_n, 0.0).to(tl.int32)
        is_apart = tl.load(stats + 4 * N + offs_n, mask_n, 0.0) < 0.0
        weight += tl.where(is_apart, tl.load(stats + 3 * N + partner, mask_n, 0.0), 0.0)
    if col_stats is not None:
        weight += tl.load(col_stats + 3 * N + offs_n, mask_n, 0.0)
    weight = (weight * unit)[:, None]
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = mask_n[:, None] & (offs_d < D)[None, :]
        offs = offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
        match = load_embeddings(partners, partner, offs_d, row_stride, stride, mask, 0)
        values = tl.load(sums + offs, mask, 0.0) - tl.where(weight == 0.0, 0.0, weight * match)
        tl.store(out + offs, (values * factor).to(out.dtype.element_ty), mask)


@triton.jit
def _finish_kernel(
    x,  # (N, D)
    y,  # (N, D)
    dx_sums,  # (N, D) or None
    dy_sums,  # (N, D) or None
    dx,  # (N, D) or None
    dy,  # (N, D) or None
    row_stats,  # (6, N)
    col_stats,  # (6, N) or None
    scale,  # ()
    row_sums,  # (3, row_programs) float64, or None
    tile_sums,  # (3, tiles) float64, or None
    loss,  # ()
    dscale,  # () or None
    dbias,  # () or None
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
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    share = 1.0 / tl.maximum(divisor, 1.0).to(tl.float64)
    if KIND == LABELS:
        rows = tl.maximum(_add(row_sums + 2 * row_programs, row_programs, BLOCK), 1.0)
        share = tl.where(divisor == 0.0, 1.0 / rows, share)
    factor = (tl.load(scale).to(tl.float64) * share / unit).to(tl.float32)
    first_of_y = 0
    if dx is not None:
        first_of_y = tl.cdiv(N, BLOCK_N)
        if program < first_of_y:
            _finish_rows(
                program, dx_sums, dx, y, y_row_stride, y_stride, row_stats, col_stats, factor, unit, N, D,
                KIND, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    if dy is not None:
        if program >= first_of_y:
            _finish_rows(
                program - first_of_y, dy_sums, dy, x, x_row_stride, x_stride, row_stats, col_stats, factor, unit, N, D,
                KIND, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    if program == 0:
        total = _add(tile_sums, tiles, BLOCK) if KIND == SIGMOID else _add(row_sums, row_programs, BLOCK)
        tl.store(loss, (total * share).to(loss.dtype.element_ty))
        if dscale is not None:
            total = _add(tile_sums + tiles, tiles, BLOCK)
            if KIND != SIGMOID:
                total += _add(row_sums + row_programs, row_programs, BLOCK)
            tl.store(dscale, (total * share).to(dscale.dtype.element_ty))
        if dbias is not None:
            total = _add(tile_sums + 2 * tiles, tiles, BLOCK)
            tl.store(dbias, (total * share).to(dbias.dtype.element_ty))


def _power_of_two(count: int) -> int:
    """The smallest that is not less."""
    return 1 << (count - 1).bit_length()


class Pairs(NamedTuple):
    """The similarities of a loss, and which of them count."""

    kind: int
    products: Tensor  # (N, N) float32, contiguous
    scale: Tensor  # ()
    bias: Tensor | None = None  # () of SIGMOID
    ids: Tensor | None = None  # (N,), or labels
    period: int | None = None  # of LABELS: rows whose numbers are equal modulo it have the same label
    ids_are_positives: bool = False  # of SIGMOID

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of columns, tiles of rows."""
        N = self.products.shape[0]
        return -(-N // _BLOCK_M), -(-N // _BLOCK_N)  # Triton's own cdiv takes the host 5 µs


class Rounding(NamedTuple):
    """How weights are stored: times `unit`, and rounded to the type of their tensor or to TF32."""

    unit: float
    tf32: bool


class Statistics(NamedTuple):
    """Of rows and columns."""

    row: Tensor  # (6, N)
    col: Tensor | None  # (6, N)
    sums: Tensor | None  # (3, programs) float64


def statistics(pairs: Pairs, *, columns: bool) -> Statistics:
    """Sums of exponentials of all rows, and with `columns` of all columns; the losses, and the weights of the matches."""
    products, N, grid = pairs.products, pairs.products.shape[0], pairs.grid
    row_parts = products.new_empty(7 if pairs.kind == LABELS.value else 2, grid[0], N)
    col_parts = products.new_empty(2, grid[1], N) if columns else None
    _partial_sums_kernel[grid](
        products, pairs.scale, pairs.ids, row_parts, col_parts, N, pairs.period,
        KIND=pairs.kind, BLOCK_N=_BLOCK_N, BLOCK_M=_BLOCK_M, num_warps=8, **_EXACT,
    )  # fmt: skip
    programs = -(-N // _ROWS) * (2 if columns else 1)
    row = products.new_empty(_PLANES, N)
    col = products.new_empty(_PLANES, N) if columns else None
    sums = products.new_empty(_SUMS, programs, dtype=torch.float64)
    _combine_kernel[(programs,)](
        products, pairs.scale, row_parts, col_parts, row, col, sums, N, *grid,
        KIND=pairs.kind, ROW_PARTS=_power_of_two(grid[0]), COL_PARTS=_power_of_two(grid[1]), BLOCK_N=_ROWS, **_EXACT,
    )  # fmt: skip
    return Statistics(row, col, sums)


def softmax_weights(pairs: Pairs, found: Statistics, weights: Tensor | None, how: Rounding) -> Tensor:
    """Stores unit · d loss / d similarity, without the matches, in `weights`. Returns sums of the tiles, (3, tiles)."""
    products, grid = pairs.products, pairs.grid
    sums = products.new_empty(_SUMS, grid[0] * grid[1], dtype=torch.float64)
    _softmax_weights_kernel[grid](
        products, weights, pairs.scale, pairs.ids, found.row, found.col, sums, products.shape[0], pairs.period,
        how.unit, KIND=pairs.kind, TF32=how.tf32, BLOCK_N=_BLOCK_N, BLOCK_M=_BLOCK_M, num_warps=8, **_EXACT,
    )  # fmt: skip
    return sums


def sigmoid_weights(pairs: Pairs, weights: Tensor | None, how: Rounding) -> tuple[Statistics, Tensor]:
    """`softmax_weights` of a sigmoid loss, whose sums include the loss; statistics hold the weights of the matches alone."""
    products, grid = pairs.products, pairs.grid
    stats = products.new_empty(_PLANES, products.shape[0])
    sums = products.new_empty(_SUMS, grid[0] * grid[1], dtype=torch.float64)
    _sigmoid_kernel[grid](
        products, weights, pairs.scale, pairs.bias, pairs.ids, stats, sums, products.shape[0], how.unit,
        IDS_ARE_POSITIVES=pairs.ids_are_positives, TF32=how.tf32, BLOCK_N=_BLOCK_N, BLOCK_M=_BLOCK_M, num_warps=8, **_EXACT,
    )  # fmt: skip
    return Statistics(stats, None, None), sums


class Results(NamedTuple):
    """What `finish` writes."""

    loss: Tensor  # ()
    dx: Tensor | None  # (N, D)
    dy: Tensor | None  # (N, D)
    dscale: Tensor | None  # ()
    dbias: Tensor | None  # ()


def finish(
    pairs: Pairs,
    found: Statistics,
    tile_sums: Tensor | None,
    sides: tuple[Tensor, Tensor],  # x, y: (N, D), as they were multiplied
    sums: Sequence[Tensor | None],  # weights · y, weightsᵀ · x: (N, D) float32, contiguous
    results: Results,
    *,
    divisor: int,
    unit: float,
) -> None:
    """Adds the matches to the gradients, multiplies by scale and share, rounds once; adds up loss, d scale and d bias."""
    (x, y), (N, D) = sides, sides[0].shape
    programs = -(-N // _FINISH_N) * sum(side is not None for side in (results.dx, results.dy))
    _finish_kernel[(max(1, programs),)](
        x, y, *sums, results.dx, results.dy, found.row, found.col, pairs.scale, found.sums, tile_sums,
        results.loss, results.dscale, results.dbias, N, D, *x.stride(), *y.stride(),
        0 if found.sums is None else found.sums.shape[1], 0 if tile_sums is None else tile_sums.shape[1], float(divisor), unit,
        KIND=pairs.kind, BLOCK_N=_FINISH_N, BLOCK_D=_FINISH_D, BLOCK=1024,
    )  # fmt: skip
