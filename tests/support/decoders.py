"""A tiny decoder of transformers in float64, its texts, and a step with hard negatives; importable by other processes."""

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F

import megabatch as mb
from megabatch_train.towers.layers.lora import inject
from megabatch_train.towers.sentence_transformer import TextEncoder
from megabatch_train.towers.tower import LoraConfig, set_checkpointing

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64}
LONGEST = 20
SCALE = 7.0


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is made; the defaults are the plain way."""

    lora: int = 0
    packed: bool = False
    checkpointing: bool = False
    pooling: str = "last"
    left: bool = False
    dropout: float = 0.0
    frozen: int = 0  # layers


def decoder(way=Way(), seed=0):  # noqa: B008
    from transformers import AutoModel, Qwen3Config

    torch.manual_seed(seed)
    model = AutoModel.from_config(Qwen3Config(**SIZES))
    if way.lora:
        inject(model, LoraConfig(way.lora, dropout=way.dropout))
    for name, parameter in model.named_parameters():  # as after some training: large weights, adapters that do something
        torch.nn.init.normal_(parameter, std=0.3)
        if int(name.split(".")[1]) < way.frozen if name.startswith("layers.") else way.frozen:
            parameter.requires_grad_(False)
    for part in model.modules():
        if type(part).__name__ == "Qwen3RMSNorm":  # rounds to float32, whatever the type of its inputs
            part.forward = partial(_norm, part)
    encoder = TextEncoder(model).double()
    encoder.pooling = way.pooling
    if way.packed:
        assert encoder.pack()
    set_checkpointing([encoder], way.checkpointing)
    return encoder


def _norm(part, states):
    return F.rms_norm(states, states.shape[-1:], part.weight.to(states.dtype), part.variance_epsilon)


def texts(count, seed, left=False):
    """Random tokens of different lengths; some texts are as long as can be, one has a single token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (1 + torch.rand(count, generator=generator) ** 2 * LONGEST).long()
    lengths[0] = LONGEST
    ids = torch.randint(1, SIZES["vocab_size"], (count, LONGEST), generator=generator)
    places = torch.arange(LONGEST)
    mask = places >= LONGEST - lengths[:, None] if left else places < lengths[:, None]
    if left:  # the same texts at the other end
        ids = torch.stack([row.roll(LONGEST - int(length)) for row, length in zip(ids, lengths, strict=True)])
    return {"input_ids": ids, "attention_mask": mask.long()}


def batch(queries, negatives, left=False):
    """Queries; their documents, followed by hard negatives."""
    return texts(queries, 1, left), texts(queries + negatives, 2, left)


def part(inputs, rows):
    return {key: value[rows] for key, value in inputs.items()}


def dense(query, second):
    """Each query against all documents and all hard negatives."""
    return F.cross_entropy(SCALE * query @ second.T, torch.arange(len(query)))


class Loss:
    further_rows = True

    def __init__(self, group=None):
        self.group = group

    def __call__(self, query, second):
        document, hard = second[: len(query)], second[len(query) :]
        return mb.info_nce_loss(query, document, scale=SCALE, negatives=hard, group=self.group)


def gradients(encoder):
    """By name; of shards, whole."""
    found = {name: p.grad for name, p in encoder.named_parameters() if p.requires_grad}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


def plain(way, queries, negatives):
    """One graph over the whole batch: padded on the right, nothing computed twice, a dense loss."""
    encoder = decoder(dataclasses.replace(way, packed=False, checkpointing=False))
    loss = dense(*(encoder(**inputs) for inputs in batch(queries, negatives)))
    loss.backward()
    return loss.detach(), gradients(encoder)
