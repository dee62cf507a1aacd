"""The training loop, from the first step or from a checkpoint to the last step.

    trainer = Trainer(config, pair, dataset, Path("runs/mine"), validation=other_dataset)
    trainer.fit()

All ranks create a `Trainer` with the same arguments. trained.py builds towers, loss and optimizer, step.py makes one step,
storage.py writes checkpoints and weights, config.py has the settings.
"""

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from megabatch.cached import randomness
from megabatch.cached.budget import free_memory
from megabatch.cached.replay import sample_seed
from megabatch.cached.timing import Clock, phase
from megabatch.data import readers
from megabatch.data.dataset import Dataset
from megabatch.data.order import Order
from megabatch.data.resident import Resident
from megabatch.evaluation import evaluate
from megabatch.machine import peak_bytes
from megabatch.towers.tower import SIDES, Pair
from megabatch.trainer import compiling, lock, locked_side, loss_inputs, optim, parallel
from megabatch.trainer.checkpoint import CheckpointError
from megabatch.trainer.config import TrainConfig, reader_count
from megabatch.trainer.fit import Fit, repeated, what_fits
from megabatch.trainer.observers import Observer, Observers
from megabatch.trainer.precision import autocast, fast_products
from megabatch.trainer.run import LOCKED, TEACHER, Run
from megabatch.trainer.step import Inputs, Outcome, Step
from megabatch.trainer.stopping import Request, StoppedError, requests
from megabatch.trainer.storage import Storage, check_best
from megabatch.trainer.trained import build
from megabatch.trainer.unreadable import Unreadable
from megabatch.world import World

LOG = logging.getLogger("megabatch")
SAMPLES_REPEATED = 64  # repeated to a whole chunk for the compiler


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
        check_best(config, dataset.sides, list(self.validation))
        self._encoded = [side for side in (0, 1) if not config.keep_locked or config.lock != SIDES[side]]
        self._negatives = loss_inputs.with_negatives(config.loss, dataset, self._encoded)
        groups: Any = getattr(dataset, "groups", len(dataset))
        self.order = Order(groups, config.batch_size, config.seed, self.world.rank, self.world.size)
        self.steps = config.total_steps(self.order.batches_per_epoch)
        self.run = Run(folder, config, command, self.steps)
        self._observers = Observers(observers if self.world.rank == 0 else ())
        self._unreadable = Unreadable(dataset, self.order.batches_per_epoch * config.batch_size)
        self._rate = optim.scaled_rate(config.optimizer, config.batch_size)
        self._trained = build(self.config, pair, self._samples, self._encoded, self.world)
        self.objective, self.optimizer, self.average = self._trained.objective, self._trained.optimizer, self._trained.average
        self._storage = Storage(self.run, self.config, self._trained, dataset, self._observers, self.world)
        self._fit: Fit | None = None

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.run.step

    def resume(self, checkpoint: Path | None = None) -> bool:
        """Resumes from a checkpoint, or from the newest intact one of the run's folder.

        Returns:
            Whether there was one. A named checkpoint must exist and be intact.
        """
        resumed = self._storage.resume(checkpoint)
        if resumed is None:
            return False
        self._fit = resumed.fit
        if not resumed.generators:
            self._seed(self.step)
        return True

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
            return self._run_to_the_end()

    def _run_to_the_end(self) -> dict[str, float] | None:
        self.run.first_step = self.step
        self._storage.open()
        self._observers.start(self.run)
        try:
            products = fast_products(self.config.precision, self.world.device)
            compiler = compiling.settings() if self._trained.compiled else nullcontext()
            with requests(impatient=self.world.size == 1) as request, self._readers() as workers, products, compiler:
                failed = None
                try:
                    self._train(self._make_step(workers), request)
                except CheckpointError as error:
                    if not self._storage.weights_saved or request.number:
                        raise
                    failed = error  # the last checkpoint; the weights are saved, and are evaluated first
                if not self._storage.weights_saved:  # resumed after its last step
                    self._storage.save_weights()
                result = self._evaluate(workers) if self.validation else None
                if failed is not None:
                    raise failed
        finally:
            self._observers.finish(self.run)
            self._unreadable.count()
        return result

    def _make_step(self, workers: int | Executor) -> Step:
        """Finds the chunk sizes, and computes the embeddings of a teacher and of a locked side, before the first step."""
        if self.step == 0:
            self._seed(0)
        modules = self.pair.modules
        dataset = self._resident(workers)  # first: chunks and graphs share the memory that is left
        if self._fit is None:
            share = -(-self.config.batch_size // self.world.size)
            with compiling.plain(modules), autocast(self.config.precision, self.world.device):
                self._fit = what_fits(self.config.memory, self.config.chunk_size, modules, self._samples, share, self.world)
        loss, taught = self.config.loss, None
        if spec := loss.teacher or loss.guide:
            place, chunk_size = self.run.folder / TEACHER, min(self._fit.chunk_sizes)
            # A teacher is built with random weights first; these must not change generators that `resume` has restored.
            with randomness.untouched([self.world.device]), autocast(self.config.precision, self.world.device):
                taught, self.objective.teacher_scale = loss_inputs.teacher(
                    spec, self.dataset, place, self.world, chunk_size=chunk_size, workers=workers
                )
        self.objective.inputs_of = loss_inputs.of_batches(loss, self.dataset, self._negatives, taught)
        known = self._locked_embeddings(workers, self._fit)
        return Step(self.config, self._trained, dataset, known, self.world, self._fit, workers)

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
        if self._trained.compiled and self.step < self.steps:
            chunks = [repeated(self._samples(side, SAMPLES_REPEATED), size) for side, size in enumerate(fit.chunk_sizes)]
            with autocast(self.config.precision, self.world.device):
                compiling.warm_up(self.pair.modules, chunks, self.world)

    def _locked_embeddings(self, workers: int | Executor, fit: Fit) -> dict[int, locked_side.KeptEmbeddings]:
        """Embeddings of the locked side, by its index, if they are computed once."""
        if self.config.lock == "none" or not self.config.keep_locked:
            return {}
        side = SIDES.index(self.config.lock)
        if self.config.augment and self.world.rank == 0:
            LOG.info("the locked side is not augmented, because its embeddings are computed once (keep_locked)")
        with parallel.whole(self.pair.modules), autocast(self.config.precision, self.world.device):
            kept = locked_side.KeptEmbeddings(
                self.run.folder / LOCKED,
                self.dataset,
                side,
                self.pair,
                chunk_size=fit.chunk_sizes[side],
                workers=workers,
                world=self.world,
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
            # The checkpoint that is being written is still good. Ending it needs all ranks, and all raise FloatingPointError.
            if self.world.size == 1 or isinstance(error, FloatingPointError):
                self._storage.settle(wait=True)
            raise
        finally:
            if upcoming is not None:
                upcoming.stop()

    def _one_step(self, step: Step, inputs: Inputs, request: Request, clock: Clock) -> None:
        """One step, then its record, and a checkpoint and an evaluation if they are due."""
        began = time.perf_counter()
        batch = inputs.batch
        rate = optim.learning_rate(self.config.schedule, self._rate, batch.number, self.steps)
        with self.world.named(lambda: f"in step {batch.number + 1} of {self.steps}; {self.saved()}"):
            outcome = step(inputs, rate)
        self.run.step = batch.number + 1
        self._fit = step.fit
        if self.average is not None:
            with phase("optimizer"):
                self.average.update(self.step)
        self._unreadable.check(self.step, self.config.batch_size, outcome.pairs, self.world)
        stop, late = map(int, self.world.max([request.number, self._storage.overdue()]))
        self._record(outcome, batch.epoch, rate, began, clock)
        self._unreadable.name_new()
        with phase("checkpoint"):
            self._storage.after_step(step.fit, now=bool(late), stopping=bool(stop))
        if stop:
            raise self._stopped(stop)
        every = self.config.evaluate_every
        if self.validation and every and self.step % every == 0 and self.step < self.steps:
            with phase("evaluation"):  # the last one comes after the loop
                self._evaluate(step.workers)

    def _record(self, outcome: Outcome, epoch: int, rate: float, began: float, clock: Clock) -> None:
        numbers = self.objective.numbers()  # waits for the device
        seconds = time.perf_counter() - began
        self.run.pairs += outcome.pairs
        self.run.seconds += seconds
        record = {
            "step": self.step,
            "epoch": epoch,
            "pairs": self.run.pairs,
            "loss": outcome.loss,
            **numbers,
            "learning_rate": rate,
            "gradient_norm": outcome.gradient_norm,
            "pairs_per_second": outcome.pairs / seconds,
            **self._trained.utilisation.numbers(outcome.pairs, seconds),
            "memory_bytes": peak_bytes(self.world.device),
            "seconds": self.run.seconds,
            "phases": clock.lap(),
        }
        self._observers.step(record)

    def _evaluate(self, workers: int | Executor) -> dict[str, float]:
        result: dict[str, float] = {}
        whole = parallel.whole(self.pair.modules)
        with self._trained.averaged(), whole, autocast(self.config.precision, self.world.device):
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
            self._storage.keep_best(result)
        return result

    def saved(self) -> str:
        """The state of the disk, for a message after a failure."""
        return self._storage.saved()

    def _stopped(self, number: int) -> StoppedError:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        message = (
            f"stopped by {name} after step {self.step} of {self.steps}, and saved; continue with "
            f"megabatch train --resume {self.run.folder}"
        )
        return StoppedError(message, number)

    def _samples(self, side: int, count: int) -> Any:
        """Inputs of the first samples of one side."""
        indices = range(min(count, len(self.dataset)))
        source = self.dataset.source(indices, side, self.pair.towers[side], augment=False)
        return next(iter(source.chunks([(0, len(indices))], None)))

    def _seed(self, step: int) -> None:
        seed = sample_seed(sample_seed(self.config.seed, step), self.world.rank)
        randomness.seed_host(seed)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _readers(self) -> AbstractContextManager[int | Executor]:
        datasets = [self.dataset, *self.validation.values()]
        preparations = [getattr(tower.prepare, "__self__", tower.prepare) for tower in self.pair.towers]
        count = reader_count(self.config, self.world)
        return readers.opened(count, [*datasets, *preparations], processes=self.world.device.type == "cuda")
