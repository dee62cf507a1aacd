"""A tiny BERT with a tokenizer that has mask tokens and punctuation, for late interaction; importable by other processes."""

import json

import torch

WORDS = [f"{first}{second}" for first in "bcdfg" for second in ("at", "og", "ip", "un")]
QUERIES = ["bat", "cat dog", "fun gip bog", "din cog cat bat"]
DOCUMENTS = ["bat fog.", "the cat, dog!", "fun gip bog cun dat", "din, cog. cat? bat! gog"]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPTIONS = {"token_dim": 6, "query_length": 8, "max_length": 12}


def write_encoder(folder, seed=0):
    """A transformer without a projection, and its tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    vocabulary = {word: i for i, word in enumerate([*names.values(), *",.!?", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **sizes, **NO_DROPOUT))
    for parameter in model.parameters():  # as large as after some training, so that attention and positions matter
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def lines():
    """Twelve pairs of texts as JSON lines. Documents contain the words of their queries."""
    triples = zip(WORDS[:12], WORDS[4:16], WORDS[8:20], strict=True)
    return [json.dumps({"query": f"{a} {b}", "document": f"{b}, {a} {c}."}) for a, b, c in triples]


def write_pairs(path):
    path.write_text("\n".join(lines()))
    return path
