"""Sources of a tower's inputs, chunk by chunk: tensors on the device, tensors on the host, or replay.

A step reads every chunk once, and a second time if its graph was not kept. A source must return the same tensors for the same
span each time. The two sources here hold tensors; `ReplaySource` (replay.py) reads and augments the samples again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.dtensors import local
from megabatch.cached.lengths import Lengths, known, padded, width_of
from megabatch.cached.streaming import closed_at_the_end, streamed
from megabatch.cached.tower_io import count_rows, map_rows
from megabatch.cached.tower_io import tensors as all_tensors

Span = tuple[int, int]  # first sample, one past the last


class Source(ABC):
    """Inputs of a tower, fetched when they are needed. Subclass it for your own storage."""

    reuses_memory = False  # whether a chunk's memory is overwritten once the chunk after the next is requested

    # For samples of different lengths (docs/cached.md), with `reordered`. None keeps the order of the samples.
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

    def reordered(self, order: Tensor) -> "Source":  # (N,) int64 on the host
        """The same samples in another order: sample i is sample `order[i]` of this source.

        Its chunks may be cut after their longest sample, to the width that `megabatch.cached.lengths.padded` gives.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reordered(order), because it has lengths")

    def placeholder(self, device: torch.device | None) -> Any:
        """Inputs of one dummy sample, for a pass whose result is not used.

        All ranks must encode equally often, so a rank with fewer chunks encodes a dummy. None if the source cannot make one.
        """
        if len(self) == 0:
            return None
        chunks = self.chunks([(0, 1)], device)
        with closed_at_the_end(chunks):
            return map_rows(torch.clone, next(chunks))


class TensorSource(Source):
    """Tensors on the tower's device; a chunk is a view. Plain tensor inputs become this source."""

    def __init__(self, inputs: Any, name: str = "inputs", lengths: Lengths = "auto") -> None:
        self._inputs = map_rows(local, inputs)
        self._rows = count_rows(self._inputs, name)
        self.width = width_of(self._inputs)
        self.lengths = known(lengths, self._inputs, self._rows, self.width)
        self.requires_grad = any(tensor.requires_grad for _, tensor in all_tensors(self._inputs, name))

    def __len__(self) -> int:
        """The number of samples."""
        return self._rows

    def reordered(self, order: Tensor) -> Source:
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
        devices = {tensor.device for _, tensor in all_tensors(inputs, "inputs")}
        self._orders = {device: order.to(device) for device in devices}

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._source)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Copies, on the device of the tensors."""
        for start, stop in spans:
            width = padded(int(self._sorted[start:stop].max()), self.width)

            def cut(tensor: Tensor, span: slice = slice(start, stop), width: int = width) -> Tensor:
                whole = tensor.dim() < 2 or tensor.shape[1] != self.width
                return (tensor if whole else tensor[:, :width]).index_select(0, self._orders[tensor.device][span])

            yield map_rows(cut, self._inputs)

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

    Example:
        mb.cached_backward(loss_fn, [(image_tower, mb.HostSource(images.pin_memory())), (text_tower, tokens)])
    """

    reuses_memory = True

    def __init__(self, inputs: Any, device: torch.device | str | None = None, *, lengths: Lengths = "auto") -> None:
        self._tensors: Source = TensorSource(inputs, lengths=lengths)
        self.lengths, self.width = self._tensors.lengths, self._tensors.width
        self._device = None if device is None else torch.device(device)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._tensors)

    def reordered(self, order: Tensor) -> "HostSource":
        """The rows in another order, each chunk cut after its longest sample."""
        other = copy(self)
        other._tensors = self._tensors.reordered(order)
        return other

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Copies on the device; the chunk after the next reuses a chunk's memory."""
        return streamed(self._tensors.chunks(spans, None), self._device or device)

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample, or ones."""
        target = self._device or device
        return map_rows(lambda tensor: tensor if target is None else tensor.to(target), self._tensors.placeholder(device))


def as_source(inputs: Any, name: str, device: torch.device | None) -> Source:
    """A source unchanged; tensors as a `TensorSource`, or as a `HostSource` if they have to be copied to a CUDA device."""
    if isinstance(inputs, Source):
        return inputs
    count_rows(inputs, name)  # an error names the tower
    on_host = any(tensor.device.type == "cpu" for _, tensor in all_tensors(inputs, name))
    return HostSource(inputs) if device is not None and device.type == "cuda" and on_host else TensorSource(inputs, name)


def _one_row(tensor: Tensor) -> Tensor:
    if len(tensor):
        return tensor[:1].detach()
    return tensor.new_ones((1, *tensor.shape[1:]))
