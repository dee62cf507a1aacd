"""Batch normalisation in chunks: said once, and running statistics that move once."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import megabatch as mb
import steps
from steps import Loss, N, assert_same, cached, data, gradients, in_chunks, plain, tower


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def test_batch_norm_is_named_once_and_its_running_statistics_move_once():
    image, twin, text, loss = Normalised(), Normalised(), tower(5, 1), Loss()
    x, pairs = data(6, 0), [(image, data(6, 0)), (text, data(5, 1))]
    with pytest.warns(UserWarning, match=r"towers\[0\] has BatchNorm1d 'norm' in training mode.*chunk of 4 samples") as caught:
        found = cached(loss, pairs, (image, text, loss), chunk_size=4)
    assert len(caught) == 1
    wanted = plain(loss, [(lambda x: in_chunks(twin, x, 4), x), pairs[1]], (twin, text, loss))
    assert_same(found, wanted)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(image.norm, name), getattr(twin.norm, name))
    assert image.norm.track_running_stats
    mb.cached_backward(loss, pairs, chunk_size=4)  # and not a second time


def test_batch_norm_says_nothing_where_it_does_not_matter():
    """Warnings are errors in these tests."""
    image, pairs = Normalised(), [(tower(6, 0), data(6, 0))]
    mb.cached_backward(lambda x, y: Loss()(x, y), [(image, data(6, 0)), *pairs], chunk_size=N)
    mb.cached_backward(lambda x, y: Loss()(x, y), [(image.eval(), data(6, 0)), *pairs], chunk_size=3)


def _uneven(group, rank, budget):
    """A rank of four chunks and one of two, which encodes placeholders beside them: one sample each, which has no variance."""
    rows = (8, 4)[rank]
    image, twin, text, loss = Normalised(), Normalised(), tower(5, 1), Loss()
    x, y = data(6, rank, rows), data(5, 2 + rank, rows)
    towers = [(DistributedDataParallel(module, process_group=group), inputs) for module, inputs in ((image, x), (text, y))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"towers\[0\] has BatchNorm1d")
        mb.cached_backward(loss, towers, chunk_size=2, budget=budget)
    assert image.norm.training
    assert image.norm.track_running_stats
    found, text_too = gradients(image), tower(5, 1)
    _, *own = plain(loss, [(lambda x: in_chunks(twin, x, 2), x), (text_too, y)], (twin,))
    return found, own, list(image.norm.buffers()), list(twin.norm.buffers())


@pytest.mark.quick({"budget": None})
@pytest.mark.parametrize("budget", [None, "all"])
@pytest.mark.thorough
def test_passes_that_keep_ranks_in_step_leave_no_trace_in_statistics(pool, budget):
    answers = pool.run(_uneven, 2, budget)
    for found, _, statistics, wanted in answers:
        assert_same(found, [(first + second) / 2 for first, second in zip(answers[0][1], answers[1][1], strict=True)])
        for one, other in zip(statistics, wanted, strict=True):
            torch.testing.assert_close(one, other)


class Held:
    """A callable that is no module, and holds one out of sight: in a dictionary, behind a function."""

    def __init__(self, net):
        self.parts = {"net": lambda: net}

    def __call__(self, x):
        return self.parts["net"]()(x)

    def encode(self, x):
        return self(x)


HIDDEN = {
    "lambda": lambda net: lambda x: net(x),
    "partial of a function": lambda net: partial(lambda scale, x: scale * net(x), 1.0),
    "callable object": Held,
    "method of an object": lambda net: Held(net).encode,
    "a part of the net at a time": lambda net: lambda x: net.last(net.norm(net.first(x)).relu()),
    "compiled in a lambda": lambda net: (lambda compiled: lambda x: compiled(x))(torch.compile(net, backend="eager")),
    "compiled in place": lambda net: (net.compile(backend="eager"), lambda x: net(x))[1],
    "compiled function": lambda net: torch.compile(lambda x: net(x), backend="eager"),
}


@pytest.mark.parametrize("budget", [None, "all"])
@pytest.mark.parametrize("how", HIDDEN)
def test_batch_norm_behind_a_function_is_named_and_its_running_statistics_move_once(how, budget):
    image, twin, text, loss = Normalised(), Normalised(), tower(5, 1), Loss()
    hidden, x, y = HIDDEN[how](image), data(6, 0), data(5, 1)
    with pytest.warns(UserWarning, match=r"towers\[0\] has BatchNorm1d '[a-z_.]*' in training mode") as caught:
        found = cached(loss, [(hidden, x), (text, y)], (image, text, loss), chunk_size=4, budget=budget)
    assert [warning.filename for warning in caught] == [steps.__file__]
    assert_same(found, plain(loss, [(lambda x: in_chunks(twin, x, 4), x), (text, y)], (twin, text, loss)))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(image.norm, name), getattr(twin.norm, name))
    assert image.norm.track_running_stats


class Checkpointed(Normalised):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("budget", [None, "all"])
def test_statistics_move_once_under_activation_checkpointing(budget):
    image, twin, text = Checkpointed(), Normalised(), tower(5, 1)
    x, y = data(6, 0), data(5, 1)
    with pytest.warns(UserWarning, match=r"towers\[0\] has BatchNorm1d"):
        found = cached(Loss(), [(image, x), (text, y)], (image, text), chunk_size=4, budget=budget)
    assert_same(found, plain(Loss(), [(lambda x: in_chunks(twin, x, 4), x), (text, y)], (twin, text)))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(image.norm, name), getattr(twin.norm, name))


def test_looking_for_batch_norm_compiles_nothing_again():
    """A tower is compiled for the pass without a graph and for the one with it, and in no later step."""
    compiled, x = [], data(6, 0)

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    net, loss = torch.compile(tower(6, 0), backend=backend, fullgraph=True, dynamic=False), Loss()
    for _ in range(4):
        mb.cached_backward(loss, [(lambda x: net(x), x), (tower(5, 1), data(5, 1))], chunk_size=N)
    assert len(compiled) == 2


def _behind_a_function(group, rank):
    net = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4, process_group=group))
    held = Held(net)
    mb.cached_backward(lambda x: x.sum(), [(held, data(6, rank, 4 + rank).float())], chunk_size=2)


def test_layers_that_wait_for_ranks_are_refused_behind_a_function(pool):
    for worked, answer in pool.attempt(_behind_a_function, 2):
        assert not worked
        assert "ValueError: towers[0][0] must be a module if it has SyncBatchNorm" in answer
        assert "got Held that calls Sequential with SyncBatchNorm '1'" in answer
