"""Bidirectional encoders on a GPU: packed texts with and without dropout, and compiled layers."""

from functools import partial

import pytest
import torch

import encoders
import megabatch as mb
from encoders import encoder, gradients
from megabatch.world import World
from megabatch_train.towers import tower as blocks
from megabatch_train.towers.layers import packed as packed_texts

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.gpu

FAMILIES = ["bert", "roberta", "distilbert", "modernbert"]
ROWS = 40


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch):
    """Flash attention takes heads whose dimension is a multiple of 8. The texts are longer than the window of ModernBERT."""
    monkeypatch.setattr(encoders, "SIZES", encoders.SIZES | {"hidden_size": 32, "intermediate_size": 48})
    monkeypatch.setitem(encoders.FAMILIES, "distilbert", encoders.FAMILIES["distilbert"] | {"dim": 32, "hidden_dim": 48})


def batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [torch.randint(1, encoders.LONGEST, (ROWS,), generator=generator) for _ in range(2)]
    return [{key: value.cuda() for key, value in encoders.texts(of_side, seed).items()} for seed, of_side in enumerate(lengths)]


def step(module, half, budget=None):
    """A cached step: the loss and all gradients in one row."""
    module.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss_fn = partial(mb.info_nce_loss, scale=7.0)
        loss = mb.cached_backward(loss_fn, [(module, one) for one in batch()], chunk_size=6, budget=budget)
    return loss.item(), torch.cat([gradient.double().flatten() for gradient in gradients(module).values()])


def error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_are_the_padded_ones(family, half, monkeypatch):
    """The error against float64 is at most twice the error of padded texts in the same precision."""
    calls = []
    if packed_texts.varlen is not None:
        original = packed_texts.varlen.varlen_attn
        monkeypatch.setattr(
            packed_texts.varlen, "varlen_attn", lambda *args, **options: calls.append(options) or original(*args, **options)
        )
    _, wanted = step(encoder(family, packed=False).cuda(), half=False)
    padded, packed = (step(encoder(family, packed=way).float().cuda(), half)[1] for way in (False, True))
    assert bool(calls) == (half and packed_texts.varlen is not None)
    assert error(packed, wanted) < 2 * error(padded, wanted)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_dropout_stays_within_a_text_and_repeats(window, causal):
    """One value of each token is 1, and another one is the number of its text, so their ratio is this number.

    With dropout, the output for the value 1 is the sum of the kept weights, divided by the probability to keep a weight. Its
    mean is 1. A text of L equal weights has a variance of p ÷ (1 − p) ÷ L, which is at most p ÷ (1 − p) for other weights.
    """
    lengths, heads, rate = [1, 30, 7, 64, 12] * 8, 4, 0.25
    limits = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    query, key = (torch.randn(len(rows), heads, 32, device="cuda", generator=generator).bfloat16() for _ in range(2))
    value = torch.zeros_like(query)
    value[..., 0], value[..., 1] = 1, rows[:, None]  # bfloat16 represents the integers up to 256
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        parts = [part.transpose(0, 1)[None].clone().requires_grad_() for part in (query, key, value)]
        options = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": max(lengths), "sliding_window": window}
        module = torch.nn.Module()
        module.is_causal = causal
        output, _ = packed_texts.attention(module, *parts, None, dropout=rate, **options)
        output.float().square().sum().backward()
        found.append([output.detach(), *(part.grad for part in parts)])
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        assert error(one, other) < 2**-7, "sums of gradients on a GPU have no fixed order"
    kept, numbers = found[0][0][0, ..., 0].double(), found[0][0][0, ..., 1].double()
    torch.testing.assert_close(numbers, kept * rows[:, None], rtol=2**-7, atol=0)
    deviation = (rate / (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - 1) < 5 * deviation + 2**-8
    assert (kept == 0).any()  # texts of one token, whose only weight is dropped


def test_dropout_of_attention_is_the_same_in_both_passes():
    found = []
    for budget in ("all", None):
        made = encoder("bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).float().cuda().train()
        torch.manual_seed(3)
        found.append(step(made, half=True, budget=budget))
    still = step(encoder("bert").float().cuda(), half=True)[1]
    assert error(found[1][1], found[0][1]) < 0.02  # rounding of bfloat16; with other random numbers, the error is about 1
    assert error(found[0][1], still) > 0.2


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_compiled_layers_give_the_same_gradients(family):
    """With dropout in BERT, because compiled layers use the same random numbers. Other numbers have an error of about 1."""
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.2 if family == "bert" else 0.0)
    plain, compiled = (encoder(family, **rates).float().cuda().train() for _ in range(2))
    try:
        assert blocks.compile_towers([compiled, compiled], World(torch.device("cuda")))
        found = []
        for module in (plain, compiled):
            torch.manual_seed(3)
            with blocks.compiler_settings(strict=True):
                found.append(step(module, half=True)[1])
    finally:
        torch._dynamo.reset()
    _, exact = step(encoder(family, packed=False).cuda(), half=False)
    rounding = error(step(encoder(family).float().cuda(), half=True)[1], exact)
    assert error(found[1], found[0]) < 4 * rounding < 0.8
