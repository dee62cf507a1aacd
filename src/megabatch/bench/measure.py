"""Peak memory of a piece of work, its time, and the possible outcomes of a measurement."""

import contextlib
import ctypes
import gc
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from megabatch import machine

OK, WRONG, MEMORY, MISSING, LATE = "ok", "WRONG", "out of memory", "not installed", "no time left"
FAILED = "failed"  # followed by a colon and the reason
T = TypeVar("T")


def peak_memory(work: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """The result of `work()`, and the bytes in use at its peak beyond those in use before.

    On a CPU these are resident bytes of the whole process (elsewhere than on Linux a lower bound: only a growth of the
    largest peak so far is seen); on CUDA the bytes of tensors on `device`.
    """
    importlib.import_module("torch._dynamo")  # 120 MiB, which the first call of an operator would load
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    if not _forget_peak():
        before = machine.peak_bytes(torch.device("cpu"))
        result = work()
        return result, machine.peak_bytes(torch.device("cpu")) - before
    before = process_status("VmRSS")
    result = work()
    return result, max(0, process_status("VmHWM") - before)


def now(device: torch.device | str) -> float:
    """Seconds, when the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: torch.device | str) -> float:
    """Seconds that `work()` takes on the device."""
    begun = now(device)
    work()
    return now(device) - begun


def process_status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> bool:
    """Resets the peak to the present resident memory; False if the system cannot."""
    # Freed pages that still belong to the process would be used again, uncounted. Only the GNU C library has the call.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
