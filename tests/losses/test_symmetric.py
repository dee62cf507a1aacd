"""Symmetric similarities: the operation, nt_xent_loss and sup_con_loss, against the reference and other libraries."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, examples, gradients, leaves, outcomes, tile_size, unit
from megabatch import reference, ring
from megabatch.tiles import eager, plan
from products import operations
from rounding import similarities_rounded_twice


def some_labels(N, kinds, seed):
    return torch.randint(-3, kinds - 3, (N,), generator=torch.Generator().manual_seed(seed))


@examples(40)
@given(
    N=st.integers(0, 40),
    D=st.sampled_from((1, 5, 200)),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    log_scale=st.floats(-3, 4),
    exclude=st.sampled_from([None, "diagonal", "ids"]),
    seed=st.integers(0, 1000),
)
def test_symmetric_logsumexp(N, D, tile, log_scale, exclude, seed):
    inputs = leaves(unit(N, D, seed=seed), torch.tensor(10**log_scale, dtype=torch.float64))
    ids = some_labels(N, 4, seed)
    left_out = {None: None, "diagonal": torch.eye(N, dtype=torch.bool), "ids": ids[:, None] == ids}[exclude]
    weight = torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with tile_size(*tile):
        found = mb.pairwise_symmetric_logsumexp(*inputs, exclude=ids if exclude == "ids" else exclude)
        found_gradients = gradients([found], [weight], inputs)
    wanted = reference.pairwise_logsumexp(inputs[0], inputs[0], inputs[1], left_out=left_out)[0]
    wanted_gradients = gradients([wanted], [weight], inputs)
    for actual, expected in zip([found.detach(), *found_gradients], [wanted.detach(), *wanted_gradients], strict=True):
        assert_equal_to_rounding(actual, expected, 10**log_scale)


LOSSES = {
    "nt_xent_loss": (
        lambda z, labels, scale, **o: mb.nt_xent_loss(*z.chunk(2), scale, **o),
        lambda z, labels, scale: reference.nt_xent_loss(*z.chunk(2), scale),
    ),
    "sup_con_loss out": (mb.sup_con_loss, reference.sup_con_loss),
    "sup_con_loss in": (
        lambda *a, **o: mb.sup_con_loss(*a, form="in", **o),
        lambda *a: reference.sup_con_loss(*a, form="in"),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@examples(40)
@given(
    pairs=st.integers(1, 20),
    D=st.sampled_from((1, 3, 200)),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    log_scale=st.floats(-3, 4),
    kinds=st.sampled_from([1, 3, 15, 1000]),
    noise=st.sampled_from([0.0, 0.3, 10.0]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients(loss, pairs, D, tile, log_scale, kinds, noise, seed):
    mine, dense = LOSSES[loss]
    z = torch.cat(aligned_pairs(pairs, D, noise=noise, seed=seed))
    labels = some_labels(2 * pairs, kinds, seed)
    inputs = leaves(z, torch.tensor(10**log_scale, dtype=torch.float64))
    with tile_size(*tile):
        found = outcomes(lambda z, scale: mine(z, labels, scale), inputs)
    wanted = outcomes(lambda z, scale: dense(z, labels, scale), inputs)
    assert found[0] >= 0
    for actual, expected in zip(found, wanted, strict=True):
        assert_equal_to_rounding(actual, expected, 10**log_scale)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss):
    labels = torch.tensor([0, 1, 2, 0, 4, 5, 1, 1])
    inputs = leaves(unit(8, 4, seed=0), torch.tensor(3.0, dtype=torch.float64))
    with tile_size(3, 2):
        assert torch.autograd.gradcheck(lambda z, scale: LOSSES[loss][0](z, labels, scale), inputs)


@pytest.mark.quick({"scale": 100.0, "noise": 0.05}, {"scale": 1e4, "noise": 0.0})
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 100.0])
def test_never_negative_and_always_finite(loss, dtype, scale, noise):
    z = torch.cat(aligned_pairs(33, 24, noise=noise, seed=3)).to(dtype).requires_grad_()
    labels = torch.arange(33).repeat(2)
    with tile_size(16, 24):
        value = LOSSES[loss][0](z, labels, scale)
    assert value >= 0
    assert value.isfinite()
    (gradient,) = torch.autograd.grad(value, z)
    assert gradient.isfinite().all()
    assert gradient.dtype == dtype


@pytest.mark.parametrize("loss", LOSSES)
def test_small_losses_keep_their_digits(loss):
    """One positive each, at distance 0, and 62 others at cosine 0: dense float32 sees 1 + 1e-9 = 1 and returns exactly 0."""
    z, labels = torch.eye(32).repeat(2, 1).requires_grad_(), torch.arange(32).repeat(2)
    value = LOSSES[loss][0](z, labels, 25.0)
    wanted = torch.log1p(62 * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    assert abs(value.item() / wanted.item() - 1) < 1e-6
    (gradient,) = torch.autograd.grad(value, z)
    exact = z.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(LOSSES[loss][1](exact, labels, 25.0), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=0)


# Noise between views, scale. Above it, positives are so certain that the dense "in" form, 1 − 1 in its gradient, is wrong in
# float64 as well.
REGIMES = {"untrained": (10.0, 14.0), "training": (0.7, 50.0), "trained": (0.3, 50.0)}


@pytest.mark.quick(
    {"regime": "training", "dtype": torch.float32, "loss": "sup_con_loss out"},
    {"regime": "trained", "dtype": torch.float16, "loss": "nt_xent_loss"},
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_the_dense_one(loss, regime, dtype):
    with tile_size(64, 40):
        found, bar, _ = errors(loss, *REGIMES[regime], dtype, seeds=16, backend="eager")
    assert (found <= 2 * bar).all(), (found, bar)


@pytest.mark.quick  # none of them in `make test`, and all where other processors are imitated
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on inf and NaN, which are meant
@pytest.mark.parametrize("loss", ["nt_xent_loss", "sup_con_loss out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16 products
def test_error_of_kernels(loss, dtype):
    with mock.patch.object(plan, "SYMMETRIC_SQUARE", 256), similarities_rounded_twice():
        # The scale's gradient is one number: of fewer seeds its error may be next to nothing by chance.
        seeds = 2 if loss == "nt_xent_loss" else 8
        found, *bars = errors(loss, *REGIMES["training"], dtype, seeds, backend="triton", pairs=150)
    assert (found <= 2 * torch.maximum(*bars)).all(), (found, bars)


@pytest.mark.quick(
    {"rows": 513, "exclude": None, "hostile": True},
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rows", [1, 255, 513])
@pytest.mark.parametrize("exclude", [None, "diagonal", "ids"])
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.thorough
def test_kernels_over_several_squares(rows, exclude, hostile):
    """Against the dense form in float64: ragged squares and rectangles, and rows far from what one shift for all can hold."""
    z = unit(rows, 24, seed=1, dtype=torch.float32)
    if hostile:
        z = z * torch.logspace(-1, 1, rows)[:, None]
    weights = unit(rows, seed=2, dtype=torch.float32)
    ids = torch.arange(rows) % 7
    excluded = ids if exclude == "ids" else exclude
    inputs = leaves(z, torch.tensor(12.0))

    def mine(z, scale, backend):
        return (
            (mb.pairwise_symmetric_logsumexp(z, scale, exclude=excluded, backend=backend) * weights)
            .nan_to_num(neginf=0.0)
            .sum()
        )

    def dense(z, scale):
        logits = scale * z @ z.T
        if exclude == "diagonal":
            logits = logits.masked_fill(torch.eye(rows, dtype=torch.bool), -torch.inf)
        elif exclude == "ids":
            logits = logits.masked_fill(ids[:, None] == ids, -torch.inf)
        return (logits.logsumexp(1) * weights.to(z.dtype)).nan_to_num(neginf=0.0).sum()

    wide = leaves(*(t.double() for t in inputs))
    with mock.patch.object(plan, "SYMMETRIC_SQUARE", 256), similarities_rounded_twice():
        found = outcomes(partial(mine, backend="triton"), inputs)
        rounded_twice = outcomes(partial(mine, backend="eager"), wide)
    for actual, noisy, expected in zip(found, rounded_twice, outcomes(dense, wide), strict=True):
        error, bar = ((values - expected.nan_to_num()).norm() for values in (actual, noisy))
        assert error <= 2 * bar + 2e-6 * expected.nan_to_num().norm()  # the rounding of everything else


def errors(loss, noise, scale, dtype, seeds, backend, pairs=96):
    """Root mean squares over seeds, of the value and each gradient: ours, those of the dense loss in the same type, and ours in
    float64, which is exact, or inside `similarities_rounded_twice` exact but for its products.
    """
    mine, dense = LOSSES[loss]
    labels = torch.arange(pairs).remainder(40).repeat(2)
    squares = []
    for seed in range(0, 2 * seeds, 2):
        inputs = [torch.cat(aligned_pairs(pairs, 48, noise=noise, seed=seed)).to(dtype), torch.tensor(scale, dtype=dtype)]
        exact = outcomes(lambda z, s: dense(z, labels, s), leaves(*(t.double() for t in inputs)))
        found = outcomes(lambda z, s: mine(z, labels, s, backend=backend), leaves(*inputs))
        bar = outcomes(lambda z, s: dense(z, labels, s), leaves(*inputs))
        wide = outcomes(lambda z, s: mine(z, labels, s, backend="eager"), leaves(*(t.double() for t in inputs)))
        squares.append([[(a - b).square().sum() for a, b in zip(result, exact, strict=True)] for result in (found, bar, wide)])
    return torch.tensor(squares).mean(0).sqrt()


@pytest.mark.parametrize("form", ["out", "in"])
def test_no_rows(form):
    (z,) = leaves(unit(0, 4, seed=0))
    value = mb.sup_con_loss(z, torch.zeros(0, dtype=torch.int64), form=form)
    assert value == 0
    assert torch.autograd.grad(value, z)[0].shape == (0, 4)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_positives_and_no_negatives(loss):
    for labels in (torch.arange(6), torch.zeros(6, dtype=torch.uint8)):
        inputs = leaves(unit(6, 4, seed=0), torch.tensor(3.0, dtype=torch.float64))
        found = outcomes(lambda z, scale, labels=labels: LOSSES[loss][0](z, labels, scale), inputs)
        wanted = outcomes(lambda z, scale, labels=labels: LOSSES[loss][1](z, labels, scale), inputs)
        for actual, expected in zip(found, wanted, strict=True):
            assert_equal_to_rounding(actual, expected, 3.0)


def test_products_of_similarities_are_formed_once():
    """Whole squares of T rows on the diagonal, half of the rest: N²·D·(1 + T/N) operations, and no other in forward."""
    N, D, T = 320, 16, 20
    z = unit(N, D, seed=0).requires_grad_()
    with tile_size(T, 50):
        forward = operations(eager, lambda: mb.pairwise_symmetric_logsumexp(z.detach(), 5.0))
        both = operations(eager, lambda: mb.pairwise_symmetric_logsumexp(z, 5.0).sum().backward())
        general = operations(eager, lambda: mb.pairwise_logsumexp(z, z, 5.0)[0].sum().backward())
    assert forward == N * D * (N + T)
    # Backward: the similarities again, g·z for all pairs, once as rows and once as columns.
    assert both == 2 * forward + 2 * N * N * D
    assert general == 8 * N * N * D


def test_losses_form_half_the_products():
    N, D, T = 160, 16, 20
    z1, z2 = unit(N, D, seed=0), unit(N, D, seed=1)
    with tile_size(T, T):
        assert operations(eager, lambda: mb.nt_xent_loss(z1, z2)) == 2 * N * N * D + 2 * N * D * (N + T)  # a dense one: 8·N²·D
        labels = torch.arange(N) % 8
        assert operations(eager, lambda: mb.sup_con_loss(z1, labels)) == N * D * (N + T)
        # "in": labels of one tile each, so that the squares on the diagonal are all there is of positives.
        assert operations(eager, lambda: mb.sup_con_loss(z1, labels, form="in")) == N * D * (N + T) + 2 * N * D * T


def as_pml(z, labels, scale, name, reducer=None):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    reducers = pytest.importorskip("pytorch_metric_learning.reducers")
    return getattr(losses, name)(temperature=1 / scale, reducer=reducer or reducers.MeanReducer())(z, labels)


def test_nt_xent_is_pytorch_metric_learnings_with_one_label_a_pair():
    z = torch.cat(aligned_pairs(30, 8, noise=1.0, seed=0))
    labels = torch.arange(30).repeat(2)
    (z,) = leaves(z)
    found = outcomes(lambda z: mb.nt_xent_loss(*z.chunk(2), 8.0), [z])
    dense = outcomes(lambda z: reference.nt_xent_loss(*z.chunk(2), 8.0), [z])
    # Its cosine similarity normalises z, which is of unit length already: what it adds to the gradient is along z.
    theirs = outcomes(lambda z: as_pml(z, labels, 8.0, "NTXentLoss"), [z])
    own = outcomes(lambda z: mb.nt_xent_loss(*F.normalize(z, dim=1).chunk(2), 8.0), [z])
    for a, b in ((found, dense), (own, theirs)):
        torch.testing.assert_close(a, b)


def test_sup_con_is_pytorch_metric_learnings_where_every_row_has_a_positive():
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 1])
    (z,) = leaves(unit(10, 6, seed=4))
    found = outcomes(lambda z: mb.sup_con_loss(F.normalize(z, dim=1), labels, 8.0), [z])
    dense = outcomes(lambda z: reference.sup_con_loss(F.normalize(z, dim=1), labels, 8.0), [z])
    theirs = outcomes(lambda z: as_pml(z, labels, 8.0, "SupConLoss"), [z])
    torch.testing.assert_close(found, dense)
    torch.testing.assert_close(found, theirs)


def test_where_pytorch_metric_learning_means_something_else():
    labels = torch.tensor([0, 0, 1, 2])
    (z,) = leaves(unit(4, 6, seed=4))
    mine, dense = mb.sup_con_loss(z, labels, 8.0), reference.sup_con_loss(z, labels, 8.0)
    torch.testing.assert_close(mine, dense)
    # A row without a positive has no loss; a plain mean there counts it as 0.
    torch.testing.assert_close(as_pml(z, labels, 8.0, "SupConLoss"), mine / 2)
    # Its default reducer divides by the number of losses above 0, which is the same unless a loss is 0 by rounding.
    average = pytest.importorskip("pytorch_metric_learning.reducers").AvgNonZeroReducer()
    torch.testing.assert_close(as_pml(z, labels, 8.0, "SupConLoss", average), mine)
    # Of several positives its NTXentLoss keeps the others out of the denominator, which is neither form of sup_con_loss.
    labels = torch.tensor([0, 0, 0, 1, 1])
    (z,) = leaves(unit(5, 6, seed=4))
    assert abs(as_pml(z, labels, 8.0, "NTXentLoss") - mb.sup_con_loss(z, labels, 8.0)) > 0.1
    # And without any negative it returns 0, where the formula gives the logarithm of the number of positives at least.
    labels = torch.zeros(5, dtype=torch.int64)
    assert as_pml(z, labels, 8.0, "SupConLoss") == 0
    assert mb.sup_con_loss(z, labels, 8.0) > torch.tensor(4.0).log()


def test_nt_xent_is_lightlys():
    loss = pytest.importorskip("lightly.loss").NTXentLoss(temperature=1 / 8)
    inputs = leaves(*aligned_pairs(30, 8, noise=1.0, seed=0))
    found = outcomes(lambda a, b: mb.nt_xent_loss(F.normalize(a, dim=1), F.normalize(b, dim=1), 8.0), inputs)
    torch.testing.assert_close(found, outcomes(loss, inputs))


SHARES = {1: [11], 2: [3, 8], 3: [5, 0, 6]}


def on_a_rank(group, rank, loss, route, counts, tile):
    z, labels = data(counts)
    if loss == "nt_xent_loss":
        z = torch.cat([view.split(counts)[rank] for view in z.chunk(2)])
    else:
        z, labels = z.split([2 * c for c in counts])[rank], labels.split([2 * c for c in counts])[rank]
    inputs = leaves(z, torch.tensor(6.0, dtype=torch.float64))
    with ring.use_route(route), tile_size(*tile):
        if loss == "self":
            value = (mb.pairwise_symmetric_logsumexp(*inputs, exclude=labels, group=group) * labels).sum() * len(counts)
        else:
            value = LOSSES[loss][0](inputs[0], labels, inputs[1], group=group)
        assert value.requires_grad
        value.backward()
    return value.detach(), inputs[0].grad, inputs[1].grad


def data(counts):
    return torch.cat(aligned_pairs(sum(counts), 5, noise=1.0, seed=2)), some_labels(2 * sum(counts), 7, 1)


@pytest.mark.quick(
    {"world": 3, "route": "ring", "loss": "self"},
    {"world": 3, "route": "ring", "loss": "sup_con_loss in"},
    {"world": 3, "route": "gather", "loss": "sup_con_loss out"},
    {"world": 4, "loss": "nt_xent_loss"},
)
@pytest.mark.parametrize("loss", ["self", *LOSSES])
@pytest.mark.parametrize(("world", "route"), [(1, "ring"), (2, "ring"), (3, "ring"), (3, "gather"), (4, "two_level:2")])
def test_ranks_equal_one_process(pool, loss, world, route):
    counts = SHARES.get(world, [2, 1, 5, 3])
    answers = pool.run(on_a_rank, world, loss, route, counts, (3, 2))
    values, dz, dscale = ([answer[i] for answer in answers] for i in range(3))
    found = [sum(values) / world, torch.cat(dz) / world, sum(dscale) / world]
    if loss == "nt_xent_loss":  # each rank has its part of both views
        found[1] = torch.cat([torch.cat([d.chunk(2)[view] for d in dz]) for view in range(2)]) / world
    z, labels = data(counts)

    def whole(z, scale):
        if loss != "self":
            return LOSSES[loss][1](z, labels, scale)
        row = reference.pairwise_logsumexp(z, z, scale, left_out=labels[:, None] == labels)[0]
        return (row * labels).sum()

    wanted = outcomes(whole, leaves(z, torch.tensor(6.0, dtype=torch.float64)))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def products_on_a_rank(group, rank, counts):
    z = unit(sum(counts), 8, seed=0).split(counts)[rank]
    with ring.use_route("ring"), tile_size(5, 5):
        return operations(eager, lambda: mb.pairwise_symmetric_logsumexp(z, 5.0, group=group))


def test_ranks_share_the_half(pool):
    counts = [20, 20, 20, 20]
    found = pool.run(products_on_a_rank, 4, counts)
    assert found == [8 * 20 * (20 + 5) + 3 * 8 * 20 * 20] * 4, "own half, and half of every block that comes by"


def test_messages():
    z = unit(6, 4, seed=0)
    with pytest.raises(ValueError, match=r'exclude must be None, "diagonal" or a tensor of integers, got \'rows\''):
        mb.pairwise_symmetric_logsumexp(z, exclude="rows")
    with pytest.raises(TypeError, match="exclude must be None"):
        mb.pairwise_symmetric_logsumexp(z, exclude=torch.zeros(6))
    with pytest.raises(ValueError, match=r"labels must have shape \(6,\), one entry for each row of z"):
        mb.sup_con_loss(z, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="form must be 'out' or 'in', got 'both'"):
        mb.sup_con_loss(z, torch.zeros(6, dtype=torch.int64), form="both")
    with pytest.raises(ValueError, match='there are no kernels for the positives of form="in"'):
        mb.sup_con_loss(z.float(), torch.zeros(6, dtype=torch.int64), form="in", backend="triton")
    with pytest.raises(ValueError, match="z1 must have at least one row"):
        mb.nt_xent_loss(z[:0], z[:0])
