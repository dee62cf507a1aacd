"""Observers of a run: `metrics.jsonl`, displays and logs. They are called on the first rank, from the training thread."""

import json
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megabatch.data import cache
from megabatch.evaluation import results
from megabatch.trainer.run import Run

LOG = logging.getLogger("megabatch")
METRICS = "metrics.jsonl"


class Observer(Protocol):
    """Something that records a run: a file, a display, a log."""

    def start(self, run: Run) -> None:
        """Before the first step; a resumed run starts after step `run.first_step`."""

    def step(self, record: dict[str, Any]) -> None:
        """After each step: step, epoch, pairs, loss, scale, bias (SigLIP), learning_rate, gradient_norm, pairs_per_second,
        mfu (share of the GPU's peak rate, if it is known), memory_bytes, seconds, and under "phases" the seconds of each phase
        on this rank since the record before: data, forward, loss, backward, optimizer, checkpoint, evaluation, other.
        """

    def evaluated(self, record: dict[str, Any]) -> None:
        """After an evaluation: step, and under "evaluation" the metrics by open_clip's names."""

    def saved(self, path: Path) -> None:
        """After a checkpoint has been written, and at the end with the model's file."""

    def finish(self, run: Run) -> None:
        """At the end, also of a stopped or failed run; `run.step` is the last step."""


class Observers:
    """Calls several observers. If one cannot write, because a disk is full, the run goes on with one warning."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        # Observer id → method that failed. Only that method shows recovery: another one may have nothing to write.
        self._failed: dict[int, str] = {}

    def start(self, run: Run) -> None:
        """Calls all observers; one that fails here is not called again."""
        self._observers = [observer for observer in self._observers if self._told(observer, "start", run)]

    def step(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._tell("step", record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._tell("evaluated", record)

    def saved(self, path: Path) -> None:
        """Calls all observers."""
        self._tell("saved", path)

    def finish(self, run: Run) -> None:
        """Calls all observers."""
        self._tell("finish", run)

    def _tell(self, method: str, what: Any) -> None:
        for observer in self._observers:
            self._told(observer, method, what)

    def _told(self, observer: Observer, method: str, what: Any) -> bool:
        name = type(observer).__name__
        try:
            getattr(observer, method)(what)
        except OSError as error:
            if id(observer) not in self._failed:
                LOG.warning("%s could not write, and the run goes on: %s", name, error)
                self._failed[id(observer)] = method
            elif method == "finish":
                LOG.warning("%s could not write to the end: %s", name, error)
            return False
        if self._failed.get(id(observer)) == method:
            LOG.warning("%s writes again", name)
            del self._failed[id(observer)]
        return True


class MetricsFile:
    """Writes `metrics.jsonl`. A resumed run removes the lines after the step that it resumes from.

    Lines that cannot be written, because a disk is full, are kept and written later.
    """

    def __init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()

    def start(self, run: Run) -> None:
        """Keeps the lines of steps before `run.first_step`."""
        self._path = run.folder / METRICS
        known = results.read(self._path) if self._path.exists() else []
        kept = [json.dumps(line) + "\n" for line in known if line["step"] <= run.first_step]
        cache.write(self._path, lambda file: file.write("".join(kept).encode()))

    def step(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def saved(self, path: Path) -> None:
        """Does nothing."""

    def finish(self, run: Run) -> None:
        """Writes the lines that are left, or raises an error with their number."""
        try:
            self._write()
        except OSError as error:
            lost = f"{error.strerror}; {len(self._waiting)} lines are missing at the end"
            raise OSError(error.errno, lost, str(self._path)) from error

    def _write(self, *records: dict[str, Any]) -> None:
        self._waiting.extend(records)
        while self._waiting:
            results.append(self._path, self._waiting[0])
            self._waiting.popleft()
