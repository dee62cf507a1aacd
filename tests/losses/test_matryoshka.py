"""CLIP's loss at several widths: against the reference, clip_loss at one width, and sentence-transformers' MatryoshkaLoss."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import megabatch as mb
from helpers import aligned_pairs, assert_equal_to_rounding, examples, leaves, outcomes, tile_size, unit
from megabatch import reference, ring


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


@examples(40)
@given(
    N=st.integers(1, 30),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True),
    more=st.integers(0, 5),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    log_scale=st.floats(-3, 3),
    noise=st.sampled_from([0.0, 0.3, 10.0]),
    id_count=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients(N, widths, more, tile, log_scale, noise, id_count, seed):
    x, y = aligned_pairs(N, max(widths) + more, noise=noise, seed=seed)
    ids = None if id_count is None else torch.randint(id_count, (N,), generator=torch.Generator().manual_seed(seed))
    inputs = leaves(3.0 * x, y, number(10**log_scale))
    weights = torch.linspace(0.5, 2.0, len(widths)).tolist()
    with tile_size(*tile):
        found = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, widths=widths, weights=weights, ids=ids), inputs)
    wanted = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, widths, weights, ids), inputs)
    assert found[0] >= 0
    # A prefix far shorter than its row is made long again, and its gradient with it.
    longest = max((1 / side[:, : min(widths)].detach().norm(dim=1)).max().item() for side in inputs[:2])
    for actual, expected in zip(found, wanted, strict=True):
        assert_equal_to_rounding(actual, expected, 10**log_scale * longest)


def test_gradcheck():
    inputs = leaves(unit(6, 7, seed=0), unit(6, 7, seed=1), number(3.0))
    ids = torch.tensor([0, 1, 2, 0, 4, 5])
    with tile_size(4, 3):
        assert torch.autograd.gradcheck(
            lambda *a: mb.matryoshka_clip_loss(*a, widths=[2, 6], weights=[1.0, 3.0], ids=ids), inputs
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_width_is_clip_loss(dtype):
    x, y = (t.to(dtype) for t in aligned_pairs(40, 16, noise=0.7, seed=0))
    found = mb.matryoshka_clip_loss(x, y, 20.0, widths=[16])
    # Normalised in float32, then rounded once to the dtype of the inputs.
    wanted = mb.clip_loss(*(F.normalize(t.float(), dim=1).to(dtype).double() for t in (x, y)), 20.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_one_direction_is_info_nce_at_each_width():
    x, y = aligned_pairs(23, 16, noise=0.7, seed=0)
    inputs, widths, weights = leaves(x, y, number(20.0)), [16, 3], [1.0, 0.5]

    def one_by_one(x, y, scale):
        parts = [mb.info_nce_loss(F.normalize(x[:, :d], dim=1), F.normalize(y[:, :d], dim=1), scale=scale) for d in widths]
        return weights[0] * parts[0] + weights[1] * parts[1]

    found = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, widths=widths, weights=weights, symmetric=False), inputs)
    for actual, expected in zip(found, outcomes(one_by_one, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.quick({"scale": 50.0, "dtype": torch.float32})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("noise", "scale"), [(10.0, 14.0), (0.7, 50.0), (0.3, 100.0)])
def test_error_is_at_most_twice_the_dense_one(noise, scale, dtype):
    widths, weights = [8, 24, 48], [1.0, 1.0, 1.0]
    squares = []
    for seed in range(0, 32, 2):
        inputs = [*aligned_pairs(96, 48, noise=noise, seed=seed), number(scale)]
        inputs = [t.to(dtype) for t in inputs]
        exact = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, widths, weights), leaves(*(t.double() for t in inputs)))
        with tile_size(64, 40):
            found = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, widths=widths), leaves(*inputs))
        bar = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, widths, weights), leaves(*inputs))
        squares.append([[(a - b).square().sum() for a, b in zip(result, exact, strict=True)] for result in (found, bar)])
    found, bar = torch.tensor(squares).mean(0).sqrt()
    assert (found <= 2 * bar).all(), (found, bar)


def test_small_losses_keep_their_digits():
    x = torch.eye(64).requires_grad_()
    loss = mb.matryoshka_clip_loss(x, x.detach(), 25.0, widths=[64])
    wanted = torch.log1p(63 * torch.exp(number(-25.0)))
    assert abs(loss.item() / wanted.item() - 1) < 1e-6
    # An eye's gradient is along no row: what is left of it after the length is what it was.
    (gradient,) = torch.autograd.grad(loss, x)
    exact = torch.eye(64, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(reference.matryoshka_clip_loss(exact, exact.detach(), 25.0, [64], [1.0]), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_prefixes_of_length_zero():
    x, y = aligned_pairs(6, 5, noise=1.0, seed=0)
    x[2, :2], y[4, :2] = 0.0, 0.0
    inputs = leaves(x, y, number(3.0))
    found = outcomes(lambda *a: mb.matryoshka_clip_loss(*a, widths=[2, 5]), inputs)
    wanted = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, [2, 5], [1.0, 1.0]), inputs)
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


class Encoder(torch.nn.Module):
    """What sentence-transformers' losses ask of a model, for embeddings that are there already."""

    def forward(self, features):
        return {"sentence_embedding": features["embedding"]}

    def get_embedding_dimension(self):
        return None


def test_it_is_sentence_transformers_loss():
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    widths, weights = [4, 8, 16], [0.25, 0.5, 1.0]
    model = Encoder()
    directions = ("query_to_doc", "doc_to_query")
    inner = losses.MultipleNegativesRankingLoss(model, scale=15.0, directions=directions, partition_mode="per_direction")
    theirs = losses.MatryoshkaLoss(model, inner, widths, weights)
    inputs = leaves(*aligned_pairs(25, 16, noise=1.0, seed=0))

    def their_loss(x, y):
        return theirs([{"embedding": x}, {"embedding": y}], None)

    found = outcomes(lambda x, y: mb.matryoshka_clip_loss(x, y, 15.0, widths=widths, weights=weights), inputs)
    dense = outcomes(lambda x, y: reference.matryoshka_clip_loss(x, y, 15.0, widths, weights), inputs)
    torch.testing.assert_close(found, dense)
    torch.testing.assert_close(found, outcomes(their_loss, inputs))


def data(counts):
    return *aligned_pairs(sum(counts), 7, noise=1.0, seed=2), number(6.0), torch.arange(sum(counts)) % 7


def on_a_rank(group, rank, route, counts):
    x, y, scale, ids = data(counts)
    x, y, ids = (t.split(counts)[rank] for t in (x, y, ids))
    with ring.use_route(route), tile_size(3, 2):
        return outcomes(
            lambda *a: mb.matryoshka_clip_loss(*a, widths=[2, 5, 7], weights=[1.0, 2.0, 0.5], ids=ids, group=group),
            leaves(x, y, scale),
        )


@pytest.mark.quick({"world": 3}, {"world": 4})
@pytest.mark.parametrize(("world", "route"), [(1, "ring"), (2, "ring"), (3, "ring"), (3, "gather"), (4, "two_level:2")])
def test_ranks_equal_one_process(pool, world, route):
    counts = {1: [11], 2: [3, 8], 3: [5, 0, 6], 4: [2, 1, 5, 3]}[world]
    values, dx, dy, dscale = zip(*pool.run(on_a_rank, world, route, counts), strict=True)
    found = [sum(values) / world, torch.cat(dx) / world, torch.cat(dy) / world, sum(dscale) / world]
    *inputs, ids = data(counts)
    wanted = outcomes(lambda *a: reference.matryoshka_clip_loss(*a, [2, 5, 7], [1.0, 2.0, 0.5], ids), leaves(*inputs))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_messages():
    x = unit(6, 4, seed=0)
    for widths in ([], [4, 4], [0, 4], [5]):
        with pytest.raises(ValueError, match="widths must be different integers from 1 to 4, the embedding dimension, got"):
            mb.matryoshka_clip_loss(x, x, 1.0, widths=widths)
    with pytest.raises(TypeError, match="widths must be a sequence of integers, got 4"):
        mb.matryoshka_clip_loss(x, x, 1.0, widths=4)
    with pytest.raises(ValueError, match="weights must be 2 numbers, one for each width, got 1"):
        mb.matryoshka_clip_loss(x, x, 1.0, widths=[2, 4], weights=[1.0])
    with pytest.raises(TypeError, match=r"weights must be None or a sequence of numbers, got \['a'\]"):
        mb.matryoshka_clip_loss(x, x, 1.0, widths=[2], weights=["a"])
