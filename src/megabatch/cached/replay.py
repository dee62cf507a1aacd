"""Replay: samples are read, decoded and augmented again for the second pass, so that no memory ever holds the batch.

Per sample, only a reference (a path, an index, any argument of `read`) and a 32-bit checksum are kept. Its seed follows from
its position. If the second reading differs from the first, an error names the samples.
"""

import ctypes
import itertools
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabatch.cached import randomness
from megabatch.cached.sources import Source, Span
from megabatch.cached.streaming import streamed

PIECE = 16  # samples per task: enough to hide the overhead of a task, few enough to spread a chunk over workers
NAMED = 5  # samples that an error lists
_UNREAD = 2**32  # no checksum

Read = Callable[[Any, torch.Generator], Any]


class ReplayMismatchError(RuntimeError):
    """The second reading of a sample gave other tensors than the first, so the gradients would be wrong."""


class ReplaySource(Source):
    """Samples that are read when they are needed, identically each time.

    `read(reference, generator)` returns one sample: a tensor, or a mapping or tuple of tensors and numbers. All its randomness
    must come from `generator`, which is seeded for the sample. If samples are read in the main thread of a process (`workers=0`
    or a process pool), the global generators of PyTorch, Python and NumPy are seeded too, so transforms that use them are
    replayed as well. Threads share the global generators, so this does not work in a thread pool.

    Args:
        references: one for each sample; any sequence.
        read: reads one sample.
        seed: of the batch. Sample i gets a seed made of this one and i. Use another seed for every batch.
        workers: 0 to read on demand; n for n threads; or your own `concurrent.futures.Executor`, shared by many batches.
        collate: turns a list of samples into inputs of the tower (default: stacks tensors). Runs in the main thread.
        ahead: chunks that workers read in advance.

    Example:
        source = mb.ReplaySource(paths, lambda path, generator: crop(decode(path), generator), seed=step, workers=8)
        mb.cached_backward(loss_fn, [(image_tower, source), (text_tower, tokens)])
    """

    reuses_memory = True

    def __init__(
        self,
        references: Sequence[Any],
        read: Read,
        *,
        seed: int = 0,
        workers: int | Executor = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        ahead: int = 2,
    ) -> None:
        if not callable(read):
            raise TypeError(f"read must be a function of a reference and a generator, got {type(read).__name__}")
        if not isinstance(workers, Executor) and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
            raise ValueError(f"workers must be a number of threads, 0 for none, or an Executor, got {workers!r}")
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ValueError(f"ahead must be a number of chunks of at least 1, got {ahead!r}")
        self._references, self._read, self._seed = references, read, seed
        self._workers, self._collate, self._ahead = workers, collate, ahead
        self._checksums = array("Q", [_UNREAD]) * len(references)
        self._collated: dict[Span, int] = {}  # checksums of the collated chunks

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._references)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        """Reads the spans in order and ahead of the computation, and compares repeated samples with their checksum."""
        pinned = device is not None and device.type == "cuda"
        return streamed(self._assembled(spans, pinned), device)

    def _assembled(self, spans: Sequence[Span], pinned: bool) -> Iterator[Any]:
        with ExitStack() as cleanup:
            executor = self._workers
            if isinstance(executor, int):
                executor = _Inline() if executor == 0 else ThreadPoolExecutor(executor, thread_name_prefix="megabatch-replay")
                cleanup.callback(executor.shutdown, wait=True, cancel_futures=True)
            waiting: deque[list[Future[list[tuple[Any, int]]]]] = deque()
            cleanup.callback(_cancel, waiting)
            upcoming = iter(spans)
            ahead = 1 if isinstance(executor, _Inline) else self._ahead
            for span in itertools.islice(upcoming, ahead):
                waiting.append(self._start(executor, span))
            for span in spans:
                pieces = [future.result() for future in waiting.popleft()]
                waiting.extend(self._start(executor, later) for later in itertools.islice(upcoming, 1))
                yield self._checked(span, [one for piece in pieces for one in piece], pinned)

    def _start(self, executor: Executor, span: Span) -> list[Future[list[tuple[Any, int]]]]:
        futures = []
        for start in range(*span, PIECE):
            positions = range(start, min(start + PIECE, span[1]))
            work = [(i, self._references[i], sample_seed(self._seed, i)) for i in positions]
            futures.append(executor.submit(_read_piece, self._read, work))
        return futures

    def _checked(self, span: Span, read: list[tuple[Any, int]], pinned: bool) -> Any:
        different = []
        for i, (_, now) in zip(range(*span), read, strict=True):
            if self._checksums[i] not in (_UNREAD, now):
                different.append(i)
            self._checksums[i] = now
        if different:
            raise ReplayMismatchError(
                f"read must return the same tensors for the same reference and seed, but {len(different)} of samples {span[0]} "
                f"to {span[1] - 1} came out differently the second time: {self._named(different)}. Draw all randomness from "
                "the generator that is passed to read, and read nothing that changes"
            )
        samples = [sample for sample, _ in read]
        if self._collate is None:
            return stack(samples, pinned)
        chunk = self._collate(samples)
        found = checksum(chunk)
        if self._collated.setdefault(span, found) != found:
            raise ReplayMismatchError(
                f"collate must return the same tensors for the same samples, but those it made of samples {span[0]} to "
                f"{span[1] - 1} came out differently the second time: {self._named(range(*span))}"
            )
        return chunk

    def _named(self, positions: Sequence[int]) -> str:
        names = ", ".join(f"sample {i} ({self._references[i]!r})" for i in positions[:NAMED])
        return f"{names} and {len(positions) - NAMED} more" if len(positions) > NAMED else names


def sample_seed(seed: int, position: int) -> int:
    """63 bits that mix both numbers (the finaliser of splitmix64), so that neighbouring samples are independent."""
    state = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return (state ^ (state >> 31)) >> 1


def stack(samples: list[Any], pinned: bool = False) -> Any:
    """Stacks samples of one structure into tensors with one row per sample; in pinned memory if a GPU will read it."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples], pinned) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(list(values), pinned) for values in zip(*samples, strict=True))
    tensors = [torch.as_tensor(sample) for sample in samples]
    if not pinned:
        return torch.stack(tensors)
    room = torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, pin_memory=True)
    return torch.stack(tensors, out=room)


def checksum(inputs: Any) -> int:
    """CRC-32 over the bytes, shape and dtype of every tensor, and over the `repr` of everything else."""
    value = 0

    def add(tensor: Tensor) -> None:
        nonlocal value
        data = tensor.detach().cpu().contiguous()
        value = zlib.crc32(f"{data.dtype} {tuple(data.shape)}".encode(), value)
        size = data.numel() * data.element_size()
        if size:
            value = zlib.crc32((ctypes.c_char * size).from_address(data.data_ptr()), value)

    def rest(inputs: Any) -> None:
        nonlocal value
        if isinstance(inputs, Tensor):
            add(inputs)
        elif isinstance(inputs, Mapping):
            for key, entry in inputs.items():
                value = zlib.crc32(repr(key).encode(), value)
                rest(entry)
        elif isinstance(inputs, tuple | list):
            for entry in inputs:
                rest(entry)
        elif hasattr(inputs, "__array__"):
            add(torch.as_tensor(inputs))
        else:
            value = zlib.crc32(repr(inputs).encode(), value)

    rest(inputs)
    return value


def _read_piece(read: Read, work: list[tuple[int, Any, int]]) -> list[tuple[Any, int]]:
    """Samples and their checksums. In the main thread the global random generators are restored afterwards."""
    in_thread = threading.current_thread() is not threading.main_thread()
    with ExitStack() as cleanup:
        if not in_thread:
            cleanup.enter_context(randomness.untouched(()))
        results = []
        for position, reference, seed in work:
            if not in_thread:
                randomness.seed_host(seed)
            try:
                sample = read(reference, torch.Generator().manual_seed(seed))
            except Exception as error:
                raise RuntimeError(
                    f"read failed for sample {position} ({reference!r}): {type(error).__name__}: {error}"
                ) from error
            results.append((sample, checksum(sample)))
        return results


def _cancel(waiting: deque[list[Future[Any]]]) -> None:
    for futures in waiting:
        for future in futures:
            future.cancel()


class _Inline(Executor):
    """Reads on demand, in the calling thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that runs when its result is requested: nothing is read ahead."""
        return _Later(partial(function, *args, **kwargs))


class _Later(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        return self._work()
