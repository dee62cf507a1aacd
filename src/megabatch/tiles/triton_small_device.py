"""Device functions that the kernels of `triton_small` share, and what they keep where.

The kind of a loss says which pairs count:
    MATCHES  row i belongs to column i, and column i to row i; pairs of equal ids are left out of the sums
    ROWS     the same, of the rows alone: one launch computes sums and weights
    VIEWS    rows against themselves, all but a row itself; row i belongs to row i ± N/2
    LABELS   rows against themselves; rows of equal labels are positives. A row's only positive is kept apart, like a match
    SIGMOID  every pair counts for itself; pair (i, i) is a match, and pairs of equal ids are left out or are matches too
A match is kept apart: its weight reaches the gradients unrounded, in the last step.

All numbers of a step are in two tensors, because an allocation takes the host 5 µs:
    work  float32: statistics of rows and of columns, (6, N) each, then partial sums of rows, (2 or 7, tiles of columns, N), and
          of columns, (2, tiles of rows, N)
    sums  float64: d scale, d bias, then sums of the programs that combine, (3, programs), and of the tiles, (3, tiles)
"""

import triton
import triton.language as tl

from megabatch.tiles.triton_device import equal_ids, finite_or_zero, round_to_tf32

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = (tl.constexpr(number) for number in range(5))

# Of rows: shift, total, weight of a unit, weight of the match, pull of a positive, the sole positive.
PLANES = tl.constexpr(6)
# Of a program: loss, d scale, rows with a positive. Of a tile: loss, d scale, d bias.
SUMS = tl.constexpr(3)
FIRST_SUM = tl.constexpr(2)


@triton.jit
def partner_of(offs_n, N):
    """The other view of the same thing."""
    return tl.where(offs_n < N // 2, offs_n + N // 2, offs_n - N // 2)


@triton.jit
def relations(ids, offs_n, offs_m, N, IS_VIEWS: tl.constexpr):
    """(inside, on the diagonal, other pairs of equal ids) of a tile; two views of one thing have equal ids."""
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
    """(products, inside, on the diagonal, other pairs of equal ids)."""
    inside, own, same = relations(ids, offs_n, offs_m, N, IS_VIEWS)
    return tl.load(products + offs_n[:, None] * N + offs_m[None, :], inside, 0.0), inside, own, same


@triton.jit
def form_tile(
    x, y, products, ids, offs_n, offs_m, N, D, x_row_stride, x_stride, y_row_stride, y_stride,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Like `load_tile`. If x and y are given, forms the products, and stores them unless `products` is None."""
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
    """Stores what a program knows of its rows, and the sums of their losses and of the matches' part of d scale."""
    tl.store(stats + offs_n, finite_or_zero(shift), mask)
    tl.store(stats + N + offs_n, total.to(tl.float32), mask)
    tl.store(stats + 2 * N + offs_n, per_unit.to(tl.float32), mask)
    tl.store(stats + 3 * N + offs_n, weight.to(tl.float32), mask)
    tl.store(sums + program, tl.sum(tl.where(mask, loss, 0.0), 0))
    tl.store(sums + programs + program, -tl.sum(tl.where(mask & (weight != 0.0), weight * product, 0.0), 0))


@triton.jit
def softmax_of(t, shift, total, per_unit, axis: tl.constexpr):
    """weight · softmax(t) along rows (axis 1) or columns (axis 0); each term is capped by its sum."""
    e = tl.minimum(tl.exp(t - tl.expand_dims(shift, axis)), tl.expand_dims(total, axis))
    return e * tl.expand_dims(per_unit, axis)


@triton.jit
def sum_all(tile):
    """Rows in float32, and their sums in float64: the terms of d scale nearly cancel."""
    return tl.sum(tl.sum(tile, 1).to(tl.float64), 0)


@triton.jit
def store_weights(weights, g, offs_n, offs_m, inside, N, unit, TF32: tl.constexpr):
    """Stores g · unit in the type of `weights`."""
    g = g * unit
    if TF32:
        g = round_to_tf32(g)
    tl.store(weights + offs_n[:, None] * N + offs_m[None, :], g.to(weights.dtype.element_ty), inside)
