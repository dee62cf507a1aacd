"""Replay: samples are read when their chunk is due, and kept in host memory for the second pass if they fit.

A sample that is not kept is read, decoded and augmented again, so the batch never has to fit into memory. Only its reference (a
path, an index, or any argument of `read`) and a 32-bit checksum are kept. The seed of a sample depends on its position. If the
second reading differs from the first, an error lists the samples.
"""

import ctypes
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.cached import second_pass
from megabatch.cached.sources import Source, Span, longest_first
from megabatch.cached.streaming import copy_to, produce_chunks

PIECE = 64  # samples of a task: enough to hide the overhead of a task, and few enough to spread a chunk over workers
NAMED = 5  # the largest number of samples that an error lists
_UNREAD = 2**32  # stored instead of a checksum if the sample has not been read

Read = Callable[[Any, torch.Generator], Any]


class Checked(NamedTuple):
    """A sample and a checksum, which `read` may return. The checksum may cover only the source data, which can be smaller."""

    sample: Any
    checksum: int


class ReplayMismatchError(RuntimeError):
    """The second reading of a sample gave different tensors than the first, so the gradients would be wrong."""


class ReplaySource(Source):
    """Samples that are read when they are needed, identically each time.

    `read(reference, generator)` returns one sample: a tensor, or a mapping or tuple of tensors and numbers. It must draw all
    random numbers from `generator`, which is seeded for the sample. If the main thread of a process reads the samples
    (`workers=0` or a process pool), the global generators of PyTorch, Python and NumPy are seeded as well, so transforms may
    use them. This does not work in a thread pool, because threads share the global generators.

    Args:
        references: a sequence of one reference for each sample.
        read: reads one sample.
        seed: of the batch. The seed of sample i depends on this seed and on i. Use a different seed for every batch.
        workers: 0 to read on demand, n for n threads, or a `concurrent.futures.Executor` that many batches can share.
        collate: turns a list of samples into inputs of the tower (default: stacks tensors). For a CUDA device it runs in a
            separate thread, ahead of the computation.
        finish: replaces `collate`. It turns a list of samples and the tower's device into inputs on that device, so it can
            decode and augment a whole chunk there.
        ahead: the number of chunks that workers read in advance.
        hold: bytes of host memory for samples that wait for the second pass. Samples that do not fit are read again.
        length: a function of a reference that returns the number of tokens of its sample, without preparing the sample. The
            step then encodes samples of similar length together. `chunk_size` counts samples of the largest length, and a
            chunk of shorter samples has more samples. An estimate suffices, because `collate` pads each chunk.

    Examples:
        ```python
        source = mb.ReplaySource(paths, lambda path, generator: crop(decode(path), generator), seed=step, workers=8)
        mb.cached_backward(loss_fn, [(image_tower, source), (text_tower, tokens)])
        ```
    """

    def __init__(
        self,
        references: Sequence[Any],
        read: Read,
        *,
        seed: int = 0,
        workers: int | Executor = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        finish: Callable[[list[Any], torch.device | None], Any] | None = None,
        ahead: int = 2,
        hold: int = 0,
        length: Callable[[Any], int] | None = None,
    ) -> None:
        if not callable(read):
            raise TypeError(f"read must be a function of a reference and a generator, got {type(read).__name__}")
        if not isinstance(workers, Executor) and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
            raise ValueError(f"workers must be a number of threads, 0 for none, or an Executor, got {workers!r}")
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ValueError(f"ahead must be a number of chunks of at least 1, got {ahead!r}")
        if isinstance(hold, bool) or not isinstance(hold, int) or hold < 0:
            raise ValueError(f"hold must be a number of bytes of at least 0, got {hold!r}")
        if collate is not None and finish is not None:
            raise ValueError("collate must not be set if finish is given, because finish gets the samples; got both")
        self._references, self._read, self._seed, self._length = references, read, seed, length
        self._places: Sequence[int] = range(len(references))  # positions that determine the seeds of the samples
        self._lengths: Tensor | None = None  # measured when they are needed
        self._by_length: ReplaySource | None = None  # the samples from long to short, which `start` reads ahead
        self._measuring = threading.Lock()
        self._starting: threading.Thread | None = None  # sorts the samples and starts to read them
        self._workers, self._collate, self._finish, self._ahead = workers, collate, finish, ahead
        self._checksums = array("Q", [_UNREAD]) * len(references)
        # A piece is PIECE samples. It is in `_coming` from its request to its use in a chunk. Then it is in `_held` until the
        # end, or in `_passing` until no later chunk needs it. Worker threads request pieces too, so `_lock` guards `_coming`.
        self._hold = hold
        self._held: dict[int, list[Any]] = {}  # piece → samples
        self._held_bytes = 0
        self._passing: dict[int, list[Any]] = {}  # piece that is not held and contains the start of the next span → samples
        self._coming: dict[int, Future[list[tuple[Any, int, int]]]] = {}  # piece → future of its samples
        self._planned: Iterator[int] = iter(())  # pieces to read ahead
        self._lock = threading.Lock()
        self._ahead_bytes = 0  # bytes that `start` has read
        self._is_stopped = False

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._references)

    @property
    def lengths(self) -> Tensor | None:  # type: ignore[override]  # (N,) int64
        """The numbers of tokens, which the workers measure at the first access; None without the argument `length`."""
        if self._length is None:
            return None
        with self._measuring:
            if self._lengths is None:
                pieces = [self._references[piece * PIECE : (piece + 1) * PIECE] for piece in pieces_of((0, len(self)))]
                measure = partial(_measure_piece, self._length)
                if isinstance(self._workers, Executor):
                    measured = list(self._workers.map(measure, pieces))
                else:
                    measured = [measure(piece) for piece in pieces]
                self._lengths = torch.tensor([length for piece in measured for length in piece], dtype=torch.int64)
            return self._lengths

    @property
    def width(self) -> int:  # type: ignore[override]
        """The largest number of tokens of a sample."""
        lengths = self.lengths
        return int(lengths.max()) if lengths is not None and len(lengths) else 0

    def reorder(self, order: Tensor) -> "ReplaySource":  # (N,)
        """Returns a source with the samples in another order. Each sample has the same seed as in this source."""
        if self._starting is not None and self._starting is not threading.current_thread():
            self._starting.join()  # its source already reads the samples
        places = order.tolist()
        if self._by_length is not None and list(self._by_length._places) == places:
            return self._by_length
        other = ReplaySource(
            [self._references[place] for place in places],
            self._read,
            seed=self._seed,
            workers=self._workers,
            collate=self._collate,
            finish=self._finish,
            ahead=self._ahead,
            hold=self._hold,
        )
        other._places = places
        return other

    def start(self) -> None:
        """Starts to read as many samples as `hold` allows, for a batch that is due later. `workers` must be an executor.

        Only a few pieces are requested at a time, so that a batch that is due now does not wait for this one.
        """
        if isinstance(self._workers, Executor) and self._length is not None:
            self._starting = threading.Thread(target=self._start_longest, name="megabatch-lengths", daemon=True)
            self._starting.start()
        else:
            self._read_ahead()

    def _start_longest(self) -> None:
        """Starts to read the samples in the order in which the step encodes them."""
        with suppress(Exception):  # the step measures again, and raises the error
            lengths = self.lengths
            order = None if lengths is None else longest_first(lengths, self.width)
            first = self if order is None else self.reorder(order)
            with self._lock:
                if self._is_stopped:
                    return
                self._by_length = None if first is self else first
            first._read_ahead()

    def _read_ahead(self) -> None:
        if isinstance(self._workers, Executor) and self._hold:
            self._planned = iter(pieces_of((0, len(self))))
            for _ in range(2 * getattr(self._workers, "_max_workers", 4)):
                self._read_next_planned()

    def stop(self) -> None:
        """Cancels the reading of samples that no chunk needs, because the step or the run has failed."""
        with self._lock:
            self._is_stopped, self._planned = True, iter(())
            coming = list(self._coming.values())
            self._coming.clear()
        for future in coming:
            future.cancel()
        if self._by_length is not None:
            self._by_length.stop()

    def _read_next_planned(self, done: Future[list[tuple[Any, int, int]]] | None = None) -> None:
        """Requests the next piece. The thread that has read a piece calls this function as well."""
        if done is not None:
            # Reading ends after a canceled piece. The executor cancels under a lock, so no other piece may be submitted here.
            if done.cancelled() or done.exception() is not None:
                return
            self._ahead_bytes += sum(size for _, _, size in done.result())
            if self._ahead_bytes >= self._hold:
                return
        with suppress(RuntimeError):  # the executor is shutting down
            for piece in self._planned:
                if self._checksums[piece * PIECE] != _UNREAD:
                    continue  # already read for a chunk
                if self._request(self._workers, [piece], then=self._read_next_planned):
                    return

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Reads the spans in order, ahead of the computation, and compares samples that are read again with their checksum."""
        on_cuda = device is not None and device.type == "cuda"
        # Without workers the main thread reads, because it may seed the global random generators.
        return produce_chunks(
            self._assemble(spans, on_cuda), device, self._finish or copy_to, ahead=on_cuda and self._workers != 0
        )

    def _assemble(self, spans: Sequence[Span], pinned: bool) -> Iterator[Any]:
        """Yields the chunks on the host. With `finish`, it yields lists of samples."""
        with ExitStack() as cleanup:
            executor = self._workers
            if isinstance(executor, int):
                executor = _Inline() if executor == 0 else ThreadPoolExecutor(executor, thread_name_prefix="megabatch-replay")
                cleanup.callback(executor.shutdown, wait=True, cancel_futures=True)
            cleanup.callback(self.stop)
            ahead = 1 if isinstance(executor, _Inline) else self._ahead
            self._passing.clear()
            for span in spans[:ahead]:
                self._request(executor, pieces_of(span))
            for i, span in enumerate(spans):
                samples = self._samples(span, executor)
                for later in spans[i + ahead : i + ahead + 1]:
                    self._request(executor, pieces_of(later))
                if self._finish is not None:
                    yield samples
                elif self._collate is not None:
                    yield self._collate(samples)
                else:
                    yield stack(samples, pinned)

    def _request(self, executor: Any, pieces: Iterable[int], then: Callable[[Any], None] | None = None) -> int:
        """Submits the pieces that are not available yet, and calls `then` after each. Returns the number of these pieces.

        The main thread and worker threads call it.
        """
        submitted = []
        with self._lock:
            for piece in pieces:
                if not any(piece in available for available in (self._held, self._passing, self._coming)):
                    positions = range(piece * PIECE, min((piece + 1) * PIECE, len(self)))
                    work = [(i, self._references[i], sample_seed(self._seed, self._places[i])) for i in positions]
                    self._coming[piece] = executor.submit(_read_piece, self._read, work)
                    submitted.append(self._coming[piece])
        for future in submitted:
            if then is not None:
                future.add_done_callback(then)
        return len(submitted)

    def _samples(self, span: Span, executor: Executor) -> list[Any]:
        result = []
        for piece in pieces_of(span):
            self._request(executor, [piece])  # it is already requested, unless spans overlap
            samples = self._held.get(piece) or self._passing.get(piece) or self._receive(piece)
            first = piece * PIECE
            result += samples[max(0, span[0] - first) : span[1] - first]
            if piece not in self._held and span[1] < first + len(samples):
                self._passing[piece] = samples
            else:
                self._passing.pop(piece, None)
        return result

    def _receive(self, piece: int) -> list[Any]:
        """Waits for a piece, compares it with its first reading, and keeps it if it fits `hold`."""
        read = self._coming[piece].result()
        first, different = piece * PIECE, []
        for i, (_, now, _) in enumerate(read, first):
            if self._checksums[i] == _UNREAD:
                self._checksums[i] = now
            elif self._checksums[i] != now:
                different.append(i)
        if different:
            raise ReplayMismatchError(
                f"read must return equal tensors for equal references and seeds, but {len(different)} of samples {first} to "
                f"{first + len(read) - 1} differed in the second reading: {self._name_samples(different)}. Draw all random "
                "numbers from the generator that is passed to read, and read only data that does not change"
            )
        samples = [sample for sample, _, _ in read]
        size = sum(size for _, _, size in read)
        if self._held_bytes + size <= self._hold:
            self._held[piece] = samples
            self._held_bytes += size
        with self._lock:
            self._coming.pop(piece, None)  # last, because workers request a piece if it is in none of the three dicts
        return samples

    def _name_samples(self, positions: Sequence[int]) -> str:
        names = ", ".join(f"sample {i} ({self._references[i]!r})" for i in positions[:NAMED])
        return f"{names} and {len(positions) - NAMED} more" if len(positions) > NAMED else names


def sample_seed(seed: int, position: int) -> int:
    """Hashes both numbers to 63 bits (the finalizer of splitmix64), so that neighboring samples are independent."""
    state = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return (state ^ (state >> 31)) >> 1


def stack(samples: list[Any], pinned: bool = False) -> Any:
    """Stacks samples of one structure into tensors with one row for each sample. `pinned` memory is for copies to a GPU."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples], pinned) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(list(values), pinned) for values in zip(*samples, strict=True))
    tensors = [sample if isinstance(sample, Tensor) else torch.as_tensor(sample) for sample in samples]
    if not pinned:
        return torch.stack(tensors)
    out = torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, pin_memory=True)
    return torch.stack(tensors, out=out)


def checksum(sample: Any, value: int = 0) -> int:
    """Computes the CRC-32 of the bytes, shape and dtype of each tensor and of the `repr` of other values.

    It continues from the checksum `value`.
    """
    if isinstance(sample, Tensor):
        data = sample.detach().cpu().contiguous()
        value = zlib.crc32(f"{data.dtype} {tuple(data.shape)}".encode(), value)
        return zlib.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr()), value) if data.nbytes else value
    if isinstance(sample, Mapping):
        for key, entry in sample.items():
            value = checksum(entry, zlib.crc32(repr(key).encode(), value))
        return value
    if isinstance(sample, tuple | list):
        for entry in sample:
            value = checksum(entry, value)
        return value
    if isinstance(sample, bytes):
        return zlib.crc32(sample, value)
    if is_dataclass(sample) and not isinstance(sample, type):
        return checksum(_values(sample), value)
    if hasattr(sample, "__array__"):
        return checksum(torch.as_tensor(sample), value)
    return zlib.crc32(repr(sample).encode(), value)


def size_of(sample: Any) -> int:
    """Returns the bytes of the tensors, arrays and strings in a sample."""
    if isinstance(sample, Tensor):
        return sample.nbytes
    if isinstance(sample, Mapping):
        return sum(map(size_of, sample.values()))
    if isinstance(sample, tuple | list):
        return sum(map(size_of, sample))
    if is_dataclass(sample) and not isinstance(sample, type):
        return size_of(_values(sample))
    return len(sample) if isinstance(sample, bytes | str) else int(getattr(sample, "nbytes", 8))


def _values(sample: Any) -> list[Any]:
    return [getattr(sample, field.name) for field in fields(sample)]


def pieces_of(span: Span) -> range:
    """Returns the pieces that contain the samples of a span."""
    return range(span[0] // PIECE, -(-span[1] // PIECE))


def _measure_piece(length: Callable[[Any], int], references: Sequence[Any]) -> list[int]:
    return [length(reference) for reference in references]


def _read_piece(read: Read, work: list[tuple[int, Any, int]]) -> list[tuple[Any, int, int]]:
    """Reads samples and returns them with their checksums and sizes.

    In the main thread, the global random generators are restored afterwards.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    with ExitStack() as cleanup:
        if not in_thread:
            cleanup.enter_context(second_pass.preserve_generators(()))
        results = []
        for position, reference, seed in work:
            if not in_thread:
                second_pass.seed_host(seed)
            try:
                sample = read(reference, torch.Generator().manual_seed(seed))
            except ConnectionError:  # the sample is not the cause, and the message names the server
                raise
            except Exception as error:
                raise RuntimeError(
                    f"read failed for sample {position} ({reference!r}): {type(error).__name__}: {error}"
                ) from error
            if not isinstance(sample, Checked):
                sample = Checked(sample, checksum(sample))
            results.append((*sample, size_of(sample.sample)))
        return results


class _Inline(Executor):
    """An executor that runs each task in the calling thread when its result is requested."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a future that runs the function when its result is requested."""
        return _Later(partial(function, *args, **kwargs))


class _Later(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        return self._work()
