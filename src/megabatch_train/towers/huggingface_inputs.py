"""Preprocessing for transformers encoders: tokenizers or hashed words, and images of the encoder's size."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch_train.data.images import RandomCrop, TrainingImages, fit_to_square, leave_unchanged, to_pillow
from megabatch_train.towers.small import n_grams
from megabatch_train.towers.tower import allows_remote_code

LONGEST = 128  # tokens; a longer text is cut, unless the model takes fewer
_NO_LIMIT = 1_000_000  # tokens; tokenizers without a limit have a larger number
IMAGE_SIZE = 224  # pixels of a side, if the config has none
_FIRST_WORD = 3  # ids below are special tokens in most vocabularies
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
_PROCESSOR = "preprocessor_config.json"
_PURPOSE = "A transformers encoder"


def texts_of(config: Any, folder: Path) -> "TokenInputs | HashedWords":
    """The folder's tokenizer, or hashed words if it has none."""
    if any((folder / file).is_file() for file in _TOKENIZERS):
        transformers = extras.load("transformers", extra="huggingface", purpose=_PURPOSE)
        options = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
        return TokenInputs(transformers.AutoTokenizer.from_pretrained(folder, **options), longest(config))
    return HashedWords(config.vocab_size, longest(config))


def images_of(config: Any, folder: Path) -> "ImageInputs":
    """Normalised by the folder's image processor, or to [−1, 1] if it has none."""
    processor = None
    if (folder / _PROCESSOR).is_file():
        transformers = extras.load("transformers", extra="huggingface", purpose=_PURPOSE)
        options = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **options)
    return ImageInputs(config, processor)


def longest(config: Any) -> int:
    """Largest number of tokens of a text encoder."""
    most = getattr(config, "max_position_embeddings", None)
    # RoBERTa-like models count positions from the padding id on.
    return min(LONGEST, most - 2) if isinstance(most, int) and most > 2 else LONGEST


def height_and_width(config: Any) -> tuple[int, int]:
    """Pixels of the images that an encoder takes."""
    size = getattr(config, "image_size", None) or IMAGE_SIZE
    return (size, size) if isinstance(size, int) else tuple(size)


class TokenInputs:
    """A tokenizer of transformers, a chunk at a time.

    Attributes:
        longest: tokens of a text; a longer one is cut.
        prompt_tokens: at the beginning of each text, which are not pooled; None if all tokens are pooled.
    """

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self.longest = tokenizer, longest
        self.prompt_tokens: int | None = None
        tokenizer.padding_side = "right"  # chunks of similar length are cut there
        if tokenizer.pad_token is None:  # of many decoders
            tokenizer.pad_token = tokenizer.eos_token

    def prepare(self, text: str, generator: torch.Generator | None) -> str:
        """As it is."""
        return text

    def collate(self, samples: list[str]) -> dict[str, Tensor]:
        """A chunk, padded to its longest; an empty text has one token, the padding's."""
        tokens = self._tokenizer(samples, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
        ids, mask = (tokens[key].long() for key in ("input_ids", "attention_mask"))
        if ids.shape[1] == 0:
            ids, mask = ids.new_full((len(samples), 1), self._tokenizer.pad_token_id), mask.new_ones(len(samples), 1)
        mask[:, 0] |= ~mask.any(1)
        found = {"input_ids": ids, "attention_mask": mask}
        if self.prompt_tokens is not None:
            found["pooled_mask"] = mask * (torch.arange(mask.shape[1]) >= self.prompt_tokens)
        return found

    def limit(self, config: Any, stored: int | None) -> int:
        """Tokens of a text in a model of sentence-transformers: as stored in its files, or else as many as the model takes."""
        most = getattr(config, "max_position_embeddings", None)
        known = [stored or self._tokenizer.model_max_length, *([most] if isinstance(most, int) and most > 0 else [])]
        return min(known) if min(known) < _NO_LIMIT else self.longest

    def lowercase(self) -> None:
        """Puts texts into lower case before anything else."""
        normalizers = extras.load("tokenizers.normalizers", extra="huggingface", purpose=_PURPOSE)
        inner = self._tokenizer.backend_tokenizer
        inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [inner.normalizer])])

    def count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt with the special tokens before it, and without the one after it."""
        ids = self._tokenizer([prompt], truncation=True, max_length=self.longest)["input_ids"][0] if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)

    def write(self, folder: Path) -> None:
        """The tokenizer's files."""
        self._tokenizer.save_pretrained(folder)


class HashedWords:
    """Words as hashed ids, without a vocabulary."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        self.vocabulary, self.longest = vocabulary, longest

    def prepare(self, text: str, generator: torch.Generator | None) -> Tensor:  # (k,)
        """One text."""
        words = n_grams(text, self.vocabulary - _FIRST_WORD, ()) + _FIRST_WORD
        return words[: self.longest]

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

    def limit(self, config: Any, stored: int | None) -> int:
        """As for `Tokens`."""
        most = getattr(config, "max_position_embeddings", None)
        return min(stored or self.longest, most) if isinstance(most, int) and most > 0 else stored or self.longest

    def lowercase(self) -> None:
        """Does nothing: words are hashed in lower case."""

    def write(self, folder: Path) -> None:
        """Writes nothing: the config is enough."""


class ImageInputs:
    """Images of the encoder's size: random crops in training, else as its image processor resizes them."""

    def __init__(self, config: Any, processor: Any | None) -> None:
        self.size = height_and_width(config)
        self.processor = processor
        mean, deviation = (getattr(processor, name, None) or [0.5] * 3 for name in ("image_mean", "image_std"))
        self.training = TrainingImages(RandomCrop(self.size), tuple(mean), tuple(deviation), "pixel_values")
        self._mean, self._deviation = (torch.tensor(value)[:, None, None] for value in (mean, deviation))

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> Tensor:  # (3, S, S)
        """One image, for evaluation."""
        if self.processor is not None:
            made: Tensor = self.processor(images=to_pillow(image), return_tensors="pt")["pixel_values"][0]
            return made
        middle = fit_to_square(image, max(self.size))[:, : self.size[0], : self.size[1]]
        return (leave_unchanged(middle) - self._mean) / self._deviation

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """A chunk."""
        return {"pixel_values": torch.stack(samples)}

    def write(self, folder: Path) -> None:
        """The image processor's numbers."""
        if self.processor is not None:
            self.processor.save_pretrained(folder)
