"""Packed texts: a transformer encodes the tokens of a chunk in one row without padding.

Only attention combines several tokens. Every other layer computes the tokens of all texts at once, and computes no padding.
Attention gets the positions where texts begin and end. On CUDA in half precision, it is PyTorch's variable-length attention
(`varlen_attn`). Elsewhere, texts are padded, but only for attention. Decoders attend to earlier tokens of a text. Encoders
attend to all tokens of a text. Both can have a sliding window.
"""

import inspect
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torch.nn.attention import varlen
except ImportError:  # before version 2.10
    varlen = None  # type: ignore[assignment]

ATTENTION = "megabatch_packed"  # the name in transformers' table of attention functions
HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD, WIDEST_WITH_DROPOUT, HEAD_MULTIPLE = 256, 192, 8  # limits of flash attention
FIRST_CAPABILITY = (8, 0)  # minimum compute capability for flash attention
# The arguments of `varlen_attn` differ between versions of PyTorch.
ARGUMENTS = frozenset() if varlen is None else frozenset(inspect.signature(varlen.varlen_attn).parameters)
# A window that is longer than any text. Without a window, some versions of `varlen_attn` use cuDNN, which prepares a plan for
# each number of texts and each length of a chunk.
EVERYTHING = 1 << 30
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

    def states(self, model: nn.Module, first: int = 0, takes_types: bool = False) -> Tensor:  # (T, H)
        """Returns the output of the last layer. `enable_packing` must have been called with the model.

        Args:
            model: a transformers model.
            first: the result of `first_position`.
            takes_types: whether the model takes `token_type_ids`. They are 0, as without packing.
        """
        device = self.tokens.device
        has_kernel = varlen is not None and device.type == "cuda"
        has_kernel = has_kernel and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
        inputs = {"token_type_ids": torch.zeros_like(self.tokens)[None]} if takes_types else {}
        output = model(
            input_ids=self.tokens[None],
            position_ids=self._number_positions(first)[None],
            use_cache=False,
            cu_seq_lens_q=self.limits,
            cu_seq_lens_k=self.limits if has_kernel else None,
            max_length_q=self.longest,
            max_length_k=self.longest,
            **inputs,
        )
        states: Tensor = output.last_hidden_state[0]
        return states

    def _number_positions(self, first: int) -> Tensor:  # (T,)
        """Returns the positions as the model numbers them.

        If they begin at more than 0, padding tokens within a text are not counted and have the position before the first.
        """
        if first == 0:
            return self.positions
        counted = self.tokens != first - 1  # the position of padding is the id of padding
        total = counted.cumsum(0)
        before = F.pad(total, (1, 0))[self.limits[:-1].long()]
        return (total - before[self.rows]) * counted + first - 1

    def first(self, states: Tensor) -> Tensor:  # (T, H) -> (n, H)
        """Returns the state of the first token of each text."""
        return states[self.limits[:-1].long()]

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


def first_position(model: nn.Module) -> int:
    """Returns the position of the first token. RoBERTa-like models number positions from the padding id on."""
    starts = [
        part.padding_idx + 1
        for name, part in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]
    return max(starts, default=0)


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
    can_set = getattr(model, "_can_set_attn_implementation", lambda: True)  # otherwise transformers logs a warning
    if can_set() and getattr(model.config, "_attn_implementation", None) == "sdpa":
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


class _Pattern(NamedTuple):
    """The tokens of its text that a token attends to."""

    causal: bool  # only to itself and earlier tokens
    window: int | None  # only to tokens at a distance of less than this

    def sizes(self) -> tuple[int, int]:
        """Returns the largest distances to an earlier and to a later token, for `varlen_attn`."""
        if self.causal:
            return (-1 if self.window is None else self.window - 1, 0)
        return (EVERYTHING,) * 2 if self.window is None else (self.window - 1,) * 2

    def mask(self, lengths: Tensor, longest: int) -> Tensor | None:  # (n,) -> None, (L, L), (n, 1, 1, L) or (n, 1, L, L)
        """Returns the mask of texts that are padded at their ends, or None if the causal flag is sufficient.

        Padding attends to itself at least, because a row without any token would have undefined gradients.
        """
        number = torch.arange(longest, device=lengths.device)
        behind = number[:, None] - number
        if self.causal:
            return None if self.window is None else (behind >= 0) & (behind < self.window)
        own = (number < lengths[:, None])[:, None, None]
        return own if self.window is None else (own & (behind.abs() < self.window)) | (behind == 0)


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
    """Computes attention within each text, with the arguments that transformers passes.

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
    if attention_mask is not None:
        raise NotImplementedError("attention of packed texts does not support a mask of the model")
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # PyTorch's attention casts in the same way
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    pattern = _Pattern(_is_causal(module), window)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # (T, heads, d)
    head_dim = query.shape[-1]
    widest = WIDEST_WITH_DROPOUT if dropout else WIDEST_HEAD
    fits = query.dtype in HALF and head_dim <= widest and head_dim % HEAD_MULTIPLE == 0
    if cu_seq_lens_k is not None and fits and dropout:
        return _attend_with_dropout(query, key, value, cu_seq_lens_q, max_length_q, scaling, pattern, dropout)[None], None
    if cu_seq_lens_k is not None and fits and (window is None or "window_size" in ARGUMENTS):
        return _attend_packed(query, key, value, cu_seq_lens_q, max_length_q, scaling, pattern)[None], None
    return _attend_padded(query, key, value, cu_seq_lens_q, max_length_q, scaling, pattern, dropout)[None], None


def _is_causal(module: nn.Module) -> bool:
    """Returns whether a layer attends only to earlier tokens. The config of a decoder can make its layers encoders."""
    config = getattr(module, "config", None)
    return getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, longest: int, scaling: float | None, pattern: _Pattern
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
        options["window_size"] = pattern.sizes()
    else:
        options["is_causal"] = pattern.causal
    output: Any = varlen.varlen_attn(query, key, value, limits, limits, longest, longest, **options)
    return cast(Tensor, output)


def _attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    longest: int,
    scaling: float | None,
    pattern: _Pattern,
    dropout: float,
) -> Tensor:  # (T, heads, d)
    """Calls the operator behind `varlen_attn`, which has no argument for dropout."""
    left, right = pattern.sizes()
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        limits,
        limits,
        longest,
        longest,
        dropout,
        (left, right) == (-1, 0),
        False,  # no debug mask
        scale=scaling,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    longest: int,
    scaling: float | None,
    pattern: _Pattern,
    dropout: float,
) -> Tensor:  # (T, heads, d)
    """Pads the texts at their ends and computes attention."""
    texts = len(limits) - 1
    lengths = limits.diff()
    rows = torch.repeat_interleave(torch.arange(texts, device=limits.device), lengths, output_size=len(query))
    places = rows * longest + torch.arange(len(query), device=limits.device) - limits[rows]
    mask = pattern.mask(lengths, longest)
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
