"""A run's numbers for TensorBoard, in the folder `tensorboard` of the run: `tensorboard --logdir RUNS`."""

import contextlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch import extras
from megabatch.names import shown

LOG = logging.getLogger("megabatch")
FOLDER = "tensorboard"
ADDRESS = "http://localhost:6006"  # TensorBoard's own default
_NOT_DRAWN = ("step", "epoch", "pairs", "seconds")  # counters


class TensorBoardLog:
    """An observer that writes every training number and every evaluation. Needs the package tensorboard.

    TensorBoard's writer cannot be used again after a full disk. Once a checkpoint can be written, there is room again: a new
    writer starts with the values that the first may not have written.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder = Path()
        self._numbers: list[tuple[str, float, int]] = []  # (name, value, step) since the last flush
        if not self.available():
            extras.load("tensorboard", extra="tensorboard", purpose="A log for TensorBoard")

    @staticmethod
    def available() -> bool:
        """Whether it is installed."""
        return extras.installed("tensorboard")

    def start(self, run: Any) -> None:
        """The run begins or continues. Values of steps that are repeated are replaced."""
        self._folder, self._numbers = run.folder / FOLDER, []
        self._open(purge_step=run.first_step + 1 if run.first_step else None)
        config = run.folder / "config.toml"
        if config.is_file():
            self._writer.add_text("config", "".join(f"    {line}\n" for line in shown(config.read_text("utf-8")).splitlines()))
        LOG.info("curves: tensorboard --logdir %s, then %s in a browser", shlex.quote(str(self._folder)), ADDRESS)

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        self._add("training", {name: value for name, value in record.items() if name not in _NOT_DRAWN}, record["step"])
        self._add("phases", record.get("phases", {}), record["step"])

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """There is a new evaluation."""
        self._add("evaluation", record["evaluation"], record["step"])
        self._flush()

    def saved(self, path: Path) -> None:
        """A checkpoint is written; the log is flushed."""
        self._flush()

    def finish(self, run: Any) -> None:
        """The run has ended or was stopped."""
        self._flush()
        self._writer.close()

    def _open(self, purge_step: int | None = None) -> None:
        tensorboard = extras.load("torch.utils.tensorboard", extra="tensorboard", purpose="A log for TensorBoard")
        self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=purge_step)

    def _add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        found = [(f"{group}/{name}", value, step) for name, value in values.items() if isinstance(value, int | float)]
        self._numbers += found
        self._write(found)

    def _write(self, numbers: Sequence[tuple[str, float, int]]) -> None:
        if self._writer is None:
            raise OSError("the log waits for the next checkpoint")
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
        """Ends the writer and its thread. `SummaryWriter.close` does not: it flushes first, and that raises again."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):  # the disk is still full
            writer.file_writer.close()
