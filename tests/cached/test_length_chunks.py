"""Chunks of samples sorted by length: their widths, their number, their padding, and the samples that reach a tower."""

import pytest
import torch
from torch import nn

import megabatch as mb
from megabatch.cached.sources import choose_width, spans
from padded_texts import Encoder, plain, texts
from steps import Loss, assert_same, cached, random_lengths


def test_widths_of_chunks():
    assert [choose_width(n, 1000) for n in (0, 1, 8, 9, 64, 65, 128, 129, 256, 257)] == [
        8,
        8,
        8,
        16,
        64,
        80,
        128,
        192,
        256,
        320,
    ]
    assert [choose_width(n, 77) for n in (1, 64, 65, 77)] == [8, 64, 77, 77]
    assert choose_width(3, 5) == 5


@pytest.mark.parametrize("chunk_size", [1, 3, 50, 256])
@pytest.mark.parametrize("width", [77, 500])
def test_chunks_cover_every_sample_once_and_hold_no_more_tokens_than_a_padded_chunk(width, chunk_size):
    lengths = sorted(random_lengths(3000, width).tolist(), reverse=True)
    found = spans(lengths, width, chunk_size)
    assert sorted(i for span in found for i in range(*span)) == list(range(3000))
    rows = [stop - start for start, stop in found]
    tokens = [count * choose_width(lengths[start], width) for count, (start, _) in zip(rows, found, strict=True)]
    assert max(tokens) <= chunk_size * width
    assert tokens[0] > 0.85 * max(tokens)  # the largest first
    assert sum(tokens) < 1.4 * sum(lengths)
    assert len(found) < 0.7 * 3000 / chunk_size + 8
    in_the_middle = [count for count, (_, stop) in zip(rows, found, strict=True) if stop < 3000]
    assert all(count % 8 == 0 or count == chunk_size for count in in_the_middle if count >= 64)


def test_a_chunk_of_very_different_lengths_ends_early():
    lengths = [500] + 15 * [40]
    assert spans(lengths, 512, 16) == [(0, 2), (2, 16)]  # an eighth of 16
    assert spans([500] + 15 * [490], 512, 16) == [(0, 16)]


def test_tokens_that_reach_the_tower():
    """Sorted and cut: 40 samples of 8 tokens and 8 of 64 take 832 tokens where 3,072 were given."""
    lengths = torch.full((48,), 8)
    lengths[::6] = 61
    tower, loss = Encoder(), Loss()
    inputs = texts(lengths, 64, number=torch.arange(48))
    mb.cached_backward(lambda x: loss(x[:24], x[24:]), [(tower, inputs)], chunk_size=4)
    long = list(range(0, 48, 6))
    short = [i for i in range(48) if i % 6]
    once = [((4, 64), long[:4]), ((4, 64), long[4:]), ((32, 8), short[:32]), ((8, 8), short[32:])]
    assert tower.seen == 2 * once
    assert tower.tokens == 2 * 832


def test_a_batch_of_full_length_keeps_its_order_and_is_not_copied():
    tower, loss = Encoder(), Loss()
    inputs = texts([40, 33, 40, 36], 40, number=torch.arange(4))
    mb.cached_backward(lambda x: loss(x[:2], x[2:]), [(tower, inputs)], chunk_size=2)
    assert tower.seen == 2 * [((2, 40), [0, 1]), ((2, 40), [2, 3])]


def test_batch_norm_in_training_is_not_sorted():
    tower, loss = Encoder(), Loss()
    tower.inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    inputs = texts(random_lengths(8, 60), 60, number=torch.arange(8))
    halves = lambda x: loss(x[:4], x[4:])  # noqa: E731
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        cached(halves, [(tower, inputs)], (tower, loss), chunk_size=4)
    assert tower.seen == 2 * [((4, 60), [0, 1, 2, 3]), ((4, 60), [4, 5, 6, 7])]
    tower.eval()  # normalises each sample by the running statistics
    assert cached(halves, [(tower, inputs)], (tower, loss), chunk_size=4)
    assert tower.seen[4][1] != [0, 1, 2, 3]
    assert_same(cached(halves, [(tower, inputs)], (tower, loss), chunk_size=4), plain(halves, [(tower, inputs)], (tower, loss)))


def test_the_width_of_embeddings_is_checked_and_samples_are_named():
    def wider(input_ids, attention_mask):
        return torch.ones(len(input_ids), input_ids.shape[1], requires_grad=True)

    with pytest.raises(ValueError, match=r"got \(16, torch.float32\) first and \(8, torch.float32\) for 1 samples such as 0"):
        mb.cached_backward(torch.sum, [(wider, texts([2, 12], 16))], chunk_size=1)
