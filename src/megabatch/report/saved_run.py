"""The files in a run's folder: configuration, command, and metrics of each step and each evaluation."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabatch import settings
from megabatch.data import load as data
from megabatch.data.dataset import Dataset
from megabatch.evaluation import results

CONFIG, COMMAND, METRICS, ENVIRONMENT = "config.toml", "command.txt", "metrics.jsonl", "environment.json"


@dataclass(frozen=True)
class SavedRun:
    """A run as its folder has it."""

    folder: Path
    config_text: str
    config: dict[str, Any]
    command: str
    training: list[dict[str, Any]]  # by step, each once
    evaluations: list[dict[str, Any]]  # by step, each once: {"step", "evaluation"}
    environment: dict[str, Any] = field(default_factory=dict)  # date, hardware, versions, sizes

    @property
    def training_data(self) -> str:
        """The training data's name."""
        return str(self.config.get("data", ""))

    @property
    def test_data(self) -> tuple[str, str | None] | None:
        """(name, split) of the data to evaluate on, which is the training data if there is no other; None if none is named."""
        if self.config.get("holdout"):
            return self.training_data, "test"
        named = self.config.get("validation") or self.training_data
        spec = str(named[0] if isinstance(named, list) else named)
        return (spec, "test" if spec in data.WITH_SPLITS else None) if spec else None

    @property
    def tests_on_training_data(self) -> bool:
        """Whether the run names no other data to evaluate on than what it learned."""
        known = self.config.get("validation") or self.config.get("holdout")
        return not known and self.training_data not in data.WITH_SPLITS

    def test_set(self, *, size: int | None = None) -> Dataset:
        """The data to evaluate on. `size` is the side length of emoji, in pixels."""
        found = self.test_data
        if found is None:
            raise ValueError(f"{self.folder / CONFIG} must name data (data = …), got none")
        return data.load(*found, size=size, **self.test_options)

    @property
    def test_options(self) -> dict[str, Any]:
        """Options of that data, such as a table's columns."""
        if holdout := self.config.get("holdout"):
            return {**self.config.get("data_options", {}), "holdout": holdout}
        options: dict[str, Any] = self.config.get("data_options" if self.tests_on_training_data else "validation_options", {})
        return options


def read(folder: str | Path) -> SavedRun:
    """Reads a run. A missing file leaves its part empty; a damaged one raises an error that names it."""
    place = Path(folder)
    if not place.is_dir():
        raise FileNotFoundError(f"No such folder: {folder}")
    config_text = _text(place / CONFIG)
    records = results.read(place / METRICS) if (place / METRICS).is_file() else []
    return SavedRun(
        place,
        config_text,
        settings.read(place / CONFIG) if config_text else {},
        _text(place / COMMAND).strip(),
        _by_step([record for record in records if "loss" in record]),
        _by_step([record for record in records if "evaluation" in record]),
        json.loads(_text(place / ENVIRONMENT) or "{}"),
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _by_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by step; of a step that was repeated after a stop, the last record."""
    last = {int(record["step"]): record for record in records}
    return [last[step] for step in sorted(last)]
