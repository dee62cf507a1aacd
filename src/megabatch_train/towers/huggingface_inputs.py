"""Inputs of transformers encoders: tokens or hashed words, and images of the encoder's size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch_train.data.media.audio import AudioInputs
from megabatch_train.data.media.images import RandomCrop, TrainingImages, fit_to_square, leave_unchanged, to_pillow
from megabatch_train.towers.layers.packed import first_position
from megabatch_train.towers.small import n_grams, pad
from megabatch_train.towers.tokens import pair_of
from megabatch_train.towers.tower import allows_remote_code

if TYPE_CHECKING:
    from typing_extensions import Self

# ----------------------------------------------------------------------------------------------------------------------
# Preprocessing: tokenizers or hashed words, and images of the encoder's size.

LONGEST = 128  # maximum number of tokens; a longer text is truncated; models with fewer positions have a lower limit
_NO_LIMIT = 1_000_000  # a `model_max_length` of at least this means that the tokenizer has no limit
IMAGE_SIZE = 224  # side length in pixels if the config has no image size
_FIRST_WORD = 3  # ids below are special tokens in most vocabularies
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PURPOSE = "A transformers encoder"
SCALES = ("logit_scale", "logit_scale_a", "logit_scale_t")  # names of the logarithm of the scale in models of both sides


def texts_of(config: Any, folder: Path) -> "TokenInputs | HashedWords":
    """Returns the tokenizer of the folder, or hashed words if the folder has none."""
    if has_tokenizer(folder):
        transformers = extras.load("transformers", purpose=_PURPOSE)
        options = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
        return TokenInputs(transformers.AutoTokenizer.from_pretrained(folder, **options), longest(config))
    return HashedWords(config.vocab_size, longest(config))


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer."""
    return any((folder / file).is_file() for file in _TOKENIZERS)


def images_of(config: Any, folder: Path, made_for: Any = None) -> "ImageInputs":
    """Returns inputs that are normalized as in the folder's image processor, or to [−1, 1] if the folder has none.

    Args:
        config: the config of the model.
        folder: the folder of the image processor.
        made_for: the image size of the image processor, if the size in the config was changed.
    """
    processor = None
    if any((folder / file).is_file() for file in _PROCESSORS):
        transformers = extras.load("transformers", purpose=_PURPOSE)
        options = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **options)
    return ImageInputs(config, processor, made_for)


def takes_audio(model: Any) -> bool:
    """Returns whether a transformers model of both sides encodes recordings instead of images, as `ClapModel` does."""
    return hasattr(model, "get_audio_features") and not hasattr(model, "get_image_features")


def media_of(model: Any, place: str | Path, options: Mapping[str, Any], made_for: Any) -> "ImageInputs | AudioInputs":
    """Returns the inputs of images, or of recordings if the model takes them.

    Args:
        model: the model.
        place: the name of the model, whose preprocessing is loaded, or a folder that may lack the files of the preprocessing.
        options: arguments of transformers' `from_pretrained`.
        made_for: the image size of the image processor, if the size in the config was changed.
    """
    transformers = extras.load("transformers", purpose=_PURPOSE)
    if not takes_audio(model):
        config = part_of(model.config, "vision")
        if isinstance(place, Path):
            return images_of(config, place, made_for)
        return ImageInputs(config, transformers.AutoImageProcessor.from_pretrained(place, **options), made_for)
    if isinstance(place, Path) and not any((place / file).is_file() for file in _PROCESSORS):
        raise ValueError(f"{place} must have the feature extractor of a model of recordings, got no {' or '.join(_PROCESSORS)}")
    return AudioInputs(transformers.AutoFeatureExtractor.from_pretrained(place, **options))


def read_scale(model: Any) -> dict[str, float]:
    """Returns the `logit_scale` and the `logit_bias` of a `Pair` that a model of both sides contains.

    CLAP has a scale for each direction. The loss has one scale, which is the geometric mean of both.
    """
    scales = [getattr(model, name).detach().double() for name in SCALES if getattr(model, name, None) is not None]
    temperature = getattr(model, "temperature", None)  # of ALIGN
    numbers: dict[str, float] = {}
    if scales:
        numbers["logit_scale"] = torch.stack(scales).mean().exp().item()
    elif isinstance(temperature, Tensor):
        numbers["logit_scale"] = 1 / temperature.detach().double().item()
    if (bias := getattr(model, "logit_bias", None)) is not None:
        numbers["logit_bias"] = bias.detach().item()
    return numbers


def longest(config: Any) -> int:
    """Returns the maximum number of tokens of a text."""
    most = getattr(config, "max_position_embeddings", None)
    # RoBERTa-like models number positions from the padding id on, so they have up to two positions less.
    return min(LONGEST, most - 2) if isinstance(most, int) and most > 2 else LONGEST


def part_of(config: Any, kind: str) -> Any:
    """Returns the config of one side, which is a part of the config of a pair."""
    return getattr(config, f"{kind}_config", config)


def height_and_width(config: Any) -> tuple[int, int]:
    """Returns the size of the images that an encoder takes, in pixels."""
    size = getattr(config, "image_size", None) or IMAGE_SIZE
    if (patches := getattr(config, "num_patches", None)) and not getattr(config, "image_size", None):
        size = math.isqrt(patches) * config.patch_size  # the model takes any size with at most this many patches
    return (size, size) if isinstance(size, int) else tuple(size)


def count_positions(model: Any) -> int | None:
    """Returns the maximum number of tokens of a model or of the text side of a pair; None if there is no limit."""
    most = getattr(part_of(model.config, "text"), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    return most - first_position(model)


class FixedBatchNorm(nn.BatchNorm2d):
    """A batch normalization that always uses its stored statistics, so that embeddings do not depend on other samples."""

    def train(self, mode: bool = True) -> "Self":
        """Keeps evaluation mode."""
        return super().train(False)


def fix_batch_norms(model: nn.Module) -> None:
    """Makes batch normalizations use their stored statistics, in place. Chunks of a batch would have other statistics."""
    for part in model.modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = FixedBatchNorm
            part.eval()


class TokenInputs:
    """A transformers tokenizer, which is called once per chunk.

    Attributes:
        longest: maximum number of tokens of a text. Longer texts are truncated.
        prompt_tokens: number of tokens at the beginning of each text that are not pooled; None if all tokens are pooled.
        fixed: whether all texts are padded to `longest` tokens, without a mask.
    """

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self.longest = tokenizer, longest
        self._own_side = tokenizer.padding_side
        self.prompt_tokens: int | None = None
        self.fixed = False
        tokenizer.padding_side = "right"  # inputs are trimmed on the right
        if tokenizer.pad_token is None:  # many decoders have none
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    def prepare(self, text: str, generator: torch.Generator | None) -> str:
        """Returns the text unchanged."""
        return text

    def collate(self, samples: list[str]) -> dict[str, Tensor]:
        """Returns the tokens of a chunk, padded to its longest text. An empty text has one token, the padding token."""
        padding = "max_length" if self.fixed else "longest"
        tokens = self._tokenizer(samples, padding=padding, truncation=True, max_length=self.longest, return_tensors="pt")
        ids, mask = (tokens[key].long() for key in ("input_ids", "attention_mask"))
        if ids.shape[1] == 0:
            ids, mask = ids.new_full((len(samples), 1), self._tokenizer.pad_token_id), mask.new_ones(len(samples), 1)
        if self.fixed:
            return {"input_ids": ids}
        mask[:, 0] |= ~mask.any(1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.prompt_tokens is not None:
            inputs["pooled_mask"] = mask * (torch.arange(mask.shape[1]) >= self.prompt_tokens)
        return inputs

    def pad_fully(self) -> None:
        """Pads all texts to `longest` tokens from now on, on the tokenizer's own side and without a mask."""
        self.fixed, self._tokenizer.padding_side = True, self._own_side

    @property
    def padding_side(self) -> str:
        """The side of the padding, "right" or "left"."""
        return str(self._tokenizer.padding_side)

    @property
    def padding_id(self) -> int:
        """The id of the padding token."""
        return int(self._tokenizer.pad_token_id)

    def limit_to(self, most: int | None, stored: int | None = None) -> int:
        """Returns the maximum number of tokens: `stored` or the limit of the tokenizer, and at most `most`."""
        limits = [stored or self._tokenizer.model_max_length, *([] if most is None else [most])]
        return min(limits) if min(limits) < _NO_LIMIT else self.longest

    def lowercase(self) -> None:
        """Makes the tokenizer convert texts to lower case before any other step."""
        normalizers = extras.load("tokenizers.normalizers", purpose=_PURPOSE)
        inner = self._tokenizer.backend_tokenizer
        inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [inner.normalizer])])

    def count_prompt(self, prompt: str) -> int:
        """Returns the number of tokens of a prompt, including special tokens before it, but not the one after it."""
        ids = self._tokenizer([prompt], truncation=True, max_length=self.longest)["input_ids"][0] if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)

    def write(self, folder: Path) -> None:
        """Writes the files of the tokenizer."""
        self._tokenizer.save_pretrained(folder)


def attends_to_padding(encoder: Any, texts: TokenInputs) -> bool:
    """Returns whether the embedding of a text depends on its padding in spite of the mask, as in SigLIP.

    SigLIP pools the last token, which is padding. So it takes texts of full length, without a mask.
    """
    short = texts.collate(["a"])
    padding = texts.longest - short["input_ids"].shape[1]
    padded = {"input_ids": F.pad(short["input_ids"], (0, padding), value=texts.padding_id)}
    padded["attention_mask"] = F.pad(short["attention_mask"], (0, padding))
    difference = (encoder(**short) - encoder(**padded)).abs().max().item()
    return not difference <= torch.finfo(encoder.model.dtype).eps ** 0.5


class HashedWords:
    """Preprocessing that hashes words to ids, without a vocabulary."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        self.vocabulary, self.longest = vocabulary, longest

    def prepare(self, text: str, generator: torch.Generator | None) -> Tensor:  # (k,)
        """Returns the ids of the words of a text."""
        words = n_grams(text, self.vocabulary - _FIRST_WORD, ()) + _FIRST_WORD
        return words[: self.longest]

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Returns the tokens of a chunk, padded to its longest text. An empty text has one token with id 0."""
        tokens, mask = pad(samples)
        mask[:, 0] = 1
        return {"input_ids": tokens, "attention_mask": mask}

    def limit_to(self, most: int | None, stored: int | None = None) -> int:
        """Returns the maximum number of tokens: `stored` or the present one, and at most `most`."""
        limits = [stored or self.longest, *([] if most is None else [most])]
        return min(limits)

    def lowercase(self) -> None:
        """Does nothing, because words are always hashed in lower case."""

    def write(self, folder: Path) -> None:
        """Writes nothing, because the config describes the preprocessing."""


class ImageInputs:
    """Images of the encoder's size. Training uses random crops. Evaluation uses the image processor, if there is one.

    Args:
        config: the config of the model.
        processor: the image processor.
        made_for: the image size of the image processor, if the size in the config was changed (default: not changed).

    Attributes:
        keys: outputs of the image processor that the encoder takes.
    """

    def __init__(self, config: Any, processor: Any | None, made_for: Any = None) -> None:
        self.size = height_and_width(config)
        if processor is not None and made_for is not None and pair_of(made_for) != self.size:
            processor = _scale_processor(processor, self.size[0] / pair_of(made_for)[0])
        self.processor = processor
        self.keys: Sequence[str] = ("pixel_values",)
        mean, deviation = (getattr(processor, name, None) or [0.5] * 3 for name in ("image_mean", "image_std"))
        self.training = TrainingImages(RandomCrop(self.size), tuple(mean), tuple(deviation), "pixel_values")
        self._mean, self._deviation = (torch.tensor(value)[:, None, None] for value in (mean, deviation))

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> Tensor | tuple[Tensor, ...]:  # (3, S, S)
        """Returns the pixels of one image for evaluation, or a tuple if the encoder takes several `keys`."""
        if self.processor is not None:
            outputs = self.processor(images=to_pillow(image), return_tensors="pt")
            pixels: tuple[Tensor, ...] = tuple(outputs[key][0] for key in self.keys)
            return pixels if len(pixels) > 1 else pixels[0]
        middle = fit_to_square(image, max(self.size))[:, : self.size[0], : self.size[1]]
        return (leave_unchanged(middle) - self._mean) / self._deviation

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Stacks the images of a chunk."""
        if isinstance(samples[0], tuple):
            return {key: torch.stack(values) for key, values in zip(self.keys, zip(*samples, strict=True), strict=True)}
        return {"pixel_values": torch.stack(samples)}

    def write(self, folder: Path) -> None:
        """Writes the files of the image processor."""
        if self.processor is not None:
            self.processor.save_pretrained(folder)


def _scale_processor(processor: Any, factor: float) -> Any:
    """Returns the image processor for another size of images."""
    options = processor.to_dict()
    for name in ("size", "crop_size"):
        if isinstance(sides := options.get(name), dict):
            options[name] = {key: round(factor * side) for key, side in sides.items() if side is not None}
    return type(processor).from_dict(options)


@dataclass(frozen=True)
class ModelFiles:
    """Writes the files that describe a transformers model and its inputs, except the weights."""

    model: Any
    inputs: Sequence[TokenInputs | HashedWords | ImageInputs | AudioInputs]

    def write(self, folder: Path) -> None:
        """Writes the config and the files of the inputs."""
        self.model.config.save_pretrained(folder)
        for inputs in self.inputs:
            inputs.write(folder)


def divide_into_patches(images: Tensor, size: int) -> dict[str, Tensor]:  # (n, 3, H, W)
    """Returns the inputs of a model that takes patches, for images of one size."""
    rows, columns = images.shape[2] // size, images.shape[3] // size
    covered = images[:, :, : rows * size, : columns * size]
    patches = covered.reshape(len(images), -1, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1)
    values = patches.flatten(3).flatten(1, 2)  # (n, rows · columns, size · size · 3)
    return {
        "pixel_values": values,
        "pixel_attention_mask": values.new_ones(values.shape[:2], dtype=torch.int32),
        "spatial_shapes": torch.tensor([[rows, columns]]).expand(len(values), 2),  # on the CPU, where the model reads it
    }
