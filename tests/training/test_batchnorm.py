"""Batch normalisation in chunks: said once, and running statistics that move once."""

import pytest
import torch
from torch import nn

import megabatch as mb
from steps import Loss, N, assert_same, cached, data, in_chunks, plain, tower


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
