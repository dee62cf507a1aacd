"""A function in fresh processes: one process with a memory limit, or the ranks of a gloo process group.

A measurement needs a fresh process because the allocator often keeps memory that an earlier measurement freed, which would
hide the next peak. Memory is limited so that a loss that does not fit fails by itself, before the system kills other programs.
"""

import datetime
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megabatch.bench.measure import process_status
from megabatch.machine import ran_out_of_memory

T = TypeVar("T")


class ProcessError(RuntimeError):
    """A process ended without a result; the message says how. As the cause of an error: its traceback in that process."""


def fresh_process(function: Callable[..., T], *args: Any, memory_limit: int | None = None) -> T:
    """`function(*args)`, computed in a fresh process.

    An exception is raised here again. A failed allocation is a `MemoryError`; a process that is killed, or ends without a
    result, is a `ProcessError`.

    Args:
        function: a function at the top of a module, so that the other process can import it.
        args: its arguments; like the result, anything that can be pickled.
        memory_limit: bytes that may be allocated beyond those in use after the start; Linux only.
    """
    if memory_limit is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_limit must be None on {sys.platform}: only Linux limits the memory of one process")
    process, reader = _start(partial(_limit_memory, memory_limit), function, args)
    try:
        succeeded, value = _answer(process, reader, function.__name__)
    finally:
        _end([process])
    if succeeded:
        result: T = value
        return result
    error, text = value
    raise error from ProcessError(text)


def on_ranks(function: Callable[..., T], world: int, *args: Any, seconds: float = 900.0) -> list[T]:
    """`function(rank, world, *args)` of each of `world` ranks, in processes that have a default group and share the cores.

    If a rank fails, or takes longer than `seconds`, all processes are ended and a `ProcessError` says why.
    """
    address = f"tcp://127.0.0.1:{_free_port()}"
    started = [_start(partial(join, rank, world, address, seconds), function, (rank, world, *args)) for rank in range(world)]
    deadline = time.monotonic() + seconds
    results = []
    try:
        for rank, (process, reader) in enumerate(started):
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                raise ProcessError(f"rank {rank} gave no answer in time")
            succeeded, value = _answer(process, reader, f"rank {rank}")
            if not succeeded:
                raise ProcessError(f"rank {rank}: {value[1]}")
            results.append(value)
    finally:
        _end([process for process, _ in started])
    return results


def join(rank: int, world: int, address: str, seconds: float) -> None:
    """Makes this process a rank of the default group; ranks share the cores evenly."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)


def _start(prepare: Callable[[], None], function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Connection]:
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    # Pickled here and not by multiprocessing, which would put tensors in shared memory that ends with the process.
    process = spawn.Process(target=_serve, args=(writer, pickle.dumps((prepare, function, args))), daemon=True)
    process.start()
    writer.close()  # the child now holds the only write end, so its exit closes the pipe
    return process, reader


def _answer(process: Any, reader: Connection, name: str) -> tuple[bool, Any]:
    """(True, result) or (False, (error, traceback))."""
    try:
        answer: tuple[bool, Any] = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        raise ProcessError(f"the process running {name} {_how_it_ended(process.exitcode)}") from None
    return answer


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _serve(writer: Connection, call: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent reports it and ends this one
    prepare, function, args = pickle.loads(call)
    try:
        prepare()
        succeeded, answer = True, pickle.dumps((True, function(*args)))
    except Exception as error:
        succeeded, answer = False, pickle.dumps((False, (_portable(error), traceback.format_exc())))
    writer.send_bytes(answer)
    writer.close()
    if dist.is_initialized():
        if succeeded:
            dist.barrier()  # a rank that exits early would look dead to the others
        os._exit(0)


def _limit_memory(extra: int | None) -> None:
    """Lets this process allocate `extra` bytes more; None for no limit.

    RLIMIT_DATA counts private writable pages. RLIMIT_AS would count the libraries that PyTorch maps and never touches too.
    """
    if extra is None:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = process_status("VmData") + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _portable(error: Exception) -> Exception:
    """`error` as the parent can raise it."""
    message = str(error)
    if ran_out_of_memory(error):
        return MemoryError(message)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of another library may fail to pickle in any way
        return RuntimeError(f"{type(error).__name__}: {message}")
    return error


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit status {exitcode} and without an answer"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
