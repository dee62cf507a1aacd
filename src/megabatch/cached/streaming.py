"""Chunks from the host to a CUDA device, copied while the device works on the chunk before.

Two places on the device, used in turn. A copy into one waits, on a stream of its own, for the work that used what was there;
the work waits for the copy. So two chunks are on the device at any time, however far the host runs ahead.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.tower_io import map_rows


def streamed(chunks: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
    """The chunks on `device`; elsewhere than on CUDA they are just moved. A chunk is overwritten by the next but one."""
    with closed_at_the_end(chunks):
        if device is not None and device.type == "cuda":
            yield from _through_two_places(chunks, device)
            return
        for chunk in chunks:
            yield chunk if device is None else map_rows(lambda tensor: tensor.to(device), chunk)


@contextmanager
def closed_at_the_end(iterator: Iterator[Any]) -> Iterator[None]:
    """Ends a generator, and so whatever works for it in the background; other iterators have nothing to end."""
    try:
        yield
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def _through_two_places(chunks: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    places = _Place(device, stream), _Place(device, stream)
    ahead: _Place | None = None
    for i, chunk in enumerate(chunks):
        place = places[i % 2]
        place.load(chunk)
        if ahead is not None:
            yield ahead.show()
            ahead.release()
        ahead = place
    if ahead is not None:
        yield ahead.show()
        ahead.release()


class _Place:
    """Memory for one chunk on the device, and pinned memory for it on the host if the chunk comes unpinned."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # the work on what was here before
        self._buffers: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._from: list[Tensor] = []  # held until they have been copied
        self._chunk: Any = None

    def load(self, chunk: Any) -> None:
        """Starts the copy; waits for nothing but, on the host, for an older copy out of the same pinned memory."""
        if self._from:
            self._copied.synchronize()
        self._from = []
        position = 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal position
            if tensor.device.type != "cpu":
                return tensor
            target = self._buffer(self._buffers, position, tensor, pinned=False)
            if not tensor.is_pinned():
                staging = self._buffer(self._staging, position, tensor, pinned=True)
                tensor = staging.copy_(tensor)
            self._from.append(tensor)
            position += 1
            with torch.cuda.stream(self._stream):
                return target.copy_(tensor, non_blocking=True)

        # Fresh memory may be in use by work that is queued; afterwards only what was here before matters.
        if self._done is not None:
            self._stream.wait_event(self._done)
        self._chunk = map_rows(copy, chunk)
        self._copied.record(self._stream)

    def show(self) -> Any:
        """The chunk, for work on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._chunk

    def release(self) -> None:
        """Says that all work on the chunk has been queued."""
        self._chunk = None
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(self._device))

    def _buffer(self, buffers: list[Tensor], position: int, like: Tensor, *, pinned: bool) -> Tensor:
        """Rows of a buffer that has room for `like`; a chunk of another shape (longer texts) gets a new one."""
        rows, rest = len(like), like.shape[1:]
        if position < len(buffers):
            old = buffers[position]
            if old.dtype == like.dtype and old.shape[1:] == rest and len(old) >= rows:
                return old[:rows]
        fresh = torch.empty_like(
            like, device="cpu" if pinned else self._device, pin_memory=pinned, memory_format=torch.contiguous_format
        )
        if not pinned:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            fresh.record_stream(self._stream)
        buffers[position : position + 1] = [fresh]
        return fresh
