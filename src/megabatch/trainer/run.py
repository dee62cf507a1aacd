"""A run's folder: its name, its files, and whether it can be written to."""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch import machine, settings
from megabatch.data import cache
from megabatch.towers.saved import WEIGHTS
from megabatch.towers.tower import SIDES, Pair
from megabatch.trainer.config import TrainConfig
from megabatch.world import World

CONFIG, COMMAND, ENVIRONMENT = "config.toml", "command.txt", "environment.json"
CHECKPOINTS, BEST, LOCKED, TEACHER = "checkpoints", "best", "locked", "teacher"  # folders
BEST_ABOUT = "best.json"  # in the folder of the best weights
PROBE = 1 << 16  # bytes: more than settings and the first lines of metrics take


@dataclass
class Run:
    """A run, as observers see it."""

    folder: Path
    config: TrainConfig
    command: str  # the command line
    total_steps: int
    first_step: int = 0  # steps done before this run resumed
    step: int = 0  # steps done so far
    pairs: int = 0  # trained on so far
    seconds: float = 0.0  # of all steps so far

    @property
    def batch_size(self) -> int:
        """Pairs in a step."""
        return self.config.batch_size

    def write(self, about: Mapping[str, Any]) -> None:
        """Writes settings, command line, and the environment (`about`) with the date into the folder."""
        text = settings.to_toml(settings.table(self.config))
        cache.write(self.folder / CONFIG, lambda file: file.write(text.encode()))
        place, now = self.folder / ENVIRONMENT, time.strftime("%Y-%m-%d %H:%M:%S %z")
        started = json.loads(place.read_text("utf-8")).get("started", now) if self.first_step and place.is_file() else now
        environment = json.dumps({"started": started, "last_start": now, **about}, indent=1)
        cache.write(place, lambda file: file.write(environment.encode()))
        if self.command:
            cache.write(self.folder / COMMAND, lambda file: file.write(f"{self.command}\n".encode()))


def environment(config: TrainConfig, pair: Pair, world: World, samples: int, steps: int) -> dict[str, Any]:
    """Hardware, versions and sizes, for a report that can be cited."""
    of_sides = zip(SIDES, pair.towers, strict=True)
    return {
        "machine": machine.describe(),
        "device": world.device.type,
        "processes": world.size,
        "parameters": sum(p.numel() for p in pair.parameters()),
        "trained_parameters": sum(p.numel() for p in pair.parameters() if p.requires_grad),
        "parameters_of": {side: sum(p.numel() for p in tower.module.parameters()) for side, tower in of_sides},
        "samples": samples,
        "pairs_per_step": config.batch_size,
        "steps": steps,
        "precision": config.precision,
    }


def unwritable(folder: Path) -> str | None:
    """Why a run could not write into its folder, which may not exist yet; None if it could. Leaves no files."""
    for wanted in (folder, folder / CHECKPOINTS):  # may belong to another user
        place = next(part for part in (wanted, *wanted.parents) if os.path.lexists(part))
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"{place}: {error.strerror or error}"
    return None


def best(folder: Path) -> dict[str, Any] | None:
    """Step, metric and value of the best weights so far; None if there are none."""
    place = folder / BEST / BEST_ABOUT
    return json.loads(place.read_text("utf-8")) if place.is_file() else None


def write_best(folder: Path, about: dict[str, Any]) -> None:
    """Notes which weights are the best."""
    cache.write(folder / BEST / BEST_ABOUT, lambda file: file.write(json.dumps(about).encode()))


def forget_best(folder: Path) -> None:
    """Removes the note and the weights that a run before left in the folder."""
    for name in (BEST_ABOUT, WEIGHTS):
        (folder / BEST / name).unlink(missing_ok=True)


def unused(parent: Path, name: str) -> Path:
    """The first of `parent/name-1`, `name-2` … that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def newest(parent: Path, name: str) -> Path | None:
    """The last of `parent/name-1`, `name-2` … that has checkpoints, or None."""
    found = [path for path in parent.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()]
    found = [path for path in found if (path / CHECKPOINTS).is_dir()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
