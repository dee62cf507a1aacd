"""A run on disk: checkpoints, the trained weights, the best weights, and how a run resumes.

In mid-run, a checkpoint that cannot be written is a warning, and the next one is tried. At the end of the run, and before a run
that was stopped, it is an error.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megabatch import settings, towers
from megabatch.data.dataset import Dataset
from megabatch.evaluation.retrieval import HEADLINES, RECALLS
from megabatch.towers.blocks import set_checkpointing
from megabatch.trainer import optim, parallel, room
from megabatch.trainer import run as runs
from megabatch.trainer.checkpoint import CheckpointError, contents, reason
from megabatch.trainer.checkpoints import Checkpoints
from megabatch.trainer.config import FREE, TrainConfig, differences
from megabatch.trainer.fit import Fit
from megabatch.trainer.observers import Observers
from megabatch.trainer.run import BEST, CHECKPOINTS, Run
from megabatch.trainer.state import State
from megabatch.trainer.trained import Trained
from megabatch.world import World

LOG = logging.getLogger("megabatch")


class Resumed(NamedTuple):
    """Contents of a checkpoint that the loop needs."""

    fit: Fit | None  # None if chunk sizes must be found again
    generators: bool  # whether random generators were restored


class Storage:
    """Writes and reads the checkpoints and weights of a run. All ranks must call the same methods in the same order.

    Args:
        run: its folder and progress.
        config: all settings, for the device of the run.
        trained: towers, loss and optimizer.
        dataset: of the run; checkpoints record its size.
        observers: called for each checkpoint and model.
        world: the ranks.
    """

    def __init__(
        self, run: Run, config: TrainConfig, trained: Trained, dataset: Dataset, observers: Observers, world: World
    ) -> None:
        self._run, self._config, self._trained, self._dataset = run, config, trained, dataset
        self._observers, self._world = observers, world
        self._checkpoints = Checkpoints(run.folder / CHECKPOINTS, config.checkpoint.keep, world)
        self._state = State(
            trained.by_name,
            trained.optimizer,
            trained.average,
            trained.scaler,
            world,
            sharded=world.size > 1 and config.parallel == parallel.FSDP,
            trained_only=trained.pair.base_is_elsewhere,
        )
        self.weights_saved = False  # the trained weights, not the best ones
        self._failed = False  # the last checkpoint
        self._began = 0.0  # time of the last checkpoint, or of the first step

    # Reading

    def resume(self, checkpoint: Path | None) -> Resumed | None:
        """Reads a checkpoint, or the newest intact one of the run. None if there is none; a named one must be intact."""
        found = self._checkpoints.newest() if checkpoint is None else (checkpoint, contents(checkpoint))
        if found is None:
            return None
        path, about = found
        self._check_unchanged(path, about)
        generators = self._state.read(path)
        if not generators and self._world.rank == 0:
            LOG.warning("%s was written by %d ranks; random generators are seeded anew", path, about["world_size"])
        run = self._run
        run.step, run.pairs, run.seconds = about["step"], about["pairs"], about["seconds"]
        fit = None
        if self._fits_as_before(about):
            fit = Fit(tuple(about["chunk_sizes"]), about["graph_bytes"], about.get("checkpointing", False))
            set_checkpointing(self._trained.pair.modules, fit.checkpointing)
        if path.resolve().parent == self._checkpoints.folder.resolve():
            self._checkpoints.set_aside_after(run.step)
            self._set_weights_aside()
        return Resumed(fit, generators)

    def _check_unchanged(self, path: Path, about: dict[str, Any]) -> None:
        changed = differences(about["config"], settings.table(self._config))
        if about["samples"] != len(self._dataset):
            changed.append(f"the data had {about['samples']} samples and has {len(self._dataset)}")
        if changed:
            raise ValueError(
                f"a run can only continue with the data and settings it began with, but in {path} {'; '.join(changed)}. "
                f"These may change: {', '.join(FREE)}"
            )

    def _fits_as_before(self, about: dict[str, Any]) -> bool:
        """Whether the chunk sizes of the checkpoint are valid for this run too."""
        before, now = about["config"], settings.table(self._config)
        same_place = (about["world_size"], about.get("device")) == (self._world.size, self._world.device.type)
        return same_place and all(before[name] == now[name] for name in ("chunk_size", "memory"))

    def _set_weights_aside(self) -> None:
        """Renames weights of a later step, as checkpoints are: they would count as newer than the next checkpoints."""
        place = self._run.folder / towers.saved.WEIGHTS
        if self._world.rank == 0 and (towers.saved.step(self._run.folder) or 0) > self._run.step:
            aside = place.replace(place.with_name(f"abandoned_{place.name}"))
            LOG.warning("the run continues from step %d; %s is now called %s", self._run.step, place, aside.name)

    # Writing

    def open(self) -> None:
        """Checks the room on the disk and writes settings and environment, before the first step."""
        config, pair = self._config, self._trained.pair
        moments = optim.MOMENTS[config.optimizer.name] + (self._trained.average is not None)
        models = 2 if config.evaluate_every and config.checkpoint.best != "none" else 1
        room.check(self._run.folder, pair, moments, self._checkpoints, config.checkpoint.keep, self._world, models=models)
        self._began = time.monotonic()
        if self._world.rank == 0:
            if self._run.step == 0:  # the best weights of another run in this folder are none of this one's
                runs.forget_best(self._run.folder)
            self._run.write(runs.environment(config, pair, self._world, len(self._dataset), self._run.total_steps))

    def overdue(self) -> bool:
        """Whether the last checkpoint is too long ago, by the clock of this rank."""
        return self._config.checkpoint.late(time.monotonic() - self._began)

    def after_step(self, fit: Fit, *, now: bool, stopping: bool) -> None:
        """Writes the checkpoint if one is due, and the weights after the last step.

        Args:
            fit: chunk sizes of the step.
            now: whether a checkpoint is due whatever the number of the step.
            stopping: whether the run stops after this step: the checkpoint is on disk when this returns.
        """
        step, steps = self._run.step, self._run.total_steps
        self.settle(wait=False)
        if step == steps:  # the weights first: they take less room than a checkpoint
            self.settle(wait=True)
            self.save_weights()
        if now or stopping or self._config.checkpoint.due(step, steps):
            self._save_checkpoint(fit, must=stopping or step == steps)

    def _save_checkpoint(self, fit: Fit, *, must: bool) -> None:
        """Begins to write a checkpoint, after the one before. With `must`, it is on disk afterwards."""
        about = {
            "step": self._run.step,
            "pairs": self._run.pairs,
            "seconds": self._run.seconds,
            "samples": len(self._dataset),
            "sides": list(self._dataset.sides),
            "world_size": self._world.size,
            "device": self._world.device.type,
            "chunk_sizes": list(fit.chunk_sizes),
            "graph_bytes": fit.graph_bytes,
            "checkpointing": fit.checkpointing,
            "config": settings.table(self._config),
        }
        self._began = time.monotonic()
        self.settle(wait=True)
        try:
            self._attempt(lambda: self._checkpoints.begin(self._run.step, about, self._state.copied), must=must)
            if must:
                self.settle(wait=True, must=True)
        except CheckpointError:
            if not self.weights_saved:  # the weights may still fit
                with suppress(CheckpointError):
                    self.save_weights()
            raise

    def settle(self, *, wait: bool, must: bool = False) -> None:
        """Ends the checkpoint that is being written, if it is ready or if it is to `wait`."""
        path = self._attempt(lambda: self._checkpoints.settle(wait=wait), must=must)
        if path is None:
            return
        if self._world.rank == 0 and self._failed:
            LOG.warning("checkpoints are written again: %s", path)
        self._failed = False
        self._observers.saved(path)

    def _attempt(self, work: Callable[[], Path | None], *, must: bool) -> Path | None:
        """A part of saving. If it fails in mid-run, training goes on with one warning, and the next checkpoint is tried."""
        try:
            return work()
        except CheckpointError as error:
            if must:
                raise
            if self._world.rank == 0 and not self._failed:
                LOG.warning("%s; training goes on. So far, %s", error, self.saved())
            self._failed = True
            return None

    def save_weights(self, within: str = "") -> None:
        """Writes the weights into the run's folder, or into a folder in it."""
        folder, problem = self._run.folder / within, None
        with self._trained.averaged():
            learned = self._trained.learned()
            try:
                towers.save(learned, folder, step=self._run.step)
            except OSError as error:  # on the first rank, which writes
                problem = reason(error)
        if problem := self._world.from_first(problem):
            raise CheckpointError(f"the model could not be written in {folder}: {problem}")
        self.weights_saved = self.weights_saved or not within
        self._observers.saved(folder / towers.saved.WEIGHTS)

    def keep_best(self, result: dict[str, float]) -> None:
        """Saves the weights to best/ if no evaluation before was better."""
        name = self._config.checkpoint.best
        name = next(key for key in HEADLINES if key in result) if name == "auto" else name
        value, lower = result[name], "rank" in name or "loss" in name
        before = self._world.from_first(runs.best(self._run.folder))
        if before is not None and before["metric"] == name and before["step"] < self._run.step:
            if (value >= before["value"]) if lower else (value <= before["value"]):
                return
        try:
            self.save_weights(BEST)
        except CheckpointError as error:
            if self._world.rank == 0:
                LOG.warning("%s; the run goes on", error)
            return
        if self._world.rank == 0:
            runs.write_best(self._run.folder, {"step": self._run.step, "metric": name, "value": value})

    def saved(self) -> str:
        """The state of the disk, for a message after a failure."""
        newest = self._checkpoints.last_step()
        weights = f"the weights after step {self._run.step} are in {self._run.folder / towers.saved.WEIGHTS}, and "
        resumable = f"--resume {self._run.folder} continues after step {newest}"
        told = resumable if newest is not None else "there is no checkpoint to resume from"
        return (weights if self.weights_saved else "") + told


def check_best(config: TrainConfig, sides: Sequence[str], prefixes: Sequence[str]) -> None:
    """Checks the metric of `checkpoint.best` before the first step, and not at the first evaluation.

    Args:
        config: all settings.
        sides: of the data.
        prefixes: names of the validation datasets before their metrics.
    """
    name = config.checkpoint.best
    if name in ("auto", "none"):
        return
    if not config.evaluate_every:
        raise ValueError(f'checkpoint.best must be "auto" or "none" without evaluate_every, got {name!r}')
    of_one = metric_names(sides)
    known = [f"{prefix}/{metric}" if prefix else metric for prefix in prefixes for metric in of_one]
    if name not in known:
        raise ValueError(f'checkpoint.best must be "auto", "none" or one of {", ".join(known)}, got {name!r}')


def metric_names(sides: Sequence[str]) -> list[str]:
    """The metrics of an evaluation by which the best weights can be kept."""
    first, second = ("image", "text") if sides[0] != sides[1] else ("query", "text")
    each = [*(f"R@{k}" for k in RECALLS), "MRR", "nDCG@10", "mean_rank", "median_rank"]
    return [*(f"{way}_{name}" for way in (f"{first}_to_{second}", f"{second}_to_{first}") for name in each), "clip_val_loss"]
