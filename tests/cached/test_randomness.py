"""Both passes of a step draw the same random numbers, and a tower that does not repeat itself is noticed."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import megabatch as mb
from steps import Loss, assert_same, cached, data, in_chunks, plain, tower


@pytest.mark.parametrize("budget", [None, 900, "all"])
def test_dropout_is_the_same_in_both_passes(budget):
    """Against one graph over the same chunks: same masks, and the generator goes on from the same place."""
    image, text, loss = tower(6, 0, dropout=0.5), tower(5, 1, dropout=0.3), Loss()
    pairs, modules = [(image, data(6, 0)), (text, data(5, 1))], (image, text, loss)

    def noisy(x, y):
        return loss(x, y) * (1 + torch.rand(()))

    torch.manual_seed(7)
    wanted = plain(noisy, [(lambda x, t=t: in_chunks(t, x, 3), x) for t, x in pairs], modules)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert_same(cached(noisy, pairs, modules, chunk_size=3, budget=budget), wanted)
    assert torch.equal(torch.rand(3), after)
    torch.manual_seed(8)
    different = cached(noisy, pairs, modules, chunk_size=3, budget=budget)
    assert (different[0] - wanted[0]).abs() > 1e-6


class OtherRandomness(nn.Module):
    """Masks drawn by Python and NumPy, as speech encoders do; remembers what it drew."""

    def __init__(self):
        super().__init__()
        self.inner, self.drawn = tower(6, 0), []

    def forward(self, x):
        self.drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        return self.inner(x * sum(self.drawn[-1]))


def test_randomness_of_python_and_numpy_is_replayed():
    image, text, loss = OtherRandomness(), tower(5, 1), Loss()
    mb.cached_backward(loss, [(image, data(6, 0)), (text, data(5, 1))], chunk_size=4)
    first, second = image.drawn[:3], image.drawn[3:]
    assert first == second
    assert len(set(first)) == 3


def test_a_tower_that_does_not_repeat_itself_is_noticed():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.generator = tower(6, 0), torch.Generator().manual_seed(0)

        def forward(self, x):
            return self.inner(x * torch.rand((), generator=self.generator))

    with pytest.warns(RuntimeWarning, match=r"towers\[0\] must give the same embeddings in both passes"):
        mb.cached_backward(Loss(), [(Moody(), data(6, 0)), (tower(5, 1), data(5, 1))], chunk_size=4)
