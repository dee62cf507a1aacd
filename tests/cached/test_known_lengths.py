"""Where a step gets lengths from: an attention mask, the argument `lengths`, or a source; and inputs without lengths."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb
from megabatch.cached.sources import TensorSource, from_mask
from padded_texts import VOCABULARY, Encoder, plain, texts
from steps import Loss, assert_same, cached, gradients, random_lengths


@pytest.mark.parametrize(
    "unusual",
    [
        {"attention_mask": torch.ones(4, 40)},  # numbers to add or to multiply with
        {"attention_mask": 2 * torch.ones(4, 40, dtype=torch.int64)},  # packed texts
        {"attention_mask": torch.ones(4, 1, 40, 40, dtype=torch.bool)},
        {"attention_mask": torch.ones(4, 0, dtype=torch.int64)},
        {"attention_mask": None},
        {"pixel_values": torch.ones(4, 3, 40, 40)},
        {"decoder_input_ids": torch.ones(4, 40, dtype=torch.int64)},
    ],
)
def test_unusual_inputs_have_no_lengths(unusual):
    usual = texts([3, 9, 20, 1], 40)
    assert from_mask(usual).tolist() == [3, 9, 20, 1]
    assert from_mask({**usual, **unusual}) is None
    assert from_mask(list(usual.values())) is None


class EndToken(nn.Module):
    """A causal encoder without a mask, as CLIP's: the running mean up to the largest token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(VOCABULARY, 6).double(), nn.Linear(6, 4).double()
        self.tokens = 0

    def forward(self, tokens):
        self.tokens += tokens.numel()
        x = self.words(tokens)
        x = torch.tanh(x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None])
        return self.head(x[torch.arange(len(x)), tokens.argmax(1)])


@pytest.mark.parametrize("source", [TensorSource, mb.HostSource])
def test_lengths_that_are_given(source):
    lengths = random_lengths(30, 77, 4)
    tokens = torch.randint(0, VOCABULARY - 1, (30, 77), generator=torch.Generator().manual_seed(0))
    tokens[torch.arange(30), lengths - 1] = VOCABULARY - 1
    tower, other, loss = EndToken(), Encoder(1), Loss()
    keys = texts(random_lengths(30, 50, 5), 50)
    value = loss(tower(tokens), other(**keys))
    value.backward()
    wanted = [value.detach(), *gradients(tower, other, loss)]
    tower.tokens = 0
    towers = [(tower, source(tokens, lengths=lengths.int())), (other, keys)]
    assert_same(cached(loss, towers, (tower, other, loss), chunk_size=4), wanted)
    assert tower.tokens < 30 * 77


def test_lengths_of_none_keep_order_and_padding():
    """For a tower that depends on padding: its mean is over all tokens."""
    tower, loss, widths = Encoder(), Loss(), []

    def mean(input_ids, attention_mask):
        widths.append(input_ids.shape[1])
        return tower.inner(tower.words(input_ids).mean(1))

    inputs = texts(random_lengths(8, 40), 40)
    halves = lambda x: loss(x[:4], x[4:])  # noqa: E731
    towers = [(mean, mb.HostSource(inputs, lengths=None))]
    wanted = plain(halves, [(mean, inputs)], (tower, loss))
    assert_same(cached(halves, towers, (tower, loss), chunk_size=3), wanted)
    assert set(widths) == {40}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.ones(3, dtype=torch.int64), r"must be a tensor of 4 integers, .* got shape \(3,\) of int64"),
        (torch.ones(4), r"got shape \(4,\) of float32"),
        ([1, 2, 3, 4], r"got \[1, 2, 3, 4\]"),
        ("mask", r"\"auto\" or None, got 'mask'"),
        (torch.tensor([1, 2, 41, 0]), r"between 0 and the 40 tokens of the inputs, got 0 to 41"),
        (torch.tensor([1, 2, -1, 0]), r"got -1 to 2"),
    ],
)
def test_wrong_lengths_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        mb.HostSource(torch.ones(4, 40), lengths=lengths)


class Strings(mb.Source):
    """Texts of different lengths in a list, padded to the longest of a chunk."""

    def __init__(self, rows, lengths=None):
        self.rows, self.lengths, self.width = rows, lengths, max(map(len, rows))

    def __len__(self):
        return len(self.rows)

    def chunks(self, spans, device):
        for start, stop in spans:
            part = self.rows[start:stop]
            longest = max(map(len, part))
            ids = torch.stack([F.pad(row, (0, longest - len(row))) for row in part])
            yield {"input_ids": ids, "attention_mask": torch.arange(longest) < torch.tensor([[len(row)] for row in part])}


class SortedStrings(Strings):
    def reorder(self, order):
        return Strings([self.rows[i] for i in order.tolist()])


def test_a_source_of_ones_own():
    lengths = random_lengths(15, 60)
    rows = list(texts(lengths, 60)["input_ids"])
    rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    tower, loss = Encoder(), Loss()
    halves = lambda x: loss(x[:7], x[7:14])  # noqa: E731
    in_order = cached(halves, [(tower, Strings(rows))], (tower, loss), chunk_size=3)
    tokens = tower.tokens
    tower.seen.clear()
    assert_same(cached(halves, [(tower, SortedStrings(rows, lengths))], (tower, loss), chunk_size=3), in_order)
    assert tower.tokens < tokens
    with pytest.raises(NotImplementedError, match=r"Strings must define reorder\(order\), because it has lengths"):
        mb.cached_backward(halves, [(tower, Strings(rows, lengths))], chunk_size=3)
