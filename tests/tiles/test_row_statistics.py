"""Row sums alone, and limits of rows: both backends against the dense reference, and what they do not compute."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import examples, leaves, tile_size, unit
from megabatch import operators, reference
from megabatch.primitives import KEPT, SEPARATE, SKIPPED, Ceiling, ceiling_above, execution, logsumexp, number
from megabatch.tiles.eager import Tiles
from megabatch.tiles.sums import LogSum

pytestmark = [
    pytest.mark.usefixtures("small_launches"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy on inf and NaN, which are meant
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def row_logsumexp(x, y, scale, *, backend="auto", **options):
    """(log Σ_j exp s_ij, s_ii, share)."""
    row, _, match, share = logsumexp(x, y, number(scale, "scale", x), execution(x, y, backend=backend), **options)
    return row, match, share


def close(actual, expected, exponent, eps, what):
    finite = expected.isfinite()
    torch.testing.assert_close(actual.double()[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    size = expected[finite].abs().max().item() if finite.any() else 0.0
    bound = 60 * eps * (1 + exponent) * (1 + size)
    error = (actual.double() - expected)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound, f"{what}: {error} > {bound}"


def limits_between(products, generator):
    """Halfway between two products of each row; none where these are so near that rounding would decide."""
    ordered = products.sort(1).values
    place = torch.randint(products.shape[1], (len(products), 1), generator=generator).to(DEVICE)
    limit = (ordered.gather(1, place) + ordered.gather(1, (place + 1).clamp_max(products.shape[1] - 1))) / 2
    near = (products - limit).abs().amin(1) < 1e-5
    return torch.where(near, torch.inf, limit[:, 0])


@pytest.mark.parametrize("backend", ["eager", "triton"])
@examples(12, quick=3)
@given(
    N=st.integers(0, 150),
    M=st.integers(0, 150),
    D=st.sampled_from((1, 3, 40, 130)),
    log_scale=st.floats(-2, 3),
    spread=st.sampled_from([1.0, 30.0]),
    left_out=st.sampled_from([None, "diagonal", "ids"]),
    limited_by=st.sampled_from([None, "products", "guide"]),
    tile=st.sampled_from([(16, 24), (7, 200), (1024, 1024)]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_match_the_reference(backend, N, M, D, log_scale, spread, left_out, limited_by, tile, with_bias, seed):
    if backend == "triton":
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(seed)
    x = unit(N, D, seed=seed) * torch.linspace(1 / spread, 1, N, dtype=torch.float64)[:, None]
    tensors = [x, unit(M, D, seed=seed + 1), torch.tensor(10**log_scale)]
    if with_bias:
        tensors.append(spread * torch.randn(M, generator=generator))
    inputs = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in tensors]
    wide = leaves(*(t.double() for t in inputs))
    products = wide[0].detach() @ wide[1].detach().T
    mask = torch.zeros(N, M, dtype=torch.bool, device=DEVICE)
    ids = None, None
    if left_out == "diagonal":
        mask = torch.eye(N, M, dtype=torch.bool, device=DEVICE)
    elif left_out == "ids":
        ids = torch.arange(N, device=DEVICE) % 5, torch.arange(M, device=DEVICE) % 3
        mask = ids[0][:, None] == ids[1]
    ceiling = None
    if limited_by is not None and N and M:
        guide = [unit(size, 6, seed=seed + k, dtype=torch.float32, device=DEVICE) for k, size in ((5, N), (6, M))]
        compared = products if limited_by == "products" else guide[0].double() @ guide[1].double().T
        limit = limits_between(compared, generator)
        mask = mask | (compared > limit[:, None])
        ceiling = Ceiling(limit.float(), *(guide if limited_by == "guide" else ()))
    weight = torch.randn(N, generator=generator).to(DEVICE)

    def gradients_of(row, arguments):
        total = (torch.where(row.isinf(), 0.0, row) * weight).sum()
        found = torch.autograd.grad(total, arguments, allow_unused=True)
        return [torch.zeros_like(a) if g is None else g for g, a in zip(found, arguments, strict=True)]

    with tile_size(*tile):
        row, match, _ = row_logsumexp(
            *inputs[:3],
            col_bias=inputs[3] if with_bias else None,
            ids=ids,
            diagonal=SKIPPED if left_out == "diagonal" else KEPT,
            ceiling=ceiling,
            backend=backend,
        )
        found = gradients_of(row, inputs)
    assert match.numel() == 0
    wanted, _ = reference.pairwise_logsumexp(*wide[:3], None, wide[3] if with_bias else None, mask)
    exponent = 10**log_scale + (8 * spread if with_bias else 0)
    eps = torch.finfo(torch.float32).eps
    close(row.detach(), wanted.detach(), exponent, eps, "row")
    pairs = zip(found, gradients_of(wanted, wide), strict=True)
    for what, (actual, expected) in zip(("dx", "dy", "dscale", "dcol_bias"), pairs, strict=False):
        close(actual, expected, exponent, eps, what)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("scale", [10.0, 1e3, 1e5])
def test_a_row_with_nothing_in_it_has_no_gradient(backend, scale):
    """However large the shift of the block is: the kernels' weights are relative to it."""
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = leaves(torch.ones(3, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE), torch.tensor(scale, device=DEVICE))
    row, *_ = row_logsumexp(*inputs, diagonal=SKIPPED, backend=backend)
    assert row[0] == -torch.inf
    found = torch.autograd.grad(torch.where(row.isinf(), 0.0, row).sum(), inputs)
    for actual, expected in zip(found, ([[0, 0], [1, 1], [1, 1]], [[2, 2]], 4 / scale), strict=True):
        torch.testing.assert_close(
            actual / scale, torch.tensor(expected, dtype=torch.float32, device=DEVICE), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_the_matching_pair_apart(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = [unit(70, 12, seed=s, dtype=torch.float32, device=DEVICE).requires_grad_() for s in (0, 1)]
    row, match, share = row_logsumexp(*inputs, 5.0, diagonal=SEPARATE, backend=backend)
    wide = leaves(*(t.double() for t in inputs))
    logits = 5.0 * wide[0] @ wide[1].T
    own = torch.eye(70, dtype=torch.bool, device=DEVICE)
    wanted = logits.masked_fill(own, -torch.inf).logsumexp(1) - 2 * logits.diagonal()
    torch.testing.assert_close((row - 2 * match).double(), wanted, rtol=1e-5, atol=1e-5)
    assert share == 1 / 70
    found = torch.autograd.grad((row - 2 * match).sum(), inputs)
    for actual, expected in zip(found, torch.autograd.grad(wanted.sum(), wide), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_spent_on_columns(monkeypatch):
    """One exponential a similarity, and no tile beside the one of similarities."""
    exponentials, tiles = [], []
    original = LogSum.add_exponentials_
    monkeypatch.setattr(
        LogSum,
        "add_exponentials_",
        lambda self, s, dim, out: (exponentials.append(s.numel()), original(self, s, dim, out)),
    )
    buffer = Tiles.buffer
    monkeypatch.setattr(Tiles, "buffer", lambda self, *a: (tiles.append(1), buffer(self, *a))[1])
    x, y = unit(30, 4, seed=0).requires_grad_(), unit(20, 4, seed=1).requires_grad_()
    with tile_size(8, 8):
        row, *_ = row_logsumexp(x, y, 1.0)
        assert (sum(exponentials), len(tiles)) == (600, 1)
        row.sum().backward()
        assert len(tiles) == 2


def test_nothing_is_stored_for_columns_by_the_kernel(monkeypatch):
    triton_logsumexp = pytest.importorskip("megabatch.kernels.logsumexp")
    asked = []
    original = triton_logsumexp._launch

    def watched(*args, with_columns):
        asked.append(with_columns)
        return original(*args, with_columns=with_columns)

    monkeypatch.setattr(triton_logsumexp, "_launch", watched)
    x, y = (unit(40, 8, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    row_logsumexp(x, y, 1.0, backend="triton")
    assert asked
    assert not any(asked)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_what_a_limit_leaves_out_has_no_gradient(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    inputs = [unit(50, 6, seed=s, dtype=torch.float32, device=DEVICE).requires_grad_() for s in (0, 1)]
    wide = leaves(*(t.double() for t in inputs))
    products = wide[0] @ wide[1].T
    limit = limits_between(products.detach(), torch.Generator().manual_seed(0))
    row, *_ = row_logsumexp(*inputs, 4.0, ceiling=Ceiling(limit.float()), backend=backend)
    wanted = (4 * products).masked_fill(products > limit[:, None], -torch.inf).logsumexp(1)
    found = torch.autograd.grad(row.sum(), inputs)
    for actual, expected in zip(found, torch.autograd.grad(wanted.sum(), wide), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


STRANGE = {
    "strided": lambda vector: torch.stack((vector, vector + 1), 1)[:, 0],
    "expanded": lambda vector: vector[:1].expand(len(vector)),
}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_vectors_of_any_stride_and_ids_of_any_type(backend, strange, guided):
    if backend == "triton":
        pytest.importorskip("triton")
    x, y = (unit(40, 5, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    seen = [unit(40, 3, seed=s, dtype=torch.float32, device=DEVICE) for s in (2, 3)] if guided else []
    compared = (seen[0] @ seen[1].T if guided else x @ y.T).double()
    made = STRANGE[strange]
    limit, bias = made(torch.linspace(0.2, 0.6, 40, device=DEVICE)), made(torch.linspace(-1, 1, 40, device=DEVICE))
    # As bytes 200 and −56 are the same.
    row_ids = made((torch.arange(40, device=DEVICE) % 3 * 100).to(torch.uint8))
    col_ids = made((torch.arange(40, device=DEVICE) % 2 * -56).to(torch.int8))
    row, *_ = row_logsumexp(x, y, 3.0, col_bias=bias, ids=(row_ids, col_ids), ceiling=Ceiling(limit, *seen), backend=backend)
    left_out = (compared > limit.double()[:, None]) | (row_ids.long()[:, None] == col_ids.long())
    wanted = (3 * x.double() @ y.double().T + bias.double()).masked_fill(left_out, -torch.inf).logsumexp(1)
    torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_limit_below_everything_leaves_nothing(backend, guided):
    if backend == "triton":
        pytest.importorskip("triton")
    x, y = (unit(9, 4, seed=s, dtype=torch.float32, device=DEVICE).requires_grad_() for s in (0, 1))
    limit = torch.full((9,), -2.0, device=DEVICE)
    limit[3] = torch.inf
    seen = (x.detach(), y.detach()) if guided else ()
    row, *_ = row_logsumexp(x, y, 3.0, ceiling=Ceiling(limit, *seen), backend=backend)
    assert row.isfinite().tolist() == [i == 3 for i in range(9)]
    gradient, _ = torch.autograd.grad(torch.where(row.isinf(), 0.0, row).sum(), (x, y))
    assert gradient.isfinite().all()
    assert (gradient.abs().sum(1) > 0).tolist() == [i == 3 for i in range(9)]


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_nan_is_not_left_out(backend, guided):
    if backend == "triton":
        pytest.importorskip("triton")
    x, y = (unit(9, 4, seed=s, dtype=torch.float32, device=DEVICE) for s in (0, 1))
    x[2] = torch.nan
    seen = (unit(9, 4, seed=2, dtype=torch.float32, device=DEVICE), y) if guided else ()
    limit = torch.full((9,), 0.9 if guided else 0.0, device=DEVICE)
    row, *_ = row_logsumexp(x, y, 3.0, ceiling=Ceiling(limit, *seen), backend=backend)
    assert row.isnan().tolist() == [i == 2 for i in range(9)]


def test_limits_are_above_what_rounding_does():
    """⟨x, x⟩ in another order of summation stays below the limit of its row, for any width and norm."""
    for dtype in (torch.float32, torch.float64):
        for D in (1, 7, 512):
            x = 10.0 ** torch.linspace(-10, 10, 40)[:, None] * unit(40, D, seed=D, dtype=dtype)
            limit = ceiling_above(x.to(dtype), x.to(dtype), 0.0)
            backwards = (x.flip(1).to(dtype) @ x.flip(1).to(dtype).T).diagonal()
            assert (backwards <= limit).all()
            assert (limit <= backwards * (1 + 1e-3)).all()


# opcheck reads .grad of copies that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.thorough
def test_operators_keep_their_promises_to_pytorch(guided):
    x, y = leaves(unit(6, 4, seed=0, dtype=torch.float32), unit(6, 4, seed=1, dtype=torch.float32))
    scale, limit = torch.tensor(3.0, requires_grad=True), torch.full((6,), 0.5)
    seen = (x.detach()[:, :2], y.detach()[:, :2]) if guided else (None, None)
    tail = (None, None, None, None, limit, *seen, False, SEPARATE, "float32", "float32", "eager", "")
    torch.library.opcheck(operators.logsumexp, (x, y, scale, *tail))
    torch.library.opcheck(operators.matching, (x, y, "float32", "eager", ""))
    teacher = (x.detach()[:, :3], y.detach()[:, :3], torch.tensor(2.0))
    torch.library.opcheck(operators.soft_cross_entropy, (x, y, scale, *teacher, "float32", "float32", "eager", ""))
    torch.library.opcheck(operators.total, (torch.arange(3.0, requires_grad=True), ""))
