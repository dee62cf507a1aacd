"""Peak memory of a step: it does not grow with the batch, however the inputs come."""

import sys

import pytest
import torch
from torch import nn

import megabatch as mb
from megabatch_train.bench.measure import fresh_process, peak_memory

WIDTH, CHUNK = 512, 128


def read(i, generator):
    return torch.randn(3072, generator=generator)


def peaks(rows):
    """Peak bytes of steps over towers whose activations are large beside embeddings and parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.GELU(), nn.Linear(WIDTH, WIDTH))]
    image, text = nn.Sequential(nn.Linear(3072, WIDTH), *layers, nn.Linear(WIDTH, 32)), nn.Linear(8, 32)
    images, texts = torch.randn(rows, 3072), torch.randn(rows, 8)
    replay = mb.ReplaySource(range(rows), read)

    def loss(x, y):
        return mb.clip_loss(x, y, 1.0)

    def cached(inputs, count):
        return mb.cached_backward(loss, [(image, inputs), (text, texts[:count])], chunk_size=CHUNK)

    cached(images[:CHUNK], CHUNK)  # gradients, threads and libraries
    return {
        "cached": peak_memory(lambda: cached(images, rows))[1],
        "replay": peak_memory(lambda: cached(replay, rows))[1],
        "plain": peak_memory(lambda: loss(image(images), text(texts)).backward())[1],
    }


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_batch():
    small, large = (fresh_process(peaks, rows) for rows in (512, 4096))
    activations = 4096 * 24 * WIDTH * 4  # of the whole batch: 192 MiB
    assert large["plain"] > activations
    for kind in ("cached", "replay"):
        assert large[kind] < small[kind] + activations / 8, (kind, small, large)  # the loss has larger tiles to work on
