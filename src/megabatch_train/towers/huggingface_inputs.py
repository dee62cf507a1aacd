"""Inputs of transformers encoders: tokens or hashed words, padded or packed, and images of the encoder's size."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch_train.data.images import RandomCrop, TrainingImages, fit_to_square, leave_unchanged, to_pillow
from megabatch_train.towers.small import n_grams, pad
from megabatch_train.towers.tower import allows_remote_code

try:
    from torch.nn.attention import varlen
except ImportError:  # before version 2.10
    varlen = None  # type: ignore[assignment]

# ----------------------------------------------------------------------------------------------------------------------
# Preprocessing: tokenizers or hashed words, and images of the encoder's size.

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
        transformers = extras.load("transformers", purpose=_PURPOSE)
        options = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
        return TokenInputs(transformers.AutoTokenizer.from_pretrained(folder, **options), longest(config))
    return HashedWords(config.vocab_size, longest(config))


def images_of(config: Any, folder: Path) -> "ImageInputs":
    """Normalised by the folder's image processor, or to [−1, 1] if it has none."""
    processor = None
    if (folder / _PROCESSOR).is_file():
        transformers = extras.load("transformers", purpose=_PURPOSE)
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
        normalizers = extras.load("tokenizers.normalizers", purpose=_PURPOSE)
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
        tokens, mask = pad(samples)
        mask[:, 0] = 1
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


# ----------------------------------------------------------------------------------------------------------------------
# Packed texts: the tokens of a chunk in one row without padding, for causal transformers.
#
# Only attention sees more than one token at a time, so every other layer works on the tokens of all texts at once, and none of
# them on padding. Attention is told where texts begin and end. It is PyTorch's variable-length attention (`varlen_attn`) where
# that exists: on CUDA, in half precision. Elsewhere, texts are padded for attention alone.

ATTENTION = "megabatch_packed"  # the name in transformers' table of attention functions
HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD, HEAD_MULTIPLE = 256, 8  # of flash attention
FIRST_CAPABILITY = (8, 0)  # of CUDA devices with flash attention
# Arguments of `varlen_attn`, which differ between versions of PyTorch.
ARGUMENTS = frozenset() if varlen is None else frozenset(inspect.signature(varlen.varlen_attn).parameters)
# What a model may ask of its attention that neither of the two ways does.
BEYOND = ("softcap", "s_aux", "position_bias", "head_mask")


class Packed(NamedTuple):
    """The texts of a chunk, one after the other: T tokens of n texts."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, each text from 0
    rows: Tensor  # (T,) int64: the text of each token
    limits: Tensor  # (n + 1,) int32: where texts begin, and where the last one ends
    longest: int

    @staticmethod
    def of(input_ids: Tensor, attention_mask: Tensor) -> "Packed":  # (n, L), (n, L)
        """Texts that are padded on either side. A text without tokens is its first padding token."""
        mask = attention_mask.bool()
        mask = mask | (~mask.any(1, keepdim=True) & (torch.arange(mask.shape[1], device=mask.device) == 0))
        lengths = mask.sum(1)
        limits = F.pad(lengths.cumsum(0), (1, 0))
        places = mask.flatten().nonzero()[:, 0]  # the host waits for the number of tokens
        rows = places // mask.shape[1]
        positions = torch.arange(len(rows), device=rows.device) - limits[rows]
        return Packed(input_ids.flatten()[places], positions, rows, limits.to(torch.int32), int(lengths.max()))

    def states(self, model: nn.Module) -> Tensor:  # (T, H)
        """The last layer of a model that `enable_packing` was called on."""
        device = self.tokens.device
        has_kernel = varlen is not None and device.type == "cuda"
        has_kernel = has_kernel and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
        found = model(
            input_ids=self.tokens[None],
            position_ids=self.positions[None],
            use_cache=False,
            cu_seq_lens_q=self.limits,
            cu_seq_lens_k=self.limits if has_kernel else None,
            max_length_q=self.longest,
            max_length_k=self.longest,
        )
        states: Tensor = found.last_hidden_state[0]
        return states

    def last(self, states: Tensor) -> Tensor:  # (T, H) -> (n, H)
        """The states of the last tokens."""
        return states[self.limits[1:].long() - 1]

    def mean(self, states: Tensor) -> Tensor:  # (T, H) -> (n, H)
        """The means over texts; padded again, because a sum into rows in any order would round differently each time."""
        texts = len(self.limits) - 1
        total = _pad(states, self.rows * self.longest + self.positions, texts, self.longest).sum(1)
        return total / self.limits.diff()[:, None]

    def unpack(self, states: Tensor) -> tuple[Tensor, Tensor]:  # (T, H) -> (n, L, H), (n, L)
        """The states padded again, and the mask of the tokens."""
        texts = len(self.limits) - 1
        padded = _pad(states, self.rows * self.longest + self.positions, texts, self.longest)
        places = torch.arange(self.longest, device=states.device)
        return padded, places < self.limits.diff()[:, None]


def enable_packing(model: Any) -> bool:
    """Gives a model the attention of packed texts, which is PyTorch's ordinary attention for texts that are not packed.

    Returns:
        Whether transformers and the model have a place for it. If not, the model is unchanged.
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
    """PyTorch's ordinary attention again."""
    if getattr(model.config, "_attn_implementation", None) == ATTENTION:
        model.set_attn_implementation("sdpa")


def _mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask for packed texts, nor for texts without padding, which are causal by the attention's own flag."""
    from transformers.masking_utils import sdpa_mask

    made: Tensor | None = None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)
    return made


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
    """Causal attention inside each text, as transformers calls it; PyTorch's ordinary one for texts that are not packed.

    `cu_seq_lens_q` are the limits of the texts; `cu_seq_lens_k` is the same, or None on a device without `varlen_attn`.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    if any(options.get(name) is not None for name in BEYOND):
        raise NotImplementedError(f"packed texts have no attention with any of {', '.join(BEYOND)}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # as for PyTorch's own attention
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # (T, heads, d)
    width = query.shape[-1]
    fits = query.dtype in HALF and width <= WIDEST_HEAD and width % HEAD_MULTIPLE == 0 and not dropout
    if cu_seq_lens_k is not None and fits and (window is None or "window_size" in ARGUMENTS):
        return _variable(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)[None], None
    return _attend_padded(query, key, value, cu_seq_lens_q, max_length_q, scaling, window, dropout)[None], None


def _variable(
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
    made: Any = varlen.varlen_attn(query, key, value, limits, limits, longest, longest, **options)
    return cast(Tensor, made)


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
    """Padded behind each text, where causal attention does not look."""
    texts = len(limits) - 1
    rows = torch.repeat_interleave(torch.arange(texts, device=limits.device), limits.diff(), output_size=len(query))
    places = rows * longest + torch.arange(len(query), device=limits.device) - limits[rows]
    mask = None
    if window is not None:
        number = torch.arange(longest, device=limits.device)
        behind = number[:, None] - number
        mask = (behind >= 0) & (behind < window)
    query, key, value = (_pad(part, places, texts, longest).transpose(1, 2) for part in (query, key, value))
    found = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).flatten(0, 1)[places]


def _pad(values: Tensor, places: Tensor, texts: int, longest: int) -> Tensor:  # (T, …) -> (n, L, …)
    empty = values.new_zeros(texts * longest, *values.shape[1:])
    return empty.index_copy(0, places, values).view(texts, longest, *values.shape[1:])
