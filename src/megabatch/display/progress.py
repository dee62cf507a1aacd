"""Progress of a run: a bar in a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from megabatch import extras
from megabatch.display import metrics, numbers

LINE_SECONDS = 10.0  # between lines if the output is not a terminal


class ProgressDisplay:
    """An observer that shows step, loss, pairs a second, share of time spent waiting for data, MFU, memory, time left and
    the last recall.

    Args:
        stream: output (default: standard output).
        line_seconds: seconds between lines if the stream is not a terminal.
        clock: returns seconds; for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        line_seconds: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._line_seconds, self._clock = stream, line_seconds, clock
        self._bar: _Bar | None = None
        self._total = self._first = self._done = self._batch_size = 0
        self._began = self._last_line = 0.0
        self._recall = ""
        self._record: Mapping[str, Any] = {}  # of the last step

    def start(self, run: Any) -> None:
        """The run begins, or continues."""
        self._total, self._first, self._batch_size = run.total_steps, run.first_step, run.batch_size
        self._done = self._first
        self._began = self._clock()
        self._last_line = self._began - self._line_seconds  # the first step is shown at once
        self._recall = ""
        where = f" from step {self._first:,}" if self._first else ""
        self._print(f"{self._total:,} steps of {self._batch_size:,} pairs{where}, in {run.folder}")
        if self._output.isatty() and extras.installed("rich"):
            self._bar = _Bar(self._output, self._total, self._first)

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        done = self._done = int(record["step"])
        self._record = record
        if self._bar is not None:
            self._show_bar()
            return
        now = self._clock()
        if now - self._last_line >= self._line_seconds or done >= self._total:
            self._last_line = now
            width = len(f"{self._total:,}")
            self._print("  ".join([f"step {done:>{width},}/{self._total:,}", *self._shown().values()]))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """There is a new evaluation."""
        found = metrics.headline(record["evaluation"])
        if found is None:
            return
        self._recall = f"R@1 {numbers.percent(found[1])}" if found[0].endswith("R@1") else f"top {numbers.percent(found[1])}"
        shares = {name: value for name, value in record["evaluation"].items() if metrics.is_share(name)}
        shown = "  ".join(f"{metrics.words(name)} {numbers.percent(value)}" for name, value in shares.items())
        self._print(f"step {record['step']:,}: {shown}")
        if self._bar is not None and self._record:
            self._show_bar()  # with the new recall: after the last step there is no other update

    def saved(self, path: Path) -> None:
        """A checkpoint is written."""
        if self._bar is None:
            self._print(f"saved {path}")

    def finish(self, run: Any) -> None:
        """The run has ended or was stopped."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        took = numbers.duration(self._clock() - self._began)
        self._print(f"{self._done - self._first:,} steps in {took}; all of it is in {run.folder}")

    @property
    def _output(self) -> TextIO:
        return self._stream or sys.stdout

    def _show_bar(self) -> None:
        assert self._bar is not None
        self._bar.update(self._done, self._shown())

    def _shown(self) -> dict[str, str]:
        return _shown(self._record, self._time_left(self._done), self._recall)

    def _time_left(self, done: int) -> float:
        steps = done - self._first
        return (self._clock() - self._began) / steps * (self._total - done) if steps > 0 else float("inf")

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.print(line)
        else:
            print(line, file=self._output, flush=True)


def _shown(record: Mapping[str, Any], left: float, recall: str) -> dict[str, str]:
    shown = {"loss": f"loss {numbers.short(record.get('loss'))}"}
    if record.get("pairs_per_second") is not None:
        shown["speed"] = f"{numbers.count(record['pairs_per_second'])} pairs/s"
    if (phases := record.get("phases")) and sum(phases.values()):
        shown["data"] = f"data {numbers.percent(phases.get('data', 0.0) / sum(phases.values()))}"
    if record.get("mfu") is not None:
        shown["mfu"] = f"MFU {numbers.percent(record['mfu'])}"
    if record.get("memory_bytes"):
        shown["memory"] = numbers.size(record["memory_bytes"])
    if recall:
        shown["recall"] = recall
    return shown | {"left": f"{numbers.duration(left)} left"}


class _Bar:
    """rich's progress bar with the metrics beside it."""

    def __init__(self, stream: TextIO, total: int, first: int) -> None:
        progress = extras.load("rich.progress", extra="train", purpose="A progress bar")
        console = extras.load("rich.console", extra="train", purpose="A progress bar")
        self._progress: Any = progress.Progress(
            progress.TextColumn("{task.completed:,}/{task.total:,}", style="bold"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[shown]}", markup=False),
            console=console.Console(file=stream, highlight=False),
        )
        self._task = self._progress.add_task("steps", total=total, completed=first, shown="")
        self._progress.start()

    def update(self, done: int, shown: dict[str, str]) -> None:
        self._progress.update(self._task, completed=done, shown=" · ".join(shown.values()))

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()
