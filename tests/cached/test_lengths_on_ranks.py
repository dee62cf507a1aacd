"""Samples of different lengths on ranks with different numbers of samples: the gradients of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb
from padded_texts import Encoder, texts
from steps import assert_same, random_lengths


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
