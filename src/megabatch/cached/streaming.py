"""The chunks of a tower: their tensors, their copies to the device ahead of the computation, and the time of each phase.

`stream_chunks` copies tensors from host memory to two device buffers in turn. A copy runs on its own stream and waits for the
computation that used the buffer before. The computation waits for the copy. So there are two chunks on the device, however far
the CPU runs ahead.

`produce_chunks` uses a thread with its own stream. The thread prepares the next chunk (collate, copy, decode, augment) while
the main thread queues the kernels of the current chunk. It starts chunk i when the device has finished chunk i − 2, so there
are at most two chunks on the device.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.second_pass import ALLOCATING

# ----------------------------------------------------------------------------------------------------------------------
# The inputs of a tower are a tensor, or tensors in mappings, tuples and lists, with one row for each sample. Numbers, strings,
# None and 0-d tensors belong to all samples and are passed unchanged.

_SAME_FOR_ALL = (bool, int, float, str, type(None))


def map_rows(function: Callable[[Tensor], Any], inputs: Any) -> Any:
    """Applies `function` to every tensor that has rows. The structure is kept, but mappings become dicts."""
    if isinstance(inputs, Tensor):
        return function(inputs) if inputs.dim() else inputs
    if isinstance(inputs, Mapping):
        return {key: map_rows(function, value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        values = [map_rows(function, value) for value in inputs]
        is_named = hasattr(inputs, "_fields")  # a named tuple takes separate arguments
        return type(inputs)(*values) if is_named else type(inputs)(values)
    return inputs


def tensors(inputs: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the name for messages and the tensor, for every tensor that has rows."""
    if isinstance(inputs, Tensor):
        if inputs.dim():
            yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from tensors(value, f"{name}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for i, value in enumerate(inputs):
            yield from tensors(value, f"{name}[{i}]")
    elif not isinstance(inputs, _SAME_FOR_ALL):
        raise TypeError(
            f"{name} must be a tensor, a mapping, tuple or list of tensors, or a megabatch.Source, got {type(inputs).__name__}"
        )


def count_rows(inputs: Any, name: str) -> int:
    """Returns the number of samples. Raises if the tensors have different numbers of rows."""
    named = list(tensors(inputs, name))
    if not named:
        raise ValueError(f"{name} must contain a tensor with one row for each sample, got {type(inputs).__name__} without one")
    counts = {label: len(tensor) for label, tensor in named}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {label}" for label, count in counts.items())
        raise ValueError(f"{name} must have the same number of rows in all its tensors, got {listed}")
    return next(iter(counts.values()))


# ----------------------------------------------------------------------------------------------------------------------
# Copies of chunks to the device.


def stream_chunks(chunks: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
    """Copies chunks to `device`. On CUDA, chunks use two buffers in turn. On other devices, copies are new."""
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
    """The device memory for one chunk, and pinned host memory for chunks that are not pinned."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None  # after the computation on the previous chunk
        self._buffers: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._from: list[Tensor] = []  # kept alive until the copy has finished
        self._chunk: Any = None

    def load(self, chunk: Any) -> None:
        """Starts the copy. The CPU waits only for an earlier copy from the same pinned memory."""
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
        """Returns the chunk for kernels on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._chunk

    def release(self) -> None:
        """Records that all kernels that use the chunk have been queued."""
        self._chunk = None
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(self._device))

    def _buffer(self, buffers: list[Tensor], position: int, like: Tensor, *, pinned: bool) -> Tensor:
        """Returns rows of a buffer that fit `like`. A chunk of another shape, such as longer texts, gets a new buffer."""
        rows, rest = len(like), like.shape[1:]
        if position < len(buffers):
            old = buffers[position]
            if old.dtype == like.dtype and old.shape[1:] == rest and len(old) >= rows:
                return old[:rows]
        created = torch.empty_like(
            like, device="cpu" if pinned else self._device, pin_memory=pinned, memory_format=torch.contiguous_format
        )
        if not pinned:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            created.record_stream(self._stream)
        buffers[position : position + 1] = [created]
        return created


def produce_chunks(
    chunks: Iterator[Any], device: torch.device | None, make: Callable[[Any, torch.device | None], Any], *, ahead: bool
) -> Iterator[Any]:
    """Yields the inputs of each chunk on `device`, as `make(chunk, device)` returns them.

    Args:
        chunks: the chunks in host memory.
        device: of the tower.
        make: turns a chunk into inputs on the device.
        ahead: whether a thread runs `chunks` and `make` one chunk ahead. It must be False on other devices than CUDA.
    """
    if device is not None and ahead:
        yield from _ahead(chunks, device, make)  # the thread closes `chunks`
        return
    with close_at_the_end(chunks):
        for chunk in chunks:
            yield make(chunk, device)


def _ahead(chunks: Iterator[Any], device: torch.device, make: Callable[[Any, torch.device], Any]) -> Iterator[Any]:
    ready_chunks: Queue[Any] = Queue(1)
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
                    ready_chunks.put((inputs, ready, chunk))  # with the chunk, to keep its pinned memory during the copy
                    del inputs, chunk
            ready_chunks.put(None)
        except BaseException as error:  # the main thread raises it when it needs the chunk
            ready_chunks.put(error)

    thread = threading.Thread(target=produce, name="megabatch-chunks", daemon=True)
    thread.start()
    try:
        while (item := ready_chunks.get()) is not None:
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # its traceback references this frame and tensors of the thread
            inputs, ready, _ = item
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            map_rows(lambda tensor, stream=current: tensor.record_stream(stream), inputs)  # type: ignore[misc]
            yield inputs
            del inputs, item
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread takes no CPU time from workers
            done.record(torch.cuda.current_stream(device))
            used.put(done)
    finally:
        stop.set()
        used.put(torch.cuda.Event())  # type: ignore[no-untyped-call]  # wakes the thread, because an event that was never recorded counts as done
        while thread.is_alive():
            with suppress(Empty):
                ready_chunks.get(timeout=0.05)
        thread.join()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all sources of a device, because PyTorch reuses freed memory only for the stream that freed it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def close_at_the_end(iterator: Iterator[Any]) -> Iterator[None]:
    """Closes a generator at the end of the context, which ends its background work. Other iterators are not closed."""
    try:
        yield
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def copy_to(chunk: Any, device: torch.device | None) -> Any:
    """Copies the tensors to `device`. Pinned tensors are copied asynchronously."""
    return chunk if device is None else map_rows(lambda tensor: tensor.to(device, non_blocking=True), chunk)


def join_rows(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copies tensors of one shape into the rows of one tensor on `device`.

    Copies of pinned tensors to a GPU are asynchronous. Tensors that are adjacent in memory are copied together.
    """
    if device.type != "cuda":
        return torch.stack(list(tensors)).to(device)
    rows = torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device=device)
    first = 0
    for part in merge_adjacent(tensors):
        rows[first : first + len(part)].copy_(part, non_blocking=True)
        first += len(part)
    return rows


def merge_adjacent(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Merges tensors that are adjacent in memory. Yields tensors whose rows are the given tensors, in order."""
    first = 0
    for last in range(1, len(tensors) + 1):
        if last == len(tensors) or not _adjacent(tensors[last - 1], tensors[last]):
            start = tensors[first]
            yield start.as_strided((last - first, *start.shape), (start.numel(), *start.stride()))
            first = last


def _adjacent(one: Tensor, other: Tensor) -> bool:
    """Returns whether the second tensor begins in memory where the first ends. Both have one shape."""
    return (
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.is_contiguous()
        and other.is_contiguous()
    )


# ----------------------------------------------------------------------------------------------------------------------
# The time of each phase of a step: data, forward, loss, backward, and the phases that a trainer adds.
#
#     clock = Clock(device)
#     with clock.activate():
#         cached_backward(...)
#     clock.lap()  # {"data": 0.02, "forward": 0.41, "loss": 0.01, "backward": 0.83, "other": 0.01}
#
# A clock is a list of marks. The time between two marks belongs to one phase, so phases never overlap and their sum is the
# total time. On a CPU, a mark is a time of the CPU's clock. On CUDA, it is an event in the current stream. The event records
# the device's time when the work queued before the event is done. So "data" is the time that the device is idle because data
# is missing, however long the CPU waits.

DATA, FORWARD, LOSS, BACKWARD, OTHER = "data", "forward", "loss", "backward", "other"


class Clock:
    """Measures phases on one device.

    Args:
        device: the device whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = OTHER
        self._marks: list[tuple[str, Any]] = []  # phase and its start, in seconds or as a CUDA event
        self._free: list[torch.cuda.Event] = []  # events that can be used for another mark
        self._begin(OTHER)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Makes `phase` use this clock in the context."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def lap(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call.

        On CUDA it synchronizes with the device, so call it after a result of the step has been read.
        """
        self._begin(self._phase)
        last = self._marks[-1]
        if isinstance(last[1], torch.cuda.Event):
            last[1].synchronize()
        times: dict[str, float] = {}
        for (name, began), (_, ended) in zip(self._marks[:-1], self._marks[1:], strict=True):
            times[name] = times.get(name, 0.0) + _seconds(began, ended)
        self._free += [mark for _, mark in self._marks[:-1] if isinstance(mark, torch.cuda.Event)]
        self._marks = [last]
        return times

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the context for this phase, except the time in nested phases."""
        outer = self._phase
        self._begin(name)
        try:
            yield
        finally:
            self._begin(outer)

    def _begin(self, name: str) -> None:
        self._phase = name
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((name, event))


_RUNNING: ContextVar[Clock | None] = ContextVar("megabatch clock", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts the time in the context for this phase of the active clock. Without a clock, nothing is measured."""
    clock = _RUNNING.get()
    if clock is None:
        yield
    else:
        with clock.phase(name):
            yield


def _seconds(began: Any, ended: Any) -> float:
    return float(began.elapsed_time(ended)) / 1e3 if isinstance(began, torch.cuda.Event) else float(ended - began)
