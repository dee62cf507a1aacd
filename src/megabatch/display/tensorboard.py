"""A run's numbers for TensorBoard, in the folder `tensorboard` of the run: `tensorboard --logdir RUNS`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch import extras

FOLDER = "tensorboard"
_NOT_DRAWN = ("step", "epoch", "pairs", "seconds")  # they only grow


class TensorBoardLog:
    """An observer that writes every training number and every evaluation. Needs the package tensorboard."""

    def __init__(self) -> None:
        self._writer: Any = None
        if not self.available():
            extras.load("tensorboard", extra="train", purpose="A log for TensorBoard")

    @staticmethod
    def available() -> bool:
        """Whether it is installed."""
        return extras.installed("tensorboard")

    def start(self, run: Any) -> None:
        """The run begins, or continues: what was written of steps that are done again is not shown."""
        tensorboard = extras.load("torch.utils.tensorboard", extra="train", purpose="A log for TensorBoard")
        continued = run.first_step + 1 if run.first_step else None
        self._writer = tensorboard.SummaryWriter(str(run.folder / FOLDER), purge_step=continued)
        config = run.folder / "config.toml"
        if config.is_file():
            self._writer.add_text("config", "".join(f"    {line}\n" for line in config.read_text("utf-8").splitlines()))

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done."""
        for name, value in record.items():
            if name not in _NOT_DRAWN and isinstance(value, int | float):
                self._writer.add_scalar(f"training/{name}", value, record["step"])

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """There is a new evaluation."""
        for name, value in record["evaluation"].items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"evaluation/{name}", value, record["step"])
        self._writer.flush()

    def saved(self, path: Path) -> None:
        """A checkpoint is written; so is what was logged up to it."""
        self._writer.flush()

    def finish(self, run: Any) -> None:
        """The run is over, or was stopped."""
        self._writer.close()
