"""Device functions that several kernels share.

They compute the exponents of a tile, offsets, masks of equal ids, rounding, sums of partial sums, softplus, cross-entropies
and the last step of a gradient. Kernels import them from here and never from one another. Triton inlines each of them into its
caller.
"""

import triton
import triton.language as tl

# Coefficients of log(1 + e) = e·(1 + c₁e + … + c₈e⁸) for 0 ≤ e ≤ 1. They minimize the largest relative error, which is 3.4e-8.
_C1, _C2, _C3, _C4 = (tl.constexpr(c) for c in (-0.49999648, 0.33321324, -0.24857163, 0.19153655))
_C5, _C6, _C7, _C8 = (tl.constexpr(c) for c in (-0.137538, 0.079204515, -0.030065779, 0.005364821))


@triton.jit
def exponents(
    s,  # (BLOCK_N, BLOCK_M) dot products ⟨x_i, y_j⟩
    k,
    k_rest,  # k is fp32, and k + k_rest is scale · log2 e with twice as many digits
    col_offset,  # (1, BLOCK_M)
    row_offset,  # (BLOCK_N, 1)
    row_ids,  # (N,) or (N, 2) or None; see `equal_ids`
    col_ids,  # (M,) or (M, 2) or None
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
    """Returns the exponents t of the tile that starts at (n, m), and −inf for excluded pairs.

    The order of the operations is fixed, so that forward and backward round in the same way.
    """
    t = s * k + col_offset
    if EXACT:
        t += s * k_rest  # the rounding error of k is the same in every entry, so it would not average out
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
def offsets(pointer, default, offs, size, axis: tl.constexpr):
    """Returns the offsets of rows (axis 1) or columns (axis 0), in a shape that broadcasts to a tile.

    Offsets beyond the edge are −inf. Without a pointer, all offsets inside the edge are `default`.
    """
    if pointer is None:
        values = tl.where(offs < size, default, -float("inf"))
    else:
        values = tl.load(pointer + offs, mask=offs < size, other=-float("inf"))
    return tl.expand_dims(values, axis)


@triton.jit
def equal_ids(row_ids, col_ids, offs_n, offs_m, N, M):
    """Returns a mask of the pairs with equal ids. Entries beyond the edge are arbitrary.

    Ids of an unsigned dtype have two columns (`kernels.operands.pack_ids`). Two such ids are equal if they agree in at least
    one column.
    """
    columns: tl.constexpr = 2 if row_ids.dtype.element_ty == tl.uint64 else 1
    own = tl.load(row_ids + offs_n * columns, mask=offs_n < N, other=0)
    others = tl.load(col_ids + offs_m * columns, mask=offs_m < M, other=0)
    same = own[:, None] == others[None, :]
    if columns == 2:
        own = tl.load(row_ids + offs_n * 2 + 1, mask=offs_n < N, other=0)
        others = tl.load(col_ids + offs_m * 2 + 1, mask=offs_m < M, other=0)
        same |= own[:, None] == others[None, :]
    return same


@triton.jit
def finite_or_zero(shift):
    """Replaces ±inf by 0, so that exp(s − shift) of an empty sum is 0 and not NaN."""
    return tl.where(tl.abs(shift) == float("inf"), 0.0, shift)


@triton.jit
def round_to_tf32(values):
    """Rounds float32 values to the nearest TF32 values. NaN stays NaN."""
    nearest = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(values == values, nearest.to(tl.float32, bitcast=True), values)


@triton.jit
def load_embeddings(values, offs_n, offs_d, row_stride, stride, mask, ROUNDING: tl.constexpr):
    """Returns a tile of embeddings in float32, rounded in the same way as the inputs of the matmuls.

    ROUNDING is 0 for no rounding, 1 for TF32, 2 for bfloat16 and 3 for float16.
    """
    rows = tl.load(values + offs_n.to(tl.int64)[:, None] * row_stride + offs_d.to(tl.int64)[None, :] * stride, mask, 0.0)
    if ROUNDING == 1:
        rows = round_to_tf32(rows)
    elif ROUNDING == 2:
        rows = rows.to(tl.bfloat16)
    elif ROUNDING == 3:
        rows = rows.to(tl.float16)
    return rows.to(tl.float32)


@triton.jit
def log1p(e):
    """Returns log(1 + e) for e ≥ 0."""
    p = _C1 + e * (_C2 + e * (_C3 + e * (_C4 + e * (_C5 + e * (_C6 + e * (_C7 + e * _C8))))))
    return tl.where(e < 1, e + e * (e * p), 0.6931471805599453 * tl.log2(1.0 + e))


@triton.jit
def softplus_and_sigmoid(t):
    """Returns log(1 + exp t) and its derivative. Both are NaN if t is NaN."""
    small = tl.exp(-tl.abs(t))  # cannot overflow
    small = tl.where(t == t, small, t)
    return tl.where(t > 0, t, 0.0) + log1p(small), tl.where(t >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def product_less_one(a, b):
    """Returns (1 + a)·(1 + b) − 1. A reduction with this function turns Σ log(1 + e) into one logarithm of a product.

    It keeps the digits of a small a, which 1 + a would round away. Terms are at most 1, so the product of 64 factors is finite.
    """
    return a * b + (a + b)


@triton.jit
def decode_softplus(partial):
    """Returns a row sum of softplus, given its stored form.

    The stored form is either −sum, or c with 0 ≤ c ≤ ½ and sum = −log(1 − c).
    """
    return tl.where(partial < 0, -partial, log1p(partial / (1.0 - partial)))


@triton.jit
def sum_parts(part, offs_n, parts, rows, SOFTPLUS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Returns Σ_p part[p, n], added in a fixed order. With SOFTPLUS, each part is decoded by `decode_softplus` first."""
    sums = tl.zeros(offs_n.shape, tl.float32)
    for first in range(0, parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        offs = offs_p.to(tl.int64)[:, None] * rows + offs_n[None, :]
        values = tl.load(part + offs, (offs_p < parts)[:, None] & (offs_n < rows)[None, :], 0.0)
        sums += tl.sum(decode_softplus(values) if SOFTPLUS else values, 0)
    return sums


@triton.jit
def sum_all_parts(values, count, BLOCK: tl.constexpr):
    """Returns Σ values[:count] in float64, added in a fixed order."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        sums += tl.load(values + offs, offs < count, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def logarithm(total):
    """Returns log(total), and −inf for an empty sum."""
    return tl.where(total == 0.0, -float("inf"), tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def cross_entropy(shift, total, match):
    """Returns log(1 + exp(odds)) and its derivative in float64, where odds = log(exp(shift) · total) − match.

    Both are NaN if the match is +inf.
    """
    match = tl.where(match == float("inf"), float("nan"), match)
    odds = (finite_or_zero(shift).to(tl.float64) - match) + logarithm(total)
    small = tl.exp(-tl.abs(odds))
    above = 1.0 + small
    # log(above) · small / (above − 1) is accurate even if `small` is tiny, although 1 + small has lost the digits of `small`.
    rest = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
    loss = tl.where(odds > 0, odds, 0.0) + rest
    weight = tl.where(odds > 0, 1.0, small) / above
    return tl.where(odds == odds, loss, odds), tl.where(odds == odds, weight, odds)


@triton.jit
def finish_tile(
    tile, sums, out, own, partners, dmatch, factor, N, D,
    own_row_stride, own_stride, partners_row_stride, partners_stride,
    ROUNDING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores out = (sums + dmatch·partners)·factor for a tile of rows, and returns ⟨sums_i + dmatch_i·partners_i, own_i⟩.

    If `own` is None, the returned values are 0.
    """
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_products = tl.zeros((BLOCK_N,), tl.float32)
    if dmatch is not None:
        weight = tl.load(dmatch + offs_n, offs_n < N, 0.0)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = (offs_n < N)[:, None] & (offs_d < D)[None, :]
        offs = offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
        values = tl.load(sums + offs, mask, 0.0)
        if dmatch is not None:
            partner = load_embeddings(partners, offs_n, offs_d, partners_row_stride, partners_stride, mask, ROUNDING)
            values += weight[:, None] * partner
        if own is not None:
            row_products += tl.sum(values * load_embeddings(own, offs_n, offs_d, own_row_stride, own_stride, mask, ROUNDING), 1)
        if out is not None:
            tl.store(out + offs, (values * factor).to(out.dtype.element_ty), mask)
    return row_products
