"""The time of a short piece of work on a GPU."""

import math
from collections.abc import Callable
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
