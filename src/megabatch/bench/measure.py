"""Measurements in a fresh process with a memory limit, and their peak memory.

The process is fresh because the allocator often keeps memory that an earlier measurement freed, which would hide the next
peak. The memory is limited so that a loss that does not fit fails by itself, before the system kills other programs.
"""

import contextlib
import ctypes
import gc
import math
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from megabatch.machine import ALLOCATION_FAILED

T = TypeVar("T")


class ProcessError(RuntimeError):
    """The process of a measurement ended without a result; the message says how. As a cause: the traceback in that process."""


def fresh_process(function: Callable[..., T], *args: Any, memory_limit: int | None = None) -> T:
    """What `function(*args)` returns, computed in a fresh process.

    An error in it is raised here again. An allocation that fails is a `MemoryError`; a process that is killed, or ends
    without an answer, a `ProcessError`.

    Args:
        function: a function at the top of a module, which is what another process can find.
        args: its arguments; like the result, anything that can be pickled.
        memory_limit: the bytes it may allocate beyond what the process holds once it has started; Linux alone knows how.
    """
    if memory_limit is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_limit must be None on {sys.platform}: only Linux limits the memory of one process")
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    # Pickled here and not by multiprocessing, which would put tensors in shared memory that ends with the process.
    process = spawn.Process(target=_serve, args=(writer, pickle.dumps((function, args)), memory_limit), daemon=True)
    process.start()
    writer.close()  # the child now holds the only write end, so its exit closes the pipe
    try:
        succeeded, value = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        raise ProcessError(f"the process running {function.__name__} {_how_it_ended(process.exitcode)}") from None
    finally:
        reader.close()
        process.kill()
        process.join()
    if succeeded:
        result: T = value
        return result
    error, text = value
    raise error from ProcessError(text)


def peak_memory(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """What `work()` returns, and the bytes that were in use at its peak beyond those in use before.

    On a CPU these are resident bytes of the whole process (elsewhere than on Linux a lower bound: only a growth of the
    largest peak so far is seen); on CUDA the bytes of tensors on `device`.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if not _forget_peak():
        before = _largest_resident()
        result = work()
        return result, _largest_resident() - before
    before = _status("VmRSS")
    result = work()
    return result, max(0, _status("VmHWM") - before)


def milliseconds(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Of one call, with several in flight, as in training: what the host does meanwhile is hidden, as it is there.

    As many calls as take about `seconds` together, and at least one.
    """
    calls = 1
    while True:
        elapsed = _elapsed(work, calls, device)
        if elapsed >= 1000 * seconds or calls >= 64:
            return elapsed / calls
        calls = min(64, max(calls + 1, math.ceil(calls * 1000 * seconds / max(elapsed, 0.1))))


def _elapsed(work: Callable[[], Any], calls: int, device: str) -> float:
    if torch.device(device).type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        return 1000 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _serve(writer: Connection, call: bytes, memory_limit: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent reports it and ends this one
    function, args = pickle.loads(call)
    if memory_limit is not None:
        _limit_memory(memory_limit)
    try:
        answer = pickle.dumps((True, function(*args)))
    except Exception as error:
        answer = pickle.dumps((False, (_portable(error), traceback.format_exc())))
    writer.send_bytes(answer)
    writer.close()


def _limit_memory(extra: int) -> None:
    """Lets this process allocate `extra` bytes more.

    RLIMIT_DATA counts private writable pages. RLIMIT_AS would count the libraries that PyTorch maps and never touches too.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status("VmData") + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _portable(error: Exception) -> Exception:
    """`error` as the parent can raise it."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in message for sign in ALLOCATION_FAILED):
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


def _forget_peak() -> bool:
    """Resets the peak to the present resident memory; False if the system cannot."""
    # Pages that were freed but not given back would be used again, uncounted. Only the GNU C library has the call.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _largest_resident() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
