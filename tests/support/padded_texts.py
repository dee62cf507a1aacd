"""Texts of different lengths with an attention mask, and an encoder of them, for tests of sorting and cutting."""

import torch
from torch import nn

from steps import gradients

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
