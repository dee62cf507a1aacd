"""Where a tower's inputs come from, chunk by chunk, as often as a step asks: tensors on the device or the host, or replay.

A step reads every chunk once, and the chunks whose graph it did not keep once more. A source therefore has to give the same
tensors for the same span each time. `ReplaySource` (replay.py) reads and augments again; the two here keep tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.streaming import closed_at_the_end, streamed
from megabatch.cached.tower_io import count_rows, local, map_rows
from megabatch.cached.tower_io import tensors as all_tensors

Span = tuple[int, int]  # first sample, one past the last


class Source(ABC):
    """Inputs of a tower that are fetched when they are needed. Subclass it for storage of your own."""

    reuses_memory = False  # whether a chunk's tensors are overwritten after the next but one has been asked for

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """The inputs of each span, in order, on `device` (where the tower is, None if nobody knows).

        A generator, so that what works in the background ends when the step closes it. The same span gives the same tensors.
        """

    def placeholder(self, device: torch.device | None) -> Any:
        """Inputs of one sample, any sample, for a pass whose result is not used.

        On many ranks all have to encode equally often, also one that has fewer samples. None if there is nothing to show.
        """
        if len(self) == 0:
            return None
        chunks = self.chunks([(0, 1)], device)
        with closed_at_the_end(chunks):
            return map_rows(torch.clone, next(chunks))


class TensorSource(Source):
    """Tensors that are where the tower is: a chunk is a view. What inputs become that are no source."""

    def __init__(self, inputs: Any, name: str = "inputs") -> None:
        self._inputs = map_rows(local, inputs)
        self._rows = count_rows(self._inputs, name)
        self.requires_grad = any(tensor.requires_grad for _, tensor in all_tensors(self._inputs, name))

    def __len__(self) -> int:
        """The number of samples."""
        return self._rows

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Views, on whatever device the tensors are."""
        for start, stop in spans:
            yield map_rows(lambda tensor, a=start, b=stop: tensor[a:b], self._inputs)  # type: ignore[misc]

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample, or ones: a token id of 1 exists and a mask of 1 hides nothing."""
        return map_rows(_one_row, self._inputs)


class HostSource(Source):
    """Tensors on the host, copied to the device ahead of the work: at most two chunks are there at any time.

    Pinned tensors (`tensor.pin_memory()`) are copied as they are; others go through two pinned chunks, which costs a copy by
    the processor. A tower's inputs that are on the host while the tower is on a CUDA device become one by themselves.

    Args:
        inputs: a tensor, or a mapping, tuple or list of tensors, one row for each sample.
        device: where to copy to; None for where the tower's parameters are.
    """

    reuses_memory = True

    def __init__(self, inputs: Any, device: torch.device | str | None = None) -> None:
        self._tensors = TensorSource(inputs)
        self._device = None if device is None else torch.device(device)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._tensors)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Copies on the device; a chunk's memory is used again for the next but one."""
        return streamed(self._tensors.chunks(spans, None), self._device or device)

    def placeholder(self, device: torch.device | None) -> Any:
        """The first sample, or ones."""
        target = self._device or device
        return map_rows(lambda tensor: tensor if target is None else tensor.to(target), self._tensors.placeholder(device))


def as_source(inputs: Any, name: str, device: torch.device | None) -> Source:
    """A source as it is; tensors as the source that suits where they are."""
    if isinstance(inputs, Source):
        return inputs
    source = TensorSource(inputs, name)
    if device is not None and device.type == "cuda" and any(t.device.type == "cpu" for _, t in all_tensors(inputs, name)):
        return HostSource(inputs)
    return source


def _one_row(tensor: Tensor) -> Tensor:
    if len(tensor):
        return tensor[:1].detach()
    return tensor.new_ones((1, *tensor.shape[1:]))
