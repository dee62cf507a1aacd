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
    """An observer that shows step, loss, pairs a second, memory, time left and the last recall.

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
        self._bar: Any = None  # rich's, in a terminal
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
            self._start_bar()

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        done = self._done = int(record["step"])
        self._record = record
        if self._bar is not None:
            self._update_bar()
            return
        now = self._clock()
        if now - self._last_line >= self._line_seconds or done >= self._total:
            self._last_line = now
            width = len(f"{self._total:,}")
            self._print("  ".join([f"step {done:>{width},}/{self._total:,}", *self._shown()]))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """There is a new evaluation."""
        found = metrics.headline(record["evaluation"])
        if found is None:
            return
        self._recall = f"R@1 {numbers.percent(found[1])}" if found[0].endswith("R@1") else f"top {numbers.percent(found[1])}"
        for name, evaluation in metrics.by_dataset(record["evaluation"]).items():
            self._print(f"step {record['step']:,}: {f'{name}: ' if name else ''}{metrics.line(evaluation)}")
        if self._bar is not None and self._record:
            self._update_bar()  # with the new recall: after the last step there is no other update

    def saved(self, path: Path) -> None:
        """A checkpoint is written."""
        if self._bar is None:
            self._print(f"saved {path}")

    def finish(self, run: Any) -> None:
        """The run has ended or was stopped."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._done == self._first < self._total:
            return  # failed before its first step: nothing was written
        took = numbers.duration(self._clock() - self._began)
        self._print(f"{self._done - self._first:,} steps in {took}; written to {run.folder}")

    @property
    def _output(self) -> TextIO:
        return self._stream or sys.stdout

    def _start_bar(self) -> None:
        progress, console = (
            extras.load(f"rich.{name}", extra="train", purpose="A progress bar") for name in ("progress", "console")
        )
        self._bar = progress.Progress(
            progress.TextColumn("{task.completed:,}/{task.total:,}", style="bold"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[shown]}", markup=False),
            console=console.Console(file=self._output, highlight=False),
        )
        self._bar.add_task("steps", total=self._total, completed=self._first, shown="")
        self._bar.start()

    def _update_bar(self) -> None:
        self._bar.update(self._bar.task_ids[0], completed=self._done, shown=" · ".join(self._shown()))

    def _shown(self) -> list[str]:
        """Loss, speed, share of waiting for data, model FLOPs utilisation, memory, recall and time left, as far as known."""
        record, steps = self._record, self._done - self._first
        left = (self._clock() - self._began) / steps * (self._total - self._done) if steps > 0 else float("inf")
        speed, memory, mfu = (record.get(name) for name in ("pairs_per_second", "memory_bytes", "mfu"))
        phases = record.get("phases") or {}
        seconds = sum(phases.values())
        return [
            f"loss {numbers.short(record.get('loss'))}",
            *([] if speed is None else [f"{numbers.count(speed)} pairs/s"]),
            *([f"data {numbers.percent(phases.get('data', 0.0) / seconds)}"] if seconds else []),
            *([] if mfu is None else [f"MFU {numbers.percent(mfu)}"]),
            *([numbers.size(memory)] if memory else []),
            *([self._recall] if self._recall else []),
            f"{numbers.duration(left)} left",
        ]

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._output, flush=True)
