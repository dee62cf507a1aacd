"""Chunks on their way to the device, ahead of the computation.

`stream_chunks` copies tensors of the host through two buffers on the device, used in turn. A copy runs on its own stream and
waits for the computation that used the buffer before; the computation waits for the copy. So the device holds two chunks,
however far the host runs ahead.

`produce_chunks` has a thread with its own stream make the next chunk (collate, copy, decode, augment) while the main thread
queues the kernels of this one. The thread begins chunk i when the device is done with chunk i − 2, so the device holds two.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.memory import ALLOCATING
from megabatch.cached.tower_io import map_rows


def stream_chunks(chunks: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
    """The chunks on `device`. On CUDA a chunk is overwritten by the chunk after the next; other devices get plain copies."""
    with close_at_the_end(chunks):
        if device is not None and device.type == "cuda":
            yield from _double_buffer(chunks, device)
            return
        for chunk in chunks:
            yield chunk if device is None else map_rows(lambda tensor: tensor.to(device), chunk)


def _double_buffer(chunks: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    buffers = _Buffer(device, stream), _Buffer(device, stream)
    ahead: _Buffer | None = None
    for i, chunk in enumerate(chunks):
        buffer = buffers[i % 2]
        buffer.load(chunk)
        if ahead is not None:
            yield ahead.show()
            ahead.release()
        ahead = buffer
    if ahead is not None:
        yield ahead.show()
        ahead.release()


class _Buffer:
    """Device memory for one chunk, and pinned host memory for chunks that are not pinned."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # computation on the previous chunk
        self._buffers: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._from: list[Tensor] = []  # kept alive until the copy has finished
        self._chunk: Any = None

    def load(self, chunk: Any) -> None:
        """Starts the copy. The host waits only for an earlier copy out of the same pinned memory."""
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

        # The copy must not overwrite the previous chunk while queued kernels still read it.
        if self._done is not None:
            self._stream.wait_event(self._done)
        self._chunk = map_rows(copy, chunk)
        self._copied.record(self._stream)

    def show(self) -> Any:
        """The chunk, for kernels on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._chunk

    def release(self) -> None:
        """Records that all kernels that use the chunk have been queued."""
        self._chunk = None
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(self._device))

    def _buffer(self, buffers: list[Tensor], position: int, like: Tensor, *, pinned: bool) -> Tensor:
        """Rows of a tensor with room for `like`; a chunk of another shape, such as longer texts, gets a new tensor."""
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


def produce_chunks(
    chunks: Iterator[Any], device: torch.device | None, make: Callable[[Any, torch.device | None], Any], *, ahead: bool
) -> Iterator[Any]:
    """`make(chunk, device)` of each chunk: its inputs on `device`.

    Args:
        chunks: on the host.
        device: of the tower.
        make: makes the inputs.
        ahead: whether a thread runs `chunks` and `make`, one chunk ahead; on CUDA alone.
    """
    if device is not None and ahead:
        yield from _ahead(chunks, device, make)  # the thread closes `chunks`
        return
    with close_at_the_end(chunks):
        for chunk in chunks:
            yield make(chunk, device)


def _ahead(chunks: Iterator[Any], device: torch.device, make: Callable[[Any, torch.device], Any]) -> Iterator[Any]:
    made: Queue[Any] = Queue(1)
    used: Queue[torch.cuda.Event] = Queue()  # after the last kernel of each chunk
    stop = threading.Event()
    stream = _stream(device)

    def produce() -> None:
        try:
            with close_at_the_end(chunks), torch.cuda.device(device), torch.cuda.stream(stream):
                for i, chunk in enumerate(chunks):
                    if i >= 2 and not stop.is_set():
                        used.get().synchronize()  # the last kernel of chunk i − 2
                    if stop.is_set():
                        return
                    with ALLOCATING:
                        inputs = make(chunk, device)
                    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    ready.record(stream)
                    made.put((inputs, ready, chunk))  # the chunk's pinned memory lives until its copy is done
                    del inputs, chunk
            made.put(None)
        except BaseException as error:  # raised where the chunk is used
            made.put(error)

    thread = threading.Thread(target=produce, name="megabatch-chunks", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # its traceback holds this frame, and tensors of the thread
            inputs, ready, _ = item
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            map_rows(lambda tensor, stream=current: tensor.record_stream(stream), inputs)  # type: ignore[misc]
            yield inputs
            del inputs, item
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting takes no core from readers
            done.record(torch.cuda.current_stream(device))
            used.put(done)
    finally:
        stop.set()
        used.put(torch.cuda.Event())  # type: ignore[no-untyped-call]  # wakes the thread: an event never recorded counts as done
        while thread.is_alive():
            with suppress(Empty):
                made.get(timeout=0.05)
        thread.join()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all sources of a device, because PyTorch keeps the memory that a stream has freed for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def close_at_the_end(iterator: Iterator[Any]) -> Iterator[None]:
    """Closes a generator, and with it its background work; other iterators need no closing."""
    try:
        yield
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def copy_to(chunk: Any, device: torch.device | None) -> Any:
    """The tensors on `device`. Pinned ones are copied without waiting."""
    return chunk if device is None else map_rows(lambda tensor: tensor.to(device, non_blocking=True), chunk)


def join_rows(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of one shape as the rows of one tensor on `device`.

    To a GPU, pinned tensors are copied without waiting, and neighbours in memory together.
    """
    if device.type != "cuda":
        return torch.stack(list(tensors)).to(device)
    rows = torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device=device)
    first = 0
    for part in neighbours(tensors):
        rows[first : first + len(part)].copy_(part, non_blocking=True)
        first += len(part)
    return rows


def neighbours(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same tensors, in order, as rows of fewer: those that follow each other in memory are one."""
    first = 0
    for last in range(1, len(tensors) + 1):
        if last == len(tensors) or not _adjacent(tensors[last - 1], tensors[last]):
            start = tensors[first]
            yield start.as_strided((last - first, *start.shape), (start.numel(), *start.stride()))
            first = last


def _adjacent(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor begins where another of its shape ends."""
    return (
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.is_contiguous()
        and other.is_contiguous()
    )
