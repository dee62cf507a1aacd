"""Samples of different lengths: the loss and gradients of the padded plain step, from samples sorted and cut in the step."""

import pytest
import torch

import megabatch as mb
from megabatch.cached.sources import from_mask
from padded_texts import Encoder, plain, texts
from steps import Loss, assert_same, cached, gradients, random_lengths


@pytest.mark.quick({"embeddings": "device", "budget": 3000}, {"embeddings": "host", "budget": "auto"})
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


def test_float32_to_rounding():
    query, key, loss = Encoder(0).float(), Encoder(1).float(), Loss().float()
    towers = [(query, texts(random_lengths(40, 90, 1), 90, 1)), (key, texts(random_lengths(40, 90, 2), 90, 2))]
    wanted = plain(loss, towers, (query, key, loss))
    assert_same(cached(loss, towers, (query, key, loss), chunk_size=4), wanted, tolerance=1e-5)


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
