"""What a run writes and when: checkpoints, weights and the best weights, as disk space allows; and how a run resumes."""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.cached.memory import local
from megabatch.world import World
from megabatch_train import settings, towers
from megabatch_train.data.dataset import Dataset
from megabatch_train.evaluation.evaluate import HEADLINES, RECALLS
from megabatch_train.names import redact
from megabatch_train.towers import models
from megabatch_train.towers.lora import store_frozen
from megabatch_train.towers.models import text_options
from megabatch_train.towers.open_clip import split_name
from megabatch_train.towers.tower import SIDES, Pair, set_checkpointing
from megabatch_train.trainer import optim
from megabatch_train.trainer import run as runs
from megabatch_train.trainer.build import AUTOCAST_TYPES, FSDP, Trained, distinct
from megabatch_train.trainer.checkpoints import DISK_FULL, CheckpointError, Checkpoints, contents, reason
from megabatch_train.trainer.chunk_size import Fit
from megabatch_train.trainer.config import FREE, TrainConfig, anchor_paths, differences
from megabatch_train.trainer.run import BEST, CHECKPOINTS, Observers, Run
from megabatch_train.trainer.state import State, read_weights

# ----------------------------------------------------------------------------------------------------------------------
# The room on the disk of a run: whether the model and its checkpoints will fit.

LOG = logging.getLogger("megabatch")


def check(folder: Path, pair: Pair, moments: float, checkpoints: Checkpoints, keep: int, world: World, *, models: int) -> None:
    """Raises an error if the disk has no room for the model and a checkpoint, and warns if it has none for all of them.

    Args:
        folder: of the run.
        pair: the towers.
        moments: bytes of a checkpoint for each byte of a trained weight, besides the weights.
        checkpoints: of the run.
        keep: number of checkpoints.
        world: the ranks.
        models: number of models in the folder: the last, and the best if it is kept.
    """
    learned, model = _count_learned_bytes(pair), model_bytes(pair)
    each = int(model + moments * learned)
    free, there = world.from_first((free_bytes(folder), checkpoints.count()))
    told = (
        f"the disk of {folder} has {free / 1e6:,.1f} MB free; the model takes {model / 1e6:,.1f} MB"
        + (", the best one as much (checkpoint.best)," if models > 1 else "")
        + f" and each checkpoint {each / 1e6:,.1f} MB"
    )
    if free + each * max(0, there - 1) < models * model + each:  # all but the newest checkpoint are deleted if need be
        elsewhere = f"--resume {checkpoints.folder}/step_… --output OTHER_FOLDER" if there else "another folder (--output)"
        raise ValueError(f"{told}. Make room, or use {elsewhere}")
    if free < models * model + each * (keep + 1 - there) and world.rank == 0:
        LOG.warning("%s. %d of them, and the next, may not fit (checkpoint.keep)", told, keep)


def model_bytes(pair: Pair) -> int:
    """The size of the file that a run saves its model in, without its header."""
    stored = (value for module in distinct(pair.modules) for value in module.state_dict().values())
    return _count_learned_bytes(pair) if pair.base_is_elsewhere else _bytes(stored)


def _count_learned_bytes(pair: Pair) -> int:
    return _bytes(parameter for parameter in pair.parameters() if parameter.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_bytes(folder: Path) -> int:
    """Free space of the disk that the folder is on, or will be on."""
    return shutil.disk_usage(next(place for place in (folder, *folder.resolve().parents) if place.exists())).free


# ----------------------------------------------------------------------------------------------------------------------
# The towers of a run with its newest weights, which may be in a checkpoint, to search and evaluate with during the run.


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int | None]:
    """The towers of a run after its last saved step: from `model.safetensors`, or from a newer checkpoint.

    Args:
        folder: of a run, or another one with a model; of a checkpoint, for its weights.
        device: of the modules.

    Returns:
        The towers in evaluation mode, and the step of the checkpoint; None for the weights of `model.safetensors`.
    """
    if (folder / models.WEIGHTS).is_file():
        step, checkpoints = models.read_step(folder), Checkpoints(folder / CHECKPOINTS, 1, World(torch.device("cpu")))
        if step is None or (checkpoints.last_step() or 0) <= step:
            return towers.load_saved(folder, device), None
        found = checkpoints.newest()  # intact
        if found is None or found[1]["step"] <= step:
            return towers.load_saved(folder, device), None
    return load_checkpoint(folder, device)


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int]:
    """The towers with the weights that the run would save now, in evaluation mode, and the number of steps done.

    Args:
        folder: of a run, whose newest intact checkpoint is used, or of a checkpoint.
        device: of the modules.
    """
    if (folder / CHECKPOINTS).is_dir():
        found = Checkpoints(folder / CHECKPOINTS, 1, World(torch.device("cpu"))).newest()
    else:
        found = (folder, contents(folder)) if folder.name.startswith("step_") else None
    if found is None:
        raise FileNotFoundError(f"{folder} has no model.safetensors and no intact checkpoint: the run has saved nothing yet")
    path, about = found
    config = settings.build(TrainConfig, anchor_paths(about["config"], about.get("directory")))
    family, _, name = config.model.partition(":")
    model = f"{family}:{split_name(name)[0]}" if family == "open_clip" else config.model  # weights are in the checkpoint
    options = {**config.model_options, **about.get("text_options", {})}  # as the run has them, whatever the model's files say
    pair = replace(towers.load(model, tuple(about["sides"]), lora=config.lora, **options), name=config.model)
    modules = dict(zip(SIDES, distinct(pair.modules), strict=False))
    model_weights, average = read_weights(path)
    state = model_weights | average  # the average is what a run saves
    for name, module in modules.items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        module.load_state_dict(own, strict=not pair.base_is_elsewhere)
        module.to(device).eval()
    if pair.base_is_elsewhere:
        store_frozen(list(modules.values()), AUTOCAST_TYPES.get(config.on(torch.device(device)).precision, torch.float32))
    bias = state.get("loss.bias")
    scale = math.exp(state["loss.log_scale"].item())
    return replace(pair, logit_scale=scale, logit_bias=pair.logit_bias if bias is None else bias.item()), about["step"]


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
        moments = optim.MOMENTS[config.optimizer.name] + (self._trained.average is not None)
        models = 2 if config.evaluate_every and config.checkpoint.best != "none" else 1
        check(self._run.folder, pair, moments, self._checkpoints, config.checkpoint.keep, self._world, models=models)
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
