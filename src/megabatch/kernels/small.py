"""Kernels of small batches, whose logits are all in memory. They compute sums, losses and gradient weights."""

import triton
import triton.language as tl

from megabatch.kernels.device import cross_entropy, equal_ids, finite_or_zero, logarithm, round_to_tf32, softplus_and_sigmoid

# ----------------------------------------------------------------------------------------------------------------------
# Device functions that the kernels below share, and the layout of their memory.
#
# The kind of a loss decides which pairs count:
#     MATCHES  Row i and column i match each other. Pairs with equal ids are excluded from the sums.
#     ROWS     Like MATCHES, but only for the rows. One launch computes sums and weights.
#     VIEWS    Rows are compared with all other rows. Row i and row i ± N/2 match each other.
#     LABELS   Rows are compared with all other rows. Rows with equal labels are positives. If a row has only one positive,
#              that positive is treated as a match.
#     SIGMOID  Every pair has its own loss. Pair (i, i) is a match. Pairs with equal ids are excluded, or count as positives.
# Matches are excluded from the sums and from the weights that the matmuls read. The last step adds their weights to the
# gradients, so these weights are not rounded to the dtype of the matmuls.
#
# All numbers of a step are in two tensors, because an allocation takes the host 5 µs:
#     work  float32: statistics of rows and of columns, (6, N) each, then partial sums of rows, (2 or 7, tiles of columns, N),
#           then partial sums of columns, (2, tiles of rows, N)
#     sums  float64: dscale, dbias, then sums of the programs of `combine_kernel` or `rows_kernel`, (3, programs), then sums of
#           the tiles, (3, tiles)

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = (tl.constexpr(number) for number in range(5))

# Planes of the statistics of rows. Columns have the same planes. A sum Σ exp(t) is exp(SHIFT) · TOTAL, and the weight of a pair
# is exp(t − SHIFT) · PER_UNIT. Only LABELS uses the last two planes. If a row has several positives, PULL is subtracted from
# their weights. If a row has only one positive, PULL is −1, and SOLE_POSITIVE is the column of that positive.
SHIFT, TOTAL, PER_UNIT, MATCH_WEIGHT, PULL, SOLE_POSITIVE = (tl.constexpr(number) for number in range(6))
PLANES = tl.constexpr(6)
# Planes of the partial sums of rows. Columns have only the first two planes. Only LABELS has the other planes, for the
# positives of a row: Σ exp(t) in two planes, Σ (t − POSITIVE_SHIFT), the number of positives, and the largest of their columns.
PART_SHIFT, PART_TOTAL, POSITIVE_SHIFT, POSITIVE_TOTAL, POSITIVE_BELOW, POSITIVES, POSITIVE_COLUMN = (
    tl.constexpr(number) for number in range(7)
)
# Planes of the sums of programs, and of tiles. In LABELS, the third plane is the number of rows with a positive. In SIGMOID, it
# is dbias.
LOSS, DSCALE, THIRD = (tl.constexpr(number) for number in range(3))
SUMS = tl.constexpr(3)
FIRST_SUM = tl.constexpr(2)


@triton.jit
def partner_of(offs_n, N):
    """Returns the row of the other view of the same sample."""
    return tl.where(offs_n < N // 2, offs_n + N // 2, offs_n - N // 2)


@triton.jit
def relations(ids, offs_n, offs_m, N, IS_VIEWS: tl.constexpr):
    """Returns three masks of a tile: pairs inside the matrix, pairs on the diagonal, and other pairs with equal ids.

    Both views of a sample have equal ids.
    """
    inside = (offs_n < N)[:, None] & (offs_m < N)[None, :]
    own = offs_n[:, None] == offs_m[None, :]
    if ids is not None:
        same = equal_ids(ids, ids, offs_n, offs_m, N, N)
    elif IS_VIEWS:
        same = partner_of(offs_n, N)[:, None] == offs_m[None, :]
    else:
        same = own
    return inside, own, inside & same & ~own


@triton.jit
def load_tile(products, ids, offs_n, offs_m, N, IS_VIEWS: tl.constexpr):
    """Returns the dot products of a tile, and the three masks of `relations`."""
    inside, own, same = relations(ids, offs_n, offs_m, N, IS_VIEWS)
    return tl.load(products + offs_n[:, None] * N + offs_m[None, :], inside, 0.0), inside, own, same


@triton.jit
def form_tile(
    x, y, products, ids, offs_n, offs_m, N, D, x_row_stride, x_stride, y_row_stride, y_stride,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Returns the same values as `load_tile`. If x is not None, computes the dot products instead of loading them.

    Computed dot products are stored if `products` is not None.
    """
    inside, own, same = relations(ids, offs_n, offs_m, N, False)
    if x is None:
        s = tl.load(products + offs_n[:, None] * N + offs_m[None, :], inside, 0.0)
    else:
        rows, columns = x + offs_n.to(tl.int64)[:, None] * x_row_stride, y + offs_m.to(tl.int64)[:, None] * y_row_stride
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask_d = (offs_d < D)[None, :]
            a = tl.load(rows + offs_d.to(tl.int64)[None, :] * x_stride, (offs_n < N)[:, None] & mask_d, 0.0)
            b = tl.load(columns + offs_d.to(tl.int64)[None, :] * y_stride, (offs_m < N)[:, None] & mask_d, 0.0)
            s = tl.dot(a, b.T, s)
        if products is not None:
            tl.store(products + offs_n[:, None] * N + offs_m[None, :], s, inside)
    return s, inside, own, same


@triton.jit
def store_statistics(
    program, programs, offs_n, mask, shift, total, per_unit, weight, loss, product, stats, sums, N
):  # fmt: skip
    """Stores the statistics of a program's rows, the sum of their losses, and the part of dscale from their matches."""
    tl.store(stats + SHIFT * N + offs_n, finite_or_zero(shift), mask)
    tl.store(stats + TOTAL * N + offs_n, total.to(tl.float32), mask)
    tl.store(stats + PER_UNIT * N + offs_n, per_unit.to(tl.float32), mask)
    tl.store(stats + MATCH_WEIGHT * N + offs_n, weight.to(tl.float32), mask)
    tl.store(sums + LOSS * programs + program, tl.sum(tl.where(mask, loss, 0.0), 0))
    tl.store(sums + DSCALE * programs + program, -tl.sum(tl.where(mask & (weight != 0.0), weight * product, 0.0), 0))


@triton.jit
def softmax_of(t, shift, total, per_unit, axis: tl.constexpr):
    """Returns weight · softmax(t) along rows (axis 1) or columns (axis 0). Each exponential is at most its sum."""
    e = tl.minimum(tl.exp(t - tl.expand_dims(shift, axis)), tl.expand_dims(total, axis))
    return e * tl.expand_dims(per_unit, axis)


@triton.jit
def sum_all(tile):
    """Returns the sum of a tile. Row sums are float32, and they are added in float64, because terms of dscale nearly cancel."""
    return tl.sum(tl.sum(tile, 1).to(tl.float64), 0)


@triton.jit
def store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32: tl.constexpr):
    """Stores g · unit in the dtype of `weights`."""
    g = g * unit
    if TF32:
        g = round_to_tf32(g)
    tl.store(weights + offs_n[:, None] * N + offs_m[None, :], g.to(weights.dtype.element_ty), inside)


# ----------------------------------------------------------------------------------------------------------------------
# Kernels for a loss whose logits are all in memory. They compute statistics of rows and columns, and then the gradient weights.
#
# `kernels.small_gradients` contains the last step of the gradients, and launches all of these kernels.
#
# A cuBLAS matmul, or the first kernel, computes the dot products ⟨x_i, y_j⟩ in float32. Every kernel rounds the logits
# s_ij = scale·⟨x_i, y_j⟩ once and in the same way, because it uses no fused multiply-adds. Sums are exp(shift) · total, as in
# `tiles.sums`. Computations with one number for each row are in float64. There are no atomics: programs store partial sums, and
# the next launch adds them in a fixed order.


@triton.jit
def _store_sum(to, plane, t, axis: tl.constexpr, mask):
    """Stores Σ exp(t) along an axis as (largest t, total). Returns the largest t, or 0 for an empty sum."""
    peak = tl.max(t, axis)
    tl.store(to, peak, mask)
    base = finite_or_zero(peak)
    tl.store(to + plane, tl.sum(tl.exp(t - tl.expand_dims(base, axis)), axis), mask)
    return base


@triton.jit
def partial_sums_kernel(
    x,  # (N, D); None if the dot products are given
    y,  # (N, D) or None
    products,  # (N, N) dot products
    scale,  # ()
    ids,  # (N,) or None
    work,
    N,
    D,
    x_row_stride,
    x_stride,
    y_row_stride,
    y_stride,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores sums over the rows and columns of a tile. Matches are excluded."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = form_tile(
        x, y, products, ids, offs_n, offs_m, N, D, x_row_stride, x_stride, y_row_stride, y_stride, BLOCK_N, BLOCK_M, BLOCK_D
    )
    t = s * tl.load(scale).to(tl.float32)
    negatives = tl.where(inside & ~own & ~same, t, -float("inf"))
    mask_n = offs_n < N
    parts = work + 2 * PLANES * N
    to, plane = parts + tl.program_id(0) * N + offs_n, tl.num_programs(0) * N
    _store_sum(to, plane, negatives, 1, mask_n)
    if KIND == LABELS:
        base = _store_sum(to + POSITIVE_SHIFT * plane, plane, tl.where(same, t, -float("inf")), 1, mask_n)
        below = tl.sum(tl.where(same, t - base[:, None], 0.0), 1)  # a sum of t itself would lose digits
        tl.store(to + POSITIVE_BELOW * plane, below, mask_n)
        tl.store(to + POSITIVES * plane, tl.sum(same.to(tl.float32), 1), mask_n)
        tl.store(to + POSITIVE_COLUMN * plane, tl.max(tl.where(same, offs_m[None, :], 0), 1).to(tl.float32), mask_n)
    else:
        parts += 2 * plane  # PART_SHIFT and PART_TOTAL of the rows
        to, plane = parts + tl.program_id(1) * N + offs_m, tl.num_programs(1) * N
        _store_sum(to, plane, negatives, 0, offs_m < N)


@triton.jit
def _load_parts(parts, number: tl.constexpr, count, offs_n, N, other, PARTS: tl.constexpr):
    """Returns plane `number` of the partial sums of some rows, (PARTS, rows)."""
    offs_p = tl.arange(0, PARTS)
    mask = (offs_p < count)[:, None] & (offs_n < N)[None, :]
    return tl.load(parts + (count * number + offs_p)[:, None] * N + offs_n[None, :], mask, other)


@triton.jit
def _add_parts(parts, number: tl.constexpr, count, offs_n, N, PARTS: tl.constexpr):
    """Returns the shift and the float64 total of the sum in planes `number` and `number + 1`. An empty sum has shift −inf."""
    peaks = _load_parts(parts, number, count, offs_n, N, -float("inf"), PARTS)
    totals = _load_parts(parts, number + 1, count, offs_n, N, 0.0, PARTS)
    peak = tl.max(peaks, 0)
    return peak, tl.sum(totals.to(tl.float64) * tl.exp(peaks - finite_or_zero(peak)[None, :]), 0)


@triton.jit
def _combine(
    program, tile, products, scale, parts, count, stats, sums, programs, N,
    KIND: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores the statistics of the rows (or columns) of one program, and sums over these rows."""
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    factor = tl.load(scale).to(tl.float32)
    shift, total = _add_parts(parts, PART_SHIFT, count, offs_n, N, PARTS)
    if KIND == LABELS:
        others_shift, others_total = _add_parts(parts, POSITIVE_SHIFT, count, offs_n, N, PARTS)
        counts = _load_parts(parts, POSITIVES, count, offs_n, N, 0.0, PARTS)
        positives = tl.sum(counts, 0)
        bases = finite_or_zero(_load_parts(parts, POSITIVE_SHIFT, count, offs_n, N, -float("inf"), PARTS)).to(tl.float64)
        below = _load_parts(parts, POSITIVE_BELOW, count, offs_n, N, 0.0, PARTS)  # Σ of t − base over the positives of a part
        mean = tl.sum(counts * bases + below, 0) / tl.maximum(positives, 1.0)
        partner = tl.max(_load_parts(parts, POSITIVE_COLUMN, count, offs_n, N, 0.0, PARTS), 0).to(tl.int32)
        sole, several = positives == 1.0, positives > 1.0
        both = tl.maximum(shift, others_shift)
        base = finite_or_zero(both)
        all_total = total * tl.exp(shift - base) + others_total * tl.exp(others_shift - base)
    else:
        partner = offs_n
    product = tl.load(products + offs_n * N + partner, mask, 0.0)
    loss, weight = cross_entropy(shift, total, product * factor)
    per_unit = tl.where(total == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))
    if KIND == LABELS:
        loss = tl.where(sole, loss, tl.where(several, base.to(tl.float64) + logarithm(all_total) - mean, 0.0))
        shift, total = tl.where(several, both, shift), tl.where(several, all_total, total)
        per_unit = tl.where(sole, per_unit, tl.where(several, 1.0 / tl.where(all_total == 0.0, 1.0, all_total), 0.0))
        weight = tl.where(sole, weight, 0.0)
        pull = tl.where(sole, -1.0, tl.where(several, 1.0 / tl.maximum(positives, 1.0), 0.0))
        tl.store(stats + PULL * N + offs_n, pull, mask)
        tl.store(stats + SOLE_POSITIVE * N + offs_n, tl.where(sole, partner, 0).to(tl.float32), mask)
        tl.store(sums + THIRD * programs + program, tl.sum((mask & (positives > 0.0)).to(tl.float64), 0))
    store_statistics(
        program, programs, offs_n, mask, shift, total, per_unit, weight, loss, product, stats, sums, N
    )  # fmt: skip


@triton.jit
def combine_kernel(
    products,  # (N, N)
    scale,  # ()
    work,
    sums,
    N,
    row_count,
    col_count,
    KIND: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    COL_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the partial sums of rows and of columns, and stores their statistics."""
    program, programs, tiles = tl.program_id(0), tl.num_programs(0), tl.cdiv(N, BLOCK_N)
    parts = work + 2 * PLANES * N
    sums += FIRST_SUM
    if program < tiles:
        _combine(program, program, products, scale, parts, row_count, work, sums, programs, N, KIND, ROW_PARTS, BLOCK_N)
    elif KIND == MATCHES:
        _combine(
            program, program - tiles, products, scale, parts + 2 * row_count * N, col_count, work + PLANES * N, sums,
            programs, N, KIND, COL_PARTS, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _softmax(t, stats, offs, N, axis: tl.constexpr):
    """Returns `softmax_of` with statistics that are loaded from memory."""
    mask = offs < N
    shift, total = tl.load(stats + SHIFT * N + offs, mask, 0.0), tl.load(stats + TOTAL * N + offs, mask, 0.0)
    return softmax_of(t, shift, total, tl.load(stats + PER_UNIT * N + offs, mask, 0.0), axis)


@triton.jit
def _label_weights(t, inside, own, same, stats, offs, N, axis: tl.constexpr):
    """Returns d loss / d t, for the losses of a tile's rows (axis 1) or columns (axis 0). A sole positive is excluded."""
    pull = tl.expand_dims(tl.load(stats + PULL * N + offs, offs < N, 0.0), axis)
    left_out = ~inside | own | (same & (pull < 0.0))
    g = _softmax(tl.where(left_out, -float("inf"), t), stats, offs, N, axis)
    return g - tl.where(same & (pull > 0.0), pull, 0.0)


@triton.jit
def softmax_weights_kernel(
    products,  # (N, N)
    weights,  # (N, N) receives the gradient weights and may be `products` itself, or None
    scale,  # ()
    ids,  # (N,) or None
    work,
    sums,
    N,
    first_sum,  # the position of the sums of the tiles in `sums`
    unit,
    KIND: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the gradient weights d loss / d t of a tile."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = load_tile(products, ids, offs_n, offs_m, N, KIND == VIEWS)
    t = s * tl.load(scale).to(tl.float32)
    if KIND == LABELS:
        g = _label_weights(t, inside, own, same, work, offs_n, N, 1)
        of_scale = g
        g += _label_weights(t, inside, own, same, work, offs_m, N, 0)
    else:
        t = tl.where(inside & ~own & ~same, t, -float("inf"))
        g = _softmax(t, work, offs_n, N, 1)
        of_scale = g
        if KIND == VIEWS:
            g += _softmax(t, work, offs_m, N, 0)
        else:
            g += _softmax(t, work + PLANES * N, offs_m, N, 0)
            of_scale = g
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(sums + first_sum + DSCALE * programs + program, sum_all(tl.where(of_scale == 0.0, 0.0, of_scale * s)))
    if weights is not None:
        store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32)


@triton.jit
def _negatives(products, scale, ids, offs_n, offs_m, N, IS_VIEWS: tl.constexpr):
    """Returns the dot products, the logits of the negatives, and the mask of pairs inside the matrix."""
    s, inside, own, same = load_tile(products, ids, offs_n, offs_m, N, IS_VIEWS)
    return s, tl.where(inside & ~own & ~same, s * scale, -float("inf")), inside


@triton.jit
def rows_kernel(
    products,  # (N, N)
    weights,  # (N, N) receives the gradient weights and may be `products` itself, or None
    scale,  # ()
    ids,  # (N,) or None
    work,
    sums,
    N,
    unit,
    IS_VIEWS: tl.constexpr,
    WITH_WEIGHTS: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the statistics of full rows, and then the gradient weights of ROWS. The second read of a row is from the cache."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n, factor = offs_n < N, tl.load(scale).to(tl.float32)
    peak, total = tl.full((BLOCK_N,), -float("inf"), tl.float32), tl.zeros((BLOCK_N,), tl.float64)
    for first in range(0, N, BLOCK_M):
        t = _negatives(products, factor, ids, offs_n, first + tl.arange(0, BLOCK_M), N, IS_VIEWS)[1]
        before, peak = peak, tl.maximum(peak, tl.max(t, 1))
        shift = finite_or_zero(peak)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(t - shift[:, None]), 1)
    partner = partner_of(offs_n, N) if IS_VIEWS else offs_n
    product = tl.load(products + offs_n * N + partner, mask_n, 0.0)
    loss, weight = cross_entropy(peak, total, product * factor)
    per_unit = tl.where(total == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))
    sums += FIRST_SUM
    store_statistics(
        program, programs, offs_n, mask_n, peak, total, per_unit, weight, loss, product, work, sums, N
    )  # fmt: skip
    if WITH_WEIGHTS:
        of_scale = tl.zeros((BLOCK_N,), tl.float64)
        for first in range(0, N, BLOCK_M):
            offs_m = first + tl.arange(0, BLOCK_M)
            s, t, inside = _negatives(products, factor, ids, offs_n, offs_m, N, False)
            g = softmax_of(t, finite_or_zero(peak), total.to(tl.float32), per_unit.to(tl.float32), 1)
            of_scale += tl.sum(tl.where(g == 0.0, 0.0, g * s), 1)
            if weights is not None:
                store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32)
        tl.store(sums + (SUMS + DSCALE) * programs + program, tl.sum(of_scale, 0))  # each program has one tile


@triton.jit
def sigmoid_kernel(
    x,  # (N, D); None if the dot products are given
    y,  # (N, D) or None
    products,  # (N, N) dot products; None if x and y are given, because no other kernel needs them
    weights,  # (N, N) receives the gradient weights and may be `products` itself, or None
    scale,  # ()
    bias,  # ()
    ids,  # (N,) or None
    work,  # receives only the weights of the matches
    sums,
    N,
    D,
    x_row_stride,
    x_stride,
    y_row_stride,
    y_stride,
    unit,
    IDS_ARE_POSITIVES: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores the sum of the losses of a tile, and its gradient weights."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, inside, own, same = form_tile(
        x, y, products, ids, offs_n, offs_m, N, D, x_row_stride, x_stride, y_row_stride, y_stride, BLOCK_N, BLOCK_M, BLOCK_D
    )
    positive = inside & own
    counted = inside
    if IDS_ARE_POSITIVES:
        positive = positive | same
    else:
        counted = counted & ~same
    t = s * tl.load(scale).to(tl.float32) + tl.load(bias).to(tl.float32)
    t = tl.where(counted, tl.where(positive, -t, t), -float("inf"))
    losses, g = softplus_and_sigmoid(t)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    sums += FIRST_SUM
    tl.store(sums + LOSS * programs + program, sum_all(losses))
    g = tl.where(positive, -g, g)
    tl.store(sums + DSCALE * programs + program, sum_all(tl.where(g == 0.0, 0.0, g * s)))
    tl.store(sums + THIRD * programs + program, sum_all(g))
    first_n, first_m = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_M
    # BLOCK_N divides BLOCK_M, so one tile contains all matches of its rows.
    if (first_n >= first_m) & (first_n < first_m + BLOCK_M):
        tl.store(work + MATCH_WEIGHT * N + offs_n, -tl.sum(tl.where(own, g, 0.0), 1), offs_n < N)
    if weights is not None:
        store_weights(weights, tl.where(own, 0.0, g), offs_n, offs_m, inside, N, unit, TF32)
