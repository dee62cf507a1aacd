"""Ctrl-C and SIGTERM end a run after the current step, so that it can be saved first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """A run was stopped by a signal and has been saved. The message says how to resume.

    Args:
        message: shown to the user.
        number: of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Request:
    """The signal received so far."""

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0 for none


@contextmanager
def requests(impatient: bool) -> Iterator[Request]:
    """Records signals instead of ending at once. Works in the main thread; elsewhere no signal is recorded.

    Args:
        impatient: whether a second Ctrl-C ends the process at once. Not under torchrun, which forwards each signal twice.
    """
    request = Request()

    def collect(number: int, frame: FrameType | None) -> None:
        if request.number and number == signal.SIGINT and impatient:
            raise KeyboardInterrupt
        request.number = number

    before: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            before[number] = signal.signal(number, collect)
    except ValueError:  # not the main thread
        before.clear()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
