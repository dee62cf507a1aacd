"""Writes checkpoints, weights and the best weights of a run, even if disk space is short, and resumes a run."""

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

from megabatch.cached.replay import checksum
from megabatch.world import World, local
from megabatch_train import settings, towers
from megabatch_train.data.dataset import TEXT, Dataset, name_sides
from megabatch_train.evaluation.corpus import METRICS, WAY
from megabatch_train.evaluation.evaluate import RECALLS, find_headline
from megabatch_train.names import redact
from megabatch_train.towers import models
from megabatch_train.towers.models import list_bases, text_options
from megabatch_train.towers.tower import set_checkpointing
from megabatch_train.trainer import checkpoints
from megabatch_train.trainer import run as runs
from megabatch_train.trainer.build import FSDP, MOMENTS, Trained
from megabatch_train.trainer.checkpoints import (
    DISK_FULL,
    CheckpointError,
    Files,
    State,
    describe_failure,
    find_newest,
    list_checkpoints,
    read_manifest,
    step_of,
)
from megabatch_train.trainer.config import FREE, TrainConfig, anchor_paths, differences
from megabatch_train.trainer.run import BEST, CHECKPOINTS, Observers, Run, model_bytes
from megabatch_train.trainer.step import Fit

LOG = logging.getLogger("megabatch")
CHECKED_SAMPLES = 64  # number of samples whose names and texts are compared when a run resumes

# ----------------------------------------------------------------------------------------------------------------------
# The checkpoints of a run. They are written while training continues. The last few are kept, and damaged ones are skipped.
#
# Each rank copies its state, and a thread of each rank writes the copy. These threads exchange no messages. Instead, the ranks
# check between steps whether all ranks have written their files. Then a thread of the first rank completes the checkpoint
# (`finish`).


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    partial: Path
    final: Path
    manifest: dict[str, Any]
    work: Future[None]  # the work of this rank's thread
    is_written: bool = False  # whether all ranks have written their files. Then the first rank completes the checkpoint


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks share.

    Args:
        folder: the folder of the checkpoints. The first checkpoint creates it.
        keep: the number of checkpoints to keep.
        world: the ranks. All must call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self._keep, self._world = folder, keep, world
        self._pending: _Pending | None = None

    def begin(self, step: int, manifest: dict[str, Any], copy_state: Callable[[], Files]) -> None:
        """Starts to write the checkpoint of a step. The previous checkpoint must be complete.

        Args:
            step: the number of the step.
            manifest: the entries of the manifest, which JSON can represent.
            copy_state: a function that copies the state of this rank, without messages to other ranks.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints do not change.
        """
        assert self._pending is None, "the previous checkpoint must be complete"
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".partial_{final.name}"
        copies: list[Files] = []
        self._run_on_all(lambda: self._prepare(partial), "prepared", partial, only_first=True)
        self._run_on_all(lambda: copies.append(copy_state()), "copied", partial)
        copy = copies[0]
        self._run_on_all(copy.agree, "prepared", partial)
        work = _start_in_thread(lambda: checkpoints.write(partial, copy.write))
        self._pending = _Pending(partial, final, manifest, work)

    def _prepare(self, partial: Path) -> None:
        self._clear()
        partial.mkdir(parents=True)
        self._make_space()

    def _make_space(self) -> None:
        """Deletes old checkpoints if the disk has no space for another checkpoint."""
        existing = list_checkpoints(self.folder)
        if len(existing) > 1 and self._free() < (size := _size(existing[-1])):
            self._delete_oldest(size, "another checkpoint")

    def make_space(self, size: int, *, complete: bool) -> bool:
        """Deletes old checkpoints for a model that did not fit on the disk. All ranks must call it.

        Args:
            size: the size of the model in bytes.
            complete: whether the run is complete. If so, the newest checkpoint is deleted, too, if the space is needed.

        Returns:
            Whether at least one checkpoint was deleted. If the model would not fit even without these checkpoints, none is
            deleted.
        """
        deleted = self._world.rank == 0 and self._delete_oldest(size, "the model", keep_newest=not complete)
        return bool(self._world.from_first(deleted))

    def _delete_oldest(self, size: int, purpose: str, *, keep_newest: bool = True) -> bool:
        """Deletes at least one checkpoint, until `size` bytes are free. Returns whether it deleted one.

        The newest intact checkpoint is the last one. It is deleted only if fewer than `size` bytes are free, because a disk can
        be full for another reason, such as a quota, and then nothing would be left.
        """
        newest, _ = find_newest(self.folder) or (None, {})
        paths = sorted(list_checkpoints(self.folder), key=lambda path: path == newest)  # stable: the others by their steps
        if keep_newest:
            paths = [] if newest is None else paths[:-1]
        if not paths or self._free() + sum(map(_size, paths)) < size:
            return False
        has_deleted = False
        for path in paths:
            if (has_deleted or path == newest) and self._free() >= size:
                break
            which = "last checkpoint, which a complete run does not need" if path == newest else "oldest checkpoint"
            LOG.warning("the disk has no space for %s, so the %s, %s, is deleted", purpose, which, path)
            self._delete(path)
            has_deleted = True
        return has_deleted

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def complete_pending(self, *, wait: bool) -> Path | None:
        """Completes the checkpoint that is being written, if there is one.

        Args:
            wait: whether to wait until the checkpoint is complete. Otherwise, the method does only what is possible at once.

        Returns:
            The path of the checkpoint if this call completed it, or None.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints do not change.
        """
        while (pending := self._pending) is not None:
            if not wait and not self._world.min([pending.work.done()])[0]:
                return None
            self._pending = None  # nothing is pending if one of the next calls fails
            if pending.is_written:
                self._run_on_all(pending.work.result, "finished", pending.partial)
                return pending.final
            self._run_on_all(pending.work.result, "written", pending.partial)
            pending.work, pending.is_written = _start_in_thread(lambda: self._finish(pending)), True
            self._pending = pending
        return None

    def _finish(self, pending: _Pending) -> None:
        if self._world.rank == 0:
            checkpoints.finish(pending.partial, pending.final, pending.manifest)
            self._delete_old()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Returns the newest intact checkpoint and its manifest, or None. The result is the same on all ranks."""
        return self._world.from_first(find_newest(self.folder) if self._world.rank == 0 else None)  # type: ignore[no-any-return]

    def last_step(self) -> int | None:
        """Returns the step of the last checkpoint, which may be damaged, or None."""
        return max(map(step_of, list_checkpoints(self.folder)), default=None)

    def rename_after(self, step: int) -> None:
        """Renames checkpoints of later steps, because the run resumes from `step` and will write new checkpoints of them."""
        if self._world.rank == 0:
            for path in list_checkpoints(self.folder):
                if step_of(path) > step:
                    new_path = path.rename(checkpoints.free_name(path, "abandoned"))
                    LOG.warning("the run continues from step %d, so %s is renamed to %s", step, path, new_path.name)

    def _delete_old(self) -> None:
        for path in list_checkpoints(self.folder)[: -self._keep]:
            self._delete(path)
        self._clear()

    def _delete(self, path: Path) -> None:
        path.rename(checkpoints.free_name(path, ".deleted"))  # so that a half-deleted checkpoint does not count as damaged
        for leftover in self.folder.glob(".deleted_*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _clear(self) -> None:
        """Deletes unfinished and half-deleted checkpoints."""
        for leftover in [*self.folder.glob(".deleted_*"), *self.folder.glob(".partial_*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def _run_on_all(self, work: Callable[[], None], action: str, partial: Path, *, only_first: bool = False) -> None:
        """Runs `work` on all ranks, or only on the first. If a rank fails, removes the files, and all ranks raise an error."""
        problem = None
        try:
            if not only_first or self._world.rank == 0:
                work()
        except Exception as error:
            problem = describe_failure(error)
        problems = {rank: text for rank, text in enumerate(self._world.gather_objects(problem)) if text is not None}
        if problems:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            rank, text = next(iter(problems.items()))
            where = f" on rank {rank}" if self._world.size > 1 else ""
            raise CheckpointError(f"a checkpoint could not be {action} in {self.folder}{where}: {text}")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _start_in_thread(work: Callable[[], None]) -> Future[None]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-checkpoint")
    try:
        return executor.submit(work)
    finally:
        executor.shutdown(wait=False)  # the thread ends after its work, and Python waits for the thread at its exit


# ----------------------------------------------------------------------------------------------------------------------
# A run on disk: checkpoints, the trained weights and the best weights. A run resumes from them.
#
# If a checkpoint cannot be written during a run, the run logs a warning and tries to write the next checkpoint. At the end of a
# run, or if a signal or a failure stops the run, it raises an error.


class Resumed(NamedTuple):
    """The contents of a checkpoint that the loop needs."""

    fit: Fit | None  # None if chunk sizes must be chosen again
    generators: bool  # whether the random generators were restored


class Storage:
    """Writes and reads the checkpoints and weights of a run. All ranks must call the same methods in the same order.

    Args:
        run: the folder and the progress of the run.
        config: all settings, after `TrainConfig.on` for the device of the run.
        trained: the towers, the loss and the optimizer.
        dataset: the dataset of the run. Checkpoints record its size.
        observers: the observers, which are called for each checkpoint and each model.
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
        self.weights_saved = False  # whether the trained weights are saved. The best weights do not count
        self._has_failed = False  # whether the last checkpoint could not be written
        self._last_time = 0.0  # time of the last checkpoint, or of the first step

    # Reading

    def resume(self, checkpoint: Path | None) -> Resumed | None:
        """Loads a checkpoint, or the newest intact checkpoint of the run. Returns None if the run has none.

        Raises:
            CheckpointError: if the given checkpoint is damaged.
        """
        source = self._checkpoints.newest() if checkpoint is None else (checkpoint, read_manifest(checkpoint))
        if source is None:
            return None
        path, manifest = source
        self._check_unchanged(path, manifest)
        generators = self._state.read(path)
        if not generators and self._world.rank == 0:
            LOG.warning("%s was written by %d ranks, so the random generators are seeded again", path, manifest["world_size"])
        run = self._run
        run.step, run.pairs, run.seconds = manifest["step"], manifest["pairs"], manifest["seconds"]
        run.health = manifest.get("health", {})
        fit = None
        if self._is_fit_valid(manifest):
            fit = Fit(tuple(manifest["chunk_sizes"]), manifest["graph_bytes"], manifest.get("checkpointing", False))
            set_checkpointing(self._trained.pair.modules, fit.checkpointing)
        if path.resolve().parent == self._checkpoints.folder.resolve():
            self._checkpoints.rename_after(run.step)
            self._rename_later_weights()
        return Resumed(fit, generators)

    def _check_unchanged(self, path: Path, manifest: dict[str, Any]) -> None:
        directory = manifest.get("directory")
        if directory is not None and not Path(directory).is_dir():
            directory = None  # the project was moved, so relative paths are relative to the current directory
        old_settings = anchor_paths(redact(manifest["config"]), directory)
        changes = differences(old_settings, anchor_paths(redact(settings.table(self._config))))
        if manifest["samples"] != len(self._dataset):
            changes.append(f"the data had {manifest['samples']} samples and has {len(self._dataset)}")
        elif manifest.get("samples_checksum") not in (None, _checksum_samples(self._dataset)) and self._world.rank == 0:
            LOG.warning("the data has changed since %s was saved: the names, the texts or their order differ", path)
        if changes:
            raise ValueError(
                f"a run can only continue with the data and settings it began with, but in {path} {'; '.join(changes)}. "
                f"These may change: {', '.join(FREE)}"
            )

    def _is_fit_valid(self, manifest: dict[str, Any]) -> bool:
        """Returns whether the chunk sizes of the checkpoint are valid for this run."""
        old, new = manifest["config"], settings.table(self._config)
        same_device = (manifest["world_size"], manifest.get("device")) == (self._world.size, self._world.device.type)
        return same_device and all(old[name] == new[name] for name in ("chunk_size", "memory"))

    def _rename_later_weights(self) -> None:
        """Renames the weights of a later step. Otherwise commands would use them instead of the next checkpoints."""
        path = self._run.folder / models.WEIGHTS
        if self._world.rank == 0 and (models.read_step(self._run.folder) or 0) > self._run.step:
            new_path = path.replace(path.with_name(f"abandoned_{path.name}"))
            LOG.warning("the run continues from step %d, so %s is renamed to %s", self._run.step, path, new_path.name)

    # Writing

    def open(self) -> None:
        """Prepares the folder before the first step: removes leftovers, checks disk space, writes settings and environment."""
        if self._world.rank == 0:
            runs.remove_leftovers(self._run.folder)
        config, pair = self._config, self._trained.pair
        moments = MOMENTS[config.optimizer.name] + (self._trained.average is not None)
        models = 2 if config.evaluate_every and config.checkpoint.best != "none" else 1
        existing = list_checkpoints(self._checkpoints.folder)
        runs.check_disk_space(
            self._run.folder, pair, moments, config.checkpoint.keep, self._world, models=models, checkpoints=existing
        )
        self._last_time = time.monotonic()
        if self._world.rank == 0:
            if self._run.step == 0:  # a new run must not inherit the best weights of an earlier run in this folder
                runs.remove_best(self._run.folder)
            self._run.write(runs.environment(config, pair, self._world, len(self._dataset), self._run.total_steps))

    def check_clock(self) -> tuple[bool, bool]:
        """Returns whether the last checkpoint is too old, and whether it is too recent for another one, on this rank."""
        seconds = time.monotonic() - self._last_time
        return self._config.checkpoint.late(seconds), self._config.checkpoint.early(seconds)

    def after_step(self, fit: Fit, *, now: bool, skip: bool, stopping: bool) -> None:
        """Writes a checkpoint if one is due, and the weights after the last step.

        Args:
            fit: the chunk sizes of the step.
            now: whether a checkpoint is due regardless of the number of the step.
            skip: whether a checkpoint that is due by the number of the step is skipped, unless it is the last step.
            stopping: whether the run stops after this step. The checkpoint is then on disk when this method returns.
        """
        step, steps = self._run.step, self._run.total_steps
        self.complete_pending(wait=False)
        if step == steps:  # the weights are written before the checkpoint, because they take less disk space
            self.complete_pending(wait=True)
            self.save_weights()
        if now or stopping or (self._config.checkpoint.due(step, steps) and (step == steps or not skip)):
            self._save_checkpoint(fit, required=stopping or step == steps)

    def save_before_failure(self, fit: Fit) -> None:
        """Writes a checkpoint of the last complete step, because the next step failed. All ranks must call it.

        Writes nothing if there is no complete step, if the last complete step already has a checkpoint, or if the failed step
        has left a state that is not finite, such as the running statistics of a batch norm.
        """
        self.complete_pending(wait=True)
        tensors = chain.from_iterable((*module.parameters(), *module.buffers()) for module in self._trained.pair.modules)
        is_damaged = any(not bool(tensor.isfinite().all()) for tensor in map(local, tensors))
        is_saved = self._checkpoints.last_step() == self._run.step
        if self._run.step and not any(self._world.max([is_damaged, is_saved])):
            self._save_checkpoint(fit, required=True)

    def _save_checkpoint(self, fit: Fit, *, required: bool) -> None:
        """Starts to write a checkpoint, after the previous one is complete. If it is required, waits until it is on disk."""
        manifest = {
            "step": self._run.step,
            "pairs": self._run.pairs,
            "seconds": self._run.seconds,
            "health": self._run.health,
            "samples": len(self._dataset),
            "samples_checksum": _checksum_samples(self._dataset),
            "sides": list(self._dataset.sides),
            "world_size": self._world.size,
            "device": self._world.device.type,
            "chunk_sizes": list(fit.chunk_sizes),
            "graph_bytes": fit.graph_bytes,
            "checkpointing": fit.checkpointing,
            "config": redact(settings.table(self._config)),
            "text_options": text_options(self._trained.pair),
            "directory": os.getcwd(),  # relative paths in the settings are relative to it
            "bases": list_bases(self._config.model, self._checkpoints.folder),
        }
        self._last_time = time.monotonic()
        self.complete_pending(wait=True)
        try:
            self._attempt(
                lambda: self._checkpoints.begin(self._run.step, manifest, self._state.copy_to_host), required=required
            )
            if required:
                self.complete_pending(wait=True, required=True)
        except CheckpointError:
            if not self.weights_saved:  # the weights may still fit on the disk
                with suppress(CheckpointError):
                    self.save_weights()
            raise

    def complete_pending(self, *, wait: bool, required: bool = False) -> None:
        """Completes the checkpoint that is being written, if it is ready or if `wait` is set."""
        path = self._attempt(lambda: self._checkpoints.complete_pending(wait=wait), required=required)
        if path is None:
            return
        if self._world.rank == 0 and self._has_failed:
            LOG.warning("checkpoints can be written again: %s is saved", path)
        self._has_failed = False
        self._observers.on_save(path)

    def _attempt(self, work: Callable[[], Path | None], *, required: bool) -> Path | None:
        """Runs one part of saving a checkpoint. If it fails and is not required, logs one warning, and training continues."""
        try:
            return work()
        except CheckpointError as error:
            if required:
                raise
            if self._world.rank == 0 and not self._has_failed:
                LOG.warning("%s. Training continues. So far, %s", error, self.describe_saved())
            self._has_failed = True
            return None

    def save_weights(self, within: str = "") -> None:
        """Writes the weights into the folder of the run, or into its subfolder `within`.

        The model of the run is more important than old checkpoints, so these are deleted if the disk is full. The model of a
        complete run is more important than all checkpoints.
        """
        folder, size = self._run.folder / within, model_bytes(self._trained.pair)
        complete = self._run.step == self._run.total_steps
        problem = self._write_weights(folder)
        while problem == DISK_FULL and not within and self._checkpoints.make_space(size, complete=complete):
            problem = self._write_weights(folder)
        if problem is not None:
            raise CheckpointError(f"the model could not be written in {folder}: {problem}")
        self.weights_saved = self.weights_saved or not within
        self._observers.on_save(folder / models.WEIGHTS)

    def _write_weights(self, folder: Path) -> str | None:
        """Writes the weights. Returns the reason on all ranks if they could not be written, and None otherwise."""
        problem = None
        with self._trained.use_average():
            pair = self._trained.with_learned_scale()
            try:
                towers.save(pair, folder, step=self._run.step)
            except OSError as error:  # only the first rank writes
                problem = describe_failure(error)
        first_problem: str | None = self._world.from_first(problem)
        return first_problem

    def save_best(self, result: dict[str, float], loss: float | None = None) -> None:
        """Saves the weights to best/ unless an earlier evaluation was better.

        Args:
            result: the metrics of the evaluation.
            loss: the mean loss of the last training steps, or None if there were none.
        """
        name = self._config.checkpoint.best
        name = find_headline(result) if name == "auto" else name
        best = self._world.from_first(runs.read_best(self._run.folder))
        if best is not None and best["metric"] == name and best["step"] < self._run.step:
            if not is_better(name, result[name], best["value"]):
                return
        try:
            self.save_weights(BEST)
        except CheckpointError as error:
            if self._world.rank == 0:
                LOG.warning("%s. The run continues", error)
            return
        if self._world.rank == 0:
            about = {"step": self._run.step, "metric": name, "value": result[name]}
            runs.write_best(self._run.folder, about | ({} if loss is None else {"training_loss": loss}))

    def log_best(self, result: dict[str, float], loss: float | None) -> None:
        """Logs the best evaluation at the end of a run, unless it was the last one. Logs a warning if the model overfits.

        Args:
            result: the metrics of the last evaluation.
            loss: the mean loss of the last training steps, or None if there were none.
        """
        best = runs.read_best(self._run.folder)
        if best is None or best["step"] >= self._run.step or best["metric"] not in result:
            return
        name, step, value, old_loss = best["metric"], best["step"], result[best["metric"]], best.get("training_loss")
        summary = (
            f"the best evaluation was after step {step:,}, with {name} = {best['value']:.4g}; at the end it is {value:.4g}"
        )
        hint = f"{self._run.folder / BEST} has the weights of step {step:,}. Pass this folder to eval, search or export"
        if is_better(name, best["value"], value) and loss is not None and old_loss is not None and loss < old_loss:
            warning = f"the model overfits: the training loss fell from {old_loss:.4g} to {loss:.4g}, but {summary}"
            LOG.warning("%s. %s", warning, hint)
        else:
            LOG.info("%s. %s", summary, hint)

    def describe_saved(self) -> str:
        """Returns a sentence about the weights and the checkpoint on disk, for a message after a failure."""
        newest = self._checkpoints.last_step()
        weights = f"the weights after step {self._run.step} are in {self._run.folder / models.WEIGHTS}, and "
        resumable = f"--resume {self._run.folder} continues after step {newest}"
        checkpoint = resumable if newest is not None else "there is no checkpoint to resume from"
        return (weights if self.weights_saved else "") + checkpoint


def _checksum_samples(dataset: Dataset) -> int:
    """Returns a checksum of the names and texts of a few samples, which shows whether the data is another one."""
    count = len(dataset)
    values = []
    for index in sorted({number * (count - 1) // CHECKED_SAMPLES for number in range(CHECKED_SAMPLES + 1)}):
        values += [dataset.name(index), *(dataset.key(index, side) for side in (0, 1) if dataset.sides[side] == TEXT)]
    return checksum(values)


def is_better(metric: str, value: float, other: float) -> bool:
    """Returns whether a value of the metric is better than another one. Lower is better for retrieval ranks and losses."""
    return value < other if "rank" in metric or "loss" in metric else value > other


def check_best(config: TrainConfig, sides: Sequence[str], prefixes: Sequence[str], *, corpus: bool = False) -> None:
    """Raises an error if `checkpoint.best` is not a metric of the run. The trainer calls it before the first step.

    Args:
        config: all settings.
        sides: the sides of the data.
        prefixes: the prefixes of the metrics of the validation datasets.
        corpus: whether the run searches a corpus (`retrieval.corpus`).
    """
    name = config.checkpoint.best
    if name in ("auto", "none"):
        return
    if not config.evaluate_every:
        raise ValueError(f'checkpoint.best must be "auto" or "none" without evaluate_every, got {name!r}')
    metrics = metric_names(sides)
    choices = [f"{prefix}/{metric}" if prefix else metric for prefix in prefixes for metric in metrics]
    choices += [f"corpus/{WAY}_{metric}" for metric in METRICS] if corpus else []
    if name not in choices:
        raise ValueError(f'checkpoint.best must be "auto", "none" or one of {", ".join(choices)}, got {name!r}')


def metric_names(sides: Sequence[str]) -> list[str]:
    """Returns the metrics of an evaluation that can select the best weights."""
    first, second = name_sides(sides)
    one_way = [*(f"R@{k}" for k in RECALLS), "MRR", "nDCG@10", "mean_rank", "median_rank"]
    return [*(f"{way}_{name}" for way in (f"{first}_to_{second}", f"{second}_to_{first}") for name in one_way), "clip_val_loss"]
