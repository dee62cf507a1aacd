"""A run's metrics for Weights & Biases (opt-in)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch import extras
from megabatch.names import shown

ID_FILE = "wandb_id.txt"  # in the run's folder, so that a continued run keeps its id


class WandbLog:
    """An observer that sends every training number and every evaluation. Needs the package wandb.

    Args:
        project: the project of the run.
        **options: for `wandb.init`, such as `entity` or `mode="offline"`.
    """

    def __init__(self, project: str = "megabatch", **options: Any) -> None:
        self._wandb: Any = extras.load("wandb", extra="wandb", purpose="A log for Weights & Biases")
        self._project, self._options = project, options
        self._run: Any = None

    def start(self, run: Any) -> None:
        """The run begins, or continues."""
        known = run.folder / ID_FILE
        identity = known.read_text("utf-8").strip() if run.first_step and known.is_file() else None
        settings = {"project": self._project, "name": run.folder.name, "dir": str(run.folder)}
        settings |= {"id": identity, "resume": "allow", "config": _shown(_plain(run.config))}
        self._run = self._wandb.init(**{**settings, **self._options})
        known.write_text(f"{self._run.id}\n", "utf-8")

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        numbers = {f"training/{name}": value for name, value in record.items() if name not in ("step", "phases")}
        numbers |= {f"phases/{name}": value for name, value in record.get("phases", {}).items()}
        self._run.log(numbers, step=record["step"])

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """There is a new evaluation."""
        self._run.log({f"evaluation/{name}": value for name, value in record["evaluation"].items()}, step=record["step"])

    def saved(self, path: Path) -> None:
        """A checkpoint is written; it is not uploaded."""

    def finish(self, run: Any) -> None:
        """The run has ended or was stopped."""
        self._run.finish()


def _shown(value: Any) -> Any:
    """The settings without what addresses hold of passwords and tokens."""
    if isinstance(value, Mapping):
        return {key: _shown(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(entry) for entry in value]
    return shown(value) if isinstance(value, str) else value


def _plain(config: Any) -> Any:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
