"""Tiny bidirectional encoders of transformers, their tokenizers and texts; importable by other processes."""

import torch
import torch.nn.functional as F

from megabatch_train.towers.layers.lora import inject
from megabatch_train.towers.sentence_transformer import TextEncoder
from megabatch_train.towers.tower import LoraConfig, set_checkpointing

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LONGEST = 24
_FROM_ONE = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
FAMILIES = {
    "bert": {},
    "roberta": _FROM_ONE,
    "xlm-roberta": _FROM_ONE,
    "distilbert": {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "dropout": 0.0, "attention_dropout": 0.0},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 8},
    "modernbert": _MODERN,
}


def model(family, seed=0, scale=0.3, **changes):
    """Random weights, by default as large as after some training, so that attention and positions matter."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    made = AutoModel.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family] | changes))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return made.eval()


def encoder(family, pooling="mean", packed=True, lora=0, checkpointing=False, **changes):
    made = model(family, **changes)
    if lora:
        inject(made, LoraConfig(lora))
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    result = TextEncoder(made).double()
    result.pooling = pooling
    if packed:
        assert result.pack()
    set_checkpointing([result], checkpointing)
    return result


def texts(lengths, seed=0):
    """Random tokens, padded on the right. Some tokens in a text have the id of padding, as in a text with its name."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths)
    ids = torch.randint(0, SIZES["vocab_size"], (len(lengths), int(lengths.max())), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def alone(model, inputs, pooling):
    """Each text by itself, without padding, by the model's own forward."""
    found = []
    for ids, length in zip(inputs["input_ids"], inputs["attention_mask"].sum(1).tolist(), strict=True):
        states = model(input_ids=ids[None, :length], attention_mask=torch.ones(1, length).long()).last_hidden_state[0]
        pools = {"cls": lambda s: s[0], "last": lambda s: s[-1], "mean": lambda s: s.mean(0), "max": lambda s: s.amax(0)}
        found.append(pools[pooling](states))
    return F.normalize(torch.stack(found), dim=1)


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def save(family, folder):
    """A folder with weights and a tokenizer that adds a token before and after each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = (
        ["<pad>", "<s>", "</s>", "<unk>"]
        if family in ("bert", "distilbert", "modernbert")
        else ["<s>", "<pad>", "</s>", "<unk>"]
    )
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(50))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", words["<s>"]), ("</s>", words["</s>"])]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    model(family).save_pretrained(folder)
    return folder
