"""Decoding ahead: one thread decodes the samples of coming chunks on the GPU, and keeps them there as rows of bytes.

Decoding is many small kernels and copies. Beside training, each of them waits for a large kernel to end, so the thread must
never be idle: it decodes this batch and the next one as far as its memory reaches. The rows of a batch stay for the second pass
if two batches fit; otherwise a row is dropped after its use, and decoded again.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.cached.graphs import ALLOCATING
from megabatch.cached.replay import PIECE, Read, ReplaySource, pieces_of
from megabatch.cached.sources import Span

GROUP = 16 * PIECE  # samples decoded together


class Rows(NamedTuple):
    """Decoded samples of a group."""

    rows: Tensor  # (n, …) on the device
    ready: Any  # the CUDA event after their last kernel; None on a CPU

    @classmethod
    def made(cls, rows: Tensor, stream: Any) -> "Rows":
        """Rows whose last kernel has been queued on `stream`."""
        if stream is None:
            return cls(rows, None)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(stream)
        return cls(rows, ready)

    def on_current_stream(self) -> Tensor:
        """The rows, for kernels of the current stream."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.rows.device)
            current.wait_event(self.ready)
            self.rows.record_stream(current)
        return self.rows


class Decoder:
    """The thread that decodes, for all batches of a run.

    Args:
        device: that the samples are decoded on.
        room: bytes of decoded samples on the device.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room
        self._used = 0  # bytes of the room
        self._changed = threading.Condition()  # guards everything here, and `groups` of the sources
        self._planned: deque[tuple[DecodedSource, int]] = deque()  # groups to decode if there is room
        self._urgent: deque[tuple[DecodedSource, int]] = deque()  # groups that a chunk waits for
        self._ended = False
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # before training
        self._thread = threading.Thread(target=self._run, name="megabatch-decode", daemon=True)
        self._thread.start()

    def plan(self, source: "DecodedSource") -> None:
        """Decodes all groups of a source once there is room, in the order in which sources come."""
        with self._changed:
            for group in range(-(-len(source) // GROUP)):
                source.groups[group] = Future()
                self._planned.append((source, group))
            self._changed.notify_all()

    def hurry(self, source: "DecodedSource", groups: Sequence[int]) -> list[Future[Rows]]:
        """Decodes these groups next, whether there is room or not, and again if they have failed."""
        with self._changed:
            for group in groups:
                task = source, group
                if group not in source.groups:
                    source.groups[group] = Future()
                    self._urgent.append(task)
                elif task in self._planned:
                    self._planned.remove(task)
                    self._urgent.append(task)
            self._changed.notify_all()
            return [source.groups[group] for group in groups]

    def drop(self, source: "DecodedSource", groups: Sequence[int] | None = None) -> None:
        """Frees decoded groups, or ends the work for a source and frees all of them."""
        with self._changed:
            for group in list(source.groups) if groups is None else groups:
                future = source.groups.pop(group, None)
                if future is not None and future.done():
                    self._used -= source.bytes_of(group)
            if groups is None:
                for tasks in (self._planned, self._urgent):
                    for task in [task for task in tasks if task[0] is source]:
                        tasks.remove(task)
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the thread, after the group that it is decoding."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._decode(*task)
            del task  # a finished batch must not stay alive here

    def _next(self) -> "tuple[DecodedSource, int] | None":
        """The next group to decode; None at the end."""
        with self._changed:
            while not self._ended:
                if self._urgent:
                    return self._urgent.popleft()
                if self._planned:
                    source, group = self._planned[0]
                    if self._used + source.bytes_of(group) <= self.room:
                        return self._planned.popleft()
                self._changed.wait()
            return None

    def _decode(self, source: "DecodedSource", group: int) -> None:
        with self._changed:
            future = source.groups.get(group)
        if future is None:  # dropped
            return
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                rows = Rows.made(source.decoded(group), self._stream)
        except BaseException as error:
            with self._changed:
                if source.groups.get(group) is future:
                    del source.groups[group]  # a repeated step decodes it again; the error would keep tensors alive
            future.set_exception(error)  # raised where the rows are used
            return
        with self._changed:
            if source.groups.get(group) is future:  # not dropped meanwhile
                self._used += source.bytes_of(group)
            future.set_result(rows)


@contextmanager
def opened(device: torch.device, room: int) -> Iterator[Decoder | None]:
    """A decoder; None without room, and without a CUDA device, whose memory alone is worth it."""
    if device.type != "cuda" or not room:
        yield None
        return
    decoder = Decoder(device, room)
    try:
        yield decoder
    finally:
        decoder.end()


class DecodedSource(ReplaySource):
    """Samples that are read by workers, decoded ahead by a `Decoder`, and finished chunk by chunk.

    Args:
        references: as for `ReplaySource`.
        read: as for `ReplaySource`.
        decode: turns samples into rows on the device.
        finish: turns rows into inputs of the tower.
        row_bytes: of one sample.
        decoder: whose device is the tower's.
        workers: an executor, since the decoder's thread asks for samples.
        hold: as for `ReplaySource`.
    """

    def __init__(
        self,
        references: Sequence[Any],
        read: Read,
        *,
        decode: Callable[[list[Any], torch.device], Tensor],
        finish: Callable[[Tensor], Any],
        row_bytes: int,
        decoder: Decoder,
        workers: Executor,
        hold: int = 0,
    ) -> None:
        super().__init__(references, read, workers=workers, hold=hold)
        self._decode, self._inputs, self._row_bytes, self._decoder = decode, finish, row_bytes, decoder
        self._executor = workers
        self.groups: dict[int, Future[Rows]] = {}  # decoded, or to be decoded; guarded by the decoder
        self._stays = 2 * len(references) * row_bytes <= decoder.room  # whether rows stay for the second pass

    def bytes_of(self, group: int) -> int:
        """Bytes of a decoded group."""
        first, last = self._span_of(group)
        return (last - first) * self._row_bytes

    def start(self, sample_bytes: int) -> None:
        """Begins to read and decode, for a batch that is due later."""
        super().start(sample_bytes)
        self._decoder.plan(self)

    def stop(self) -> None:
        """Ends reading and decoding, and frees the decoded samples, because the step is over."""
        self._decoder.drop(self)
        super().stop()

    def decoded(self, group: int) -> Tensor:  # (n, …)
        """Reads and decodes a group; the decoder calls it in its thread."""
        samples = self._samples(self._span_of(group), self._executor)
        self._request(self._executor, pieces_of(self._span_of(group + 1)))
        with ALLOCATING:
            rows = self._decode(samples, self._decoder.device)
        if self._stays:
            self._let_go(pieces_of(self._span_of(group)))
        return rows

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """The inputs of each span, made of decoded groups."""
        if device != self._decoder.device:
            raise ValueError(f"device must be the decoder's, {self._decoder.device}, got {device}")
        for i, (first, last) in enumerate(spans):
            coming = self._decoder.hurry(self, _groups((first, last)))
            for soon in spans[i + 1 : i + 2]:
                self._decoder.hurry(self, _groups(soon))
            parts = []
            for group in _groups((first, last)):
                rows, start = coming.pop(0).result().on_current_stream(), group * GROUP
                parts.append(rows[max(0, first - start) : last - start])
                del rows
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            del parts
            if not self._stays:
                following = _groups(spans[i + 1]) if i + 1 < len(spans) else ()
                self._decoder.drop(self, [group for group in _groups((first, last)) if group not in following])
            yield self._inputs(whole)
            del whole

    def _span_of(self, group: int) -> Span:
        return group * GROUP, min((group + 1) * GROUP, len(self))


def _groups(span: Span) -> range:
    return range(span[0] // GROUP, -(-span[1] // GROUP))
