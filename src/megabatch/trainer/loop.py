"""The training loop, from the first step or from a checkpoint: steps, evaluations, checkpoints, and the saved model.

    trainer = Trainer(config, pair, dataset, Path("runs/mine"), validation=other_dataset)
    trainer.fit()

All ranks create a `Trainer` with the same arguments. One step is in step.py, the settings in config.py.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megabatch import settings, towers
from megabatch.cached import randomness
from megabatch.cached.budget import free_memory
from megabatch.cached.replay import sample_seed
from megabatch.cached.timing import Clock, phase
from megabatch.data import readers
from megabatch.data.dataset import Dataset
from megabatch.data.order import Order
from megabatch.data.resident import Resident
from megabatch.evaluation import evaluate
from megabatch.evaluation.retrieval import HEADLINES, RECALLS
from megabatch.machine import peak_bytes
from megabatch.towers.blocks import set_checkpointing
from megabatch.towers.lora import store_frozen
from megabatch.towers.tower import Pair
from megabatch.trainer import beside, compiling, lock, locked, optim, parallel, room
from megabatch.trainer import run as runs
from megabatch.trainer.checkpoint import CheckpointError, Checkpoints, contents, reason
from megabatch.trainer.config import FREE, TrainConfig, differences, reader_count
from megabatch.trainer.ema import Average
from megabatch.trainer.fit import Fit, repeated, what_fits
from megabatch.trainer.flops import Utilisation
from megabatch.trainer.objective import Objective
from megabatch.trainer.observers import Observer, Observers, Unreadable
from megabatch.trainer.run import BEST, CHECKPOINTS, LOCKED, TEACHER, Run
from megabatch.trainer.state import State
from megabatch.trainer.step import AUTOCAST_TYPES, Inputs, Outcome, Step, autocast, fast_products, grad_scaler
from megabatch.trainer.stopping import Request, StoppedError, requests
from megabatch.world import World

LOG = logging.getLogger("megabatch")
SAMPLES_SHOWN = 2  # to towers, to find their used parameters
SAMPLES_COUNTED = 64  # whose operations are counted
SAMPLES_REPEATED = 64  # of which a chunk for the compiler is made


def metric_names(sides: Sequence[str]) -> list[str]:
    """The metrics of an evaluation by which the best weights can be kept."""
    first, second = ("image", "text") if sides[0] != sides[1] else ("query", "text")
    each = [*(f"R@{k}" for k in RECALLS), "MRR", "nDCG@10", "mean_rank", "median_rank"]
    return [*(f"{way}_{name}" for way in (f"{first}_to_{second}", f"{second}_to_{first}") for name in each), "clip_val_loss"]


class Trainer:
    """Trains a model on a dataset.

    Args:
        config: all settings. Its names of data and model are ignored in favour of the next two arguments.
        pair: the towers with their initial weights, the same on all ranks. Moved to the device and trained in place.
        dataset: pairs to train on.
        folder: of the run; shared by all ranks.
        validation: pairs to evaluate on, or None; several datasets by name. Metrics of all but the first have "NAME/" before.
        observers: called on the first rank.
        world: the ranks (default: this process alone, on the CPU).
        command: the command line, recorded in the folder.
    """

    def __init__(
        self,
        config: TrainConfig,
        pair: Pair,
        dataset: Dataset,
        folder: Path,
        *,
        validation: Dataset | Mapping[str, Dataset] | None = None,
        observers: Sequence[Observer] = (),
        world: World | None = None,
        command: str = "",
    ) -> None:
        self.world = world or World(torch.device("cpu"))
        self.config, self.pair, self.dataset = config.on(self.world.device), pair, dataset
        named = validation if isinstance(validation, Mapping) else {} if validation is None else {"": validation}
        self.validation = {name if number else "": found for number, (name, found) in enumerate(named.items())}
        if config.batch_size < self.world.size:
            raise ValueError(f"batch_size must be at least 1 for each of {self.world.size} ranks, got {config.batch_size}")
        for found in self.validation.values():
            if tuple(found.sides) != tuple(dataset.sides):
                raise ValueError(
                    f"validation must have the sides of the training data, {' and '.join(dataset.sides)}, "
                    f"got {' and '.join(found.sides)}"
                )
        if config.evaluate_every and not self.validation:
            raise ValueError(
                f"evaluate_every must be 0 without data to evaluate on (--validation), got {config.evaluate_every}"
            )
        self._check_best()
        self._encoded = [side for side in (0, 1) if not config.keep_locked or config.lock != locked.SIDES[side]]
        self._negatives = beside.with_negatives(config.loss, dataset, [side for side in (0, 1) if side not in self._encoded])
        groups: Any = getattr(dataset, "groups", len(dataset))
        self.order = Order(groups, config.batch_size, config.seed, self.world.rank, self.world.size)
        self.steps = config.total_steps(self.order.batches_per_epoch)
        self.step, self.pairs, self.seconds = 0, 0, 0.0
        self.run = Run(folder, config, command, self.steps)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, config.checkpoint.keep, self.world)
        self._observers = Observers(observers if self.world.rank == 0 else ())
        self._unreadable = Unreadable(dataset, self.order.batches_per_epoch * config.batch_size)
        self._save_failed = self._model_saved = False  # the last checkpoint, the trained weights
        self._rate = optim.scaled_rate(config.optimizer, config.batch_size)
        self._build()

    def _check_best(self) -> None:
        """Checks the metric of `checkpoint.best` before the first step, and not at the first evaluation."""
        name = self.config.checkpoint.best
        if name in ("auto", "none"):
            return
        if not self.config.evaluate_every:
            raise ValueError(f'checkpoint.best must be "auto" or "none" without evaluate_every, got {name!r}')
        of_one = metric_names(self.dataset.sides)
        known = [f"{prefix}/{metric}" if prefix else metric for prefix in self.validation for metric in of_one]
        if name not in known:
            raise ValueError(f'checkpoint.best must be "auto", "none" or one of {", ".join(known)}, got {name!r}')

    def _build(self) -> None:
        """Builds everything that is trained, from the towers."""
        config = self.config
        if self.pair.lora is not None:
            store_frozen([tower.module for tower in self.pair.towers], AUTOCAST_TYPES.get(config.precision, torch.float32))
        modules = [tower.module.to(self.world.device) for tower in self.pair.towers]
        shown = [self._samples(side, SAMPLES_SHOWN) for side in (0, 1)]
        if config.lock != "none":
            with randomness.untouched([self.world.device]):
                locked.lock(self.pair, locked.SIDES.index(config.lock), shown)
        self._utilisation = Utilisation(
            [self.pair.towers[side] for side in self._encoded],
            [partial(self._samples, side, SAMPLES_COUNTED) for side in self._encoded],
            config.precision,
            self.world,
        )
        self._compiled = config.compile == "on" and compiling.compile_towers(modules, self.world)
        with randomness.untouched([self.world.device]), compiling.plain(modules):
            self._called = parallel.wrapped(modules, shown, self.world, config.parallel, offload=config.memory.offload)
        self._modules = parallel.distinct(modules)
        dtype = torch.float64 if next(modules[0].parameters()).dtype == torch.float64 else torch.float32
        self.objective = Objective(config.loss, self.pair.logit_scale, self.pair.logit_bias, dtype).to(self.world.device)
        groups = optim.parameter_groups(self._modules, self.objective, config.optimizer.weight_decay)
        self.optimizer = optim.build(config.optimizer, groups)
        named = dict(zip(locked.SIDES, self._modules, strict=False)) | {"loss": self.objective}
        self.average = Average(named, config.ema) if config.ema else None
        self._scaler = grad_scaler(config.precision, self.world.device)
        sharded = self.world.size > 1 and config.parallel == parallel.FSDP
        self._state = State(
            named,
            self.optimizer,
            self.average,
            self._scaler,
            self.world,
            sharded=sharded,
            trained_only=self.pair.base_is_elsewhere,
        )
        self._fit: Fit | None = None

    def _samples(self, side: int, count: int) -> Any:
        """Inputs of the first samples of one side."""
        indices = range(min(count, len(self.dataset)))
        source = self.dataset.source(indices, side, self.pair.towers[side], augment=False)
        return next(iter(source.chunks([(0, len(indices))], None)))

    # From a checkpoint

    def resume(self, checkpoint: Path | None = None) -> bool:
        """Resumes from a checkpoint, or from the newest intact one of the run's folder.

        Returns:
            Whether there was one. A named checkpoint must exist and be intact.
        """
        found = self.checkpoints.newest() if checkpoint is None else (checkpoint, contents(checkpoint))
        if found is None:
            return False
        path, about = found
        changed = differences(about["config"], settings.table(self.config))
        if about["samples"] != len(self.dataset):
            changed.append(f"the data had {about['samples']} samples and has {len(self.dataset)}")
        if changed:
            raise ValueError(
                f"a run can only continue with what it began with, but in {path} {'; '.join(changed)}. "
                f"These may change: {', '.join(FREE)}"
            )
        same_generators = self._state.read(path)
        if not same_generators and self.world.rank == 0:
            LOG.warning("%s was written by %d ranks; random generators are seeded anew", path, about["world_size"])
        if not same_generators:
            self._seed(about["step"])
        self.step, self.pairs, self.seconds = about["step"], about["pairs"], about["seconds"]
        if self._fits_as_before(about):
            self._fit = Fit(tuple(about["chunk_sizes"]), about["graph_bytes"], about.get("checkpointing", False))
            set_checkpointing([tower.module for tower in self.pair.towers], self._fit.checkpointing)
        if path.resolve().parent == self.checkpoints.folder.resolve():
            self.checkpoints.set_aside_after(self.step)
            self._set_model_aside()
        return True

    def _set_model_aside(self) -> None:
        """Renames the model of a later step, as checkpoints of later steps are: it would count as newer than what follows."""
        place = self.run.folder / towers.saved.WEIGHTS
        if self.world.rank == 0 and (towers.saved.step(self.run.folder) or 0) > self.step:
            aside = place.replace(place.with_name(f"abandoned_{place.name}"))
            LOG.warning("the run continues from step %d; %s is now called %s", self.step, place, aside.name)

    def _fits_as_before(self, about: dict[str, Any]) -> bool:
        """Whether the chunk sizes of the checkpoint are valid for this run too."""
        before, now = about["config"], settings.table(self.config)
        same_place = (about["world_size"], about.get("device")) == (self.world.size, self.world.device.type)
        return same_place and all(before[name] == now[name] for name in ("chunk_size", "memory"))

    # To the end

    def fit(self) -> dict[str, float] | None:
        """Trains to the last step, saves the model and evaluates it.

        Returns:
            Metrics of the last evaluation; None without validation data.

        Raises:
            StoppedError: after Ctrl-C or SIGTERM, once a checkpoint is saved.
            CheckpointError: the last checkpoint or the model could not be written; `saved` tells what is on disk.
            LockedError: another process or thread writes to the run's folder.
        """
        problem = None
        with ExitStack() as held:
            if self.world.rank == 0:
                try:
                    held.enter_context(lock.locked(self.run.folder))
                except lock.LockedError as error:
                    problem = str(error)
            if problem := self.world.from_first(problem):
                raise lock.LockedError(problem)
            return self._to_the_end()

    def _to_the_end(self) -> dict[str, float] | None:
        moments = optim.MOMENTS[self.config.optimizer.name] + (self.average is not None)
        models = 2 if self.config.evaluate_every and self.config.checkpoint.best != "none" else 1
        keep = self.config.checkpoint.keep
        room.check(self.run.folder, self.pair, moments, self.checkpoints, keep, self.world, models=models)
        self._saved_at = time.monotonic()
        self.run.first_step = self.run.step = self.step
        if self.world.rank == 0:
            if self.step == 0:  # the best weights of another run in this folder are none of this one's
                runs.forget_best(self.run.folder)
            self.run.write(room.environment(self.config, self.pair, self.world, len(self.dataset), self.steps))
        self._observers.start(self.run)
        try:
            products = fast_products(self.config.precision, self.world.device)
            compiler = compiling.settings() if self._compiled else nullcontext()
            with requests(impatient=self.world.size == 1) as request, self._workers() as workers, products, compiler:
                failed = None
                try:
                    self._train(self._ready(workers), request)
                except CheckpointError as error:
                    if not self._model_saved or request.number:
                        raise
                    failed = error  # the last checkpoint: the weights are there to be evaluated
                if not self._model_saved:  # a run that had come to its end
                    self._save_model()
                result = self._evaluate(workers) if self.validation else None
                if failed is not None:
                    raise failed
        finally:
            self._observers.finish(self.run)
            self._unreadable.count()
        return result

    def _ready(self, workers: int | Executor) -> Step:
        if self.step == 0:
            self._seed(0)
        modules = [tower.module for tower in self.pair.towers]
        dataset = self._resident(workers)  # before what is left of the memory is shared out
        if self._fit is None:
            share = -(-self.config.batch_size // self.world.size)
            with compiling.plain(modules), autocast(self.config.precision, self.world.device):
                self._fit = what_fits(self.config.memory, self.config.chunk_size, modules, self._samples, share, self.world)
        loss, taught = self.config.loss, None
        if spec := loss.teacher or loss.guide:
            place, chunk_size = self.run.folder / TEACHER, min(self._fit.chunk_sizes)
            # After `resume` the generators are those of the checkpoint, and a teacher is built with random weights first.
            with randomness.untouched([self.world.device]), autocast(self.config.precision, self.world.device):
                taught, self.objective.teacher_scale = beside.teacher(
                    spec, self.dataset, place, self.world, chunk_size=chunk_size, workers=workers
                )
        self.objective.beside = beside.of_batches(loss, self.dataset, self._negatives, taught)
        return Step(
            self.config,
            self.pair,
            self._called,
            self.objective,
            self.optimizer,
            self._scaler,
            dataset,
            self._known(workers, self._fit),
            self.world,
            self._fit,
            workers,
        )

    def _resident(self, workers: int | Executor) -> Dataset:
        """The dataset of the steps, on the device if `memory.resident` says so."""
        share = self.config.memory.resident
        if not share or isinstance(self.dataset, Resident):
            return self._negatives or self.dataset
        if self._negatives is not None:
            raise ValueError(f"memory.resident must be 0 with hard negatives, got {share}")
        limit, device = share * free_memory(self.world.device), self.world.device
        options: dict[str, Any] = {"sides": self._encoded, "augment": self.config.augment, "workers": workers}
        return Resident(self.dataset, self.pair.towers, device, limit=limit, **options)

    def _compile(self, fit: Fit) -> None:
        """Compiles the towers for chunks of the training."""
        if self._compiled and self.step < self.steps:
            chunks = [repeated(self._samples(side, SAMPLES_REPEATED), size) for side, size in enumerate(fit.chunk_sizes)]
            with autocast(self.config.precision, self.world.device):
                compiling.warm_up([tower.module for tower in self.pair.towers], chunks, self.world)

    def _known(self, workers: int | Executor, fit: Fit) -> dict[int, locked.KeptEmbeddings]:
        if self.config.lock == "none" or not self.config.keep_locked:
            return {}
        side = locked.SIDES.index(self.config.lock)
        if self.config.augment and self.world.rank == 0:
            LOG.info("the locked side is not augmented, because its embeddings are computed once (keep_locked)")
        with parallel.whole(self._modules), autocast(self.config.precision, self.world.device):
            kept = locked.KeptEmbeddings(
                self.run.folder / LOCKED,
                self.dataset,
                side,
                self.pair,
                chunk_size=fit.chunk_sizes[side],
                workers=workers,
                world=self.world,
                report=LOG.info,
            )
        return {side: kept}

    def _train(self, step: Step, request: Request) -> None:
        coming = map(step.prepare, self.order.batches(self.step, self.steps))
        upcoming = next(coming, None)
        try:
            self._compile(step.fit)  # while the first batch is read
            clock = Clock(self.world.device)
            with clock.running():
                while upcoming is not None:
                    inputs, upcoming = upcoming, next(coming, None)  # the next batch is read while this one trains
                    try:
                        self._one_step(step, inputs, request, clock)
                    finally:
                        inputs.stop()
                    del inputs
        except Exception as error:
            # The checkpoint that is being written is still good. Other ranks may not have failed, but for this error.
            if self.world.size == 1 or isinstance(error, FloatingPointError):
                self._settle(wait=True)
            raise
        finally:
            if upcoming is not None:
                upcoming.stop()

    def _one_step(self, step: Step, inputs: Inputs, request: Request, clock: Clock) -> None:
        began = time.perf_counter()
        batch = inputs.batch
        rate = optim.learning_rate(self.config.schedule, self._rate, batch.number, self.steps)
        with self.world.named(lambda: f"in step {batch.number + 1} of {self.steps}; {self.saved()}"):
            outcome = step(inputs, rate)
        self.step = self.run.step = batch.number + 1
        self._fit = step.fit
        if self.average is not None:
            with phase("optimizer"):
                self.average.update(self.step)
        self._unreadable.check(self.step, self.config.batch_size, outcome.pairs, self.world)
        waited = time.monotonic() - self._saved_at  # ranks have clocks of their own
        stop, late = map(int, self.world.max([request.number, self.config.checkpoint.late(waited)]))
        self._record(outcome, batch.epoch, rate, began, clock)
        self._unreadable.name_new()
        with phase("checkpoint"):
            self._settle(wait=False)
            if self.step == self.steps:  # the weights first: they take less room than a checkpoint
                self._settle(wait=True)
                self._save_model()
            if self.config.checkpoint.due(self.step, self.steps) or late or stop:
                self._save(must=bool(stop) or self.step == self.steps)
        if stop:
            raise StoppedError(self._farewell(stop), stop)
        every = self.config.evaluate_every
        if self.validation and every and self.step % every == 0 and self.step < self.steps:
            with phase("evaluation"):  # the last one comes after the loop
                self._evaluate(step.workers)

    def _record(self, outcome: Outcome, epoch: int, rate: float, began: float, clock: Clock) -> None:
        numbers = self.objective.numbers()  # waits for the device
        seconds = time.perf_counter() - began
        self.pairs += outcome.pairs
        self.seconds += seconds
        record = {
            "step": self.step,
            "epoch": epoch,
            "pairs": self.pairs,
            "loss": outcome.loss,
            **numbers,
            "learning_rate": rate,
            "gradient_norm": outcome.gradient_norm,
            "pairs_per_second": outcome.pairs / seconds,
            **self._utilisation.numbers(outcome.pairs, seconds),
            "memory_bytes": peak_bytes(self.world.device),
            "seconds": self.seconds,
            "phases": clock.lap(),
        }
        self._observers.step(record)

    def _evaluate(self, workers: int | Executor) -> dict[str, float]:
        result: dict[str, float] = {}
        averaged = nullcontext() if self.average is None else self.average.in_place()
        with averaged, parallel.whole(self._modules), autocast(self.config.precision, self.world.device):
            # A chunk that fits with a graph fits without one.
            chunk_size = 256 if self._fit is None else min(256, *self._fit.chunk_sizes)
            scale = self.objective.numbers()["scale"]
            for name, dataset in self.validation.items():
                found = evaluate(
                    self.pair, dataset, scale=scale, chunk_size=chunk_size, workers=workers, group=self.world.group
                )
                result |= {f"{name}/{key}" if name else key: value for key, value in found.items()}
        self._observers.evaluated({"step": self.step, "evaluation": result})
        if self.config.evaluate_every and self.config.checkpoint.best != "none":
            self._keep_best(result)
        return result

    def _keep_best(self, result: dict[str, float]) -> None:
        """Saves the weights if no evaluation before was better."""
        name = self.config.checkpoint.best
        name = next(key for key in HEADLINES if key in result) if name == "auto" else name
        value, lower = result[name], "rank" in name or "loss" in name
        before = self.world.from_first(runs.best(self.run.folder))
        if before is not None and before["metric"] == name and before["step"] < self.step:
            if (value >= before["value"]) if lower else (value <= before["value"]):
                return
        try:
            self._save_model(BEST)
        except CheckpointError as error:
            if self.world.rank == 0:
                LOG.warning("%s; the run goes on", error)
            return
        if self.world.rank == 0:
            runs.write_best(self.run.folder, {"step": self.step, "metric": name, "value": value})

    # To disk

    def _save(self, *, must: bool) -> None:
        """Begins to write a checkpoint, after the one before. With `must`, it is on disk afterwards."""
        assert self._fit is not None
        about = {
            "step": self.step,
            "pairs": self.pairs,
            "seconds": self.seconds,
            "samples": len(self.dataset),
            "sides": list(self.dataset.sides),
            "world_size": self.world.size,
            "device": self.world.device.type,
            "chunk_sizes": list(self._fit.chunk_sizes),
            "graph_bytes": self._fit.graph_bytes,
            "checkpointing": self._fit.checkpointing,
            "config": settings.table(self.config),
        }
        self._saved_at = time.monotonic()
        self._settle(wait=True)
        try:
            self._attempt(lambda: self.checkpoints.begin(self.step, about, self._state.copied), must=must)
            if must:
                self._settle(wait=True, must=True)
        except CheckpointError:
            if not self._model_saved:  # the weights may still fit
                with suppress(CheckpointError):
                    self._save_model()
            raise

    def _settle(self, *, wait: bool, must: bool = False) -> None:
        """Ends the checkpoint that is being written, if it is ready or if it is to `wait`."""
        path = self._attempt(lambda: self.checkpoints.settle(wait=wait), must=must)
        if path is None:
            return
        if self.world.rank == 0 and self._save_failed:
            LOG.warning("checkpoints are written again: %s", path)
        self._save_failed = False
        self._observers.saved(path)

    def _attempt(self, work: Callable[[], Path | None], *, must: bool) -> Path | None:
        """A part of saving. If it fails in mid-run, training goes on with one warning, and the next checkpoint is tried."""
        try:
            return work()
        except CheckpointError as error:
            if must:
                raise
            if self.world.rank == 0 and not self._save_failed:
                LOG.warning("%s; training goes on. So far, %s", error, self.saved())
            self._save_failed = True
            return None

    def saved(self) -> str:
        """What is on disk, for a message after a failure."""
        newest = self.checkpoints.last_step()
        weights = f"the weights after step {self.step} are in {self.run.folder / towers.saved.WEIGHTS}, and "
        resumable = f"--resume {self.run.folder} continues after step {newest}"
        told = resumable if newest is not None else "there is no checkpoint to resume from"
        return (weights if self._model_saved else "") + told

    def _save_model(self, within: str = "") -> None:
        """Writes the weights into the run's folder, or into a folder in it."""
        problem = None
        with nullcontext() if self.average is None else self.average.in_place():
            numbers = self.objective.numbers()
            trained = dataclasses.replace(
                self.pair, logit_scale=numbers["scale"], logit_bias=numbers.get("bias", self.pair.logit_bias)
            )
            try:
                towers.save(trained, self.run.folder / within, step=self.step)
            except OSError as error:  # on the first rank, which writes
                problem = reason(error)
        if problem := self.world.from_first(problem):
            raise CheckpointError(f"the model could not be written in {self.run.folder / within}: {problem}")
        self._model_saved = self._model_saved or not within
        self._observers.saved(self.run.folder / within / towers.saved.WEIGHTS)

    def _farewell(self, number: int) -> str:
        import signal

        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        return (
            f"stopped by {name} after step {self.step} of {self.steps}, and saved; continue with "
            f"megabatch train --resume {self.run.folder}"
        )

    def _seed(self, step: int) -> None:
        seed = sample_seed(sample_seed(self.config.seed, step), self.world.rank)
        randomness.seed_host(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _workers(self) -> AbstractContextManager[int | Executor]:
        datasets = [self.dataset, *self.validation.values()]
        preparations = [getattr(tower.prepare, "__self__", tower.prepare) for tower in self.pair.towers]
        count = reader_count(self.config, self.world)
        return readers.opened(count, [*datasets, *preparations], processes=self.world.device.type == "cuda")
