"""CLIP's loss at several widths with kernels: interpreted, against the dense reference and PyTorch operations.

The interpreter has no bfloat16 products. What is tested of that type is everything around the passes, with passes in PyTorch
operations in the place of kernels; tests/gpu has the rest.
"""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, leaves, no_dense_path, outcomes, tile_size, unit
from megabatch import reference, ring
from megabatch.operators import autograd
from megabatch.tiles import eager
from rounding import similarities_rounded_twice

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("small_launches"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy on inf and NaN, which are meant
]

EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def passes_without_kernels(monkeypatch):
    """One pass for each width, in PyTorch operations."""
    monkeypatch.setattr(autograd, "backend_for", lambda name, block: eager)
    with no_dense_path():
        yield


def on_kernels(*arguments, **options):
    return mb.matryoshka_clip_loss(*arguments, **options, backend="triton")


def given(N, D, scale, *, dtype=torch.float32, noise=1.0, seed=0):
    return leaves(*(t.to(dtype) for t in (*aligned_pairs(N, D, noise=noise, seed=seed), torch.tensor(scale))))


def one_direction(x, y, scale, widths, weights):
    """Dense."""
    labels, total = torch.arange(len(x)), 0.0
    for width, weight in zip(widths, weights, strict=True):
        prefixes = [F.normalize(side[:, :width], dim=1) for side in (x, y)]
        total = total + weight * F.cross_entropy(scale * prefixes[0] @ prefixes[1].T, labels)
    return total


def assert_close(found, wanted, exponent):
    """Float32 results whose exponents are rounded at the size `exponent`; 60 covers the length of the sums."""
    for actual, expected in zip(found, wanted, strict=True):
        bound = 60 * EPS * (1 + exponent) * (1 + expected.abs().max().item())
        assert (actual - expected).abs().max() <= bound


@pytest.mark.quick({"N": 150}, {"N": 70})
@pytest.mark.parametrize(
    ("N", "widths", "scale", "id_count"),
    [
        (1, [3], 10.0, None),
        (150, [33, 7], 20.0, None),
        (70, [40, 9], 100.0, 5),
        (30, [1, 8], 20.0, None),
        (129, [64], 0.1, 1),
        (40, [130, 8], 14.0, None),
    ],
)
def test_value_and_gradients(N, widths, scale, id_count):
    inputs = given(N, max(widths) + 3, scale)
    inputs[0].data *= 3.0
    ids = None if id_count is None else torch.arange(N) % id_count
    weights = torch.linspace(0.5, 2.0, len(widths)).tolist()
    found = outcomes(lambda *a: on_kernels(*a, widths=widths, weights=weights, ids=ids), inputs)
    wide = leaves(*(t.double() for t in inputs))
    wanted = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, widths, weights, ids), wide)
    assert found[0] >= 0
    longest = max((1 / side[:, : min(widths)].detach().norm(dim=1)).max().item() for side in inputs[:2])
    assert_close(found, wanted, scale * max(1.0, longest))


def test_one_direction():
    inputs, widths, weights = given(90, 36, 15.0), [33, 7], [1.0, 0.5]
    found = outcomes(lambda *a: on_kernels(*a, widths=widths, weights=weights, symmetric=False), inputs)
    wanted = outcomes(lambda *a: one_direction(*a, widths, weights), leaves(*(t.double() for t in inputs)))
    assert_close(found, wanted, 15.0 * 10)


def root_mean_squares(functions, exact, draws):
    """Errors of each function, of its value and its gradients."""
    squares = []
    for inputs in draws:
        truth = outcomes(exact, leaves(*(t.double() for t in inputs)))
        results = [outcomes(function, leaves(*inputs)) for function in functions]
        squares.append([[(a - b).square().sum() for a, b in zip(result, truth, strict=True)] for result in results])
    return torch.tensor(squares).mean(0).sqrt()


def dense(widths):
    return lambda *a: reference.matryoshka_clip_loss(*a, widths, [1.0] * len(widths))


def exact_but_for_products(widths):
    """Inside `similarities_rounded_twice`, and by PyTorch operations."""

    def loss(image, text, scale):
        prefixes = [[F.normalize(side.double()[:, :width], dim=1) for side in (image, text)] for width in widths]
        return sum(mb.clip_loss(*sides, scale.double(), backend="eager") for sides in prefixes)

    return loss


@pytest.mark.quick  # no case of it
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_error_is_at_most_twice_that_of_dense_or_of_similarities_rounded_twice(dtype):
    draws = [given(96, 48, 50.0, dtype=dtype, noise=2.0, seed=seed) for seed in range(0, 12, 2)]
    widths = [8, 24, 48]
    functions = [lambda *a: on_kernels(*a, widths=widths), dense(widths), exact_but_for_products(widths)]
    with similarities_rounded_twice():
        found, *bars = root_mean_squares(functions, dense(widths), draws)
    assert (found <= 2 * torch.maximum(*bars)).all(), (found, bars)


@pytest.mark.quick({"scale": 14.0, "dtype": torch.float16})
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("noise", "scale"), [(10.0, 14.0), (2.0, 50.0), (0.7, 50.0)])
def test_unit_prefixes_are_rounded_once(passes_without_kernels, noise, scale, dtype):
    draws = [given(200, 200, scale, dtype=dtype, noise=noise, seed=seed) for seed in range(0, 12, 2)]
    widths = [32, 64, 200]
    found, bar = root_mean_squares([lambda *a: on_kernels(*a, widths=widths), dense(widths)], dense(widths), draws)
    assert (found <= 2 * bar).all(), (found, bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_dense_code(passes_without_kernels, dtype):
    widths = [32, 64, 200]

    def under_autocast(function):
        def run(*a):
            with torch.autocast("cpu", dtype):
                return function(*a)

        return run

    draws = [given(200, 200, 50.0, noise=2.0, seed=seed) for seed in range(0, 12, 2)]
    functions = [under_autocast(lambda *a: on_kernels(*a, widths=widths)), under_autocast(dense(widths))]
    found, bar = root_mean_squares(functions, dense(widths), draws)
    assert (found <= 2 * bar).all(), (found, bar)


def test_gradients_of_widths_are_added_before_they_are_rounded(passes_without_kernels):
    """A bfloat16 gradient of three widths is the float32 one of the same numbers, rounded once."""
    x, y, _ = given(40, 24, 20.0, dtype=torch.bfloat16)
    wide = leaves(x.float(), y.float())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.autograd.grad(on_kernels(*wide, 20.0, widths=[5, 12, 24]), wide)
    found = torch.autograd.grad(on_kernels(x, y, 20.0, widths=[5, 12, 24]), (x, y))
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, expected.bfloat16())


def test_small_losses_keep_their_digits():
    loss = on_kernels(torch.eye(64), torch.eye(64), 25.0, widths=[64])
    wanted = torch.log1p(63 * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    assert abs(loss.item() / wanted.item() - 1) < 1e-6


def test_prefixes_of_length_zero():
    inputs = given(6, 5, 3.0)
    inputs[0].data[2, :2], inputs[1].data[4, :2] = 0.0, 0.0
    found = outcomes(lambda *a: on_kernels(*a, widths=[2, 5]), inputs)
    wide = leaves(*(t.double() for t in inputs))
    for actual, expected in zip(
        found, outcomes(lambda *a: reference.matryoshka_clip_loss(*a, [2, 5], [1.0] * 2), wide), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_nan_is_where_pytorch_operations_have_it():
    inputs = given(6, 5, 3.0)
    inputs[0].data[2, 3] = torch.nan
    widths = {"widths": [2, 5], "weights": [1.0, 1.0]}
    found = outcomes(lambda *a: on_kernels(*a, **widths), inputs)
    wanted = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, **widths, backend="eager"), inputs)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, wanted, strict=True))
    assert on_kernels(*inputs, widths=[3]).isfinite()


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.thorough
def test_a_frozen_side(frozen):
    inputs = given(30, 12, 10.0)
    wanted = torch.autograd.grad(on_kernels(*inputs, widths=[5, 12]), inputs)
    inputs[frozen].requires_grad_(False)
    on_kernels(*inputs, widths=[5, 12]).backward()
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, wanted[1 - frozen])
    torch.testing.assert_close(inputs[2].grad, wanted[2])


@pytest.mark.thorough
@pytest.mark.parametrize("symmetric", [True, False])
def test_compiles_as_one_graph(symmetric):
    def loss(x, y, scale):
        return on_kernels(x, y, scale, widths=[3, 8], symmetric=symmetric)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(outcomes(compiled, given(20, 8, 5.0)), outcomes(loss, given(20, 8, 5.0)), 5.0)  # by other operators


def shared(counts):
    return [
        *(t.float() for t in aligned_pairs(sum(counts), 9, noise=1.0, seed=2)),
        torch.tensor(6.0),
        torch.arange(sum(counts)) % 7,
    ]


def on_a_rank(group, rank, route, counts, symmetric):
    x, y, scale, ids = shared(counts)
    x, y, ids = (t.split(counts)[rank] for t in (x, y, ids))
    options = {"widths": [2, 5, 9], "weights": [1.0, 2.0, 0.5], "symmetric": symmetric}
    if symmetric:
        options["ids"] = ids
    with ring.use_route(route):
        return outcomes(lambda *a: on_kernels(*a, **options, group=group), leaves(x, y, scale))


@pytest.mark.quick({"world": 3, "route": "ring", "symmetric": True})
@pytest.mark.parametrize(
    ("world", "route", "symmetric"),
    [(1, "ring", True), (2, "ring", True), (3, "ring", True), (3, "gather", True), (3, "ring", False)],
)
@pytest.mark.thorough
def test_ranks_equal_one_process(pool, world, route, symmetric):
    counts = {1: [11], 2: [3, 8], 3: [5, 0, 6]}[world]
    values, dx, dy, dscale = zip(*pool.run(on_a_rank, world, route, counts, symmetric), strict=True)
    found = [sum(values) / world, torch.cat(dx) / world, torch.cat(dy) / world, sum(dscale) / world]
    *inputs, ids = shared(counts)
    wide, given_widths = leaves(*(t.double() for t in inputs)), ([2, 5, 9], [1.0, 2.0, 0.5])
    if symmetric:
        wanted = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, *given_widths, ids), wide)
    else:
        wanted = outcomes(lambda *a: one_direction(*a, *given_widths), wide)
    longest = max((1 / side[:, :2].norm(dim=1)).max().item() for side in inputs[:2])
    assert_close(found, wanted, 6.0 * longest)


def test_both_ways_agree_in_any_layout():
    x = unit(60, 20, seed=0, dtype=torch.float32).T.contiguous().T
    y = unit(60, 40, seed=1, dtype=torch.float32)[:, ::2]
    found = outcomes(lambda *a: on_kernels(*a, 10.0, widths=[7, 20]), [t.requires_grad_() for t in (x, y)])
    with tile_size(16, 24):
        wanted = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, 10.0, widths=[7, 20], backend="eager"), [x, y])
    assert_close(found, wanted, 10.0 * 5)


def test_float64_has_no_kernels():
    x = unit(6, 4, seed=0)
    with pytest.raises(ValueError, match="its kernels compute in float32 at most, and the inputs are float64"):
        on_kernels(x, x, 1.0, widths=[2])
