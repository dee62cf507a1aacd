"""Where the samples of a tower come from, and how samples of different lengths are sorted into chunks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from megabatch.cached.memory import local
from megabatch.cached.streaming import close_at_the_end, count_rows, map_rows, stream_chunks, tensors

# ----------------------------------------------------------------------------------------------------------------------
# Samples of different lengths: encoded longest first, in chunks of similar length that hold little padding.
#
# An embedding depends neither on the padding of its sample nor on the other samples of its chunk. So a step may sort its
# samples by length, cut each chunk after its longest sample, and put more short samples into one chunk. Embeddings return
# to the original order before the loss sees them.

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


def choose_width(length: int, width: int) -> int:
    """The width of a chunk whose longest sample has `length` tokens; `width` is that of the whole inputs."""
    multiple = next((multiple for most, multiple in MULTIPLES if length <= most), LARGE_MULTIPLE)
    return min(width, multiple * max(1, -(-length // multiple)))


def longest_first(lengths: Tensor, width: int) -> Tensor | None:  # (N,) -> (N,)
    """The samples from long to short; None if all of them need the full width, so that nothing can be cut."""
    if len(lengths) == 0 or choose_width(int(lengths.min()), width) >= width:
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
        own = choose_width(lengths[start], width)
        full = max(chunk_size, _round_rows(most // own))
        stop = min(start + full, len(lengths))
        ends = [stop, *(end for part in PARTS if start < (end := start + _round_rows(full // part)) < stop)]
        saved = [(stop - end) * (own - choose_width(lengths[min(end, stop - 1)], width)) for end in ends]
        if max(saved) > most * WORTH_A_CHUNK:
            stop = ends[saved.index(max(saved))]
        found.append((start, stop))
        start = stop
    # By quarters of a full chunk: full chunks differ by rounding, and of these the longest samples need most memory.
    return sorted(found, key=lambda span: -round(4 * (span[1] - span[0]) * choose_width(lengths[span[0]], width) / most))


def _round_rows(rows: int) -> int:
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


def resolve_lengths(lengths: Any, inputs: Any, rows: int, width: int) -> Tensor | None:  # (N,) int64 on the host
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


# ----------------------------------------------------------------------------------------------------------------------
# Sources of a tower's inputs, chunk by chunk: tensors on the device, tensors on the host, or replay.
#
# A step reads every chunk once, and a second time if its graph was not kept. A source must return the same tensors for the
# same span each time. The two sources here hold tensors; `ReplaySource` (replay.py) reads and augments the samples again.


Span = tuple[int, int]  # first sample, one past the last


class Source(ABC):
    """Inputs of a tower, fetched when they are needed. Subclass it for your own storage."""

    reuses_memory = False  # whether a chunk's memory is overwritten once the chunk after the next is requested

    # For samples of different lengths (docs/cached.md), with `reorder`. None keeps the order of the samples.
    lengths: Tensor | None = None  # (N,) int64 on the host, tokens used of each sample
    width = 0  # tokens of a sample before it is cut; `chunk_size` samples of this width are known to fit into memory

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """The inputs of each span, in order, on `device` (the tower's; None if it has no parameters).

        A generator, so that the step can close it and end background work. The same span always gives the same tensors.
        """

    def reorder(self, order: Tensor) -> "Source":  # (N,) int64 on the host
        """The same samples in another order: sample i is sample `order[i]` of this source.

        Its chunks may be cut after their longest sample, to the width that `megabatch.cached.sources.choose_width` gives.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reorder(order), because it has lengths")

    def placeholder(self, device: torch.device | None) -> Any:
        """Inputs of one dummy sample, for a pass whose result is not used.

        All ranks must encode equally often, so a rank with fewer chunks encodes a dummy. None if the source cannot make one.
        """
        if len(self) == 0:
            return None
        chunks = self.chunks([(0, 1)], device)
        with close_at_the_end(chunks):
            return map_rows(torch.clone, next(chunks))


class TensorSource(Source):
    """Tensors on the tower's device; a chunk is a view. Plain tensor inputs become this source."""

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
        """Copies of the rows, each chunk cut after its longest sample."""
        return _Reordered(self, self._inputs, order)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Views of the tensors, on their own device."""
        for start, stop in spans:
            yield map_rows(lambda tensor, a=start, b=stop: tensor[a:b], self._inputs)  # type: ignore[misc]

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample, or ones: a token id of 1 exists and a mask of 1 hides nothing."""
        return map_rows(_one_row, self._inputs)


class _Reordered(Source):
    """The rows of a `TensorSource` in another order, each chunk cut after its longest sample."""

    def __init__(self, source: TensorSource, inputs: Any, order: Tensor) -> None:
        assert source.lengths is not None, "only sources that know lengths are reordered"
        self._source, self._inputs, self.width = source, inputs, source.width
        self._sorted = source.lengths[order]
        devices = {tensor.device for _, tensor in tensors(inputs, "inputs")}
        self._orders = {device: order.to(device) for device in devices}

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._source)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Copies, on the device of the tensors."""
        for start, stop in spans:
            width = choose_width(int(self._sorted[start:stop].max()), self.width)

            def select(tensor: Tensor, span: slice = slice(start, stop), width: int = width) -> Tensor:
                whole = tensor.dim() < 2 or tensor.shape[1] != self.width
                return (tensor if whole else tensor[:, :width]).index_select(0, self._orders[tensor.device][span])

            yield map_rows(select, self._inputs)

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample of the original order, or ones."""
        return self._source.placeholder(device)


class HostSource(Source):
    """Tensors on the host, copied to the device ahead of the computation: at most two chunks are there at any time.

    Pinned tensors (`tensor.pin_memory()`) are copied directly. Other tensors go through two pinned buffers, which costs another
    copy by the CPU. Inputs on the host become a `HostSource` by themselves if the tower is on a CUDA device.

    Args:
        inputs: a tensor, or a mapping, tuple or list of tensors, one row for each sample.
        device: to copy to (default: the device of the tower's parameters).
        lengths: (N,) integers, the tokens used of each sample. The step then encodes samples of similar length together and
            cuts chunks after their longest sample: every tensor whose dimension 1 has as many entries as that of the first.
            "auto" reads the lengths from `attention_mask`, if the inputs are a mapping that has one. None keeps the order and
            all padding, which a tower needs whose embeddings depend on padding.

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
        """The rows in another order, each chunk cut after its longest sample."""
        other = copy(self)
        other._tensors = self._tensors.reorder(order)
        return other

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Copies on the device; the chunk after the next reuses a chunk's memory."""
        return stream_chunks(self._tensors.chunks(spans, None), self._device or device)

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample, or ones."""
        target = self._device or device
        return map_rows(lambda tensor: tensor if target is None else tensor.to(target), self._tensors.placeholder(device))


def as_source(inputs: Any, name: str, device: torch.device | None) -> Source:
    """A source unchanged; tensors as a `TensorSource`, or as a `HostSource` if they have to be copied to a CUDA device."""
    if isinstance(inputs, Source):
        return inputs
    count_rows(inputs, name)  # an error names the tower
    on_host = any(tensor.device.type == "cpu" for _, tensor in tensors(inputs, name))
    return HostSource(inputs) if device is not None and device.type == "cuda" and on_host else TensorSource(inputs, name)


def _one_row(tensor: Tensor) -> Tensor:
    if len(tensor):
        return tensor[:1].detach()
    return tensor.new_ones((1, *tensor.shape[1:]))
