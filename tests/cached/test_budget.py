"""Chunks that fit the budget are encoded once: counted, and weighed."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import megabatch as mb
from megabatch.cached import second_pass as budgets
from megabatch.cached.second_pass import Keeper, list_tensors, measure_graph
from steps import Counted, Loss, assert_same, cached, data, plain, tower

N = 12


class Wide(nn.Module):
    """Saves exactly two activations of 100 numbers a sample, beside its input: 1600 bytes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 100), nn.Linear(100, 4)
        self.double()

    def forward(self, x):
        return self.last(torch.sigmoid(self.first(x).sin()))


CHUNK = 3 * 2 * 100 * 8  # bytes kept for three samples: the argument of sin, and the sigmoid that both last and sigmoid save


def setting():
    image, text, loss = Counted(Wide()), Counted(tower(5, 1).requires_grad_(False)), Loss()
    return image, text, loss, [(image, data(6, 0, N)), (text, data(5, 1, N))]


def test_a_graph_is_weighed_without_what_is_there_anyway():
    module, x = Wide(), data(6, 0, 3)
    with measure_graph(torch.device("cpu"), [*list_tensors([module]), x]) as graph:
        kept = module(x)
    assert graph.bytes == CHUNK
    kept.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("budget", "once"),
    [(None, 0), (0, 0), (1, 0), (CHUNK - 1, 0), (CHUNK, 1), (2 * CHUNK + 10, 2), (4 * CHUNK, 4), ("all", 4), (10**9, 4)],
)
def test_chunks_that_fit_are_encoded_once(budget, once):
    image, text, loss, pairs = setting()
    wanted = plain(loss, pairs, (image, text, loss))
    image.samples = image.passes = image.with_graph = text.samples = 0
    assert_same(cached(loss, pairs, (image, text, loss), chunk_size=3, budget=budget), wanted)
    assert image.passes == 4 + (4 - once)
    tried_in_vain = budget in (1, CHUNK - 1)
    assert image.with_graph == 4 + tried_in_vain  # every chunk has exactly one graph that is used
    assert text.samples == N


def test_a_share_of_the_free_memory(monkeypatch):
    image, text, loss, pairs = setting()
    wanted = plain(loss, pairs, (image, text, loss))
    parameters = sum(p.numel() * 8 for p in image.parameters())
    embeddings = budgets.COPIES_OF_EMBEDDINGS * 2 * N * 4 * 8
    monkeypatch.setattr(budgets, "free_memory", lambda device: parameters + embeddings + CHUNK + 4 * CHUNK)
    for options, once in (
        ({"budget_fraction": 1.0}, 4),
        ({"budget_fraction": 1}, 4),
        ({"budget_fraction": 0.6}, 2),
        ({"budget_fraction": 0.01}, 0),
        ({"budget": "auto"}, 3),
    ):
        image.passes = 0
        assert_same(cached(loss, pairs, (image, text, loss), chunk_size=3, **options), wanted)
        assert image.passes == 8 - once, options
    monkeypatch.setattr(budgets, "free_memory", lambda device: 0)
    image.passes = 0
    assert_same(cached(loss, pairs, (image, text, loss), chunk_size=3, budget="auto"), wanted)
    assert image.passes == 8


def test_free_memory_of_this_machine_is_plausible():
    assert 2**20 < budgets.free_memory(torch.device("cpu")) < 2**50


def test_two_towers_share_one_budget():
    image, text, loss = Counted(Wide()), Counted(Wide()), Loss()
    pairs = [(image, data(6, 0, N)), (text, data(6, 1, N))]
    mb.cached_backward(loss, pairs, chunk_size=3, budget=6 * CHUNK)
    assert (image.passes, text.passes) == (4, 6)


def test_ranks_keep_what_the_smallest_of_them_can():
    keeper = Keeper(10_000, None, agree=lambda own: min(own, 3))
    keeper.begin(None)
    kept = []
    while keeper.should_build() and len(kept) < 9:
        kept.append(keeper.should_keep(1000, 9, 0))
    assert kept == [True] * 3
    keeper.begin(None)  # 7000 bytes are left for the next tower
    asked = []
    keeper._agree = lambda own: asked.append(own) or 0
    assert keeper.should_build()
    assert not keeper.should_keep(1000, 9, 0)
    assert asked == [7]
    assert not keeper.should_build()


class Marked(torch.autograd.Function):
    """The identity; its node holds a mark, so that one can see when the graph has gone."""

    @staticmethod
    def forward(ctx, x, marks):
        ctx.mark = threading.Event()
        marks.append(weakref.ref(ctx.mark))
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class Watched(Wide):
    def forward(self, x):
        self.most = max(self.most, sum(mark() is not None for mark in self.marks))
        return self.last(torch.sigmoid(Marked.apply(self.first(x), self.marks)))


@pytest.mark.parametrize(("budget", "most"), [(None, 0), (1, 0), (3 * CHUNK, 3), ("all", 3)])
def test_graphs_go_with_the_step_or_before_also_those_made_in_vain(budget, most):
    """What is saved while it is weighed must not hold the node that holds it. Without a budget there is one graph at a time."""
    image, text = Watched(), tower(5, 1)
    image.marks, image.most = [], 0
    gc.collect()
    gc.disable()
    try:
        mb.cached_backward(Loss(), [(image, data(6, 0, N)), (text, data(5, 1, N))], chunk_size=3, budget=budget)
        assert len(image.marks) >= 4
        assert not [mark for mark in image.marks if mark() is not None]
        assert image.most == most  # alive when another one is made
    finally:
        gc.enable()
