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
# Results as JSON lines: one object per line, appended, so that they can be read during a run.


def append(path: str | Path, result: Mapping[str, Any]) -> None:
    """Appends one line, or nothing if the disk is full. NaN and infinity become null, since JSON has neither."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    line = f"{json.dumps(_writable(result), ensure_ascii=False, allow_nan=False)}\n".encode()
    with place.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        except OSError:
            file.truncate(end)  # half a line, followed by another, would make the file unreadable
            raise


def read(path: str | Path) -> list[dict[str, Any]]:
    """All lines. An incomplete last line is left out: it may be in the middle of being written."""
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")  # strings may contain other line separators
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line.decode()))
        except ValueError as error:  # not JSON, or half a character
            if number < len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1}, must be a JSON object: {error}") from error
    return found


def _writable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _writable(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------------------------
# A run as its folder has it.


CONFIG, COMMAND, METRICS, ENVIRONMENT = "config.toml", "command.txt", "metrics.jsonl", "environment.json"
BEST, BEST_ABOUT = "best", "best.json"  # folder of the best weights, and their step, metric and value


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
    best: dict[str, Any] = field(
        default_factory=dict
    )  # step, metric and value of the best evaluation, if best/ has its weights

    @property
    def problems(self) -> list[str]:
        """Warnings of the trainer about runs that learn nothing."""
        return [record["problem"] for record in self.training if "problem" in record]

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

    @property
    def training_part(self) -> tuple[str, str | None] | None:
        """(name, split) of the data that the run learned from; None if none is named."""
        spec = self.training_data
        split = "train" if self.config.get("holdout") or spec in data.WITH_SPLITS else None
        return (spec, split) if spec else None

    @property
    def training_options(self) -> dict[str, Any]:
        """Options of that data, such as a table's columns."""
        holdout = self.config.get("holdout")
        return {**self._locate_options("data_options"), **({"holdout": holdout} if holdout else {})}

    @property
    def test_data_is(self) -> str:
        """How the data to evaluate on is related to the run, in words."""
        if self.config.get("holdout"):
            return "held out of the training data"
        if self.tests_on_training_data:
            return "the training data of the run"
        return "the validation data of the run"

    def test_set(self, *, size: int | None = None) -> Dataset:
        """The data to evaluate on. `size` is the side length of emoji, in pixels."""
        found = self.test_data
        if found is None:
            raise ValueError(f"{self.folder / CONFIG} must name data (data = …), got none")
        return data.load(self.locate(found[0]), found[1], size=size, **self.test_options)

    def locate(self, spec: str) -> str:
        """Data of the run, as it is found from the present working directory."""
        directory = self._directory
        return spec if directory is None else data.anchor(spec, directory)

    @property
    def _directory(self) -> Path | None:
        """The working directory that the run's paths are relative to; None if it is not known, or if it is the present one."""
        found = self.environment.get("directory")
        return Path(found) if isinstance(found, str) and os.path.isabs(found) and found != os.getcwd() else None

    @property
    def test_options(self) -> dict[str, Any]:
        """Options of that data, such as a table's columns."""
        if holdout := self.config.get("holdout"):
            return {**self._locate_options("data_options"), "holdout": holdout}
        return self._locate_options("data_options" if self.tests_on_training_data else "validation_options")

    def _locate_options(self, key: str) -> dict[str, Any]:
        options: dict[str, Any] = self.config.get(key, {})
        return options if self._directory is None else data.anchor_options(options, self._directory)


def read_run(folder: str | Path) -> SavedRun:
    """Reads a run. A missing file leaves its part empty; a damaged one raises an error that names it."""
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
    """Sorted by step; of a step that was repeated after a stop, the last record."""
    last = {int(record["step"]): record for record in records}
    return [last[step] for step in sorted(last)]
