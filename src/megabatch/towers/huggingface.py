"""Any text encoder of transformers, for text–text data: "hf:NAME" with its weights, "hf-config:FOLDER" with random ones.

One encoder serves both sides. An embedding is the mean over a text's tokens, to unit length. With "hf-config:" nothing is
downloaded: the folder's config.json says what is built, and where it has no tokenizer, words are hashed into the vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.towers.small import n_grams
from megabatch.towers.tower import Pair, Tower

PURPOSE = "A transformers encoder"
LONGEST = 128  # tokens; a longer text is cut, unless the model takes fewer
_FIRST_WORD = 3  # the numbers before it are for padding and other marks in most vocabularies


class TextEncoder(nn.Module):
    """The mean of an encoder's last layer over the tokens that are there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T), (n, T) -> (n, D)
        """Embeddings of unit length."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state  # (n, T, D)
        mask = attention_mask[..., None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1).clamp_min(1), dim=-1)


def load(name: str) -> Pair:
    """An encoder with its weights and tokenizer, from the hub's name or a folder."""
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModel.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"model must be a name on the Hugging Face hub that can be reached, or a folder, got {name!r}: {error}; "
            '"hf-config:FOLDER" builds an encoder with random weights from a config.json and downloads nothing'
        ) from error
    return _pair(model, _Tokens(tokenizer, longest(model.config)), f"hf:{name}")


def load_config(folder: str) -> Pair:
    """An encoder with random weights, as a config.json says. Nothing is downloaded."""
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise ValueError(f"model must be a folder with a config.json, got {folder!r}")
    config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    model = transformers.AutoModel.from_config(config)
    has_tokenizer = any((place / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    texts: _Tokens | _HashedWords
    if has_tokenizer:
        texts = _Tokens(transformers.AutoTokenizer.from_pretrained(place, local_files_only=True), longest(config))
    else:
        texts = _HashedWords(config.vocab_size, longest(config))
    return _pair(model, texts, f"hf-config:{folder}")


def _pair(model: nn.Module, texts: Any, name: str) -> Pair:
    tower = Tower(TextEncoder(model), "text", texts.prepare, texts.collate)
    return Pair(tower, tower, name=name)


def longest(config: Any) -> int:
    """Tokens of a text, if an encoder of this configuration is not told otherwise."""
    most = getattr(config, "max_position_embeddings", None)
    # RoBERTa and its kin count positions from the padding token's number on.
    return min(LONGEST, most - 2) if isinstance(most, int) and most > 2 else LONGEST


class _Tokens:
    """A tokenizer of transformers, a chunk at a time."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest

    def prepare(self, text: str, generator: torch.Generator | None) -> str:
        """As it is."""
        return text

    def collate(self, samples: list[str]) -> dict[str, Tensor]:
        """A chunk, padded to its longest."""
        tokens = self._tokenizer(samples, padding=True, truncation=True, max_length=self._longest, return_tensors="pt")
        return {key: tokens[key] for key in ("input_ids", "attention_mask")}


class _HashedWords:
    """Words as numbers without a vocabulary."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        self._vocabulary, self._longest = vocabulary, longest

    def prepare(self, text: str, generator: torch.Generator | None) -> Tensor:  # (k,)
        """One text."""
        words = n_grams(text, self._vocabulary - _FIRST_WORD, ()) + _FIRST_WORD
        return words[: self._longest]

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """A chunk, padded to its longest; an empty text has one token, of number 0."""
        longest = max(1, *(len(sample) for sample in samples))
        tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        mask[:, 0] = 1
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)] = sample
            mask[row, : len(sample)] = 1
        return {"input_ids": tokens, "attention_mask": mask}
