"""Losses of batches that fit in one tile: the same results as over several tiles, in few calls, and what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, leaves, outcomes, tile_size
from megabatch import dispatch
from megabatch.tiles import plan

N, D = 23, 9
IDS = torch.arange(N) // 3
LABELS = torch.tensor([0, 0, 1, 1, 1, 2]).repeat(4)[:N]  # and one label that occurs once
LABELS[5] = 9
SOLE = torch.arange(N) // 2

LOSSES = {
    "clip": mb.clip_loss,
    "clip ids": lambda x, y, s: mb.clip_loss(x, y, s, ids=IDS),
    "clip sum": lambda x, y, s: mb.clip_loss(x, y, s, reduction="sum"),
    "siglip": lambda x, y, s: mb.siglip_loss(x, y, s, s - 12),
    "siglip ids": lambda x, y, s: mb.siglip_loss(x, y, s, -5.0, ids=IDS),
    "siglip positives": lambda x, y, s: mb.siglip_loss(x, y, s, -5.0, ids=IDS, ids_are_positives=True),
    "siglip sum": lambda x, y, s: mb.siglip_loss(x, y, s, -5.0, reduction="sum"),
    "info_nce": lambda x, y, s: mb.info_nce_loss(x, y, scale=s),
    "info_nce symmetric ids": lambda x, y, s: mb.info_nce_loss(x, y, scale=s, symmetric=True, ids=IDS),
    "nt_xent": mb.nt_xent_loss,
    "nt_xent sum": lambda x, y, s: mb.nt_xent_loss(x, y, s, reduction="sum"),
    "sup_con": lambda x, y, s: mb.sup_con_loss(x + y, LABELS, s),
    "sup_con sum": lambda x, y, s: mb.sup_con_loss(x + y, LABELS, s, reduction="sum"),
    "sup_con sole": lambda x, y, s: mb.sup_con_loss(x + y, SOLE, s),
    "sup_con alone": lambda x, y, s: mb.sup_con_loss(x + y, torch.arange(N), s),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def over_tiles(loss):
    def run(*inputs):
        with tile_size(8, 8):
            return loss(*inputs)

    return run


class Calls(TorchDispatchMode):
    """Names of the operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@EVERY
@pytest.mark.parametrize("scale", [0.0, 10.0, 1000.0])
def test_same_results_as_over_several_tiles(name, scale):
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(scale, dtype=torch.float64))
    assert_same_outcomes(LOSSES[name], over_tiles(LOSSES[name]), inputs, exponent=4 * scale)


@EVERY
def test_few_calls(name):
    inputs = leaves(*(side.float() for side in aligned_pairs(N, D, noise=0.5, seed=1)), torch.tensor(10.0))
    with Calls() as few:
        LOSSES[name](*inputs).backward()
    assert len(few.names) <= 110
    assert not any("megabatch" in call for call in few.names), "an operator over tiles ran"


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_loss_of_rows_alone_has_a_limit_of_its_own(symmetric):
    inputs = leaves(*(side.float() for side in aligned_pairs(N, D, noise=0.5, seed=1)), torch.tensor(10.0))
    with Calls() as calls, dispatch.override(dense_cpu=0):
        mb.info_nce_loss(*inputs[:2], scale=inputs[2], symmetric=symmetric)
    assert any("megabatch" in call for call in calls.names) == symmetric, "over tiles in both directions, else in memory"


@pytest.mark.parametrize("scale", [20.0, 80.0])
def test_almost_certain_pairs_keep_their_digits(scale):
    """Where the dense float32 loss is 0 and has no gradient."""
    inputs = leaves(torch.eye(8), torch.eye(8), torch.tensor(scale))
    loss, dx, dy, dscale = outcomes(mb.clip_loss, inputs)
    exact = 7 * torch.tensor(-scale, dtype=torch.float64).exp()  # up to its square
    for actual, expected in ((loss, exact), (dscale, -exact), (dx.diagonal(), (-scale / 8 * exact).expand(8))):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert torch.equal(dx, dy)


@pytest.mark.parametrize("gap", [80.0, 87.0, 89.0, 100.0, 1e4])
def test_matches_far_below_another_pair(gap):
    """Where an exponential relative to the match overflows, and just before."""
    x, y = torch.eye(6), gap * torch.eye(6).roll(1, 0)
    y[2] = 0.0  # and a row without such a pair
    for name in ("clip", "info_nce", "nt_xent"):
        found, expected = (
            outcomes(LOSSES[name], leaves(x.to(t), y.to(t), torch.tensor(1.0, dtype=t))) for t in (torch.float32, torch.float64)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6 * gap)


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(name, bad):
    x, y = (side.float() for side in aligned_pairs(N, D, noise=0.5, seed=1))
    x[3, 2] = bad
    inputs = leaves(x, y, torch.tensor(10.0))
    few, many = outcomes(LOSSES[name], inputs), outcomes(over_tiles(LOSSES[name]), inputs)
    assert few[0].isfinite() == ("alone" in name)  # where no row has a positive, the loss is 0 whatever the similarities are
    for one, other in zip(few[1:], many[1:], strict=True):
        assert not one.isfinite().all() or other.isfinite().all()


@EVERY
def test_differentiating_twice_is_refused(name):
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    (dx,) = torch.autograd.grad(LOSSES[name](*inputs), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        (dx.square().sum() + inputs[0].sum()).backward()


def test_a_graph_is_used_once():
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    loss = mb.clip_loss(*inputs)
    loss.backward(retain_graph=True)
    first = inputs[0].grad.clone()
    loss.backward()
    assert torch.equal(inputs[0].grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@EVERY
def test_only_what_is_asked_for_is_computed_and_saved(name):
    x, y = aligned_pairs(200, D, noise=0.5, seed=1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
        mb.clip_loss(*leaves(x, y), 10.0)
    assert sum(saved) < 5 * x.numel() < 200 * 200
    for wanted in range(3):
        inputs = [x[:N].clone(), y[:N].clone(), torch.tensor(10.0, dtype=torch.float64)]
        whole = leaves(*inputs)
        inputs[wanted].requires_grad_()
        expected = torch.autograd.grad(LOSSES[name](*whole), whole)[wanted]
        assert torch.equal(torch.autograd.grad(LOSSES[name](*inputs), inputs[wanted])[0], expected)
    with torch.no_grad():
        assert not LOSSES[name](*whole).requires_grad


@EVERY
def test_autocast_rounds_inputs_and_nothing_else(name):
    inputs = leaves(*(side.float() for side in aligned_pairs(N, D, noise=0.5, seed=1)), torch.tensor(10.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = outcomes(LOSSES[name], inputs), outcomes(over_tiles(LOSSES[name]), inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "sup_con"])
def test_gradients_of_several_factors_at_once_and_of_two_backward_passes(name):
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    loss = LOSSES[name](*inputs)
    once, again = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    factors = torch.tensor([1.0, -3.0], dtype=torch.float64)
    batched = torch.autograd.grad(loss, inputs, factors, is_grads_batched=True)
    for first, second, both in zip(once, again, batched, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(both, torch.stack([first, -3 * first]))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sup_con alone"])  # which makes its labels itself
def test_the_default_device_does_not_matter(name):
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    expected = outcomes(LOSSES[name], inputs)
    with torch.device("meta"):
        found = outcomes(LOSSES[name], inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("sizes", [(1e19, 1e-37), (1e-37, 1e19)])
@pytest.mark.parametrize("name", ["clip", "siglip ids", "info_nce"])
def test_scale_times_embedding_may_overflow(name, sizes):
    """A library that gets the scale as a factor of a product multiplies one of its inputs by it first."""
    x, y = aligned_pairs(N, D, noise=3.0, seed=1)
    expected, _, _, dscale = outcomes(LOSSES[name], leaves(x, y, torch.tensor(100.0, dtype=torch.float64)))
    given = leaves((x * sizes[0]).float(), (y * sizes[1]).float(), torch.tensor(1e20))
    loss, *_, dscale_given = outcomes(LOSSES[name], given)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(dscale_given.double() * 1e18, dscale, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce", "nt_xent", "sup_con"])
def test_a_scale_of_zero_does_not_hide_what_is_not_finite(name):
    """A library's product by 0 is 0, whatever it multiplies."""
    x, y = aligned_pairs(N, D, noise=0.5, seed=1)
    x[3, 2] = torch.nan
    inputs = leaves(x, y, torch.tensor(0.0, dtype=torch.float64))
    assert all(result.isnan().any() for result in outcomes(LOSSES[name], inputs))


def test_fake_tensors_have_no_values_to_read():
    with FakeTensorMode():
        x, y = (torch.zeros(N, D, requires_grad=True) for _ in range(2))
        loss = mb.clip_loss(x, y, 10.0)
        loss.backward()
    assert loss.shape == ()
    assert x.grad.shape == (N, D)


@pytest.mark.parametrize("name", ["nt_xent", "sup_con"])
def test_weights_are_added_to_their_transpose_in_squares(name, monkeypatch):
    """The last square is not whole. Every sum is of the same two numbers, so the results have the same bits."""
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    whole = outcomes(LOSSES[name], inputs)
    monkeypatch.setattr(plan, "TRANSPOSED_CPU", 7)
    assert all(torch.equal(one, other) for one, other in zip(outcomes(LOSSES[name], inputs), whole, strict=True))


@pytest.mark.parametrize("name", ["siglip", "siglip ids", "siglip positives"])
def test_sigmoids_of_some_rows_at_a_time(name, monkeypatch):
    inputs = leaves(*aligned_pairs(N, D, noise=0.5, seed=1), torch.tensor(10.0, dtype=torch.float64))
    whole = outcomes(LOSSES[name], inputs)
    monkeypatch.setattr(plan, "SIGMOID_CPU", 7)
    for found, expected in zip(outcomes(LOSSES[name], inputs), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
