"""The chunks of a tower: their tensors, their way to the device ahead of the computation, and the time of each phase.

`stream_chunks` copies tensors of the host through two buffers on the device, used in turn. A copy runs on its own stream and
waits for the computation that used the buffer before; the computation waits for the copy. So the device holds two chunks,
however far the host runs ahead.

`produce_chunks` has a thread with its own stream make the next chunk (collate, copy, decode, augment) while the main thread
queues the kernels of this one. The thread begins chunk i when the device is done with chunk i − 2, so the device holds two.
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

from megabatch.cached.memory import ALLOCATING

# ----------------------------------------------------------------------------------------------------------------------
# The inputs of a tower: a tensor, or tensors in mappings, tuples and lists, with one row for each sample. Numbers, strings,
# None and 0-d tensors are the same for all samples and are passed unchanged.

_SAME_FOR_ALL = (bool, int, float, str, type(None))


def map_rows(function: Callable[[Tensor], Any], inputs: Any) -> Any:
    """Applies `function` to every tensor that has rows, and keeps the structure; mappings become dicts."""
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
    """(name for messages, tensor) of every tensor that has rows."""
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
    """The number of samples; all tensors must have the same number of rows."""
    found = list(tensors(inputs, name))
    if not found:
        raise ValueError(f"{name} must contain a tensor with one row for each sample, got {type(inputs).__name__} without one")
    counts = {label: len(tensor) for label, tensor in found}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {label}" for label, count in counts.items())
        raise ValueError(f"{name} must have the same number of rows in all its tensors, got {listed}")
    return next(iter(counts.values()))


# ----------------------------------------------------------------------------------------------------------------------
# The way of chunks to the device.


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


# ----------------------------------------------------------------------------------------------------------------------
# The time of a step by phase: data, forward, loss, backward, and the phases that a trainer adds.
#
#     clock = Clock(device)
#     with clock.activate():
#         cached_backward(...)
#     clock.lap()  # {"data": 0.02, "forward": 0.41, "loss": 0.01, "backward": 0.83, "other": 0.01}
#
# A clock is a list of marks. The time from a mark to the next belongs to one phase, so phases never overlap and their sum is
# the total time. On a CPU a mark is a reading of the host's clock. On CUDA it is an event in the current stream, which gets the
# device's time when the work queued before it is done. So "data" is the time that the device is idle for lack of data, however
# long the host waits.

DATA, FORWARD, LOSS, BACKWARD, OTHER = "data", "forward", "loss", "backward", "other"


class Clock:
    """Measures phases on one device.

    Args:
        device: whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = OTHER
        self._marks: list[tuple[str, Any]] = []  # phase, and when it began: seconds or a CUDA event
        self._free: list[torch.cuda.Event] = []  # read, and ready for another mark
        self._begin(OTHER)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """`phase` reports to this clock inside."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last call.

        On CUDA it waits for the device, so the place to call it is after a result of the step has been read.
        """
        self._begin(self._phase)
        last = self._marks[-1]
        if isinstance(last[1], torch.cuda.Event):
            last[1].synchronize()
        found: dict[str, float] = {}
        for (name, began), (_, ended) in zip(self._marks[:-1], self._marks[1:], strict=True):
            found[name] = found.get(name, 0.0) + _seconds(began, ended)
        self._free += [mark for _, mark in self._marks[:-1] if isinstance(mark, torch.cuda.Event)]
        self._marks = [last]
        return found

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time inside belongs to this phase, but for phases inside of it."""
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
    """The time inside belongs to this phase of the running clock; nothing is measured without one."""
    clock = _RUNNING.get()
    if clock is None:
        yield
    else:
        with clock.phase(name):
            yield


def _seconds(began: Any, ended: Any) -> float:
    return float(began.elapsed_time(ended)) / 1e3 if isinstance(began, torch.cuda.Event) else float(ended - began)
