"""Epilogues of the warp-specialised kernel: half a tile of products becomes sums, softmax weights or sigmoid weights.

Each works in registers on 128 rows × 64 columns, in the layout in which the tensor cores leave a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megabatch.tiles.triton_device import log1p, product_less_one


@gluon.jit
def halves(s):
    """The left and the right half of the columns of a tile. Both stay in the same registers."""
    columns: gl.constexpr = s.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    left, right = s.reshape((s.shape[0], 2, columns)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def tile_offsets(s, n, m):
    """offs_n and offs_m of a half tile that starts at (n, m)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.shape[1], 16])
    offs_n = n + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    return offs_n, m + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))


@gluon.jit
def _exclude(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL: gl.constexpr, EDGES: gl.constexpr, VALUE: gl.constexpr):
    """t with VALUE on the diagonal and beyond the edges."""
    if SKIP_DIAGONAL:
        if (n < m + t.shape[1]) & (m < n + t.shape[0]):
            t = gl.where(offs_n[:, None] == offs_m[None, :], VALUE, _keep_branch(t))
    if EDGES:
        if (n + t.shape[0] > N) | (m + t.shape[1] > M):
            t = gl.where((offs_n < N)[:, None] & (offs_m < M)[None, :], _keep_branch(t), VALUE)
    return t


@gluon.jit
def _keep_branch(t):
    """t, through an instruction that the compiler must treat as a side effect.

    Without it the compiler turns the rare branch around it into a select in every tile.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def sums(s, k, base, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Row sums of 2^t, and column sums over the rows that one thread owns: (4, 8, columns)."""
    offs_n, offs_m = tile_offsets(s, n, m)
    e = gl.exp2(_exclude(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, -float("inf")))
    pairs = gl.sum(e.reshape((s.shape[0] // 16, 2, 8, s.shape[1])), 1)
    return gl.sum(e, 1), gl.sum(pairs.reshape((s.shape[0] // 64, 4, 8, s.shape[1])), 0)


@gluon.jit
def softmax(s, k, base, a, cap_a, col_weight, col_cap, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Softmax weights; each term is capped by its sums. Weights beyond the edges are arbitrary and not stored."""
    offs_n, offs_m = tile_offsets(s, n, m)
    b, cap_b = gl.load(col_weight + offs_m), gl.load(col_cap + offs_m)
    t = _exclude(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, False, -float("inf"))
    e = gl.minimum(gl.minimum(gl.exp2(t), cap_a[:, None]), cap_b[None, :])
    return e * (a[:, None] + b[None, :])


@gluon.jit
def negated_exponents(s, k, row_offset, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """−t in units of log 2. Negating t later would be one more instruction."""
    LOG2E: gl.constexpr = 1.4426950408889634
    offs_n, offs_m = tile_offsets(s, n, m)
    t = s * (k * -LOG2E)
    if row_offset is not None:
        t += (gl.load(row_offset + gl.minimum(offs_n, N - 1)) * -LOG2E)[:, None]
    return _exclude(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, float("inf"))


@gluon.jit
def sigmoid(t, row_weight, n, m, N):
    """Sigmoid weights, their row sums, and 1 − Π(1 − sigmoid) of each row (`triton_device.decode_softplus`); t is negated.

    Every instruction counts: a warp fetches code of this length at one instruction in three or four clocks.
    """
    r = 1.0 + gl.exp2(t)  # infinite where the weight is below fp32's range; the weight is then 0
    g = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [r], dtype=gl.float32, is_pure=True, pack=1)
    row_sums, product = gl.sum(g, 1), gl.reduce(g, 1, complement_product)
    if row_weight is not None:
        weight = gl.load(row_weight + gl.minimum(tile_offsets(t, n, m)[0], N - 1))
        g, row_sums = weight[:, None] * g, weight * row_sums
    return g, row_sums, product


@gluon.jit
def complement_product(a, b):
    """1 − (1 − a)·(1 − b)."""
    return (a + b) - a * b


@gluon.jit
def softplus(t):
    """Row sums of softplus of any size; t is negated."""
    e = gl.exp2(-gl.abs(t))  # exp(−|t|) cannot overflow
    return gl.sum(gl.minimum(t, 0.0), 1) * -0.6931471805599453 + log1p(gl.reduce(e, 1, product_less_one))
