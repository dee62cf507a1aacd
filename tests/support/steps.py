"""Towers, data and a loss for tests of the cached step, and the plain step to compare with."""

import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb
from helpers import dense_clip

N = 11


def tower(width=6, seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4)).double()


def data(width=6, seed=0, rows=N):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Loss(nn.Module):
    """CLIP with a learned scale, dense, so that only the step is tested; counts its calls."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.calls = 0

    def forward(self, *embeddings):
        self.calls += 1
        x, *others = (F.normalize(e, dim=1) for e in embeddings)
        return sum(dense_clip(x, y, self.log_scale.exp()) for y in others) / len(others)


def gradients(*modules):
    found = [p.grad.clone() if p.grad is not None else None for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def assert_same(found, wanted, tolerance=1e-10):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def plain(loss_fn, towers, modules):
    loss = loss_fn(*(t(x) for t, x in towers))
    loss.backward()
    return [loss.detach(), *gradients(*modules)]


def cached(loss_fn, towers, modules, **options):
    loss = mb.cached_backward(loss_fn, towers, **options)
    assert not loss.requires_grad
    assert loss.shape == ()
    return [loss, *gradients(*modules)]


class Counted(nn.Module):
    """Counts forward passes, with and without a graph, and the samples in them."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.passes, self.with_graph, self.samples = inner, 0, 0, 0

    def forward(self, x):
        self.passes += 1
        self.with_graph += torch.is_grad_enabled()
        self.samples += len(x)
        return self.inner(x)


def in_chunks(module, x, size):
    return torch.cat([module(part) for part in x.split(size)])


def random_lengths(count, longest, seed=0):
    """Tokens of texts: many short ones, a few long ones."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return (1 + drawn**3 * (longest - 1)).long()
