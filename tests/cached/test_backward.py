"""The cached step gives the loss and the gradients of the plain step; float64, 1e-10."""

import warnings
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from steps import Counted, Loss, N, assert_same, cached, data, gradients, in_chunks, plain, tower


@pytest.mark.parametrize("chunk_size", [1, 3, 4, N, 100, (2, 5), [N, 1]])
@pytest.mark.parametrize("budget", [None, 0, 300, "all", "auto"])
def test_equals_the_plain_step(chunk_size, budget):
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    wanted = plain(loss, pairs, modules)
    assert all(value.abs().max() > 1e-6 for value in wanted)
    loss.calls = 0
    assert_same(cached(loss, pairs, modules, chunk_size=chunk_size, budget=budget), wanted)
    assert loss.calls == 1


def test_with_the_losses_of_the_library():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()

    def ours(x, y):
        return mb.clip_loss(F.normalize(x, dim=1), F.normalize(y, dim=1), loss.log_scale.exp())

    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    assert_same(cached(ours, pairs, modules, chunk_size=3), plain(loss, pairs, modules))


@pytest.mark.parametrize("budget", [None, "all"])
def test_one_shared_tower_and_three_towers(budget):
    shared, other, loss = tower(6, 0), tower(5, 1), Loss()
    pairs, modules = [(shared, data(6, 0)), (shared, data(6, 1)), (other, data(5, 2))], (shared, other, loss)
    wanted = plain(loss, pairs, modules)
    assert_same(cached(loss, pairs, modules, chunk_size=(3, 4, 2), budget=budget), wanted)
    assert_same(cached(loss, pairs[:2], modules, chunk_size=3, budget=budget), plain(loss, pairs[:2], modules))


def test_one_tower_alone():
    """A loss between the two halves of one batch of views."""
    only, loss = tower(6, 0), Loss()

    def halves(x):
        return loss(x[: N // 2], x[N // 2 : 2 * (N // 2)])

    assert_same(cached(halves, [(only, data())], (only, loss), chunk_size=4), plain(halves, [(only, data())], (only, loss)))


def test_frozen_tower_has_no_second_pass():
    image, text, loss = Counted(tower(6, 0)), Counted(tower(5, 1)), Loss()
    text.requires_grad_(False)
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    wanted = plain(loss, pairs, modules)
    image.samples = text.samples = text.with_graph = 0
    assert_same(cached(loss, pairs, modules, chunk_size=4), wanted)
    assert (image.samples, text.samples, text.with_graph) == (2 * N, N, 0)


def test_frozen_in_other_ways_is_found_out():
    image, text, loss = tower(6, 0), Counted(tower(5, 1)), Loss()
    pairs = [(image, data(6, 0)), (torch.no_grad()(lambda x: text(x)), data(5, 1))]
    wanted = plain(loss, pairs, (image, loss))
    for budget in (None, "all"):
        text.samples = 0
        assert_same(cached(loss, pairs, (image, loss), chunk_size=4, budget=budget), wanted)
        assert text.samples <= N + 4  # nobody could know before the second pass began
    pairs[1] = (torch.inference_mode()(lambda x: text(x)), data(5, 1))
    text.requires_grad_(False)
    with pytest.raises(ValueError, match=r"towers\[1\] must not run in inference mode"):
        mb.cached_backward(loss, pairs, chunk_size=4)


def test_only_the_loss_learns():
    image, text, loss = tower(6, 0).requires_grad_(False), tower(5, 1).requires_grad_(False), Loss()
    pairs = [(image, data(6, 0)), (text, data(5, 1))]
    assert_same(cached(loss, pairs, (loss,), chunk_size=4), plain(loss, pairs, (loss,)))


def test_a_tower_the_loss_does_not_use_gets_no_gradient():
    image, text, unused, loss = tower(6, 0), tower(5, 1), Counted(tower(5, 2)), Loss()
    pairs = [(image, data(6, 0)), (text, data(5, 1)), (unused, data(5, 2))]
    found = cached(lambda x, y, _: loss(x, y), pairs, (image, text, unused, loss), chunk_size=4)
    assert_same(found, plain(lambda x, y, _: loss(x, y), pairs, (image, text, unused, loss)))


def test_inputs_that_need_a_gradient():
    image, text, loss = tower(6, 0).requires_grad_(False), tower(5, 1), Loss()
    prompts = data(6, 0).requires_grad_()
    pairs = [(image, prompts), (text, data(5, 1))]
    wanted = [*plain(loss, pairs, (text, loss)), prompts.grad.clone()]
    prompts.grad = None
    assert_same([*cached(loss, pairs, (text, loss), chunk_size=4), prompts.grad], wanted)


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tower(5, 1)

    def forward(self, tokens, mask=None, scale=1.0, flip=False):
        return self.inner(scale * (tokens if mask is None else tokens * mask))


class Encoding(UserDict):
    """As a tokenizer returns it: a mapping that is not a dict."""


TOKENS, MASK = data(5, 1), (data(5, 2) > 0).double()


@pytest.mark.parametrize(
    "inputs",
    [
        {"tokens": TOKENS, "mask": MASK, "scale": 2.0, "flip": None},
        Encoding({"tokens": TOKENS, "mask": MASK, "scale": torch.tensor(2.0)}),
        (TOKENS, MASK, 2.0),
        [TOKENS, MASK, 2.0],
        mb.HostSource({"tokens": TOKENS, "mask": MASK, "scale": 2.0}),
    ],
)
def test_structured_inputs(inputs):
    image, text, loss = tower(6, 0), TextTower(), Loss()
    wanted = plain(loss, [(image, data(6, 0)), (lambda _: text(TOKENS, MASK, 2.0), None)], (image, text, loss))
    assert_same(cached(loss, [(image, data(6, 0)), (text, inputs)], (image, text, loss), chunk_size=4), wanted)


def test_scaler():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    value, *wanted = plain(loss, pairs, modules)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = cached(loss, pairs, modules, chunk_size=3, scaler=scaler)
    assert_same(found, [value, *(1024 * g for g in wanted)])
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert_same(cached(loss, pairs, modules, chunk_size=3, scaler=off), [value, *wanted])


def test_accumulation():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    modules = (image, text, loss)
    batches = [[(image, data(6, s)), (text, data(5, s + 1))] for s in (0, 10)]
    (sum(loss(*(t(x) for t, x in batch)) for batch in batches) / 2).backward()
    wanted = gradients(*modules)
    for batch in batches:
        mb.cached_backward(lambda x, y: loss(x, y) / 2, batch, chunk_size=3)
    assert_same(gradients(*modules), wanted)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_() if self.reentrant else x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("budget", [None, "all"])
def test_checkpointed_tower_with_dropout(reentrant, budget):
    inner, text, loss = tower(6, 0, dropout=0.5), tower(5, 1), Loss()
    x, y = data(6, 0), data(5, 1)
    torch.manual_seed(3)
    wanted = plain(loss, [(lambda x: in_chunks(inner, x, 3), x), (lambda y: in_chunks(text, y, 3), y)], (inner, text, loss))
    torch.manual_seed(3)
    pairs = [(Checkpointed(inner, reentrant), x.clone()), (text, y)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a reentrant checkpoint complains where there is no graph to make
        found = cached(loss, pairs, (inner, text, loss), chunk_size=3, budget=budget)
    assert_same(found, wanted)


@pytest.mark.quick({"budget": None})
@pytest.mark.parametrize("budget", [None, "all"])
@pytest.mark.thorough
def test_compiled_tower(budget):
    image, text, loss = tower(6, 0, dropout=0.5), tower(5, 1), Loss()
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    torch.manual_seed(3)
    wanted = plain(loss, [(lambda x, t=t: in_chunks(t, x, 4), x) for t, x in pairs], modules)
    compiled = torch.compile(image, backend="aot_eager")
    torch.manual_seed(3)
    assert_same(cached(loss, [(compiled, data(6, 0)), pairs[1]], modules, chunk_size=4, budget=budget), wanted)


@pytest.mark.parametrize("budget", [None, 700, "all"])
def test_autocast_is_the_same_in_both_passes_and_no_gradient_is_lost(budget):
    """Casts of weights that autocast remembers from a pass without a graph would leave the weights without a gradient."""
    image, text, loss = tower(6, 0).float(), tower(5, 1).float(), Loss().float()
    pairs, modules = [(image, data(6, 0).float()), (text, data(5, 1).float())], (image, text, loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(*(in_chunks(t, x, 4) for t, x in pairs))
    value.backward()
    wanted = [value.detach(), *gradients(*modules)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cached(loss, pairs, modules, chunk_size=4, budget=budget)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    # One graph sums a weight's gradient over chunks in bfloat16, the step in float32.
    assert_same(found, wanted, tolerance=2**-7)
    exact = tower(6, 0), tower(5, 1), Loss()
    truth = plain(exact[2], [(exact[0], data(6, 0)), (exact[1], data(5, 1))], exact)
    errors = [sum((g.double() - t).norm() for g, t in zip(result, truth, strict=True)) for result in (found, wanted)]
    assert errors[0] <= 1.5 * errors[1]


class PartlyFloat32(nn.Module):
    """Leaves autocast for a layer that needs all digits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 32)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


@pytest.mark.parametrize("budget", [None, "all"])
def test_backward_passes_are_not_autocast(budget):
    """As where a backward pass is called outside of the region, which is what PyTorch asks for."""
    image, x = PartlyFloat32(), torch.randn(40, 64, generator=torch.Generator().manual_seed(0))

    def loss(y):
        return (y @ y.T).square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(image(x))
    value.backward()
    wanted = gradients(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mb.cached_backward(loss, [(image, x)], chunk_size=10, budget=budget)
    assert_same(gradients(image), wanted, tolerance=1e-5)


class WithAuxiliary(nn.Module):
    def __init__(self, per_sample):
        super().__init__()
        self.inner, self.per_sample = tower(6, 0), per_sample

    def forward(self, x):
        embeddings = self.inner(x)
        auxiliary = self.inner[0](x).square().mean(1)
        return mb.Encoded(embeddings, auxiliary if self.per_sample else auxiliary.mean())


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("budget", [None, 700, "all"])
def test_auxiliary_losses_are_means_over_the_batch(per_sample, budget):
    image, text, loss = WithAuxiliary(per_sample), tower(5, 1), Loss()
    x, y = data(6, 0), data(5, 1)
    embeddings, auxiliary = image(x)
    total = loss(embeddings, text(y)) + auxiliary.mean()
    total.backward()
    wanted = [total.detach(), *gradients(image, text, loss)]
    assert_same(cached(loss, [(image, x), (text, y)], (image, text, loss), chunk_size=4, budget=budget), wanted)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found = cached(loss, [(image, x), (text, y)], (image, text, loss), chunk_size=4, budget=budget, scaler=scaler)
    assert_same(found, [wanted[0], *(64 * g for g in wanted[1:])])


@pytest.mark.parametrize("budget", [None, "all"])
def test_embeddings_on_the_host(budget):
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)
    wanted = plain(loss, pairs, modules)
    assert_same(cached(loss, pairs, modules, chunk_size=3, embeddings="host", budget=budget), wanted)


def test_progress():
    image, text = tower(6, 0), tower(5, 1).requires_grad_(False)
    seen = []
    mb.cached_backward(Loss(), [(image, data(6, 0)), (text, data(5, 1))], chunk_size=(4, 6), on_chunk=seen.append)
    encode, backward = ([p for p in seen if p.stage == stage] for stage in ("encode", "backward"))
    assert [(p.tower, p.done, p.total) for p in encode] == [(0, 1, 5), (0, 2, 5), (0, 3, 5), (1, 4, 5), (1, 5, 5)]
    assert [(p.tower, p.done, p.total) for p in backward] == [(0, 1, 3), (0, 2, 3), (0, 3, 3)]
