"""Time of a step by phase: data, forward, loss, backward, and the phases that a trainer adds.

    clock = Clock(device)
    with clock.running():
        cached_backward(...)
    clock.lap()  # {"data": 0.02, "forward": 0.41, "loss": 0.01, "backward": 0.83, "other": 0.01}

A clock is a list of marks. The time from a mark to the next belongs to one phase, so that phases never overlap and their sum is
the whole time. On a CPU a mark is a reading of the host's clock. On CUDA it is an event in the current stream, which gets the
device's time when the work queued before it is done: "data" is then the time that the device is idle for lack of data, however
long the host waits.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

DATA, FORWARD, LOSS, BACKWARD, OTHER = "data", "forward", "loss", "backward", "other"


class Clock:
    """Measures phases on one device.

    Args:
        device: whose time is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = OTHER
        self._marks: list[tuple[str, Any]] = []  # phase, and when it began: seconds or a CUDA event
        self._free: list[torch.cuda.Event] = []  # read, and ready for another mark
        self._begin(OTHER)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """`phase` reports to this clock inside."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last call.

        On CUDA it waits for the device, so the place to call it is after a result of the step has been read.
        """
        self._begin(self._phase)
        last = self._marks[-1]
        if isinstance(last[1], torch.cuda.Event):
            last[1].synchronize()
        found: dict[str, float] = {}
        for (name, began), (_, ended) in zip(self._marks[:-1], self._marks[1:], strict=True):
            found[name] = found.get(name, 0.0) + _seconds(began, ended)
        self._free += [mark for _, mark in self._marks[:-1] if isinstance(mark, torch.cuda.Event)]
        self._marks = [last]
        return found

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time inside belongs to this phase, but for phases inside of it."""
        outer = self._phase
        self._begin(name)
        try:
            yield
        finally:
            self._begin(outer)

    def _begin(self, name: str) -> None:
        self._phase = name
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((name, event))


_RUNNING: ContextVar[Clock | None] = ContextVar("megabatch clock", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The time inside belongs to this phase of the running clock; nothing is measured without one."""
    clock = _RUNNING.get()
    if clock is None:
        yield
    else:
        with clock.phase(name):
            yield


def _seconds(began: Any, ended: Any) -> float:
    return float(began.elapsed_time(ended)) / 1e3 if isinstance(began, torch.cuda.Event) else float(ended - began)
