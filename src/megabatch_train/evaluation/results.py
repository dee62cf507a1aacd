"""The files in a run's folder: configuration, command, and metrics of each step and each evaluation as JSON lines."""

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabatch_train import settings
from megabatch_train.data import load as data
from megabatch_train.data.dataset import Dataset

# ----------------------------------------------------------------------------------------------------------------------
# Results as JSON lines. Each result is appended as one object per line, so the file can be read during a run.


def append(path: str | Path, result: Mapping[str, Any]) -> None:
    """Appends one line. If the disk is full, writes nothing and raises an OSError. NaN and infinity become null."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    line = f"{json.dumps(_writable(result), ensure_ascii=False, allow_nan=False)}\n".encode()
    with place.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        except OSError:
            file.truncate(end)  # an incomplete line before other lines would make the file unreadable
            raise


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns the objects of all lines. Excludes an incomplete last line, because another process may be writing it."""
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")  # strings may contain other line separators
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line.decode()))
        except ValueError as error:  # the line is not JSON or ends within a character
            if number < len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1}, must be a JSON object: {error}") from error
    return records


def _writable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _writable(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------------------------
# The files of a run in its folder.


CONFIG, COMMAND, METRICS, ENVIRONMENT = "config.toml", "command.txt", "metrics.jsonl", "environment.json"
BEST, BEST_ABOUT = "best", "best.json"  # folder of the best weights, and their step, metric and value


@dataclass(frozen=True)
class SavedRun:
    """The contents of the files in the folder of a run."""

    folder: Path
    config_text: str
    config: dict[str, Any]
    command: str
    training: list[dict[str, Any]]  # one record per step, sorted by step
    evaluations: list[dict[str, Any]]  # one record {"step", "evaluation"} per step, sorted by step
    environment: dict[str, Any] = field(default_factory=dict)  # date, hardware, versions, sizes
    # step, metric and value of the best evaluation, if best/ has its weights
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """The trainer's warnings that the run learns nothing."""
        return [record["problem"] for record in self.training if "problem" in record]

    @property
    def training_data(self) -> str:
        """The name of the training data."""
        return str(self.config.get("data", ""))

    @property
    def test_data(self) -> tuple[str, str | None] | None:
        """Name and split of the evaluation data; None if the run has none. Without validation data it is the training data."""
        if self.config.get("holdout"):
            return self.training_data, "test"
        named = self.config.get("validation") or self.training_data
        spec = str(named[0] if isinstance(named, list) else named)
        return (spec, "test" if spec in data.WITH_SPLITS else None) if spec else None

    @property
    def tests_on_training_data(self) -> bool:
        """Whether the run has no evaluation data other than its training data."""
        other_data = self.config.get("validation") or self.config.get("holdout")
        return not other_data and self.training_data not in data.WITH_SPLITS

    @property
    def training_part(self) -> tuple[str, str | None] | None:
        """Name and split of the data that the run was trained on; None if the run has none."""
        spec = self.training_data
        split = "train" if self.config.get("holdout") or spec in data.WITH_SPLITS else None
        return (spec, split) if spec else None

    @property
    def training_options(self) -> dict[str, Any]:
        """Options of the training data, such as the columns of a table."""
        holdout = self.config.get("holdout")
        return {**self._locate_options("data_options"), **({"holdout": holdout} if holdout else {})}

    @property
    def test_data_is(self) -> str:
        """A description of how the evaluation data is related to the run."""
        if self.config.get("holdout"):
            return "held out of the training data"
        if self.tests_on_training_data:
            return "the training data of the run"
        return "the validation data of the run"

    def test_set(self, *, size: int | None = None) -> Dataset:
        """Loads the evaluation data. `size` is the side length of emoji in pixels."""
        spec_and_split = self.test_data
        if spec_and_split is None:
            raise ValueError(f"{self.folder / CONFIG} must have data (data = …), got none")
        return data.load(self.locate(spec_and_split[0]), spec_and_split[1], size=size, **self.test_options)

    def locate(self, spec: str) -> str:
        """Returns the data specification, changed so that relative paths work from the current working directory."""
        directory = self._directory
        return spec if directory is None else data.anchor(spec, directory)

    @property
    def _directory(self) -> Path | None:
        """The working directory of the run, which its paths are relative to; None if it is unknown or the current one."""
        directory = self.environment.get("directory")
        return Path(directory) if isinstance(directory, str) and os.path.isabs(directory) and directory != os.getcwd() else None

    @property
    def test_options(self) -> dict[str, Any]:
        """Options of the evaluation data, such as the columns of a table."""
        if holdout := self.config.get("holdout"):
            return {**self._locate_options("data_options"), "holdout": holdout}
        return self._locate_options("data_options" if self.tests_on_training_data else "validation_options")

    def _locate_options(self, key: str) -> dict[str, Any]:
        options: dict[str, Any] = self.config.get(key, {})
        return options if self._directory is None else data.anchor_options(options, self._directory)


def read_run(folder: str | Path) -> SavedRun:
    """Reads a run. If a file is missing, its part is empty. A damaged file raises an error with its name."""
    place = Path(folder)
    if not place.is_dir():
        raise FileNotFoundError(f"No such folder: {folder}")
    config_text = _text(place / CONFIG)
    records = read(place / METRICS) if (place / METRICS).is_file() else []
    return SavedRun(
        place,
        config_text,
        settings.read(place / CONFIG) if config_text else {},
        _text(place / COMMAND).strip(),
        _by_step([record for record in records if "loss" in record]),
        _by_step([record for record in records if "evaluation" in record]),
        json.loads(_text(place / ENVIRONMENT) or "{}"),
        json.loads(_text(place / BEST / BEST_ABOUT) or "{}"),
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _by_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts records by step. If a step was repeated after a stop, only its last record is kept."""
    last = {int(record["step"]): record for record in records}
    return [last[step] for step in sorted(last)]
