"""What a tile of similarities becomes on Hopper: sums, softmax weights or sigmoid weights, piece by piece, in registers.

A piece is 128 rows and as many columns as are finished at once, in the layout in which the tensor cores leave a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megabatch.tiles.triton_softplus import joint, log1p


@gluon.jit
def halves(s):
    """The left and the right columns of a piece; both are where they were, in the same registers."""
    columns: gl.constexpr = s.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    left, right = s.reshape((s.shape[0], 2, columns)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def places(s, n, m):
    """Rows and columns of a piece that begins at (n, m)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.shape[1], 16])
    offs_n = n + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    return offs_n, m + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))


@gluon.jit
def _left_out(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL: gl.constexpr, EDGES: gl.constexpr, OUT: gl.constexpr):
    """OUT on the diagonal and beyond the edges."""
    if SKIP_DIAGONAL:
        if (n < m + t.shape[1]) & (m < n + t.shape[0]):
            t = gl.where(offs_n[:, None] == offs_m[None, :], OUT, _only_here(t))
    if EDGES:
        if (n + t.shape[0] > N) | (m + t.shape[1] > M):
            t = gl.where((offs_n < N)[:, None] & (offs_m < M)[None, :], _only_here(t), OUT)
    return t


@gluon.jit
def _only_here(t):
    """t. What the compiler must take for an effect keeps the rare branch a branch: it would choose in every tile instead."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def sums(s, k, base, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Row sums of 2^t, and column sums over the rows that one thread owns: (4, 8, columns)."""
    offs_n, offs_m = places(s, n, m)
    e = gl.exp2(_left_out(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, -float("inf")))
    pairs = gl.sum(e.reshape((s.shape[0] // 16, 2, 8, s.shape[1])), 1)
    return gl.sum(e, 1), gl.sum(pairs.reshape((s.shape[0] // 64, 4, 8, s.shape[1])), 0)


@gluon.jit
def softmax(s, k, base, row_weight, col_weight, row_cap, col_cap, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Weights, of terms that are no larger than their sums; nobody reads those beyond the edges."""
    offs_n, offs_m = places(s, n, m)
    row, column = gl.minimum(offs_n, N - 1), gl.minimum(offs_m, M - 1)
    a, most_a = gl.load(row_weight + row), gl.load(row_cap + row)
    b, most_b = gl.load(col_weight + column), gl.load(col_cap + column)
    t = _left_out(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, False, -float("inf"))
    e = gl.minimum(gl.minimum(gl.exp2(t), most_a[:, None]), most_b[None, :])
    return e * (a[:, None] + b[None, :])


@gluon.jit
def negated(s, k, row_offset, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """−t, in units of log 2. To negate t later would be one more operation."""
    LOG2E: gl.constexpr = 1.4426950408889634
    offs_n, offs_m = places(s, n, m)
    t = s * (k * -LOG2E)
    if row_offset is not None:
        t += (gl.load(row_offset + gl.minimum(offs_n, N - 1)) * -LOG2E)[:, None]
    return _left_out(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, float("inf"))


@gluon.jit
def sigmoid(t, row_weight, n, m, N):
    """Weights, their row sums, and 1 − Π(1 − sigmoid) of a row (`triton_softplus.decoded`); t is negated.

    Every operation counts: a warp fetches this much code at one instruction in three or four clocks.
    """
    r = 1.0 + gl.exp2(t)  # infinite where the weight is less than fp32 holds, and then the weight is 0
    g = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [r], dtype=gl.float32, is_pure=True, pack=1)
    row_sums, product = gl.sum(g, 1), gl.reduce(g, 1, either)
    if row_weight is not None:
        weight = gl.load(row_weight + gl.minimum(places(t, n, m)[0], N - 1))
        g, row_sums = weight[:, None] * g, weight * row_sums
    return g, row_sums, product


@gluon.jit
def either(a, b):
    """1 − (1 − a)·(1 − b)."""
    return (a + b) - a * b


@gluon.jit
def softplus(t):
    """Row sums of softplus, of any size; t is negated."""
    e = gl.exp2(-gl.abs(t))  # of the two exponentials the one that cannot overflow
    return gl.sum(gl.minimum(t, 0.0), 1) * -0.6931471805599453 + log1p(gl.reduce(e, 1, joint))
