"""What a run writes and when: checkpoints, weights and the best weights, as disk space allows; and how a run resumes."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.cached.memory import local
from megabatch.world import World
from megabatch_train import settings, towers
from megabatch_train.data.dataset import Dataset
from megabatch_train.evaluation.evaluate import HEADLINES, RECALLS
from megabatch_train.names import redact
from megabatch_train.towers import models
from megabatch_train.towers.models import text_options
from megabatch_train.towers.tower import set_checkpointing
from megabatch_train.trainer import checkpoints as files
from megabatch_train.trainer import run as runs
from megabatch_train.trainer.build import FSDP, MOMENTS, Trained
from megabatch_train.trainer.checkpoints import (
    DISK_FULL,
    CheckpointError,
    Files,
    State,
    find_newest,
    list_checkpoints,
    read_manifest,
    reason,
    step_of,
)
from megabatch_train.trainer.config import FREE, TrainConfig, anchor_paths, differences
from megabatch_train.trainer.run import BEST, CHECKPOINTS, Observers, Run, model_bytes
from megabatch_train.trainer.step import Fit

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# The checkpoints of a run: written while training goes on. The last few are kept, and a damaged one is skipped.
#
# The state is copied, and a thread of each rank writes the copy. Threads exchange no messages: between steps the ranks ask
# one another whether all have written, and then the first rank's thread completes the checkpoint (`finish`).


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    partial: Path
    final: Path
    about: dict[str, Any]
    work: Future[None]  # in this rank's thread
    written: bool = False  # by all ranks; the first one finishes it


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks share.

    Args:
        folder: created with the first checkpoint.
        keep: number of checkpoints.
        world: the ranks. All must call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self._keep, self._world = folder, keep, world
        self._pending: _Pending | None = None

    def begin(self, step: int, about: dict[str, Any], copied: Callable[[], Files]) -> None:
        """Begins to write the checkpoint of a step. The one before must have been settled.

        Args:
            step: its number.
            about: entries of the table of contents, serialisable as JSON.
            copied: copies the state of this rank, without messages to other ranks.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints are unchanged.
        """
        assert self._pending is None, "one checkpoint at a time"
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".partial_{final.name}"
        made: list[Files] = []
        self._together(lambda: self._prepare(partial), "prepared", partial, only_first=True)
        self._together(lambda: made.append(copied()), "copied", partial)
        copy = made[0]
        self._together(copy.agree, "prepared", partial)
        work = _in_a_thread(lambda: files.write(partial, copy.write))
        self._pending = _Pending(partial, final, about, work)

    def _prepare(self, partial: Path) -> None:
        self._clear()
        partial.mkdir(parents=True)
        self._make_space()

    def _make_space(self) -> None:
        """Deletes old checkpoints if the disk has no space for another one."""
        existing = list_checkpoints(self.folder)
        if len(existing) > 1 and self._free() < (size := _size(existing[-1])):
            self._delete_oldest(size, "another checkpoint")

    def make_space(self, size: int) -> bool:
        """Deletes old checkpoints for a model that did not fit on the disk. All ranks must call it.

        Args:
            size: of the model, in bytes.

        Returns:
            Whether at least one was deleted. None is deleted if the model would not fit even without all of them.
        """
        return bool(self._world.from_first(self._delete_oldest(size, "the model") if self._world.rank == 0 else None))

    def _delete_oldest(self, size: int, purpose: str) -> bool:
        """Deletes at least one checkpoint, until `size` bytes are free. The newest intact checkpoint stays."""
        newest = find_newest(self.folder)
        old = [] if newest is None else [path for path in list_checkpoints(self.folder) if path != newest[0]]
        if not old or self._free() + sum(map(_size, old)) < size:
            return False
        for number, path in enumerate(old):
            if number and self._free() >= size:
                break
            LOG.warning("the disk has no space for %s; the oldest checkpoint, %s, is deleted", purpose, path)
            self._delete(path)
        return True

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def settle(self, *, wait: bool) -> Path | None:
        """Brings the checkpoint that is being written closer to its end.

        Args:
            wait: for the end; else only what is possible at once.

        Returns:
            The checkpoint, if this call completed it.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints are unchanged.
        """
        while (pending := self._pending) is not None:
            if not wait and not self._world.min([pending.work.done()])[0]:
                return None
            self._pending = None  # if it fails
            if pending.written:
                self._together(pending.work.result, "finished", pending.partial)
                return pending.final
            self._together(pending.work.result, "written", pending.partial)
            pending.work, pending.written = _in_a_thread(lambda: self._finish(pending)), True
            self._pending = pending
        return None

    def _finish(self, pending: _Pending) -> None:
        if self._world.rank == 0:
            files.finish(pending.partial, pending.final, pending.about)
            self._forget_old()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Returns the newest intact checkpoint and its manifest, or None. The same on all ranks."""
        return self._world.from_first(find_newest(self.folder) if self._world.rank == 0 else None)  # type: ignore[no-any-return]

    def last_step(self) -> int | None:
        """Returns the step of the last checkpoint, which may be damaged, or None."""
        return max(map(step_of, list_checkpoints(self.folder)), default=None)

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of later steps: a run that resumes from `step` will write its own."""
        if self._world.rank == 0:
            for path in list_checkpoints(self.folder):
                if step_of(path) > step:
                    aside = path.rename(files.free_name(path, "abandoned"))
                    LOG.warning("the run continues from step %d; %s is now called %s", step, path, aside.name)

    def _forget_old(self) -> None:
        for path in list_checkpoints(self.folder)[: -self._keep]:
            self._delete(path)
        self._clear()

    def _delete(self, path: Path) -> None:
        path.rename(files.free_name(path, ".deleted"))  # so that a half-deleted one is not taken for damaged
        for left in self.folder.glob(".deleted_*"):
            shutil.rmtree(left, ignore_errors=True)

    def _clear(self) -> None:
        """Deletes unfinished and half-deleted checkpoints."""
        for left in [*self.folder.glob(".deleted_*"), *self.folder.glob(".partial_*")]:
            shutil.rmtree(left, ignore_errors=True)

    def _together(self, work: Callable[[], None], what: str, partial: Path, *, only_first: bool = False) -> None:
        """Runs `work` on all ranks, or on the first. If one rank fails, the files are removed and all ranks raise its error."""
        problem = None
        try:
            if not only_first or self._world.rank == 0:
                work()
        except Exception as error:
            problem = reason(error)
        problems = {rank: text for rank, text in enumerate(self._world.gather_objects(problem)) if text is not None}
        if problems:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            rank, text = next(iter(problems.items()))
            where = f" on rank {rank}" if self._world.size > 1 else ""
            raise CheckpointError(f"a checkpoint could not be {what} in {self.folder}{where}: {text}")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _in_a_thread(work: Callable[[], None]) -> Future[None]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-checkpoint")
    try:
        return executor.submit(work)
    finally:
        executor.shutdown(wait=False)  # the thread ends with its work, and Python with the thread


# ----------------------------------------------------------------------------------------------------------------------
# A run on disk: checkpoints, the trained weights, the best weights, and how a run resumes.
#
# In mid-run, a checkpoint that cannot be written is a warning, and the next one is tried. At the end of the run, and before
# a run that was stopped, it is an error.


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
            sharded=world.size > 1 and config.parallel == FSDP,
            trained_only=trained.pair.base_is_elsewhere,
        )
        self.weights_saved = False  # the trained weights, not the best ones
        self._failed = False  # the last checkpoint
        self._began = 0.0  # time of the last checkpoint, or of the first step

    # Reading

    def resume(self, checkpoint: Path | None) -> Resumed | None:
        """Reads a checkpoint, or the newest intact one of the run. None if there is none; a named one must be intact."""
        found = self._checkpoints.newest() if checkpoint is None else (checkpoint, read_manifest(checkpoint))
        if found is None:
            return None
        path, about = found
        self._check_unchanged(path, about)
        generators = self._state.read(path)
        if not generators and self._world.rank == 0:
            LOG.warning("%s was written by %d ranks; random generators are seeded anew", path, about["world_size"])
        run = self._run
        run.step, run.pairs, run.seconds = about["step"], about["pairs"], about["seconds"]
        run.health = about.get("health", {})
        fit = None
        if self._fits_as_before(about):
            fit = Fit(tuple(about["chunk_sizes"]), about["graph_bytes"], about.get("checkpointing", False))
            set_checkpointing(self._trained.pair.modules, fit.checkpointing)
        if path.resolve().parent == self._checkpoints.folder.resolve():
            self._checkpoints.set_aside_after(run.step)
            self._set_weights_aside()
        return Resumed(fit, generators)

    def _check_unchanged(self, path: Path, about: dict[str, Any]) -> None:
        before = anchor_paths(redact(about["config"]), about.get("directory"))
        changed = differences(before, anchor_paths(redact(settings.table(self._config))))
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
        place = self._run.folder / models.WEIGHTS
        if self._world.rank == 0 and (models.read_step(self._run.folder) or 0) > self._run.step:
            aside = place.replace(place.with_name(f"abandoned_{place.name}"))
            LOG.warning("the run continues from step %d; %s is now called %s", self._run.step, place, aside.name)

    # Writing

    def open(self) -> None:
        """Removes temporary files, checks the disk space and writes settings and environment, before the first step."""
        if self._world.rank == 0:
            runs.remove_leftovers(self._run.folder)
        config, pair = self._config, self._trained.pair
        moments = MOMENTS[config.optimizer.name] + (self._trained.average is not None)
        models = 2 if config.evaluate_every and config.checkpoint.best != "none" else 1
        existing = list_checkpoints(self._checkpoints.folder)
        runs.check_disk_space(
            self._run.folder, pair, moments, config.checkpoint.keep, self._world, models=models, checkpoints=existing
        )
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

    def save_before_failure(self, fit: Fit) -> None:
        """Writes a checkpoint of the last complete step, because the next one failed. All ranks must call it.

        Nothing is written before the first step, if the step has a checkpoint, or if the failed step has left a state that is
        not finite, such as the running statistics of a batch norm.
        """
        self.settle(wait=True)
        tensors = chain.from_iterable((*module.parameters(), *module.buffers()) for module in self._trained.pair.modules)
        damaged = any(not bool(tensor.isfinite().all()) for tensor in map(local, tensors))
        done = self._checkpoints.last_step() == self._run.step
        if self._run.step and not any(self._world.max([damaged, done])):
            self._save_checkpoint(fit, must=True)

    def _save_checkpoint(self, fit: Fit, *, must: bool) -> None:
        """Begins to write a checkpoint, after the one before. With `must`, it is on disk afterwards."""
        about = {
            "step": self._run.step,
            "pairs": self._run.pairs,
            "seconds": self._run.seconds,
            "health": self._run.health,
            "samples": len(self._dataset),
            "sides": list(self._dataset.sides),
            "world_size": self._world.size,
            "device": self._world.device.type,
            "chunk_sizes": list(fit.chunk_sizes),
            "graph_bytes": fit.graph_bytes,
            "checkpointing": fit.checkpointing,
            "config": redact(settings.table(self._config)),
            "text_options": text_options(self._trained.pair),
            "directory": os.getcwd(),  # that relative paths of the settings are relative to
        }
        self._began = time.monotonic()
        self.settle(wait=True)
        try:
            self._attempt(lambda: self._checkpoints.begin(self._run.step, about, self._state.copy_to_host), must=must)
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
        self._observers.on_save(path)

    def _attempt(self, work: Callable[[], Path | None], *, must: bool) -> Path | None:
        """A part of saving. If it fails in mid-run, training goes on with one warning, and the next checkpoint is tried."""
        try:
            return work()
        except CheckpointError as error:
            if must:
                raise
            if self._world.rank == 0 and not self._failed:
                LOG.warning("%s; training goes on. So far, %s", error, self.describe_saved())
            self._failed = True
            return None

    def save_weights(self, within: str = "") -> None:
        """Writes the weights into the run's folder, or into a folder in it.

        The model of the run is worth more than old checkpoints, which are deleted if the disk is full.
        """
        folder = self._run.folder / within
        problem = self._write_weights(folder)
        while problem == DISK_FULL and not within and self._checkpoints.make_space(model_bytes(self._trained.pair)):
            problem = self._write_weights(folder)
        if problem is not None:
            raise CheckpointError(f"the model could not be written in {folder}: {problem}")
        self.weights_saved = self.weights_saved or not within
        self._observers.on_save(folder / models.WEIGHTS)

    def _write_weights(self, folder: Path) -> str | None:
        """Writes the weights; returns why they could not be written, on all ranks."""
        problem = None
        with self._trained.use_average():
            learned = self._trained.with_learned_scale()
            try:
                towers.save(learned, folder, step=self._run.step)
            except OSError as error:  # on the first rank, which writes
                problem = reason(error)
        found: str | None = self._world.from_first(problem)
        return found

    def keep_best(self, result: dict[str, float], loss: float | None = None) -> None:
        """Saves the weights to best/ if no evaluation before was better.

        Args:
            result: of the evaluation.
            loss: of the training steps before it; None if there were none.
        """
        name = self._config.checkpoint.best
        name = next(key for key in HEADLINES if key in result) if name == "auto" else name
        before = self._world.from_first(runs.best(self._run.folder))
        if before is not None and before["metric"] == name and before["step"] < self._run.step:
            if not is_better(name, result[name], before["value"]):
                return
        try:
            self.save_weights(BEST)
        except CheckpointError as error:
            if self._world.rank == 0:
                LOG.warning("%s; the run goes on", error)
            return
        if self._world.rank == 0:
            about = {"step": self._run.step, "metric": name, "value": result[name]}
            runs.write_best(self._run.folder, about | ({} if loss is None else {"training_loss": loss}))

    def name_best(self, result: dict[str, float], loss: float | None) -> None:
        """Logs the best evaluation at the end of a run, if it was not the last one. Warns if the model has overfitted.

        Args:
            result: of the last evaluation.
            loss: of the last training steps; None if there were none.
        """
        best = runs.best(self._run.folder)
        if best is None or best["step"] >= self._run.step or best["metric"] not in result:
            return
        name, step, value, before = best["metric"], best["step"], result[best["metric"]], best.get("training_loss")
        told = f"the best evaluation was after step {step:,}, with {name} = {best['value']:.4g}; at the end it is {value:.4g}"
        kept = f"{self._run.folder / BEST} holds the weights of step {step:,}; eval, search and export take that folder"
        if is_better(name, best["value"], value) and loss is not None and before is not None and loss < before:
            why = f"the model overfits: the training loss fell from {before:.4g} to {loss:.4g}, but {told}"
            LOG.warning("%s. %s", why, kept)
        else:
            LOG.info("%s. %s", told, kept)

    def describe_saved(self) -> str:
        """The state of the disk, for a message after a failure."""
        newest = self._checkpoints.last_step()
        weights = f"the weights after step {self._run.step} are in {self._run.folder / models.WEIGHTS}, and "
        resumable = f"--resume {self._run.folder} continues after step {newest}"
        told = resumable if newest is not None else "there is no checkpoint to resume from"
        return (weights if self.weights_saved else "") + told


def is_better(metric: str, value: float, other: float) -> bool:
    """Whether a value of the metric is better than another one: lower for ranks and losses, else higher."""
    return value < other if "rank" in metric or "loss" in metric else value > other


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
