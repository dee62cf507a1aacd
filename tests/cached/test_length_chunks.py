"""Chunks of samples sorted by length: their widths, their number, and their padding."""

import pytest

from megabatch.cached.lengths import padded, spans
from steps import random_lengths


def test_widths_of_chunks():
    assert [padded(n, 1000) for n in (0, 1, 8, 9, 64, 65, 128, 129, 256, 257)] == [8, 8, 8, 16, 64, 80, 128, 192, 256, 320]
    assert [padded(n, 77) for n in (1, 64, 65, 77)] == [8, 64, 77, 77]
    assert padded(3, 5) == 5


@pytest.mark.parametrize("chunk_size", [1, 3, 50, 256])
@pytest.mark.parametrize("width", [77, 500])
def test_chunks_cover_every_sample_once_and_hold_no_more_tokens_than_a_padded_chunk(width, chunk_size):
    lengths = sorted(random_lengths(3000, width).tolist(), reverse=True)
    found = spans(lengths, width, chunk_size)
    assert sorted(i for span in found for i in range(*span)) == list(range(3000))
    rows = [stop - start for start, stop in found]
    tokens = [count * padded(lengths[start], width) for count, (start, _) in zip(rows, found, strict=True)]
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
