"""Samples of different lengths: sorted and cut inside the step, with the loss and gradients of the padded plain step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb
from megabatch.cached.lengths import from_mask
from megabatch.cached.sources import TensorSource
from steps import Loss, assert_same, cached, gradients, random_lengths

VOCABULARY = 30


class Encoder(nn.Module):
    """One layer of attention and the state of the first token; remembers the samples and widths that it was called with.

    A row whose tokens are all masked attends to all of them equally, as in transformers, so it depends on its padding.
    """

    def __init__(self, seed=0, dropout=0.0, longest=600):
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(VOCABULARY, 6), nn.Parameter(0.3 * torch.randn(longest, 6))
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.double()
        self.seen = []

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, number=None, inputs_embeds=None):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        self.seen.append((tuple(x.shape[:2]), None if number is None else number.tolist()))
        x = x + self.places[: x.shape[1]]
        if token_type_ids is not None:
            x = x * (1 + token_type_ids[..., None])
        scores = (x @ x.mT).masked_fill(attention_mask[:, None] == 0, torch.finfo(x.dtype).min)
        return self.inner((x + scores.softmax(2) @ x)[:, 0])

    @property
    def tokens(self):
        return sum(rows * width for (rows, width), _ in self.seen)


def texts(lengths, width, seed=0, **more):
    """Random tokens also where the mask is 0, so that using them is noticed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths)
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(0, VOCABULARY, (len(lengths), width), generator=generator),
        "attention_mask": mask,
        **more,
    }


def plain(loss_fn, towers, modules):
    loss = loss_fn(*(tower(**inputs) for tower, inputs in towers))
    loss.backward()
    for tower, _ in towers:
        if isinstance(tower, Encoder):
            tower.seen.clear()
    return [loss.detach(), *gradients(*modules)]


@pytest.mark.parametrize("embeddings", ["device", "host"])
@pytest.mark.parametrize("budget", [None, 3000, "all", "auto"])
@pytest.mark.parametrize(
    ("rows", "width", "chunk_size"), [(23, 41, 2), (23, 41, (3, 5)), (90, 70, 8), (1, 33, 4), (12, 300, 3)]
)
def test_equals_the_padded_plain_step(rows, width, chunk_size, budget, embeddings):
    query, key, loss = Encoder(0), Encoder(1), Loss()
    towers = [(query, texts(random_lengths(rows, width, 1), width, 1)), (key, texts(random_lengths(rows, width, 2), width, 2))]
    modules = query, key, loss
    wanted = plain(loss, towers, modules)
    found = cached(loss, towers, modules, chunk_size=chunk_size, budget=budget, embeddings=embeddings)
    assert_same(found, wanted)
    whole = rows * width * (1 if budget == "all" else 2)
    assert max(query.tokens, key.tokens) < whole


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


@pytest.mark.parametrize("lengths", [[0, 3, 0, 30], [0, 0], [5, 0, 9, 2, 40, 1]])
def test_rows_without_any_token_keep_their_padding(lengths):
    """With all tokens masked, a softmax is uniform over the padding: cutting it would change the embedding."""
    query, key, loss = Encoder(0), Encoder(1), Loss()
    towers = [(query, texts(lengths, 40, 1)), (key, texts(lengths[::-1], 40, 2))]
    assert_same(cached(loss, towers, (query, key, loss), chunk_size=2), plain(loss, towers, (query, key, loss)))


def test_padding_in_front_is_kept_and_gaps_do_not_matter():
    mask = torch.ones(6, 40, dtype=torch.bool)
    mask[0, :30] = False  # padded in front
    mask[1, 10:] = False
    mask[2, 5:20], mask[2, 22:] = False, False  # with a gap
    assert from_mask({"attention_mask": mask}).tolist() == [40, 10, 22, 40, 40, 40]
    tower, loss = Encoder(), Loss()
    towers = [(tower, {**texts([40] * 6, 40), "attention_mask": mask})]

    def halves(x):
        return loss(x[:3], x[3:])

    assert_same(cached(halves, towers, (tower, loss), chunk_size=2), plain(halves, towers, (tower, loss)))


def test_token_types_are_cut_and_other_tensors_are_not():
    tower, loss = Encoder(), Loss()
    more = {"token_type_ids": torch.randint(0, 2, (9, 50)), "number": torch.arange(9)}
    towers = [(tower, texts(random_lengths(9, 50), 50, **more))]

    def halves(x):
        return loss(x[:4], x[4:8])

    wanted = plain(halves, towers, (tower, loss))
    assert_same(cached(halves, towers, (tower, loss), chunk_size=2), wanted)
    assert tower.tokens < 2 * 9 * 50


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


def test_shared_and_several_towers():
    shared, other, loss = Encoder(0), Encoder(1), Loss()
    towers = [(module, texts(random_lengths(17, 50, i), 50, i)) for i, module in enumerate((shared, shared, other))]
    wanted = plain(loss, towers, (shared, other, loss))
    for budget in (None, 4000):
        assert_same(cached(loss, towers, (shared, other, loss), chunk_size=(2, 3, 4), budget=budget), wanted)


def test_a_tower_behind_a_function_and_a_frozen_tower():
    query, key, loss = Encoder(0), Encoder(1).requires_grad_(False), Loss()
    inputs = [texts(random_lengths(13, 50, i), 50, i) for i in range(2)]
    wanted = plain(loss, [(query, inputs[0]), (key, inputs[1])], (query, key, loss))
    towers = [(lambda **chunk: query(**chunk), inputs[0]), (key, inputs[1])]
    assert_same(cached(loss, towers, (query, key, loss), chunk_size=3), wanted)
    assert query.tokens < 2 * 13 * 50
    assert key.tokens < 13 * 50


def test_inputs_that_need_a_gradient():
    tower, loss = Encoder(), Loss()
    vectors = torch.randn(9, 40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    mask = texts(random_lengths(9, 40), 40)["attention_mask"]
    towers = [(tower, {"inputs_embeds": vectors, "attention_mask": mask})]

    def halves(x):
        return loss(x[:4], x[4:8])

    wanted = [*plain(halves, towers, (tower, loss)), vectors.grad.clone()]
    vectors.grad = None
    assert_same([*cached(halves, towers, (tower, loss), chunk_size=2), vectors.grad], wanted)


@pytest.mark.parametrize("budget", [None, "all"])
def test_auxiliary_losses_and_a_scaler(budget):
    query, key, loss = Encoder(0), Encoder(1), Loss()
    inputs = [texts(random_lengths(13, 50, i), 50, i) for i in range(2)]
    wanted = loss(query(**inputs[0]), key(**inputs[1])) + query(**inputs[0]).square().mean(1).mean()
    wanted.backward()
    wanted = [wanted.detach(), *gradients(query, key, loss)]

    def with_loss(**chunk):
        embeddings = query(**chunk)
        return mb.Encoded(embeddings, embeddings.square().mean(1))

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    towers = [(with_loss, inputs[0]), (key, inputs[1])]
    value, *scaled = cached(loss, towers, (query, key, loss), chunk_size=3, budget=budget, scaler=scaler)
    assert_same([value, *(gradient / 256 for gradient in scaled)], wanted)


@pytest.mark.parametrize("budget", [None, 3000, "all"])
def test_dropout_is_replayed(budget):
    tower, loss = Encoder(dropout=0.5), Loss()
    inputs = texts(random_lengths(20, 60), 60, number=torch.arange(20))

    def halves(x):
        return loss(x[:10], x[10:])

    torch.manual_seed(5)
    found = cached(halves, [(tower, inputs)], (tower, loss), chunk_size=2, budget=budget)
    chunks = []
    for (_, width), number in tower.seen:
        if [number, width] not in chunks:
            chunks.append([number, width])
    torch.manual_seed(5)  # the same chunks in the same order, with one graph
    parts = []
    for number, width in chunks:
        parts.append(tower(**{key: value[number][..., :width] for key, value in inputs.items() if key != "number"}))
    order = torch.tensor([i for number, _ in chunks for i in number])
    value = halves(torch.cat(parts)[order.argsort()])
    value.backward()
    assert_same(found, [value.detach(), *gradients(tower, loss)])


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
    def reordered(self, order):
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
    with pytest.raises(NotImplementedError, match=r"Strings must define reordered\(order\), because it has lengths"):
        mb.cached_backward(halves, [(tower, Strings(rows, lengths))], chunk_size=3)


def test_the_width_of_embeddings_is_checked_and_samples_are_named():
    def wider(input_ids, attention_mask):
        return torch.ones(len(input_ids), input_ids.shape[1], requires_grad=True)

    with pytest.raises(ValueError, match=r"got \(16, torch.float32\) first and \(8, torch.float32\) for 1 samples such as 0"):
        mb.cached_backward(torch.sum, [(wider, texts([2, 12], 16))], chunk_size=1)


def test_float32_to_rounding():
    query, key, loss = Encoder(0).float(), Encoder(1).float(), Loss().float()
    towers = [(query, texts(random_lengths(40, 90, 1), 90, 1)), (key, texts(random_lengths(40, 90, 2), 90, 2))]
    wanted = plain(loss, towers, (query, key, loss))
    assert_same(cached(loss, towers, (query, key, loss), chunk_size=4), wanted, tolerance=1e-5)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = Encoder(0), Encoder(1)

    def forward(self, side, **inputs):
        return (self.query if side == "query" else self.key)(**inputs)


def rank_texts(counts, rank=None):
    """Ranks have different numbers of texts and different lengths: those of the second rank are all short."""
    total = sum(counts)
    part = slice(None) if rank is None else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    found = []
    for seed in (1, 2):
        lengths = random_lengths(total, 60, seed)
        lengths[counts[0] : counts[0] + counts[1]].clamp_(max=7)
        found.append({name: tensor[part] for name, tensor in texts(lengths, 60, seed).items()})
    return found


def clip(group):
    return lambda x, y: mb.clip_loss(F.normalize(x, dim=1), F.normalize(y, dim=1), 5.0, group=group)


def on_rank(group, rank, counts, wrapping, budget):
    model = Both()
    if wrapping == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    query, key = rank_texts(counts, rank)
    towers = [(model, {"side": "query", **query}), (model, {"side": "key", **key})]
    loss = mb.cached_backward(clip(group), towers, chunk_size=(3, 2), budget=budget)
    found = [p.grad.full_tensor() if wrapping == "fsdp" else p.grad for p in model.parameters()]
    inner = model.module if wrapping == "ddp" else model
    return loss, found, inner.query.tokens


@pytest.mark.parametrize("budget", [None, 4000, "all"])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
@pytest.mark.parametrize("counts", [(9, 14), (13, 0)])
def test_ranks_with_uneven_samples_and_lengths(pool, counts, wrapping, budget):
    model = Both()
    query, key = rank_texts(counts)
    wanted = clip(None)(model("query", **query), model("key", **key))
    wanted.backward()
    answers = pool.run(on_rank, 2, counts, wrapping, budget)
    torch.testing.assert_close(sum(loss for loss, _, _ in answers) / 2, wanted.detach(), rtol=1e-10, atol=1e-10)
    for rank, (_, found, tokens) in enumerate(answers):
        assert_same(found, [p.grad for p in model.parameters()])
        if counts[rank]:
            assert tokens < counts[rank] * 60 * (1 if budget == "all" else 2)
