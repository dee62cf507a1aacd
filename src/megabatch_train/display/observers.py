"""Observers that show the progress of a run in the terminal, in its report, in TensorBoard, or in Weights & Biases."""

import contextlib
import dataclasses
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megabatch import extras
from megabatch_train.display import tables
from megabatch_train.names import format_row, redact, sanitize, tell

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Progress of a run. A terminal shows a progress bar, and other outputs get a line every few seconds.

LINE_SECONDS = 10.0  # interval of lines if the output is not a terminal


class ProgressDisplay:
    """An observer that shows step, loss, pairs per second, waiting for data, peak memory, the last recall and the time left.

    Args:
        stream: output (default: standard output).
        line_seconds: interval of lines in seconds, if the stream is not a terminal.
        clock: function that returns seconds. Tests replace it.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        line_seconds: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._line_seconds, self._clock = stream, line_seconds, clock
        self._bar: Any = None  # progress bar of rich, only in a terminal
        self._total = self._first = self._done = self._batch_size = 0
        self._began = self._last_line = 0.0
        self._recall = ""
        self._saved: Path | None = None  # the last checkpoint
        self._record: Mapping[str, Any] = {}  # of the last step

    def start(self, run: Any) -> None:
        """Prints the run, and starts the bar. Called when the run starts or continues."""
        self._total, self._first, self._batch_size = run.total_steps, run.first_step, run.batch_size
        self._done = self._first
        self._began = self._clock()
        self._last_line = self._began - self._line_seconds  # the first step is shown at once
        self._recall, self._saved = "", None
        where = f", from step {self._first:,}" if self._first else ""
        self._print(format_row("run", f"{self._total:,} steps of {self._batch_size:,} pairs{where}; folder {run.folder}"))
        if self._output.isatty() and extras.is_installed("rich"):
            self._start_bar()

    def step(self, record: Mapping[str, Any]) -> None:
        """Called after a step."""
        done = self._done = int(record["step"])
        self._record = record
        if self._bar is not None:
            self._update_bar()
            return
        now = self._clock()
        if now - self._last_line >= self._line_seconds or done >= self._total:
            self._last_line = now
            width = len(f"{self._total:,}")
            self._print("  ".join([f"step {done:>{width},}/{self._total:,}", *self._describe_progress()]))

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Called after an evaluation."""
        headline = tables.headline(record["evaluation"])
        if headline is None:
            return
        self._recall = (
            f"R@1 {tables.percent(headline[1])}" if headline[0].endswith("R@1") else f"top {tables.percent(headline[1])}"
        )
        for name, evaluation in tables.by_dataset(record["evaluation"]).items():
            self._print(f"step {record['step']:,}: {f'{name}: ' if name else ''}{tables.line(evaluation)}")
        if self._bar is not None and self._record:
            self._update_bar()  # shows the new recall, because no update follows the last step

    def on_save(self, path: Path) -> None:
        """Called after a checkpoint or the model is written. It prints the first checkpoint, and `finish` prints the last."""
        if path.suffix:
            return  # the path is the file of the model
        if self._bar is None and self._saved is None:
            self._print(f"first checkpoint: {path}")
        self._saved = path

    def finish(self, run: Any) -> None:
        """Called when the run ends or is stopped."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._done == self._first < self._total:
            return  # the run failed before its first step, so no file was written
        duration = tables.duration(self._clock() - self._began)
        is_there = self._saved is not None and self._saved.exists()  # a full disk can cause its deletion
        checkpoint = f"; last checkpoint: {self._saved}" if is_there else ""
        self._print(f"{self._done - self._first:,} steps in {duration}{checkpoint}")

    @property
    def _output(self) -> TextIO:
        return self._stream or sys.stdout

    def _start_bar(self) -> None:
        progress, console = (extras.load(f"rich.{name}", purpose="A progress bar") for name in ("progress", "console"))
        self._bar = progress.Progress(
            progress.TextColumn("{task.completed:,}/{task.total:,}", style="bold"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[shown]}", markup=False),
            console=console.Console(file=self._output, highlight=False),
        )
        self._bar.add_task("steps", total=self._total, completed=self._first, shown="")
        self._bar.start()

    def _update_bar(self) -> None:
        self._bar.update(self._bar.task_ids[0], completed=self._done, shown=" · ".join(self._describe_progress()))

    def _describe_progress(self) -> list[str]:
        """Returns loss, speed, share of waiting for data, model FLOPs utilization, memory, recall and time left, if known."""
        record, steps = self._record, self._done - self._first
        left = (self._clock() - self._began) / steps * (self._total - self._done) if steps > 0 else float("inf")
        speed, memory, mfu = (record.get(name) for name in ("pairs_per_second", "memory_bytes", "mfu"))
        phases = record.get("phases") or {}
        seconds = sum(phases.values())
        return [
            f"loss {tables.short(record.get('loss'))}",
            *([] if speed is None else [f"{tables.count(speed)} pairs/s"]),
            *([f"waiting for data {tables.percent(phases.get('data', 0.0) / seconds)}"] if seconds else []),
            *([] if mfu is None else [f"MFU {tables.percent(mfu)}"]),
            *([f"peak memory {tables.gibibytes(memory)}"] if memory else []),
            *([self._recall] if self._recall else []),
            f"{tables.duration(left)} left",
        ]

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(sanitize(line), markup=False, highlight=False)
        else:
            tell(line, self._output)


# ----------------------------------------------------------------------------------------------------------------------
# The report of a run that continues. An observer writes the page every few minutes, without search results.

REPORT = "report.html"  # name of the page in the folder of the run
EVERY = 300.0  # seconds between two pages; writing one takes about a second of the training thread


class LiveReport:
    """An observer that writes report.html after a checkpoint or an evaluation, at most every `EVERY` seconds."""

    def __init__(self) -> None:
        self._folder, self._written, self._works = Path(), 0.0, True

    def start(self, run: Any) -> None:
        """Called when the run starts. The first page is written after `EVERY` seconds."""
        self._folder, self._written = run.folder, time.monotonic()
        LOG.info("%s", format_row("report", f"{self._folder / REPORT}, written every {EVERY / 60:.0f} minutes"))

    def step(self, record: dict[str, Any]) -> None:
        """Does nothing."""

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Called after an evaluation. Writes the page."""
        self._write()

    def on_save(self, path: Path) -> None:
        """Called after a checkpoint. Writes the page."""
        self._write()

    def finish(self, run: Any) -> None:
        """Does nothing, because the last page, with search results, is written after the run."""

    def _write(self) -> None:
        if not self._works or time.monotonic() - self._written < EVERY:
            return
        from megabatch_train.display import report  # a run without a report does not need its packages

        self._written = time.monotonic()
        try:
            report.write_report(self._folder, load=None)
        except OSError:
            raise  # the disk may be full, and the run tries again
        except Exception as error:  # an error of the page must not stop the run
            self._works = False
            LOG.warning("the report is written only after the run, because of an error: %s", error)


# ----------------------------------------------------------------------------------------------------------------------
# TensorBoard. The folder `tensorboard` of the run contains its numbers. `tensorboard --logdir RUNS` shows them.


FOLDER = "tensorboard"
URL = "http://localhost:6006"  # the default of TensorBoard
_GROUPS = ("phases", "start")  # keys of a record whose values are dictionaries of numbers
_NOT_DRAWN = ("step", "epoch", "pairs", "seconds")  # counters, which TensorBoard does not show


class TensorBoardLog:
    """An observer that writes every training number and every evaluation. It needs the package tensorboard.

    After an error of a full disk, the writer of TensorBoard cannot be used again. When a checkpoint can be written again, a new
    writer starts with the values that the old writer may not have written.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder = Path()
        self._numbers: list[tuple[str, float, int]] = []  # (name, value, step) since the last flush
        if not self.available():
            extras.load("tensorboard", purpose="A log for TensorBoard")

    @staticmethod
    def available() -> bool:
        """Whether TensorBoard is installed."""
        return extras.is_installed("tensorboard")

    def start(self, run: Any) -> None:
        """Called when the run starts or continues. Replaces the values of steps that the run repeats."""
        self._folder, self._numbers = run.folder / FOLDER, []
        self._open(purge_step=run.first_step + 1 if run.first_step else None)
        config = run.folder / "config.toml"
        if config.is_file():
            self._writer.add_text(
                "config", "".join(f"    {line}\n" for line in sanitize(config.read_text("utf-8")).splitlines())
            )
        where = f"tensorboard --logdir {shlex.quote(str(self._folder))}, then {URL} in a browser"
        LOG.info("%s", format_row("curves", where))

    def step(self, record: Mapping[str, Any]) -> None:
        """Called after a step."""
        self._add("training", {name: value for name, value in record.items() if name not in _NOT_DRAWN}, record["step"])
        for group in _GROUPS:
            self._add(group, record.get(group, {}), record["step"])

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Called after an evaluation."""
        self._add("evaluation", record["evaluation"], record["step"])
        self._flush()

    def on_save(self, path: Path) -> None:
        """Called after a checkpoint is written. Flushes the log."""
        self._flush()

    def finish(self, run: Any) -> None:
        """Called when the run ends or is stopped."""
        self._flush()
        self._writer.close()

    def _open(self, purge_step: int | None = None) -> None:
        tensorboard = extras.load("torch.utils.tensorboard", purpose="A log for TensorBoard")
        self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=purge_step)

    def _add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        numbers = [(f"{group}/{name}", value, step) for name, value in values.items() if isinstance(value, int | float)]
        self._numbers += numbers
        self._write(numbers)

    def _write(self, numbers: Sequence[tuple[str, float, int]]) -> None:
        if self._writer is None:
            raise OSError("TensorBoard continues at the next checkpoint")
        try:
            for name, value, step in numbers:
                self._writer.add_scalar(name, value, step)
        except OSError:
            self._give_up()
            raise

    def _flush(self) -> None:
        if self._writer is None:
            self._open(purge_step=self._numbers[0][-1] if self._numbers else None)
            self._write(self._numbers)
        try:
            self._writer.flush()
        except OSError:
            self._give_up()
            raise
        self._numbers = []

    def _give_up(self) -> None:
        """Ends the writer and its thread. `SummaryWriter.close` would flush first, which raises the error again."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):  # the disk is still full
            writer.file_writer.close()


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases, for users who ask for it.


ID_FILE = "wandb_id.txt"  # in the folder of the run, so that a run that continues keeps its id
WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # modes of wandb that need no login
DISABLE_METADATA = ("WANDB_X_DISABLE_META", "WANDB__DISABLE_META")  # variables of newer and of older versions of wandb


class WandbLog:
    """An observer that sends every training number and every evaluation. It needs the package wandb.

    Args:
        project: project of the run.
        **options: arguments of `wandb.init`, such as `entity` or `mode="offline"`.

    Raises:
        ValueError: no user is logged in. In a terminal, wandb first asks for the API key.
    """

    def __init__(self, project: str = "megabatch", **options: Any) -> None:
        self._wandb: Any = extras.load("wandb", purpose="A log for Weights & Biases")
        self._project, self._options = project, options
        self._run: Any = None
        if redact(sys.argv) != sys.argv:  # wandb stores the arguments of the process in its metadata
            os.environ |= dict.fromkeys(DISABLE_METADATA, "true")
        if (options.get("mode") or os.environ.get("WANDB_MODE", "online")) not in WITHOUT_LOGIN:
            self._check_login()

    def _check_login(self) -> None:
        try:
            self._wandb.login()
        except self._wandb.Error as error:
            raise ValueError(
                "--wandb needs a login. Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to log into the folder "
                f"of the run. wandb reports: {str(error).rstrip('.')}"
            ) from error

    def start(self, run: Any) -> None:
        """Called when the run starts or continues."""
        id_file = run.folder / ID_FILE
        run_id = id_file.read_text("utf-8").strip() if run.first_step and id_file.is_file() else None
        settings = {"project": self._project, "name": run.folder.name, "dir": str(run.folder)}
        settings |= {"id": run_id, "resume": "allow", "config": redact(_plain(run.config))}
        self._run = self._wandb.init(**{**settings, **self._options})
        id_file.write_text(f"{self._run.id}\n", "utf-8")

    def step(self, record: Mapping[str, Any]) -> None:
        """Called after a step."""
        self._run.log(_name_numbers(record), step=record["step"])

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Called after an evaluation."""
        self._run.log({f"evaluation/{name}": value for name, value in record["evaluation"].items()}, step=record["step"])

    def on_save(self, path: Path) -> None:
        """Does nothing, because checkpoints are not uploaded."""

    def finish(self, run: Any) -> None:
        """Called when the run ends or is stopped."""
        self._run.finish()


class TrackioLog:
    """An observer that writes every training number and every evaluation to trackio, which stores them on this machine.

    Args:
        project: project of the run. `trackio show` opens its curves in a browser.
        **options: arguments of `trackio.init`, such as `space_id`.
    """

    def __init__(self, project: str = "megabatch", **options: Any) -> None:
        self._trackio: Any = extras.load("trackio", purpose="A log for trackio")
        self._project, self._options = project, options
        self._run: Any = None

    def start(self, run: Any) -> None:
        """Called when the run starts or continues. A run that continues keeps its curves."""
        settings = {"project": self._project, "name": run.folder.name, "resume": "allow", "embed": False}
        settings |= {"config": redact(_plain(run.config))}
        self._run = self._trackio.init(**{**settings, **self._options})

    def step(self, record: Mapping[str, Any]) -> None:
        """Called after a step."""
        self._run.log(_name_numbers(record), step=record["step"])

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Called after an evaluation."""
        self._run.log({f"evaluation/{name}": value for name, value in record["evaluation"].items()}, step=record["step"])

    def on_save(self, path: Path) -> None:
        """Does nothing, because checkpoints are not stored."""

    def finish(self, run: Any) -> None:
        """Called when the run ends or is stopped."""
        self._run.finish()


def _name_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a step by the names of their charts."""
    numbers = {f"training/{name}": value for name, value in record.items() if name not in ("step", *_GROUPS)}
    return numbers | {f"{group}/{name}": value for group in _GROUPS for name, value in record.get(group, {}).items()}


def _plain(config: Any) -> Any:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
