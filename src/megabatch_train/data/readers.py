"""Data-loader workers: an executor that runs tasks in other Python processes, so that one thread keeps the GPU busy.

Threads share Python's interpreter lock, so reading, tokenizing and launching kernels would compete for it. Each worker is a
new Python process. It imports this package, but nothing from the program that started it, so it works from any script and
after CUDA was initialized. Objects that every task needs (datasets, tokenizers) are sent once. A worker ends when its socket
closes, including when the program is killed.

The memory of tensors is sent separately from the pickled data, and is received directly into the memory of the new tensors.
Tensors of one shape are received together, because each operation on a tensor may wait for the interpreter lock.
"""

import ctypes
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
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG = logging.getLogger("megabatch")
SLAB = 1 << 28  # bytes of pinned memory allocated at once
NICENESS = 10  # lowers the priority of workers below the thread that launches kernels
ALIGNED = 64  # bytes; each tensor begins at a multiple of this number
_LENGTH = struct.Struct("<Q")  # length of the pickled part of a message


@contextmanager
def open_readers(count: int, shared: Sequence[Any], *, processes: bool) -> Iterator[int | Executor]:
    """Yields workers for `ReplaySource`: 0, or an executor. Tasks that are still waiting at the end are dropped.

    Args:
        count: number of workers; 0 reads in the main thread.
        shared: objects that tasks refer to, such as datasets.
        processes: whether workers are processes. Otherwise, or if an object cannot be pickled, they are threads.
    """
    if count == 0:
        yield 0
        return
    executor: Executor | None = None
    if processes:
        try:
            executor = ReaderProcesses(count, shared)
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
    """

    def __init__(self, count: int, shared: Sequence[Any] = ()) -> None:
        super().__init__(count, thread_name_prefix="megabatch-read")
        self._numbers = {id(value): number for number, value in enumerate(shared)}
        self._shared = list(shared)  # kept alive, because the id of a freed object can become the id of another object
        first = _dump(list(shared), {})
        memory = _Memory(pinned=torch.cuda.is_available())
        self._processes = [_Process(first, memory) for _ in range(count)]
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


class _Process:
    """One worker: a Python process and the socket to it.

    Args:
        first: message with the shared objects, which the process gets before its first task.
        memory: memory for results.
    """

    def __init__(self, first: "Message", memory: "_Memory") -> None:
        self.connection, worker_end = socket.socketpair()
        for end in (self.connection, worker_end):
            end.settimeout(None)  # the program can have set a default timeout
        self._first: Message | None = first
        self._memory = memory
        self._problem: str | None = None
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        program = f"from megabatch_train.data.readers import serve; serve({worker_end.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[worker_end.fileno()], env=environment, start_new_session=True
        )
        worker_end.close()

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

    def end(self) -> None:
        """Waits for the process after its socket was closed."""
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _do_nothing() -> None:
    """Does nothing. As the first task of a process, it makes the process load the shared objects."""


def serve(number: int) -> None:
    """Runs a worker: answers tasks from the socket with this file descriptor until the socket is closed."""
    torch.set_num_threads(1)
    os.nice(NICENESS)
    connection = socket.socket(fileno=number)
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
