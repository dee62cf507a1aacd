"""The training loop, and the embeddings by a teacher or a guide."""

import logging
import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megabatch.cached import second_pass
from megabatch.cached.replay import sample_seed
from megabatch.cached.streaming import Clock, phase
from megabatch.world import World, free_memory
from megabatch_train import towers
from megabatch_train.data import loader
from megabatch_train.data.dataset import Dataset
from megabatch_train.data.resident import Resident
from megabatch_train.data.tables import Table
from megabatch_train.evaluation import Evaluated, evaluate
from megabatch_train.evaluation.corpus import RetrievalTask, evaluate_corpus
from megabatch_train.machine import StartClock, describe_device, peak_bytes
from megabatch_train.names import format_row, sanitize
from megabatch_train.towers import custom
from megabatch_train.towers.tokens import drop_patches
from megabatch_train.towers.tower import SIDES, Pair, compiler_settings, warm_up, without_compiler
from megabatch_train.trainer import run
from megabatch_train.trainer.build import Utilization, allow_tf32, autocast, build, gather_parameters
from megabatch_train.trainer.checkpoints import CheckpointError
from megabatch_train.trainer.config import MemoryConfig, TrainConfig, reader_count
from megabatch_train.trainer.health import (
    Health,
    MissingNegatives,
    StepSummary,
    StoppedError,
    StopSignal,
    TrainingFailedError,
    UnreadableSamples,
    record_signals,
)
from megabatch_train.trainer.loss import StoredEmbeddings, add_negatives, make_input_reader
from megabatch_train.trainer.run import FROZEN, TEACHER, Observer, Observers, Run, load_newest
from megabatch_train.trainer.stages import BatchMiner, Stage, plan_stages
from megabatch_train.trainer.step import BatchReader, Fit, NotFiniteError, Outcome, Step, StepInputs, choose_fit, repeat_inputs
from megabatch_train.trainer.storage import Storage, check_best

# ----------------------------------------------------------------------------------------------------------------------
# Embeddings by a teacher or a guide.


def embed_by_teacher(
    spec: str, dataset: Dataset, folder: Path, world: World, *, chunk_size: int, workers: int | Executor
) -> tuple[list[StoredEmbeddings], float]:
    """Embeds both sides of all samples with a teacher or a guide. Returns the embeddings and the scale of this model.

    Samples are not augmented.

    Args:
        spec: the folder of a run, or the name of a model.
        dataset: the dataset of the pairs.
        folder: the folder of the embeddings, which all ranks share.
        world: the ranks.
        chunk_size: the number of samples that are encoded at once.
        workers: the workers, as in `Dataset.source`.
    """
    custom.check(spec, "a teacher or guide")  # the files of a run can name it
    pair = load_newest(Path(spec), world.device)[0] if Path(spec).is_dir() else towers.load(spec, dataset.sides)
    for module in pair.modules:
        module.to(world.device).requires_grad_(False).eval()
    embed = partial(StoredEmbeddings, chunk_size=chunk_size, workers=workers, world=world)
    return [embed(folder / name, dataset, side, pair) for side, name in enumerate(SIDES)], pair.logit_scale


# ----------------------------------------------------------------------------------------------------------------------
# The training loop, from the first step or a checkpoint to the last step.
#
#     trainer = Trainer(config, pair, dataset, Path("runs/mine"), validation=other_dataset)
#     trainer.fit()
#
# All ranks create a `Trainer` with the same arguments. build.py builds the towers, the loss and the optimizer. step.py makes
# one step. storage.py writes checkpoints and weights. config.py defines the settings.


LOG = logging.getLogger("megabatch")
RECENT = 20  # number of last steps whose mean loss is compared between evaluations
MEASURED = 1024  # number of samples whose lengths are measured to find long samples
SAMPLES_REPEATED = 64  # number of samples that are repeated to a full chunk for the compiler


def open_workers(
    config: TrainConfig,
    pair: Pair,
    datasets: Sequence[Dataset],
    world: World,
    started: Sequence[loader.WorkerProcess] = (),
) -> AbstractContextManager[int | Executor]:
    """Returns a context with the data-loader workers of a run. `started` are processes of `loader.start_processes`."""
    preparations = [getattr(tower.prepare, "__self__", tower.prepare) for tower in pair.towers]
    count, processes = reader_count(config, world), world.device.type != "cpu"
    return loader.open_readers(count, [*datasets, *preparations], processes=processes, started=started)


class Trainer:
    """Trains a model on a dataset.

    Args:
        config: all settings. The names of the data and the model in them are ignored, because the next two arguments replace
            them.
        pair: the towers with their initial weights, which must be the same on all ranks. The trainer moves them to the device
            and trains them in place.
        dataset: the pairs to train on.
        folder: the folder of the run, which all ranks share.
        validation: the pairs to evaluate on. This is a dataset, several datasets by name, or None. The metrics of all datasets
            but the first have the prefix "NAME/".
        observers: the observers of the run. They are called only on the first rank.
        world: the ranks (default: only this process, on the CPU).
        command: the command line, which is recorded in the folder.
        workers: the data-loader workers of `open_workers` (default: `fit` starts them, and ends them).
        clock: a clock that measures the start of the run (default: a new clock).
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
        workers: int | Executor | None = None,
        clock: StartClock | None = None,
    ) -> None:
        self._start = clock or StartClock()
        self.world, self._workers = world or World(torch.device("cpu")), workers
        self.config, self.pair, self.dataset = config.on(self.world.device), pair, dataset
        by_name = validation if isinstance(validation, Mapping) else {} if validation is None else {"": validation}
        self.validation = {name if number else "": data for number, (name, data) in enumerate(by_name.items())}
        for data in self.validation.values():
            if tuple(data.sides) != tuple(dataset.sides):
                raise ValueError(
                    f"validation must have the sides of the training data, {' and '.join(dataset.sides)}, "
                    f"got {' and '.join(data.sides)}"
                )
        self._task = RetrievalTask(config.retrieval, "retrieval.") if config.retrieval.corpus else None
        if config.evaluate_every and not self.validation and self._task is None:
            raise ValueError(
                "evaluate_every must be 0 without validation data (--validation) and without retrieval.corpus, got "
                f"{config.evaluate_every}"
            )
        check_best(config, dataset.sides, list(self.validation), corpus=self._task is not None)
        self._encoded = [side for side in (0, 1) if not config.keep_frozen or config.freeze != SIDES[side]]
        self._negatives = add_negatives(config.loss, dataset, self._encoded)
        self._miner = BatchMiner(config, dataset, folder, self.world)
        self.stages = plan_stages(config, self._miner.order_of, pair)
        for stage in self.stages:
            if stage.config.batch_size < self.world.size:
                raise ValueError(
                    f"batch_size must be at least 1 for each of {self.world.size} ranks, got {stage.config.batch_size}"
                )
        self.order = self.stages[0].order
        self.steps = self.stages[-1].stop
        self.run = Run(folder, config, command, self.steps)
        self._observers = Observers(observers if self.world.rank == 0 else ())
        self._unreadable = UnreadableSamples(dataset, self.order.batches_per_epoch * self.order.batch_size)
        self._missing_negatives = MissingNegatives(self.steps)
        samples = [partial(self._samples, stage) for stage in self.stages]
        self._trained = build(self.config, pair, samples, self._encoded, self.world)
        self.objective, self.optimizer, self.average = self._trained.objective, self._trained.optimizer, self._trained.average
        self._storage = Storage(self.run, self.config, self._trained, dataset, self._observers, self.world)
        self._fit: Fit | None = None
        self._stored: dict[int, StoredEmbeddings] | None = None
        self._resident: Resident | None = None
        self.evaluated: Evaluated | None = None  # embeddings of the first validation data by the saved weights, on rank 0
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._health = Health(
            batch_size=min(stage.config.batch_size for stage in self.stages),
            max_scale=config.loss.max_scale,
            warm_up=config.schedule.warm_up(self.stages[0].schedule[1]),
            highest_rate=max(stage.rate for stage in self.stages),
        )
        self._start.end_phase("optimizer")

    @property
    def step(self) -> int:
        """The number of steps that the run has completed."""
        return self.run.step

    def describe(self) -> dict[str, str]:
        """Returns the rows of the header of a run: model, data, device, batch and learning rate."""
        config, schedule, batches = self.config, self.config.schedule, self.order.batches_per_epoch
        sizes = [f"{len(data):,}{f' of {name}' if name else ''}" for name, data in self.validation.items()]
        validation = f"{' and '.join(sizes) or 'none'} {'held out' if config.holdout else 'to evaluate on'}"
        columns = f" (columns {', '.join(self.dataset.columns.all)})" if isinstance(self.dataset, Table) else ""
        rate = self.stages[0].rate
        decays = {"constant": "constant", "cosine": "a cosine to {}", "wsd": "constant, then linear to {}"}
        decay = decays[schedule.name].format(f"{schedule.end * rate:.2g}")
        size = "" if config.chunk_size == "auto" else f" in chunks of {config.chunk_size:,}"
        rows = {
            "model": f"{sanitize(config.model)}: {self.pair.describe_parameters()}",
            "data": f"{len(self.dataset):,} pairs of {sanitize(config.data)}{columns}, {validation}; an epoch has "
            f"{batches * self.order.batch_size:,} samples in {batches:,} {'batch' if batches == 1 else 'batches'}",
            "device": f"{describe_device(self.world)}, {config.precision}{', compiled' if self._trained.compiled else ''}",
        }
        if config.stage:
            rows["loss"] = f"{config.loss.name}{size}"
            return rows | {f"stage {number}": stage.describe() for number, stage in enumerate(self.stages, 1)}
        return rows | {
            "batch": f"{config.batch_size:,} pairs{size}, loss {config.loss.name}",
            "learning rate": f"up to {rate:.2g} after {schedule.warm_up(self.steps):,} of {self.steps:,} steps, then {decay}",
        }

    def resume(self, checkpoint: Path | None = None) -> bool:
        """Resumes from a checkpoint, or from the newest intact checkpoint in the folder of the run.

        Args:
            checkpoint: the folder of a checkpoint, which must be intact (default: the newest intact checkpoint of the run).

        Returns:
            Whether there was a checkpoint.
        """
        resumed = self._storage.resume(checkpoint)
        if resumed is None:
            return False
        if self.steps < self.step:
            raise ValueError(
                f"steps must be at least {self.step:,}, because the checkpoint was saved after so many steps, got "
                f"{self.steps:,} (--steps, --epochs)"
            )
        self._fit = resumed.fit
        self._miner.restore(self.stages, self.step, checkpoint)
        self._health.restore(self.run.health)
        for problem in self._health.problems if self.world.rank == 0 else ():
            LOG.warning("the run had this problem when it was saved: %s", problem)
        if not resumed.generators:
            self._seed(self.step)
        return True

    def fit(self) -> dict[str, float] | None:
        """Trains to the last step, saves the model and evaluates it.

        Returns:
            The metrics of the last evaluation, or None without validation data.

        Raises:
            StoppedError: after Ctrl-C or SIGTERM. A checkpoint is saved first.
            TrainingFailedError: if the model learned nothing, unless `collapse` is "warn". The state is saved first.
            CheckpointError: if the last checkpoint or the model could not be written. `describe_saved` returns what is on disk.
            LockedError: if another process or thread writes to the folder of the run.
        """
        problem = None
        with ExitStack() as lock:
            if self.world.rank == 0:
                try:
                    lock.enter_context(run.lock_folder(self.run.folder))
                except run.LockedError as error:
                    problem = str(error)
            if problem := self.world.from_first(problem):
                raise run.LockedError(problem)
            return self._run_to_the_end()

    def _run_to_the_end(self) -> dict[str, float] | None:
        self.run.first_step = self.step
        self._storage.open()
        if self.step == 0:
            self._miner.start()
        self._observers.start(self.run)
        self._start.end_phase("folder")
        try:
            tf32 = allow_tf32(self.config.precision, self.world.device)
            compiler = compiler_settings() if self._trained.compiled else nullcontext()
            with record_signals(end_at_second=self.world.size == 1) as stop, self._open_workers() as workers, tf32, compiler:
                checkpoint_error = None
                try:
                    for stage in self.stages:
                        if self.step < stage.stop or stage is self.stages[-1]:
                            self._train(stage, workers, stop)
                except CheckpointError as error:
                    if not self._storage.weights_saved or stop.number:
                        raise
                    checkpoint_error = error  # the weights are saved, so they are evaluated before the error is raised
                if not self._storage.weights_saved:  # the run resumed after its last step
                    self._storage.save_weights()
                result = self._evaluate(workers) if self.validation or self._task is not None else None
                if checkpoint_error is not None:
                    raise checkpoint_error
                if self.config.collapse == "stop" and (failure := self._health.final_failure(self.step)):
                    raise TrainingFailedError(
                        f"the run has ended, but its model is of no use: {failure}. {self.describe_saved()}"
                    )
        finally:
            self._observers.finish(self.run)
            self._unreadable.log_total()
            if self.world.rank == 0:
                self._missing_negatives.log_total()
        if result is not None and self.world.rank == 0:
            self._storage.log_best(result, self._recent_loss())
        return result

    def _make_reader(self, stage: Stage, workers: int | Executor) -> BatchReader:
        dataset = self._load_resident(workers)  # before chunks and graphs, which share the remaining memory
        return BatchReader(self.config, dataset, stage.towers(self.pair), self._encoded, self.world, workers)

    def _make_step(self, stage: Stage, reader: BatchReader) -> Step:
        """Chooses chunk sizes, computes the embeddings of a teacher and a frozen side, and returns the training step."""
        if self._fit is None:
            self._fit = self._choose_fit(stage, self.config.memory)
            if self.config.chunk_size == "auto" and self.world.rank == 0:
                by_tower = zip(self._fit.chunk_sizes, self.pair.towers, strict=True)
                chunks = " and ".join(dict.fromkeys(f"{size:,} {tower.plural}" for size, tower in by_tower))
                before = ", measured before on this GPU" if self._fit.is_reused else ""
                LOG.info("%s", format_row("chunk size", f"{chunks}{before}"))
            self._start.end_phase("chunk_size")
        if self._stored is None:
            self._stored = self._embed_once(reader.workers, self._fit)
            self._start.end_phase("stored_embeddings")
        measure = partial(self._choose_fit, stage, replace(self.config.memory, reuse=False))
        return Step(self.config, self._trained, reader, self._stored, self.world, self._fit, stage, measure)

    def _choose_fit(self, stage: Stage, memory: MemoryConfig) -> Fit:
        config, modules, share = self.config, self.pair.modules, -(-stage.config.batch_size // self.world.size)
        names = ("precision", "compile", "parallel", "model", "model_options", "lora")
        about = {name: getattr(config, name) for name in names} | {"stage": (stage.image_size, stage.patch_dropout)}
        with without_compiler(modules), autocast(config.precision, self.world.device):
            return choose_fit(memory, config.chunk_size, modules, partial(self._longest, stage), share, self.world, about)

    def _embed_once(self, workers: int | Executor, fit: Fit) -> dict[int, StoredEmbeddings]:
        """Computes the embeddings of a teacher and of a frozen side. Returns the embeddings of the frozen side by its index."""
        loss, embeddings = self.config.loss, None
        if spec := loss.teacher or loss.guide:
            folder, chunk_size = self.run.folder / TEACHER, min(fit.chunk_sizes)
            # A teacher is built with random weights first. This must not change the generators that `resume` has restored.
            with second_pass.preserve_generators([self.world.device]), autocast(self.config.precision, self.world.device):
                embeddings, self.objective.teacher_scale = embed_by_teacher(
                    spec, self.dataset, folder, self.world, chunk_size=chunk_size, workers=workers
                )
        self.objective.inputs_of = make_input_reader(loss, self.dataset, self._negatives, embeddings)
        return self._embed_frozen_side(workers, fit)

    def _load_resident(self, workers: int | Executor) -> Dataset:
        """Returns the dataset that the steps read. Moves it to the device if `memory.resident` is set."""
        share = self.config.memory.resident
        if not share or isinstance(self.dataset, Resident):
            return self._negatives or self.dataset
        if self._negatives is not None:
            raise ValueError(f"memory.resident must be 0 with hard negatives, got {share}")
        limit, device = share * free_memory(self.world.device), self.world.device
        options: dict[str, Any] = {"sides": self._encoded, "augment": self.config.augment, "workers": workers}
        if self._resident is None:
            self._resident = Resident(self.dataset, self.pair.towers, device, limit=limit, **options)
        return self._resident

    def _compile(self, stage: Stage, fit: Fit) -> None:
        """Compiles the towers for the chunks of the stage if compilation is on."""
        if self._trained.compiled and self.step < self.steps:
            if self.step > self.run.first_step:
                torch.compiler.reset()  # towers would be compiled for any size, because the previous stage had other sizes
            samples = partial(self._samples, stage)
            chunks = [repeat_inputs(samples(side, SAMPLES_REPEATED), size) for side, size in enumerate(fit.chunk_sizes)]
            with autocast(self.config.precision, self.world.device):
                warm_up(self.pair.modules, chunks, self.world)

    def _embed_frozen_side(self, workers: int | Executor, fit: Fit) -> dict[int, StoredEmbeddings]:
        """Returns {side: embeddings} for the frozen side, or an empty dictionary if they are not computed in advance."""
        if self.config.freeze == "none" or not self.config.keep_frozen:
            return {}
        side = SIDES.index(self.config.freeze)
        if self.config.augment and self.world.rank == 0:
            LOG.info("the frozen side is not augmented, because its embeddings are computed once (keep_frozen)")
        with gather_parameters(self.pair.modules), autocast(self.config.precision, self.world.device):
            embeddings = StoredEmbeddings(
                self.run.folder / FROZEN,
                self.dataset,
                side,
                self.pair,
                chunk_size=fit.chunk_sizes[side],
                workers=workers,
                world=self.world,
            )
        return {side: embeddings}

    def _train(self, stage: Stage, workers: int | Executor, stop: StopSignal) -> None:
        if self.step == 0:
            self._seed(0)
        elif self.step == stage.first:
            self._fit = None  # the chunk sizes of the previous stage
        reader = self._make_reader(stage, workers)
        batches = map(reader.prepare, self._mine(stage, workers).batches(self.step))
        next_inputs = next(batches, None)  # workers read the first batch while chunk sizes are chosen and towers are compiled
        try:
            step = self._make_step(stage, reader)
            self._compile(stage, step.fit)
            self._start.end_phase("compilation")
            clock = Clock(self.world.device)
            with clock.activate():
                while next_inputs is not None:
                    due = self._miner.is_due(next_inputs.batch.number + 1)  # this step decides what is in the next batch
                    # Workers read the next batch during this step.
                    inputs, next_inputs = next_inputs, None if due else next(batches, None)
                    try:
                        self._train_step(stage, step, inputs, stop, clock)
                    finally:
                        inputs.stop()
                    del inputs
                    if due and self.step < stage.stop:
                        batches = map(reader.prepare, self._mine(stage, workers).batches(self.step))
                        next_inputs = next(batches, None)
        except Exception as error:
            # The checkpoint that is being written is still valid. Only all ranks together can complete it, and only the error
            # below is raised on all ranks.
            if self.world.size == 1 or isinstance(error, FloatingPointError):
                self._storage.complete_pending(wait=True)
            raise
        finally:
            if next_inputs is not None:
                next_inputs.stop()

    def _mine(self, stage: Stage, workers: int | Executor) -> Stage:
        """Mines new groups if they are due before the next step. Returns the stage with its new order."""
        if self.step < self.steps and self._miner.is_due(self.step):
            gathered = gather_parameters(self.pair.modules)
            with phase("mining"), gathered, autocast(self.config.precision, self.world.device):
                chunk_size = 256 if self._fit is None else min(256, *self._fit.chunk_sizes)
                self._miner.mine(self.stages, self.step, self.pair, chunk_size=chunk_size, workers=workers)
        return next(one for one in self.stages if one.first == stage.first)

    def _train_step(self, stage: Stage, step: Step, inputs: StepInputs, stop: StopSignal, clock: Clock) -> None:
        """Makes one step and records it. Then writes a checkpoint and evaluates the model if they are due."""
        start = time.perf_counter()
        batch = inputs.batch
        rate = stage.learning_rate(batch.number)
        try:
            with self.world.explain_errors(lambda: f"in step {batch.number + 1} of {self.steps}; {self.describe_saved()}"):
                outcome = step(inputs, rate)
        except NotFiniteError as error:
            self._observers.step({"step": batch.number + 1, "epoch": batch.epoch, "loss": math.nan, "problem": str(error)})
            self._storage.save_before_failure(step.fit)
            raise NotFiniteError(f"{error}. {self.describe_saved()}") from error
        self.run.step = batch.number + 1
        self._fit = step.fit
        if self.average is not None:
            with phase("optimizer"):
                self.average.update(self.step)
        self._unreadable.check(self.step, stage.config.batch_size, outcome.pairs, self.world)
        stop_number, is_overdue, is_recent = map(int, self.world.max([stop.number, *self._storage.check_clock()]))
        self._record(outcome, batch.epoch, rate, start, clock, self._trained.utilizations[self.stages.index(stage)])
        self._unreadable.log_new()
        failure = None
        if self.config.collapse == "stop":
            failure = self._health.failure() or self._missing_negatives.failure()
        with phase("checkpoint"):
            stopping = bool(stop_number or failure)
            self._storage.after_step(step.fit, now=bool(is_overdue), skip=bool(is_recent), stopping=stopping)
        if stop_number:
            raise self._describe_stop(stop_number)
        if failure:
            raise TrainingFailedError(
                f"the run ends after step {self.step} of {self.steps}, because of this problem: {failure}. "
                f"{self.describe_saved()}. To continue in spite of the problem, use --set collapse=warn"
            )
        every = self.config.evaluate_every
        if every and self.step % every == 0 and self.step < self.steps:
            with phase("evaluation"):  # the last evaluation follows after the loop
                self._evaluate(step.reader.workers)

    def _record(self, outcome: Outcome, epoch: int, rate: float, start: float, clock: Clock, utilization: Utilization) -> None:
        numbers = self.objective.numbers()  # waits for the device
        seconds = time.perf_counter() - start
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
            **utilization.numbers(outcome.pairs, seconds),
            "memory_bytes": peak_bytes(self.world.device),
            "seconds": self.run.seconds,
            "phases": clock.lap(),
        }
        problems = self._missing_negatives.add(self.step, outcome.without_negatives, outcome.pairs)
        if not outcome.is_skipped:
            record |= {"spread": outcome.statistics.spread, "advantage": numbers["scale"] * outcome.statistics.advantage}
            summary = StepSummary(outcome.loss, outcome.gradient_norm, numbers["scale"], outcome.statistics)
            problems += self._health.check(self.step, summary)
            self._losses.append(outcome.loss)
        if self.step == self.steps:
            problems += self._health.conclude()
        self.run.health = self._health.state()
        for problem in problems if self.world.rank == 0 else ():
            LOG.warning("%s", problem)
        record |= {"problem": "; ".join(problems)} if problems else {}
        if self.step == self.run.first_step + 1:
            self._start.end_phase("first_step")
            record["start"] = self._start.seconds
            if self.world.rank == 0:
                LOG.info("%s", format_row("start", self._start.describe()))
        self._observers.step(record)

    def _recent_loss(self) -> float | None:
        """Returns the mean loss of the last steps, or None before the first step."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def _evaluate(self, workers: int | Executor) -> dict[str, float]:
        result: dict[str, float] = {}
        gathered = gather_parameters(self.pair.modules)
        with self._trained.use_average(), gathered, autocast(self.config.precision, self.world.device):
            # A chunk that fits with a graph fits without one.
            chunk_size = 256 if self._fit is None else min(256, *self._fit.chunk_sizes)
            scale = self.objective.numbers()["scale"]
            for name, dataset in self.validation.items():
                keep = self._keep_evaluated if self.step == self.steps and not name else None
                metrics = evaluate(
                    self.pair, dataset, scale=scale, chunk_size=chunk_size, workers=workers, group=self.world.group, keep=keep
                )
                result |= {f"{name}/{key}" if name else key: value for key, value in metrics.items()}
            if self._task is not None:
                with (
                    ThreadPoolExecutor(count) if (count := reader_count(self.config, self.world)) else nullcontext(0) as threads
                ):
                    metrics = evaluate_corpus(
                        self.pair, self._task, chunk_size=chunk_size, workers=threads, group=self.world.group
                    )
                result |= {f"corpus/{key}": value for key, value in metrics.items()}
        self._observers.on_evaluation({"step": self.step, "evaluation": result})
        if self.config.evaluate_every and self.config.checkpoint.best != "none":
            self._storage.save_best(result, self._recent_loss())
        return result

    def _keep_evaluated(self, evaluated: Evaluated) -> None:
        if self.world.rank == 0:
            self.evaluated = evaluated

    def describe_saved(self) -> str:
        """Returns a sentence about the weights and the checkpoint on disk, for a message after a failure."""
        return self._storage.describe_saved()

    def _describe_stop(self, number: int) -> StoppedError:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        message = (
            f"stopped by {name} after step {self.step} of {self.steps}. A checkpoint is saved. Continue with "
            f"megabatch train --resume {self.run.folder}"
        )
        return StoppedError(message, number)

    def _longest(self, stage: Stage, side: int, count: int) -> Any:
        """Returns the inputs that determine the chunk size: the longest samples if the tower measures lengths."""
        tower = stage.towers(self.pair)[side]
        if tower.measure is None or count == 1:
            return self._samples(stage, side, count)
        lengths = self.dataset.source(range(min(MEASURED, len(self.dataset))), side, tower).lengths
        assert lengths is not None, "the tower measures lengths"
        return self._samples(stage, side, count, lengths.argsort(descending=True, stable=True)[:count].tolist())

    def _samples(self, stage: Stage, side: int, count: int, chosen: Sequence[int] | None = None) -> Any:
        """Returns the inputs of samples of one side (default: the first ones), as the steps of the stage have them."""
        indices = range(min(count, len(self.dataset))) if chosen is None else chosen
        tower = stage.towers(self.pair)[side]
        source = self.dataset.source(indices, side, tower, augment=tower is not self.pair.towers[side])
        source = drop_patches(source, tower.patches, stage.patch_dropout, indices, seed=0, epoch=0, side=side)
        return next(iter(source.chunks([(0, len(indices))], None)))

    def _seed(self, step: int) -> None:
        seed = sample_seed(sample_seed(self.config.seed, step), self.world.rank)
        second_pass.seed_host(seed)
        if self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).manual_seed(seed)

    def _open_workers(self) -> AbstractContextManager[int | Executor]:
        if self._workers is not None:
            return nullcontext(self._workers)
        return open_workers(self.config, self.pair, [self.dataset, *self.validation.values()], self.world)
