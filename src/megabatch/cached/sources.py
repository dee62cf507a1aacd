"""The sources of a tower's samples, and the sorting of samples of different lengths into chunks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from megabatch.cached.streaming import close_at_the_end, count_rows, map_rows, stream_chunks, tensors
from megabatch.world import local

# ----------------------------------------------------------------------------------------------------------------------
# Samples of different lengths are encoded from long to short. Each chunk has samples of similar length, with little padding.
#
# An embedding depends neither on the padding of its sample nor on the other samples of its chunk. So a step may sort its
# samples by length, truncate each chunk to its longest sample, and put more short samples into one chunk. Embeddings return
# to the original order before the loss uses them. In this module, `width` is the padded length in tokens.

Lengths = Tensor | Literal["auto"] | None

MASK = "attention_mask"
# A compiled tower compiles again for each new width, and matmuls are fastest for multiples of 8. Rounding up adds 4 tokens on
# average to widths up to 64, 8 tokens up to 128, and 32 tokens above.
MULTIPLES = ((64, 8), (128, 16))
LARGE_MULTIPLE = 64
ROWS_MULTIPLE, FEW_ROWS = 8, 64  # the number of samples of a chunk is a multiple of 8 if there are 64 or more
# If the samples of a chunk differ much in length, the chunk ends after a half, a quarter or an eighth of the samples that fit,
# provided that the saved padding tokens are more than the fraction `WORTH_A_CHUNK` of the tokens in a full chunk. Then 16,384
# captions in chunks of 1,024 take 7 chunks with 28 % padding. Full chunks would take 5 chunks with 41 % padding.
PARTS, WORTH_A_CHUNK = (2, 4, 8), 1 / 16
ROWS_AT_ONCE = 1 << 16  # rows of a mask that are processed at once, which limits the extra memory


def choose_width(length: int, width: int) -> int:
    """Returns the width of a chunk whose longest sample has `length` tokens. `width` is the width of the whole inputs."""
    multiple = next((multiple for most, multiple in MULTIPLES if length <= most), LARGE_MULTIPLE)
    return min(width, multiple * max(1, -(-length // multiple)))


def longest_first(lengths: Tensor, width: int) -> Tensor | None:  # (N,) -> (N,)
    """Returns the samples from long to short, or None if all of them need the full width."""
    if len(lengths) == 0 or choose_width(int(lengths.min()), width) >= width:
        return None
    return torch.sort(lengths, descending=True, stable=True).indices


def spans(lengths: Sequence[int], width: int, chunk_size: int) -> list[tuple[int, int]]:
    """Divides samples that are sorted from long to short into chunks.

    Returns the first sample of each chunk, and one past its last sample.
    The largest chunks come first. If memory does not suffice, the step then fails early, and the first measured graph is large.

    Args:
        lengths: the lengths of the samples.
        width: the width of the whole inputs.
        chunk_size: samples in a chunk of full width. A chunk of shorter samples has more samples and at most as many tokens.
    """
    most = chunk_size * width  # tokens
    chunks: list[tuple[int, int]] = []
    start = 0
    while start < len(lengths):
        own = choose_width(lengths[start], width)
        full = max(chunk_size, _round_rows(most // own))
        stop = min(start + full, len(lengths))
        ends = [stop, *(end for part in PARTS if start < (end := start + _round_rows(full // part)) < stop)]
        saved = [(stop - end) * (own - choose_width(lengths[min(end, stop - 1)], width)) for end in ends]
        if max(saved) > most * WORTH_A_CHUNK:
            stop = ends[saved.index(max(saved))]
        chunks.append((start, stop))
        start = stop
    # Sizes are compared in quarters of a full chunk, because full chunks differ by rounding. Among equal sizes, the longest
    # samples come first, because they need most memory.
    return sorted(chunks, key=lambda span: -round(4 * (span[1] - span[0]) * choose_width(lengths[span[0]], width) / most))


def _round_rows(rows: int) -> int:
    return rows if rows < FEW_ROWS else rows - rows % ROWS_MULTIPLE


def width_of(inputs: Any) -> int:
    """Returns the size of dimension 1 of the first tensor that has this dimension, or 0."""
    return next((tensor.shape[1] for _, tensor in tensors(inputs, "inputs") if tensor.dim() > 1), 0)


def from_mask(inputs: Any) -> Tensor | None:  # (N,) int64 on the CPU
    """Computes lengths from the attention mask of a tokenizer's output: the position after the last 1 of each row.

    Returns None if there is no mask, or if the inputs are unusual. They are unusual if the mask does not consist of (N, L)
    integers or booleans of 0 and 1, if they are inputs of a decoder, or if dimension 1 of another tensor differs from the
    mask's. A row without any 1 gets the full width, because a softmax over only masked tokens depends on their number.
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_complex():
        return None
    width = mask.shape[1]
    if any(str(key).startswith("decoder_") for key in inputs):
        return None
    if not width or any(tensor.dim() > 1 and tensor.shape[1] != width for _, tensor in tensors(inputs, "inputs")):
        return None
    lengths = torch.cat([_last_one(part) for part in torch.split(mask, ROWS_AT_ONCE)] or [mask.new_zeros(0)])
    lengths = lengths.to("cpu", torch.int64)  # one copy for all rows, because it synchronizes with the GPU
    return None if bool((lengths < 0).any()) else lengths.masked_fill_(lengths == 0, width)


def _last_one(mask: Tensor) -> Tensor:  # (n, L) -> (n,)
    """Returns the position after the last 1 of each row, or −1 for a row with numbers other than 0 and 1."""
    number = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    binary = ((mask == 0) | (mask == 1)).all(1)
    return torch.where(binary, (mask.bool() * number).amax(1), -1)


def resolve_lengths(lengths: Any, inputs: Any, rows: int, width: int) -> Tensor | None:  # (N,) int64 on the CPU
    """Resolves the argument `lengths` of a source. "auto" uses the attention mask. Integers are checked."""
    if lengths is None or (isinstance(lengths, str) and lengths == "auto"):
        return from_mask(inputs) if lengths == "auto" else None
    if not isinstance(lengths, Tensor) or lengths.shape != (rows,) or lengths.is_floating_point() or lengths.is_complex():
        got = repr(lengths)
        if isinstance(lengths, Tensor):
            got = f"shape {tuple(lengths.shape)} of {str(lengths.dtype).removeprefix('torch.')}"
        raise ValueError(f'lengths must be a tensor of {rows} integers, one for each sample, "auto" or None, got {got}')
    checked = lengths.to("cpu", torch.int64)
    if rows and not 0 <= int(checked.min()) <= int(checked.max()) <= width:
        raise ValueError(
            f"lengths must be between 0 and the {width} tokens of the inputs, got {int(checked.min())} to {int(checked.max())}"
        )
    return checked


# ----------------------------------------------------------------------------------------------------------------------
# Sources of a tower's inputs: tensors on the device, tensors on the host, or replay.
#
# A step reads every chunk once, and a second time if its graph was not kept. A source must return equal tensors for equal
# spans each time. The two sources here store tensors. `ReplaySource` (replay.py) reads and augments the samples again.


Span = tuple[int, int]  # first sample, one past the last


class Source(ABC):
    """The inputs of a tower, which are fetched when they are needed. Subclass it for your own storage."""

    reuses_memory = False  # whether a chunk's memory is overwritten when the chunk after the next one is requested

    # For samples of different lengths (docs/cached.md), with `reorder`. None keeps the order of the samples.
    lengths: Tensor | None = None  # (N,) int64 on the CPU, the number of tokens of each sample without padding
    width = 0  # the padded length of a sample; `chunk_size` samples of this length must fit into memory

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Yields the inputs of each span, in order, on `device`. `device` is None if the tower has no parameters.

        It must be a generator, so that the step can close it and end background work. A span must always give equal tensors.
        """

    def reorder(self, order: Tensor) -> "Source":  # (N,) int64 on the CPU
        """Returns a source with the samples in another order. Its sample i is sample `order[i]` of this source.

        Its chunks may be truncated to their longest sample, at the width that `megabatch.cached.sources.choose_width` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reorder(order), because it has lengths")

    def placeholder(self, device: torch.device | None) -> Any:
        """Returns the inputs of one dummy sample, or None if the source cannot create one.

        All ranks must encode equally often, so a rank with fewer chunks encodes dummy samples. Their result is not used.
        """
        if len(self) == 0:
            return None
        chunks = self.chunks([(0, 1)], device)
        with close_at_the_end(chunks):
            return map_rows(torch.clone, next(chunks))


class TensorSource(Source):
    """Tensors on the tower's device. A chunk is a view. Inputs that are plain tensors become this source."""

    def __init__(self, inputs: Any, name: str = "inputs", lengths: Lengths = "auto") -> None:
        self._inputs = map_rows(local, inputs)
        self._rows = count_rows(self._inputs, name)
        self.width = width_of(self._inputs)
        self.lengths = resolve_lengths(lengths, self._inputs, self._rows, self.width)
        self.requires_grad = any(tensor.requires_grad for _, tensor in tensors(self._inputs, name))

    def __len__(self) -> int:
        """The number of samples."""
        return self._rows

    def reorder(self, order: Tensor) -> Source:
        """Returns a source with the rows in another order. Its chunks are copies, truncated to their longest sample."""
        return _Reordered(self, self._inputs, order)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Yields views of the tensors on the device of the tensors."""
        for start, stop in spans:
            yield map_rows(lambda tensor, a=start, b=stop: tensor[a:b], self._inputs)  # type: ignore[misc]

    def placeholder(self, device: torch.device | None) -> Any:
        """Returns the first sample, or ones if there is none, because 1 is a valid token id and a valid mask value."""
        return map_rows(_one_row, self._inputs)


class _Reordered(Source):
    """The rows of a `TensorSource` in another order. Each chunk is truncated to its longest sample."""

    def __init__(self, source: TensorSource, inputs: Any, order: Tensor) -> None:
        assert source.lengths is not None, "only sources with lengths are reordered"
        self._source, self._inputs, self.width = source, inputs, source.width
        self._sorted = source.lengths[order]
        devices = {tensor.device for _, tensor in tensors(inputs, "inputs")}
        self._orders = {device: order.to(device) for device in devices}

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._source)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Yields copies on the device of the tensors."""
        for start, stop in spans:
            width = choose_width(int(self._sorted[start:stop].max()), self.width)

            def select(tensor: Tensor, span: slice = slice(start, stop), width: int = width) -> Tensor:
                unpadded = tensor.dim() < 2 or tensor.shape[1] != self.width
                return (tensor if unpadded else tensor[:, :width]).index_select(0, self._orders[tensor.device][span])

            yield map_rows(select, self._inputs)

    def placeholder(self, device: torch.device | None) -> Any:
        """Returns the first sample of the original order, or ones."""
        return self._source.placeholder(device)


class HostSource(Source):
    """Tensors in host memory that are copied to the device ahead of the computation. At most two chunks are on the device.

    Pinned tensors (`tensor.pin_memory()`) are copied directly. Other tensors are first copied to pinned buffers by the CPU.
    Inputs in host memory become a `HostSource` automatically if the tower is on a CUDA device.

    Args:
        inputs: a tensor, or a mapping, tuple or list of tensors, one row for each sample.
        device: the target of the copies (default: the device of the tower's parameters).
        lengths: (N,) integers, the number of tokens of each sample without padding. The step then encodes samples of similar
            length together and truncates each chunk to its longest sample. It truncates each tensor whose dimension 1 has the
            padded length. The first tensor that has a dimension 1 determines the padded length. "auto" computes the lengths
            from `attention_mask`, if the inputs are a mapping that has one. None keeps the order and all padding, which is
            needed for towers whose embeddings depend on padding.

    Examples:
        ```python
        mb.cached_backward(loss_fn, [(image_tower, mb.HostSource(images.pin_memory())), (text_tower, tokens)])
        ```
    """

    reuses_memory = True

    def __init__(self, inputs: Any, device: torch.device | str | None = None, *, lengths: Lengths = "auto") -> None:
        self._tensors: Source = TensorSource(inputs, lengths=lengths)
        self.lengths, self.width = self._tensors.lengths, self._tensors.width
        self._device = None if device is None else torch.device(device)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._tensors)

    def reorder(self, order: Tensor) -> "HostSource":
        """Returns a source with the rows in another order. Each chunk is truncated to its longest sample."""
        other = copy(self)
        other._tensors = self._tensors.reorder(order)
        return other

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Yields copies on the device. Each chunk reuses the memory of the chunk before the previous one."""
        return stream_chunks(self._tensors.chunks(spans, None), self._device or device)

    def placeholder(self, device: torch.device | None) -> Any:
        """Returns the first sample, or ones."""
        target = self._device or device
        return map_rows(lambda tensor: tensor if target is None else tensor.to(target), self._tensors.placeholder(device))


def as_source(inputs: Any, name: str, device: torch.device | None) -> Source:
    """Wraps tensors in a `TensorSource`, or in a `HostSource` if they have to be copied to a GPU. Sources are unchanged."""
    if isinstance(inputs, Source):
        return inputs
    count_rows(inputs, name)  # errors then name the tower
    on_host = any(tensor.device.type == "cpu" for _, tensor in tensors(inputs, name))
    return HostSource(inputs) if device is not None and device.type == "cuda" and on_host else TensorSource(inputs, name)


def _one_row(tensor: Tensor) -> Tensor:
    if len(tensor):
        return tensor[:1].detach()
    return tensor.new_ones((1, *tensor.shape[1:]))
