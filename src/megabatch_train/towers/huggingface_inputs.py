"""Inputs of transformers encoders: tokens or hashed words, padded or packed, and images of the encoder's size."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch_train.data.images import RandomCrop, TrainingImages, fit_to_square, leave_unchanged, to_pillow
from megabatch_train.towers.small import n_grams, pad
from megabatch_train.towers.tokens import pair_of
from megabatch_train.towers.tower import allows_remote_code

try:
    from torch.nn.attention import varlen
except ImportError:  # before version 2.10
    varlen = None  # type: ignore[assignment]

# ----------------------------------------------------------------------------------------------------------------------
# Preprocessing: tokenizers or hashed words, and images of the encoder's size.

LONGEST = 128  # maximum number of tokens; a longer text is truncated; models with fewer positions have a lower limit
_NO_LIMIT = 1_000_000  # a `model_max_length` of at least this means that the tokenizer has no limit
IMAGE_SIZE = 224  # side length in pixels if the config has no image size
_FIRST_WORD = 3  # ids below are special tokens in most vocabularies
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PURPOSE = "A transformers encoder"


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
    """Returns the maximum number of tokens of the text side of a pair; None if there is no limit."""
    most = getattr(model.config.text_config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    # RoBERTa-like models number positions from the padding id on.
    starts = [
        part.padding_idx + 1
        for name, part in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]
    return most - max(starts, default=0)


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

    def limit(self, config: Any, stored: int | None) -> int:
        """Returns the maximum number of tokens of a sentence-transformers model: `stored`, or the limit of the model."""
        most = getattr(config, "max_position_embeddings", None)
        return self.limit_to(most if isinstance(most, int) and most > 0 else None, stored)

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

    def limit(self, config: Any, stored: int | None) -> int:
        """Returns the maximum number of tokens, as in `TokenInputs.limit`."""
        most = getattr(config, "max_position_embeddings", None)
        return min(stored or self.longest, most) if isinstance(most, int) and most > 0 else stored or self.longest

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
    inputs: Sequence[TokenInputs | HashedWords | ImageInputs]

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


# ----------------------------------------------------------------------------------------------------------------------
# Packed texts: a causal transformer encodes the tokens of a chunk in one row without padding.
#
# Only attention combines several tokens. Every other layer computes the tokens of all texts at once, and computes no padding.
# Attention gets the positions where texts begin and end. On CUDA in half precision, it is PyTorch's variable-length attention
# (`varlen_attn`). Elsewhere, texts are padded, but only for attention.

ATTENTION = "megabatch_packed"  # the name in transformers' table of attention functions
HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD, HEAD_MULTIPLE = 256, 8  # limits of flash attention
FIRST_CAPABILITY = (8, 0)  # minimum compute capability for flash attention
# The arguments of `varlen_attn` differ between versions of PyTorch.
ARGUMENTS = frozenset() if varlen is None else frozenset(inspect.signature(varlen.varlen_attn).parameters)
# Options of a model's attention that neither implementation supports.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


class Packed(NamedTuple):
    """The texts of a chunk, one after the other: T tokens of n texts."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, counted from 0 in each text
    rows: Tensor  # (T,) int64, the text of each token
    limits: Tensor  # (n + 1,) int32, where texts begin, and where the last one ends
    longest: int

    @staticmethod
    def of(input_ids: Tensor, attention_mask: Tensor) -> "Packed":  # (n, L), (n, L)
        """Packs texts that are padded on either side. A text without tokens becomes its first padding token."""
        mask = attention_mask.bool()
        mask = mask | (~mask.any(1, keepdim=True) & (torch.arange(mask.shape[1], device=mask.device) == 0))
        lengths = mask.sum(1)
        limits = F.pad(lengths.cumsum(0), (1, 0))
        places = mask.flatten().nonzero()[:, 0]  # the CPU waits for the GPU here, because it needs the number of tokens
        rows = places // mask.shape[1]
        positions = torch.arange(len(rows), device=rows.device) - limits[rows]
        return Packed(input_ids.flatten()[places], positions, rows, limits.to(torch.int32), int(lengths.max()))

    def states(self, model: nn.Module) -> Tensor:  # (T, H)
        """Returns the output of the last layer. `enable_packing` must have been called with the model."""
        device = self.tokens.device
        has_kernel = varlen is not None and device.type == "cuda"
        has_kernel = has_kernel and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
        output = model(
            input_ids=self.tokens[None],
            position_ids=self.positions[None],
            use_cache=False,
            cu_seq_lens_q=self.limits,
            cu_seq_lens_k=self.limits if has_kernel else None,
            max_length_q=self.longest,
            max_length_k=self.longest,
        )
        states: Tensor = output.last_hidden_state[0]
        return states

    def last(self, states: Tensor) -> Tensor:  # (T, H) -> (n, H)
        """Returns the state of the last token of each text."""
        return states[self.limits[1:].long() - 1]

    def mean(self, states: Tensor) -> Tensor:  # (T, H) -> (n, H)
        """Returns the mean over each text. The states are padded first, because a scattered sum is not deterministic."""
        texts = len(self.limits) - 1
        total = _pad(states, self.rows * self.longest + self.positions, texts, self.longest).sum(1)
        return total / self.limits.diff()[:, None]

    def unpack(self, states: Tensor) -> tuple[Tensor, Tensor]:  # (T, H) -> (n, L, H), (n, L)
        """Returns the padded states and the mask of the tokens."""
        texts = len(self.limits) - 1
        padded = _pad(states, self.rows * self.longest + self.positions, texts, self.longest)
        places = torch.arange(self.longest, device=states.device)
        return padded, places < self.limits.diff()[:, None]


def enable_packing(model: Any) -> bool:
    """Replaces the attention of a model by `attention`, which also accepts padded texts.

    Returns:
        Whether transformers and the model support this. If not, the model is unchanged.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:  # before version 4.53
        return False
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(ATTENTION)
    return getattr(model.config, "_attn_implementation", None) == ATTENTION


def disable_packing(model: Any) -> None:
    """Restores PyTorch's standard attention."""
    if getattr(model.config, "_attn_implementation", None) == ATTENTION:
        model.set_attn_implementation("sdpa")


def _mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Returns None without an attention mask, because packed texts need no mask and other texts use the causal flag."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)
    return mask


def attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, T, d)
    key: Tensor,  # (1, fewer heads, T, d)
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # (1, T, heads, d)
    """Computes causal attention within each text, with the arguments that transformers passes.

    For texts that are not packed, it is PyTorch's standard attention. `cu_seq_lens_q` contains the limits of the packed texts.
    `cu_seq_lens_k` contains the same limits, or is None on a device without `varlen_attn`.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    if any(options.get(name) is not None for name in UNSUPPORTED):
        raise NotImplementedError(f"attention of packed texts does not support {', '.join(UNSUPPORTED)}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # PyTorch's attention casts in the same way
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # (T, heads, d)
    head_dim = query.shape[-1]
    fits = query.dtype in HALF and head_dim <= WIDEST_HEAD and head_dim % HEAD_MULTIPLE == 0 and not dropout
    if cu_seq_lens_k is not None and fits and (window is None or "window_size" in ARGUMENTS):
        return _attend_packed(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)[None], None
    return _attend_padded(query, key, value, cu_seq_lens_q, max_length_q, scaling, window, dropout)[None], None


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:  # (T, heads, d)
    if "scale" not in ARGUMENTS and scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    options: dict[str, Any] = {"scale": scaling} if "scale" in ARGUMENTS else {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in ARGUMENTS:
            options["enable_gqa"] = True
        else:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    if "window_size" in ARGUMENTS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    output: Any = varlen.varlen_attn(query, key, value, limits, limits, longest, longest, **options)
    return cast(Tensor, output)


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:  # (T, heads, d)
    """Pads the texts at their ends and computes attention. Tokens do not attend to the padding, because attention is causal."""
    texts = len(limits) - 1
    rows = torch.repeat_interleave(torch.arange(texts, device=limits.device), limits.diff(), output_size=len(query))
    places = rows * longest + torch.arange(len(query), device=limits.device) - limits[rows]
    mask = None
    if window is not None:
        number = torch.arange(longest, device=limits.device)
        behind = number[:, None] - number
        mask = (behind >= 0) & (behind < window)
    query, key, value = (_pad(part, places, texts, longest).transpose(1, 2) for part in (query, key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)[places]


def _pad(values: Tensor, places: Tensor, texts: int, longest: int) -> Tensor:  # (T, …) -> (n, L, …)
    empty = values.new_zeros(texts * longest, *values.shape[1:])
    return empty.index_copy(0, places, values).view(texts, longest, *values.shape[1:])
