"""The Triton kernels against the dense reference: on a GPU if there is one, otherwise interpreted on the CPU.

The interpreter computes in float32 and float16. It has no bfloat16 products; tests/gpu covers them.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import aligned_pairs, dense_clip, dense_siglip, examples, leaves, outcomes, unit
from megabatch import dispatch, reference
from megabatch.kernels import plan as kernel_plan
from megabatch.tiles import plan
from rounding import similarities_rounded_twice, truth_and_bounds

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("small_launches"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # from the interpreter's numpy, on intended inf and NaN
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps


def to_device(*tensors, dtype=torch.float32):
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors]


def close(actual, expected, exponent, what):
    """Float32 results whose exponents are rounded at the size `exponent`; 60 covers the length of the sums."""
    finite = expected.isfinite()
    torch.testing.assert_close(actual.double()[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    size = expected[finite].abs().max().item() if finite.any() else 0.0
    bound = 60 * EPS * (1 + exponent) * (1 + size)
    error = (actual.double() - expected)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound, f"{what}: {error} > {bound}"


@examples(25, quick=4)
@given(
    N=st.integers(0, 150),
    M=st.integers(0, 150),
    D=st.sampled_from((1, 3, 40, 130)),
    log_scale=st.floats(-2, 3),
    spread=st.sampled_from([1.0, 30.0]),
    exclude_by=st.sampled_from([None, "diagonal", "ids"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_logsumexp_matches_reference(N, M, D, log_scale, spread, exclude_by, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    x = unit(N, D, seed=seed) * torch.linspace(1 / spread, 1, N, dtype=torch.float64)[:, None]
    tensors = [x, unit(M, D, seed=seed + 1), torch.tensor(10**log_scale)]
    if with_bias:
        tensors += [spread * torch.randn(size, generator=generator) for size in (N, M)]
    inputs = to_device(*tensors)
    exclude, left_out = exclude_by, None
    if exclude_by == "diagonal":
        left_out = torch.eye(N, M, dtype=torch.bool, device=DEVICE)
    elif exclude_by == "ids":
        exclude = (torch.arange(N, device=DEVICE) % 5, torch.arange(M, device=DEVICE) % 3)
        left_out = exclude[0][:, None] == exclude[1]
    weights = [torch.randn(size, generator=generator).to(DEVICE) for size in (N, M)]

    def run(function, arguments, **options):
        found = function(*arguments, **options)
        total = sum((torch.where(o.isinf(), 0.0, o) * w).sum() for o, w in zip(found, weights, strict=True))
        return [*(o.detach() for o in found), *torch.autograd.grad(total, arguments)]

    found = run(mb.pairwise_logsumexp, inputs, exclude=exclude, backend="triton")
    wide = leaves(*(t.double() for t in inputs))
    wanted = run(reference.pairwise_logsumexp, wide, left_out=left_out)
    exponent = 10**log_scale + (8 * spread if with_bias else 0)
    for what, actual, expected in zip(("row", "col", "dx", "dy", "dscale", "du", "dv"), found, wanted, strict=False):
        close(actual, expected, exponent, what)


@examples(15, quick=2)
@given(
    N=st.integers(1, 150),
    D=st.sampled_from((1, 3, 40, 130)),
    log_scale=st.floats(-2, 3),
    id_count=st.sampled_from([None, 5]),
    loss=st.sampled_from(["clip", "siglip"]),
    seed=st.integers(0, 1000),
)
def test_losses_match_reference(N, D, log_scale, id_count, loss, seed):
    numbers = [10**log_scale] if loss == "clip" else [10**log_scale, -5.0]
    inputs = to_device(*aligned_pairs(N, D, noise=1.0, seed=seed), *map(torch.tensor, numbers))
    ids = None if id_count is None else torch.arange(N, device=DEVICE) % id_count
    mine, dense = (mb.clip_loss, reference.clip_loss) if loss == "clip" else (mb.siglip_loss, reference.siglip_loss)
    found = outcomes(lambda *a: mine(*a, ids=ids, backend="triton"), inputs)
    wanted = outcomes(lambda *a: dense(*a, ids=ids), leaves(*(t.double() for t in inputs)))
    assert found[0] >= 0
    for actual, expected in zip(found, wanted, strict=True):
        close(actual, expected, 10**log_scale, loss)


@pytest.mark.quick  # none of them in `make test`, and all where other processors are imitated
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("noise", "scale", "dtype"),
    [(1.0, 14.0, torch.float16), (2.0, 50.0, torch.float16), (0.5, 100.0, torch.float32), (3.0, 1000.0, torch.float32)],
)
def test_error_is_at_most_twice_that_of_dense_or_of_similarities_rounded_twice(loss, dtype, noise, scale):
    numbers = [scale] if loss == "clip" else [scale, -10.0]
    mine, dense, truth = {
        "clip": (lambda *a: mb.clip_loss(*a, backend="triton"), dense_clip, reference.clip_loss),
        "siglip": (lambda *a: mb.siglip_loss(*a, backend="triton"), dense_siglip, reference.siglip_loss),
    }[loss]
    exact = partial(mb.clip_loss if loss == "clip" else mb.siglip_loss, backend="eager")
    squares = {mine: 0.0, dense: 0.0, exact: 0.0}
    for seed in range(0, 16, 2):
        pair = aligned_pairs(100, 24, noise=noise, seed=seed)
        inputs = to_device(*pair, *map(torch.tensor, numbers), dtype=dtype)
        wide = leaves(*(t.double() for t in inputs))
        wanted = outcomes(truth, wide)
        for function in squares:
            with similarities_rounded_twice():
                found = outcomes(function, wide if function is exact else inputs)
            squares[function] += torch.stack([(a - b).square().sum() for a, b in zip(found, wanted, strict=True)])
    found, *bars = (squares[function].sqrt() for function in squares)
    assert (found <= 2 * torch.maximum(*bars)).all(), (found, bars)


def test_rows_out_of_range_are_computed_again_and_others_are_not(monkeypatch):
    from megabatch.kernels import logsumexp

    recomputed = []
    original = logsumexp.complete_sums

    def watched(operands, block, row_part, row, col_part, col):
        original(operands, block, row_part, row, col_part, col)
        recomputed.extend(sums.shift.isfinite().sum().item() for sums in (row, col))

    monkeypatch.setattr(logsumexp, "complete_sums", watched)
    x, y = (unit(80, 8, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    for outlier in (False, True):
        if outlier:
            x[9] *= 8  # raises the common shift far above the other rows
        recomputed.clear()
        inputs = leaves(x, y)
        found = mb.pairwise_logsumexp(*inputs, 20.0, backend="triton")
        assert (sum(recomputed) > 0) == outlier
        assert sum(recomputed) < 160
        wide = leaves(*(t.double() for t in inputs))
        wanted = reference.pairwise_logsumexp(*wide, 20.0)
        results = [[*f, *torch.autograd.grad(f[0].sum() + f[1].sum(), i)] for f, i in ((found, inputs), (wanted, wide))]
        for actual, expected in zip(*results, strict=True):
            close(actual.detach(), expected.detach(), 160.0 if outlier else 20.0, f"outlier {outlier}")


@pytest.mark.quick({"factor": 1e6})
@pytest.mark.parametrize("factor", [1e2, 1e4, 1e6, 1e18])
@pytest.mark.parametrize("what", ["norm", "row bias", "column bias"])
def test_one_outlier_does_not_cost_the_others_their_digits(factor, what):
    if what != "norm" and factor > 1e6:
        pytest.skip("the bias alone is then beyond what float32 can add 1 to")
    x, y = (unit(70, 8, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    u, v = torch.zeros(2, 70, device=DEVICE)
    if what == "norm":
        x[9] *= factor
    else:
        (u if what == "row bias" else v)[9] = factor
    inputs = to_device(x, y, u, v)
    wide = leaves(*(t.double() for t in inputs))
    results = []
    for function, (a, b, c, d) in (
        (lambda *i: mb.pairwise_logsumexp(*i, backend="triton"), inputs),
        (reference.pairwise_logsumexp, wide),
    ):
        row = function(a, b, 20.0, c, d)[0]
        results.append((row, torch.autograd.grad(row[torch.arange(70) != 9].sum(), a)[0]))
    others = torch.arange(70, device=DEVICE) != 9
    (row, dx), (wanted_row, wanted_dx) = results
    exponent = 20.0 if what != "column bias" else 20.0 + factor
    close(row[others], wanted_row[others], exponent, "row")
    close(dx[others], wanted_dx[others], exponent, "dx")


@pytest.mark.parametrize(("N", "scale"), [(70, 1e8), (1, 1e9)])
def test_exponents_beyond_all_reason(N, scale):
    inputs = to_device(unit(N, 8, seed=0), unit(N, 8, seed=1), torch.tensor(scale))
    row, col = mb.pairwise_logsumexp(*inputs, backend="triton")
    found = torch.autograd.grad(row.sum() + col.sum(), inputs[:2])
    x, y, _ = (t.detach() for t in inputs)
    for gradient, (truth, bound) in zip(found, truth_and_bounds(x, y, scale), strict=True):
        assert ((gradient.double() - truth).abs() <= bound).all()


def test_a_constant_bias_shifts_and_nothing_else():
    x, y = (unit(300, 16, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    for bias in (100.0, 1000.0):
        row, _ = mb.pairwise_logsumexp(x, y, 5.0, torch.full((300,), bias, device=DEVICE), backend="triton")
        wanted = (5.0 * x.double() @ y.double().T + bias).logsumexp(1)
        assert abs((row.double() - wanted).mean()) < 0.1 * EPS * bias


@pytest.mark.parametrize("where", ["inf", "nan", "huge"])
def test_what_is_not_finite_stays_where_it_belongs(where):
    x, y = (unit(70, 8, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    x[3, 2] = {"inf": torch.inf, "nan": torch.nan, "huge": 1e30}[where]
    row, col = mb.pairwise_logsumexp(x, y, backend="triton")
    wanted = reference.pairwise_logsumexp(x.double(), y.double())
    others = torch.arange(70, device=DEVICE) != 3
    close(row[others], wanted[0][others], 10.0, where)
    if where == "nan":
        assert row[3].isnan()
        assert col.isnan().all()
    if where == "huge":
        torch.testing.assert_close(row.double(), wanted[0], rtol=1e-5, atol=1e-4)


@pytest.mark.quick({"bias": -20.0})
@pytest.mark.parametrize("bias", [0.0, -10.0, -20.0, -60.0])
def test_softplus_keeps_its_digits_when_it_is_small(bias):
    x, y = (unit(70, 8, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    found = mb.pairwise_softplus(x, y, 2.0, bias, backend="triton").double()
    wanted = reference.pairwise_softplus(x.double(), y.double(), 2.0, bias)
    assert (found / wanted - 1).abs().max() < 3e-6


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1e18])
def test_upstream_gradients_of_any_size(size):
    e = torch.eye(8, dtype=torch.float32, device=DEVICE)[:1]
    x, y = leaves(torch.cat([-e.expand(4, 8), e.expand(4, 8)]), e.expand(8, 8))
    row, col = mb.pairwise_logsumexp(x, y, 47.0, backend="triton")
    found = torch.autograd.grad((row.sum() + col.sum()) * size, (x, y))
    wide = leaves(x.double(), y.double())
    row, col = reference.pairwise_logsumexp(*wide, 47.0)
    for actual, expected in zip(found, torch.autograd.grad((row.sum() + col.sum()) * size, wide), strict=True):
        assert (actual.double() - expected).norm() / expected.norm() < 1e-5


def test_rank_matches_a_stable_sort():
    generator = torch.Generator().manual_seed(0)
    for N, D in ((150, 3), (1, 1), (0, 2), (70, 40)):
        x, y = (torch.randint(-2, 3, (N, D), generator=generator).to(DEVICE, torch.float32) for _ in range(2))
        found = mb.pairwise_rank(x, y, backend="triton")
        for actual, expected in zip(found, reference.pairwise_rank(x.double(), y.double()), strict=True):
            assert torch.equal(actual, expected)
    x = unit(1, 33, seed=0, dtype=torch.float32, device=DEVICE).expand(100, 33)
    assert torch.equal(mb.pairwise_rank(x, x, backend="triton")[0], torch.arange(100, device=DEVICE))


@pytest.mark.parametrize("layout", ["transposed", "odd offset", "expanded"])
def test_any_memory_layout(layout):
    x, y = (unit(90, 10, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    other = {
        "transposed": lambda: x.t().contiguous().t(),
        "odd offset": lambda: torch.cat([x.new_zeros(90, 1), x], dim=1)[:, 1:],
        "expanded": lambda: x[:1].expand(90, 10),
    }[layout]()
    results = []
    for tensor in (other, other.contiguous().clone()):
        a = tensor.detach().requires_grad_()
        loss = mb.clip_loss(a, y, 7.0, backend="triton")
        results.append((loss, *torch.autograd.grad(loss, a)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_strided_ids_and_offsets():
    x, y = (unit(90, 10, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    ids, bias = torch.arange(180, device=DEVICE) % 7, torch.linspace(-2, 2, 180, device=DEVICE)
    results = []
    for pick in (lambda v: v[::2], lambda v: v[::2].contiguous()):
        row, col = mb.pairwise_logsumexp(
            x, y, 5.0, pick(bias), pick(bias.flip(0)), exclude=(pick(ids), pick(ids).to(torch.int32)), backend="triton"
        )
        results.append((row, col))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    same = mb.pairwise_logsumexp(x, y, 5.0, bias[::2], bias.flip(0)[::2], exclude=(ids[::2], ids[::2]), backend="eager")
    torch.testing.assert_close(results[0], same)


@pytest.mark.quick({"N": 70})
@pytest.mark.parametrize("N", [70, 200])
@pytest.mark.thorough
def test_bitwise_the_same_over_repeated_runs(N):
    inputs = to_device(*aligned_pairs(N, 40, noise=1.0, seed=0), torch.tensor(30.0))

    def run():
        loss = mb.clip_loss(*inputs, backend="triton") + mb.siglip_loss(*inputs, -5.0, backend="triton")
        return [loss, *torch.autograd.grad(loss, inputs)]

    first = run()
    for _ in range(3 if DEVICE == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("N", [1, 100, 8448, 65536, 262144, 1_000_003])
@pytest.mark.parametrize("M", [1, 5000, 1_048_576])
def test_strips_stay_within_the_workspace(monkeypatch, N, M):
    monkeypatch.undo()
    for element_size, D in ((2, 512), (2, 768), (4, 512), (2, 8192)):
        size = plan.strip_size(N, M, D, element_size)
        assert min(size.rows, N) * min(size.columns, M) * element_size <= 256 * 2**20
        assert min(size.rows, N) * D * 4 <= 64 * 2**20
        assert size.rows % 256 == size.columns % 256 == 0
        size = plan.pair_strip(N, element_size)
        assert min(size.rows, N) * min(size.columns, N) * element_size <= 512 * 2**20
        assert size.rows % 256 == size.columns % 256 == 0
    for panels in (1, 3, 256):
        splits, rows = kernel_plan.row_splits(panels, N, 256, 132)
        assert splits * rows >= N > (splits - 1) * rows


@pytest.mark.parametrize(
    ("N", "element_size", "size"),
    [
        (16384, 2, (16384, 16384)),
        (16385, 2, (8448, 16640)),
        (16384, 4, (16384, 8192)),
        (65536, 2, (16384, 16384)),
        (40000, 2, (13568, 13568)),
    ],
)
def test_a_strip_of_pairs_fills_the_workspace(monkeypatch, N, element_size, size):
    """16,384 pairs in half precision are one strip, because such a batch waits for the host."""
    monkeypatch.undo()
    assert plan.pair_strip(N, element_size) == plan.TileSize(*size)


@pytest.mark.parametrize(
    ("rows", "D", "kind", "served"),
    [
        (65536, 2048, dispatch.BOTH, True),
        (65537, 16, dispatch.BOTH, False),
        (65536, 2049, dispatch.BOTH, False),
        (32768, 4096, dispatch.SIGMOID, True),
        (32768, 512, dispatch.VIEWS, True),
        (32769, 512, dispatch.VIEWS, False),
        (16384, 512, dispatch.LABELS, True),
        (16385, 512, dispatch.LABELS, False),
    ],
)
def test_gradients_with_the_loss_fit_the_limits_of_memory(rows, D, kind, served):
    """The float32 sums of dx, 4·rows·D bytes, are at most as large as the workspace that is freed before gradients are made."""
    assert (dispatch.find_rule(kind, rows, D, "triton").module == "one_gpu") is served
    assert not served or 4 * rows * D <= 512 * 2**20


@pytest.mark.parametrize(("panels", "programs"), [(1, 132), (64, 128), (86, 129), (128, 128), (132, 132), (256, 128)])
def test_programs_work_on_the_same_rows_at_the_same_time(panels, programs):
    assert kernel_plan.panel_programs(panels, 132) == programs
    assert kernel_plan.panel_programs(panels, 4) == 4


def test_ids_of_different_types():
    """−1 and 255 have the same eight bits."""
    x, y = (unit(rows, 8, seed=rows, dtype=torch.float32, device=DEVICE) for rows in (20, 30))
    ids = torch.arange(20, dtype=torch.int8, device=DEVICE) - 1, (torch.arange(30, device=DEVICE) + 250).to(torch.uint8)
    for found, expected in zip(
        *(mb.pairwise_logsumexp(x, y, exclude=ids, backend=b) for b in ("triton", "eager")), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
