"""Who is told what happens in a run: on the first rank alone, in this order, from the thread that trains."""

import json
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megabatch.data import cache
from megabatch.data.dataset import Dataset
from megabatch.evaluation import results
from megabatch.trainer.run import Run

LOG = logging.getLogger("megabatch")
METRICS = "metrics.jsonl"
NAMED = 5  # unreadable samples that are named


class Observer(Protocol):
    """Something that watches a run: a file, a display, a log."""

    def start(self, run: Run) -> None:
        """Before the first step; `run.first_step` steps have been done by runs before."""

    def step(self, record: dict[str, Any]) -> None:
        """After each step: step, epoch, pairs, loss, scale, bias (SigLIP), learning_rate, gradient_norm, pairs_per_second,
        memory_bytes, seconds.
        """

    def evaluated(self, record: dict[str, Any]) -> None:
        """After an evaluation: step, and under "evaluation" open_clip's names of metrics with their values."""

    def saved(self, path: Path) -> None:
        """After a checkpoint has been written, and at the end with the model's file."""

    def finish(self, run: Run) -> None:
        """At the end, also when the run was stopped or failed; `run.step` says how far it came."""


class Observers:
    """Several as one. One that cannot write, because a disk is full, is named once until it can, and does not end the run."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        # By the observer's id, the method that failed: that another one works says nothing, it may have nothing to write.
        self._failed: dict[int, str] = {}

    def start(self, run: Run) -> None:
        """To all. One that cannot begin has nowhere to write to and is told nothing more."""
        self._observers = [observer for observer in self._observers if self._told(observer, "start", run)]

    def step(self, record: dict[str, Any]) -> None:
        """To all."""
        self._tell("step", record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """To all."""
        self._tell("evaluated", record)

    def saved(self, path: Path) -> None:
        """To all."""
        self._tell("saved", path)

    def finish(self, run: Run) -> None:
        """To all."""
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
    """Writes `metrics.jsonl`. A run that continues takes away what came after the step it continues from.

    Lines that cannot be written, because a disk is full, wait until they can.
    """

    def __init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()

    def start(self, run: Run) -> None:
        """Keeps the lines of steps that are not done again."""
        self._path = run.folder / METRICS
        known = results.read(self._path) if self._path.exists() else []
        kept = [json.dumps(line) + "\n" for line in known if line["step"] <= run.first_step]
        cache.write(self._path, lambda file: file.write("".join(kept).encode()))

    def step(self, record: dict[str, Any]) -> None:
        """One line."""
        self._write(record)

    def evaluated(self, record: dict[str, Any]) -> None:
        """One line."""
        self._write(record)

    def saved(self, path: Path) -> None:
        """Nothing: files speak for themselves."""

    def finish(self, run: Run) -> None:
        """The lines that still wait; says how many there are if they cannot be written now either."""
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


class Unreadable:
    """What this rank has met of a dataset's failures."""

    def __init__(self, dataset: Dataset) -> None:
        self._failures = dataset.failures
        self._named = 0

    def name_new(self) -> None:
        """Those that came since, as long as they are few."""
        if self._named == min(NAMED, len(self._failures)):
            return
        for reason in list(self._failures.values())[self._named : NAMED]:
            LOG.warning("left out: %s", reason)
            self._named += 1
        if self._named == NAMED:
            LOG.warning("further samples that cannot be read are counted, not named")

    def count(self) -> None:
        """How many there were."""
        if self._failures:
            LOG.warning("%d samples could not be read and were left out", len(self._failures))
