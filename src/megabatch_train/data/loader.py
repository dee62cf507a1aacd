"""The batches of a run, and the processes that read their samples."""

import ctypes
import importlib
import io
import logging
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.cached.replay import sample_seed

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# The batches of a run: each epoch is shuffled by (seed, epoch), cut into batches, and each batch is split over ranks.
#
# Batches are numbered across all epochs. Each batch depends only on the seed and its number, so a run can continue in the
# middle of an epoch. Batches do not depend on the number of ranks, because each rank has a contiguous part of every batch.


class Batch(NamedTuple):
    """The shard of one batch on this rank."""

    number: int  # number of the batch, from the start of the run
    epoch: int
    indices: Tensor  # (n,) int64 sample indices


@dataclass(frozen=True)
class Mixture:
    """A mixture of several sources. Samples are numbered one source after another.

    Args:
        parts: the number of samples of each source, or the sizes of its shards.
        weights: share of each source in an epoch. The weights need not sum to one.
    """

    parts: "tuple[int | tuple[int, ...] | Mixture, ...]"
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Checks the values."""
        valid = len(self.weights) == len(self.parts) and all(0 <= weight < math.inf for weight in self.weights)
        if not valid or not any(self.weights):
            raise ValueError(
                f"weights must be a number of at least 0 for each of {len(self.parts)} sources, got {self.weights}"
            )

    def shares(self) -> list[int]:
        """Returns how many samples of each source an epoch has. An epoch has as many samples as all sources together."""
        total, whole = sum(map(_count, self.parts)), sum(self.weights)
        exact = [total * weight / whole for weight in self.weights]
        counts = [int(share) for share in exact]
        for number in sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
            counts[number] += 1  # the largest fractions round up
        return counts


def _count(samples: "int | tuple[int, ...] | Mixture") -> int:
    if isinstance(samples, Mixture):
        return sum(map(_count, samples.parts))
    return samples if isinstance(samples, int) else sum(samples)


@dataclass(frozen=True)
class Order:
    """Shuffled batches of samples. The last, incomplete batch of an epoch is dropped.

    Args:
        samples: number of samples, or the sizes of shards, or a mixture. Shards are shuffled first. Then samples are shuffled
            within `window` shards at a time, so that only a few shards are read at once. Each source of a mixture is shuffled
            like this on its own, and the sources alternate at random.
        batch_size: number of pairs in a batch, over all ranks.
        seed: seed of the run.
        rank: number of this process.
        world_size: number of ranks that each batch is split over.
        window: number of shards whose samples are shuffled together.
    """

    samples: int | tuple[int, ...] | Mixture
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    window: int = 16

    def __post_init__(self) -> None:
        """Checks the values."""
        total = _count(self.samples)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if total < self.batch_size:
            raise ValueError(f"batch_size must be at most the number of samples, {total}, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    @property
    def batches_per_epoch(self) -> int:
        """The number of complete batches in an epoch."""
        return _count(self.samples) // self.batch_size

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yields the batches `start` to `stop - 1`. Without `stop`, the batches never end."""
        number, current, order = start, None, torch.empty(0)
        first = self.rank * self.batch_size // self.world_size
        last = (self.rank + 1) * self.batch_size // self.world_size
        while stop is None or number < stop:
            epoch, position = divmod(number, self.batches_per_epoch)
            if epoch != current:
                current, order = epoch, self.epoch(epoch)
            begin = position * self.batch_size
            yield Batch(number, epoch, order[begin + first : begin + last])
            number += 1

    def epoch(self, epoch: int) -> Tensor:  # (samples,) int64
        """Returns all sample indices in the order of an epoch."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
        if isinstance(self.samples, int):
            return torch.randperm(self.samples, generator=generator)
        if isinstance(self.samples, Mixture):
            return self._mix(self.samples, epoch, generator)
        sizes = torch.tensor(self.samples, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        groups = torch.randperm(len(sizes), generator=generator).tolist()
        parts = []
        for window in range(0, len(groups), self.window):
            together = groups[window : window + self.window]
            members = torch.cat([torch.arange(int(starts[g]), int(starts[g] + sizes[g])) for g in together])
            parts.append(members[torch.randperm(len(members), generator=generator)])
        return torch.cat(parts)

    def _mix(self, mixture: Mixture, epoch: int, generator: torch.Generator) -> Tensor:  # (samples,) int64
        shares = mixture.shares()
        turns = torch.arange(len(shares)).repeat_interleave(torch.tensor(shares))
        turns = turns[torch.randperm(len(turns), generator=generator)]
        samples, first = torch.empty_like(turns), 0
        for number, (part, share) in enumerate(zip(mixture.parts, shares, strict=True)):
            own = Order(part, 1, sample_seed(self.seed, number), window=self.window)
            samples[turns == number] = first + own.stretch(epoch * share, share)
            first += _count(part)
        return samples

    def stretch(self, start: int, count: int) -> Tensor:  # (count,) int64
        """Returns samples `start` to `start + count - 1` of the sequence of all epochs."""
        size, end, pieces = _count(self.samples), start + count, [torch.empty(0, dtype=torch.int64)]
        for epoch in range(start // size, -(-end // size)):
            pieces.append(self.epoch(epoch)[max(start - epoch * size, 0) : end - epoch * size])
        return torch.cat(pieces)


# ----------------------------------------------------------------------------------------------------------------------
# Data-loader workers: an executor that runs tasks in other Python processes, so that one thread keeps the GPU busy.
#
# Threads share Python's interpreter lock, so reading, tokenizing and launching kernels would compete for it. Each worker is a
# new Python process. It imports this package, but nothing from the program that started it, so it works from any script and
# after CUDA was initialized. Objects that every task needs (datasets, tokenizers) are sent once. A worker ends when its socket
# closes, including when the program is killed.
#
# The memory of tensors is sent separately from the pickled data, and is received directly into the memory of the new tensors.
# Tensors of one shape are received together, because each operation on a tensor may wait for the interpreter lock.


SLAB = 1 << 28  # bytes of pinned memory allocated at once
NICENESS = 10  # lowers the priority of workers below the thread that launches kernels
ALIGNED = 64  # bytes; each tensor begins at a multiple of this number
_LENGTH = struct.Struct("<Q")  # length of the pickled part of a message


@contextmanager
def start_processes(count: int, packages: Sequence[str] = ()) -> Iterator["list[WorkerProcess]"]:
    """Starts worker processes for `open_readers`, which import packages while the program loads a model and data.

    Processes that are not used are ended at the end of the context.

    Args:
        count: number of processes.
        packages: packages of the objects that the processes will get. Packages that cannot be imported are skipped.
    """
    processes = [WorkerProcess(packages) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:  # `ReaderProcesses` has ended the processes that it used
            process.connection.close()
            process.end(0.0)


@contextmanager
def open_readers(
    count: int, shared: Sequence[Any], *, processes: bool, started: "Sequence[WorkerProcess]" = ()
) -> Iterator[int | Executor]:
    """Yields workers for `ReplaySource`: 0, or an executor. Tasks that are still waiting at the end are dropped.

    Args:
        count: number of workers; 0 reads in the main thread.
        shared: objects that tasks refer to, such as datasets.
        processes: whether workers are processes. Otherwise, or if an object cannot be pickled, they are threads.
        started: processes of `start_processes`, which become workers.
    """
    if count == 0:
        yield 0
        return
    executor: Executor | None = None
    if processes:
        try:
            executor = ReaderProcesses(count, shared, started)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            LOG.warning("samples are read by threads instead of processes, because one object cannot be sent: %s", error)
    executor = executor or ThreadPoolExecutor(count, thread_name_prefix="megabatch-read")
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class ReaderProcesses(ThreadPoolExecutor):
    """An executor of `count` processes. One thread per process sends tasks and waits for results.

    Args:
        count: number of processes. They load the shared objects and their packages while the program continues.
        shared: objects that tasks can refer to. They are pickled once, and tasks contain only their numbers.
        started: processes that run already.
    """

    def __init__(self, count: int, shared: Sequence[Any] = (), started: "Sequence[WorkerProcess]" = ()) -> None:
        super().__init__(count, thread_name_prefix="megabatch-read")
        self._numbers = {id(value): number for number, value in enumerate(shared)}
        self._shared = list(shared)  # kept alive, because the id of a freed object can become the id of another object
        first = _dump(list(shared), {})
        memory = _Memory(pinned=torch.cuda.is_available())
        self._processes = [*started[:count], *(WorkerProcess() for _ in range(count - len(started)))]
        for process in self._processes:
            process.assign(first, memory)
        self._free = list(self._processes)
        self._lock = threading.Lock()
        self._warned = False
        for _ in range(count):
            self.submit(_do_nothing)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs `function(*args, **kwargs)` in a process. The function and its arguments must be picklable."""
        return super().submit(self._run, function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        task = _dump((function, args, kwargs), self._numbers)
        with self._lock:
            process = self._free.pop()  # there are as many processes as threads
        try:
            problem = process.introduce()
            if problem is None:
                return process.answer(task)
        finally:
            with self._lock:
                self._free.append(process)
        with self._lock:
            if not self._warned:
                LOG.warning("samples are read by threads instead of processes, because a process cannot load them: %s", problem)
                self._warned = True
        return function(*args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads, and then the processes."""
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in self._processes:
            process.connection.close()
        for process in self._processes:
            process.end()


class WorkerProcess:
    """One worker: a Python process and the socket to it. It imports these packages before it has a task."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.connection, worker_end = socket.socketpair()
        for end in (self.connection, worker_end):
            end.settimeout(None)  # the program can have set a default timeout
        self._first: Message | None = None
        self._memory = _Memory(pinned=False)
        self._problem: str | None = None
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        serve = f"from megabatch_train.data.loader import serve; serve({worker_end.fileno()}, {list(packages)})"
        program = f"import os; os.nice({NICENESS}); {serve}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[worker_end.fileno()], env=environment, start_new_session=True
        )
        worker_end.close()

    def assign(self, first: "Message", memory: "_Memory") -> None:
        """Sets the message with the shared objects, which the process gets before its first task, and memory for results."""
        self._first, self._memory = first, memory

    def introduce(self) -> str | None:
        """Sends the shared objects once. Returns why the process cannot load them, for example a class of the user's script."""
        if self._first is not None:
            try:
                self.answer(self._first)
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
            self._first = None
        return self._problem

    def answer(self, task: "Message") -> Any:
        """Sends a task and waits for its result."""
        try:
            _send(self.connection, task)
            result, error = _load(_receive(self.connection, self._memory), [])
        except (EOFError, OSError) as broken:
            try:
                code: int | None = self._process.wait(1)
            except subprocess.TimeoutExpired:
                code = None
            raise RuntimeError(f"a data-loader worker ended unexpectedly, with exit code {code}") from broken
        if error is not None:
            raise error
        return result

    def end(self, seconds: float = 5.0) -> None:
        """Waits for the process after its socket was closed, and kills it after some seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _do_nothing() -> None:
    """Does nothing. As the first task of a process, it makes the process load the shared objects."""


def import_packages(packages: Sequence[str]) -> None:
    """Imports packages early. If one cannot be imported, the code that needs it raises the error."""
    for name in packages:
        with suppress(Exception):
            importlib.import_module(name)


def serve(number: int, packages: Sequence[str] = ()) -> None:
    """Runs a worker: answers tasks from the socket with this file descriptor until the socket is closed."""
    torch.set_num_threads(1)
    connection = socket.socket(fileno=number)
    import_packages(packages)
    memory, shared = _Memory(pinned=False), list[Any]()

    def introduce(objects: list[Any]) -> None:
        shared[:] = objects

    def compute_answer(message: Message, first: bool) -> Message:
        try:
            loaded = _load(message, shared)
            function, args, kwargs = (introduce, (loaded,), {}) if first else loaded
            return _dump((function(*args, **kwargs), None), {})
        except Exception as error:
            return _dump_error(error)

    with suppress(EOFError, OSError, KeyboardInterrupt):  # the program has ended
        _send(connection, compute_answer(_receive(connection, memory), first=True))
        while True:
            _send(connection, compute_answer(_receive(connection, memory), first=False))


class Message(NamedTuple):
    """A message: pickled data, and tensors that are sent separately."""

    pickled: bytes
    groups: list[list[Tensor]]  # tensors of one dtype and shape each


def _send(connection: socket.socket, message: Message) -> None:
    kinds = [(group[0].dtype, tuple(group[0].shape), len(group)) for group in message.groups]
    body = pickle.dumps((message.pickled, kinds))
    connection.sendall(_LENGTH.pack(len(body)) + body)
    for tensor in chain.from_iterable(message.groups):
        together = tensor.contiguous()
        connection.sendall(_bytes_of(together))


def _receive(connection: socket.socket, memory: "_Memory") -> Message:
    """Waits for a message. Raises an EOFError if the other side has closed the socket."""
    (length,) = _LENGTH.unpack(_fill(connection, bytearray(_LENGTH.size)))
    pickled, kinds = pickle.loads(_fill(connection, bytearray(length)))
    groups = []
    for dtype, shape, count in kinds:
        rows = memory.take(dtype, (count, *shape))
        _fill(connection, _bytes_of(rows))
        groups.append(list(rows.unbind(0)))
    return Message(pickled, groups)


def _fill(connection: socket.socket, buffer: Any) -> Any:
    """Waits until `buffer` is full, and returns it."""
    rest = memoryview(buffer).cast("B")
    while rest:
        got = connection.recv_into(rest, len(rest), socket.MSG_WAITALL)
        if got == 0:
            raise EOFError
        rest = rest[got:]
    return buffer


def _bytes_of(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous tensor. The tensor must stay alive."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


class _Memory:
    """Memory for received tensors. It is never zeroed, because zeroing would take the interpreter lock.

    Pinned memory is allocated in slabs that many tensors share, because PyTorch rounds sizes up to a power of two. PyTorch
    keeps a slab after its last tensor is freed, so the next batch is received into memory that is already pinned.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialized tensor."""
        if not self._pinned:
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            start = -(-self._used // ALIGNED) * ALIGNED
            if start + size > len(self._slab):
                self._slab, start = torch.empty(max(size, SLAB), dtype=torch.uint8, pin_memory=True), 0
            self._used = start + size
            return self._slab[start : self._used].view(dtype).view(shape)


def _dump_error(error: Exception) -> Message:
    try:
        answer = pickle.dumps((None, error))
        pickle.loads(answer)  # some exceptions cannot be unpickled
    except Exception:
        answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return Message(answer, [])


def _dump(value: Any, numbers: dict[int, int]) -> Message:
    stream = io.BytesIO()
    pickler = _Pickler(stream, numbers)
    pickler.dump(value)
    return Message(stream.getvalue(), list(pickler.groups.values()))


def _load(message: Message, shared: list[Any]) -> Any:
    return _Unpickler(message, shared).load()


class _Pickler(pickle.Pickler):
    """Replaces shared objects by their numbers. Groups tensors by dtype and shape, and excludes them from the pickled data."""

    def __init__(self, stream: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers
        self._places: dict[int, tuple[int, int]] = {}  # group and position of each tensor, by its id
        self.groups: dict[Any, list[Tensor]] = {}

    def persistent_id(self, value: Any) -> int | tuple[int, int] | None:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
            return self._numbers.get(id(value))
        if id(value) not in self._places:
            group = self.groups.setdefault((value.dtype, value.shape), [])
            self._places[id(value)] = list(self.groups).index((value.dtype, value.shape)), len(group)
            group.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message, shared: list[Any]) -> None:
        super().__init__(io.BytesIO(message.pickled))
        self._groups, self._shared = message.groups, shared

    def persistent_load(self, place: int | tuple[int, int]) -> Any:
        return self._shared[place] if isinstance(place, int) else self._groups[place[0]][place[1]]
