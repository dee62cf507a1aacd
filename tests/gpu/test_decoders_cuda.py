"""Decoders on a GPU: packed texts by PyTorch's variable-length attention, and checkpointing chosen by measurement."""

import pytest
import torch

import decoders
import megabatch as mb
from decoders import Loss, Way
from megabatch.world import World
from megabatch_train.towers.layers import packed as packed_texts
from megabatch_train.trainer.config import MemoryConfig
from megabatch_train.trainer.step import choose_fit

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


def on_gpu(way):
    return decoders.decoder(way).float().cuda()


def step(encoder, queries, negatives):
    inputs = [{key: value.cuda() for key, value in one.items()} for one in decoders.batch(queries, negatives)]
    encoder.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = mb.cached_backward(Loss(), [(encoder, one) for one in inputs], chunk_size=4)
    return loss.item(), torch.cat([gradient.flatten() for gradient in decoders.gradients(encoder).values()])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_packed_texts_in_half_precision_are_the_padded_ones(pooling, monkeypatch):
    calls = []
    if packed_texts.varlen is not None:
        original = packed_texts.varlen.varlen_attn
        monkeypatch.setattr(
            packed_texts.varlen, "varlen_attn", lambda *args, **options: calls.append(1) or original(*args, **options)
        )
    sizes = decoders.SIZES | {"head_dim": 16}  # flash attention takes multiples of 8
    monkeypatch.setattr(decoders, "SIZES", sizes)
    exact = on_gpu(Way(pooling=pooling))
    inputs = [{key: value.cuda() for key, value in one.items()} for one in decoders.batch(40, 20)]
    mb.cached_backward(Loss(), [(exact, one) for one in inputs], chunk_size=4)
    wanted = torch.cat([gradient.flatten() for gradient in decoders.gradients(exact).values()])
    padded, packed = step(on_gpu(Way(pooling=pooling)), 40, 20), step(on_gpu(Way(packed=True, pooling=pooling)), 40, 20)
    assert bool(calls) == (packed_texts.varlen is not None)
    errors = [((found[1] - wanted).norm() / wanted.norm()).item() for found in (padded, packed)]
    assert errors[1] < 2 * errors[0], "at most twice the error of padded texts in the same type"


def test_checkpointing_is_measured_where_chunks_are_small():
    encoder = on_gpu(Way(packed=True))
    inputs = decoders.texts(64, 1)
    world = World(torch.device("cuda"))

    def samples(side, count):
        return decoders.part(inputs, slice(count))

    plain = choose_fit(MemoryConfig(checkpointing="off"), "auto", [encoder], samples, 64, world)
    found = choose_fit(MemoryConfig(), "auto", [encoder], samples, 64, world)
    assert plain.chunk_sizes == found.chunk_sizes == (64,)  # large chunks fit, and nothing is measured
    assert not found.checkpointing
    assert not any("forward" in vars(layer) for layer in encoder.model.layers)
