"""The time of short pieces of work on a GPU, one after the other."""

import gc
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megabatch.bench.measure import seconds_of


def milliseconds(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Of one call, with several calls in flight as in training, so that the host's work is hidden behind the device's.

    As many calls as take about `seconds` together, and at least one.
    """
    calls = 1
    while True:
        elapsed = _elapsed(work, calls, device)
        if elapsed >= 1000 * seconds or calls >= 64:
            return elapsed / calls
        calls = min(64, max(calls + 1, math.ceil(calls * 1000 * seconds / max(elapsed, 0.1))))


def take_turns(works: dict[str, Callable[[], Any]], device: str, rounds: int, seconds: float) -> dict[str, float]:
    """Milliseconds of each, the median of the rounds; one round for work that takes more than a second."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name, work in works.items():
            if turn == 0 or times[name][0] < 1000:
                times[name].append(_timed(work, device, seconds))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def _timed(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Milliseconds. Out of memory is retried after emptying the cache, which is fragmented by the system before."""
    try:
        return milliseconds(work, device, seconds)
    except torch.OutOfMemoryError:
        pass
    clear(device)
    return milliseconds(work, device, seconds)


def clear(device: str) -> None:
    """Frees the memory of the last system."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def failure(error: Exception) -> str:
    """The entry of a table for a system that cannot be run."""
    if isinstance(error, ImportError):
        return f"not installed ({error.name or error})"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"fails ({type(error).__name__}: {str(error).splitlines()[0][:100]})" if str(error) else "fails"


class TimeUp(BaseException):
    """Not an `Exception`, which libraries catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeUp` inside after so many seconds, between two lines of Python. Only in the main thread."""

    def expired(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _elapsed(work: Callable[[], Any], calls: int, device: str) -> float:
    def repeated() -> None:
        for _ in range(calls):
            work()

    if torch.device(device).type != "cuda":
        return 1000 * seconds_of(repeated, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    repeated()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
