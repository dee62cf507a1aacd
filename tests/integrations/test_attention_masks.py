"""Encoders of transformers in a cached step, which cuts texts by their attention mask: gradients of the padded plain step."""

import pytest
import torch
from torch import nn

from megabatch.integrations.trainers import route_through_wrappers
from steps import Loss, assert_same, cached, gradients

transformers = pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "Bert": BERT,
    "Roberta": {**BERT, "max_position_embeddings": 64},  # positions from the ids
    "MPNet": {**BERT, "attn_implementation": "eager"},  # relative positions; it has no other attention
    "ModernBert": {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8},
    "Llama": {"num_key_value_heads": 1},  # causal
}
PADDED_IN_FRONT = ("Llama",)


class Encoder(nn.Module):
    """The mean over tokens, or the last token of texts that are padded in front."""

    def __init__(self, kind):
        super().__init__()
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **ENCODERS[kind]})
        torch.manual_seed(0)
        self.model = transformers.AutoModel.from_config(config).double()
        self.last, self.tokens = kind in PADDED_IN_FRONT, 0

    def forward(self, attention_mask, **inputs):
        self.tokens += attention_mask.numel()
        states = self.model(attention_mask=attention_mask, **inputs).last_hidden_state
        if self.last:
            return states[:, -1]
        mask = attention_mask[..., None].to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_of_transformers(kind):
    tower, loss = Encoder(kind), Loss()
    generator = torch.Generator().manual_seed(1)
    lengths = 1 + (torch.rand(14, generator=generator) ** 2 * 40).long()
    ids = torch.randint(4, 60, (14, 41), generator=generator)
    mask = (torch.arange(41) < lengths[:, None]).long()
    if kind in PADDED_IN_FRONT:
        mask = mask.flip(1)
    inputs = {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask}
    if kind == "Bert":
        inputs |= {"token_type_ids": ids % 2, "position_ids": torch.arange(41).expand(14, -1)}

    def halves(x):
        return loss(x[:7], x[7:])

    value = halves(tower(**inputs))
    value.backward()
    wanted = [value.detach(), *gradients(tower, loss)]
    tower.tokens = 0
    towers = route_through_wrappers([(tower, inputs)], tower)
    assert_same(cached(halves, towers, (tower, loss), chunk_size=3), wanted, tolerance=1e-9)
    assert (tower.tokens == 2 * 14 * 41) if kind in PADDED_IN_FRONT else (tower.tokens < 1.4 * 14 * 41)
