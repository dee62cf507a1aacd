"""Packed texts: the tokens of a chunk in one row without padding, for causal transformers.

Only attention sees more than one token at a time, so every other layer works on the tokens of all texts at once, and none of
them on padding. Attention is told where texts begin and end. It is PyTorch's variable-length attention (`varlen_attn`) where
that exists: on CUDA, in half precision. Elsewhere, texts are padded for attention alone.
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
        """The last layer of a model that `prepare` was called on."""
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


def prepare(model: Any) -> bool:
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


def undo(model: Any) -> None:
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
