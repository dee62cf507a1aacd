"""Samples of different lengths: encoded longest first, in chunks of similar length that hold little padding.

An embedding depends neither on the padding of its sample nor on the other samples of its chunk. So a step may sort its samples
by length, cut each chunk after its longest sample, and put more short samples into one chunk. Embeddings return to the original
order before the loss sees them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megabatch.cached.tower_io import tensors

Lengths = Tensor | Literal["auto"] | None

MASK = "attention_mask"
# A compiled tower compiles again for each new width, and matrix products are fastest for multiples of 8. Rounding up adds 4
# tokens on average to widths up to 64, 8 up to 128, and 32 above.
MULTIPLES = ((64, 8), (128, 16))
LARGE_MULTIPLE = 64
ROWS_MULTIPLE, FEW_ROWS = 8, 64  # samples of a chunk are a multiple of 8 if there are 64 or more
# A chunk whose samples differ much in length ends early, after a half, a quarter or an eighth of the samples that it could
# hold, if that saves more tokens of padding than this share of a full chunk. 16,384 captions in chunks of 1,024 then have 28 %
# of padding in 7 chunks; full chunks would be 5, with 41 %.
PARTS, WORTH_A_CHUNK = (2, 4, 8), 1 / 16
ROWS_AT_ONCE = 1 << 16  # of a mask, which bounds the memory beside it


def padded(length: int, width: int) -> int:
    """The width of a chunk whose longest sample has `length` tokens; `width` is that of the whole inputs."""
    multiple = next((multiple for most, multiple in MULTIPLES if length <= most), LARGE_MULTIPLE)
    return min(width, multiple * max(1, -(-length // multiple)))


def longest_first(lengths: Tensor, width: int) -> Tensor | None:  # (N,) -> (N,)
    """The samples from long to short; None if all of them need the full width, so that nothing can be cut."""
    if len(lengths) == 0 or padded(int(lengths.min()), width) >= width:
        return None
    return torch.sort(lengths, descending=True, stable=True).indices


def spans(lengths: Sequence[int], width: int, chunk_size: int) -> list[tuple[int, int]]:
    """Chunks of samples sorted from long to short: the first sample of each, and one past its last.

    The largest chunks come first, so that memory runs out at once if it does, and a graph that is measured is a large one.

    Args:
        lengths: of the samples.
        width: tokens of the whole inputs.
        chunk_size: samples in a chunk of full width. A chunk of shorter samples holds more of them and at most as many tokens.
    """
    most = chunk_size * width  # tokens
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(lengths):
        own = padded(lengths[start], width)
        full = max(chunk_size, _rounded(most // own))
        stop = min(start + full, len(lengths))
        ends = [stop, *(end for part in PARTS if start < (end := start + _rounded(full // part)) < stop)]
        saved = [(stop - end) * (own - padded(lengths[min(end, stop - 1)], width)) for end in ends]
        if max(saved) > most * WORTH_A_CHUNK:
            stop = ends[saved.index(max(saved))]
        found.append((start, stop))
        start = stop
    # By quarters of a full chunk: full chunks differ by rounding, and of these the longest samples need most memory.
    return sorted(found, key=lambda span: -round(4 * (span[1] - span[0]) * padded(lengths[span[0]], width) / most))


def _rounded(rows: int) -> int:
    return rows if rows < FEW_ROWS else rows - rows % ROWS_MULTIPLE


def width_of(inputs: Any) -> int:
    """The number of tokens: the size of dimension 1 in the first tensor that has one; 0 if none has."""
    return next((tensor.shape[1] for _, tensor in tensors(inputs, "inputs") if tensor.dim() > 1), 0)


def from_mask(inputs: Any) -> Tensor | None:  # (N,) int64 on the host
    """Lengths by the attention mask of a tokenizer's output: the position after the last 1 of each row.

    None if there is no mask, or if something about the inputs is unusual: a mask that is not (N, L) integers or booleans of 0
    and 1, inputs of a decoder, or another tensor whose dimension 1 is not the mask's. A row without any 1 counts as long as
    the mask, because a softmax over nothing but masked tokens depends on their number.
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_complex():
        return None
    width = mask.shape[1]
    if any(str(key).startswith("decoder_") for key in inputs):
        return None
    if not width or any(tensor.dim() > 1 and tensor.shape[1] != width for _, tensor in tensors(inputs, "inputs")):
        return None
    found = torch.cat([_last_one(part) for part in torch.split(mask, ROWS_AT_ONCE)] or [mask.new_zeros(0)])
    found = found.to("cpu", torch.int64)  # one copy for all rows, since the host waits for it
    return None if bool((found < 0).any()) else found.masked_fill_(found == 0, width)


def _last_one(mask: Tensor) -> Tensor:  # (n, L) -> (n,)
    """The position after the last 1; −1 for a row that has other numbers than 0 and 1."""
    number = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    usual = ((mask == 0) | (mask == 1)).all(1)
    return torch.where(usual, (mask.bool() * number).amax(1), -1)


def known(lengths: Any, inputs: Any, rows: int, width: int) -> Tensor | None:  # (N,) int64 on the host
    """The argument `lengths` of a source: "auto" by the attention mask; integers are checked."""
    if lengths is None or (isinstance(lengths, str) and lengths == "auto"):
        return from_mask(inputs) if lengths == "auto" else None
    if not isinstance(lengths, Tensor) or lengths.shape != (rows,) or lengths.is_floating_point() or lengths.is_complex():
        got = repr(lengths)
        if isinstance(lengths, Tensor):
            got = f"shape {tuple(lengths.shape)} of {str(lengths.dtype).removeprefix('torch.')}"
        raise ValueError(f'lengths must be a tensor of {rows} integers, one for each sample, "auto" or None, got {got}')
    found = lengths.to("cpu", torch.int64)
    if rows and not 0 <= int(found.min()) <= int(found.max()) <= width:
        raise ValueError(
            f"lengths must be between 0 and the {width} tokens of the inputs, got {int(found.min())} to {int(found.max())}"
        )
    return found
