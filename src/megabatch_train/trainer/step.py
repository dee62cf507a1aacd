"""One training step: forward and backward pass, averages over ranks, clipping and the optimizer. Also chooses chunk sizes."""

import gc
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import file_io
from megabatch.cached import HostSource, ReplaySource, Source, second_pass
from megabatch.cached.second_pass import COPIES_OF_EMBEDDINGS
from megabatch.cached.step import cached_backward
from megabatch.cached.streaming import DATA, close_at_the_end, count_rows, map_rows, phase
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World, available_memory, free_memory, is_sharded, local
from megabatch_train.data import paths
from megabatch_train.data.dataset import TEXT, Dataset
from megabatch_train.data.loader import Batch
from megabatch_train.machine import VERSIONS_OF, describe_device, ran_out_of_memory, version
from megabatch_train.towers.tokens import drop_patches
from megabatch_train.towers.tower import Tower, forward_backward, set_checkpointing, use_evaluation_mode
from megabatch_train.trainer.build import RATE_SCALE, Trained, autocast
from megabatch_train.trainer.config import MemoryConfig, TrainConfig
from megabatch_train.trainer.health import PairStatistics, average_statistics
from megabatch_train.trainer.loss import ReadablePairs, StoredEmbeddings
from megabatch_train.trainer.stages import Stage

# ----------------------------------------------------------------------------------------------------------------------
# Memory of a step: the chunk size of each tower, activation checkpointing, and the memory budget for kept graphs.
#
# The chunk size doubles while the next size certainly fits in a fraction of the free memory (`memory.chunk`). This fraction is
# small, because a chunk only needs to keep the device busy. The rest of the memory is better spent on kept graphs, which save
# second forward passes. If memory runs out in training, chunk size and budget are halved and the step is repeated. Checkpoints
# store both, because another chunk size rounds differently, and a resumed run should be bitwise identical.
#
# Activation checkpointing costs one more forward pass, but allows larger chunks and more kept graphs. If chunks without it are
# too small to keep the device busy, the trainer measures whether activation checkpointing is faster.

LOG = logging.getLogger("megabatch")
ON_CPU = 256  # chunk size on a CPU. It is large enough for two cores (docs/log.md, "Emoji"), and needs little memory
FIRST_TRIED = 32  # first chunk size that is measured on CUDA
OPTIMIZER_COPIES = 3  # copies of the parameters that the first step allocates: gradients and two moments


@dataclass(frozen=True)
class Fit:
    """Chunk sizes, memory for graphs, and whether activation checkpointing is on."""

    chunk_sizes: tuple[int, ...]  # one for each side
    graph_bytes: int
    checkpointing: bool = False
    is_reused: bool = False  # whether an earlier run measured the chunk sizes

    def halve(self) -> "Fit":
        """Returns a fit with half of the chunk sizes and half of the memory for graphs."""
        return replace(
            self, chunk_sizes=tuple(max(1, size // 2) for size in self.chunk_sizes), graph_bytes=self.graph_bytes // 2
        )


# Chunk sizes that were measured are stored in the cache folder, one file for each combination of model, inputs, settings,
# GPU and versions. The sizes depend on the free memory, too, so a file is valid only for a similar amount of free memory.

CACHE = "chunk_sizes"  # folder in the cache folder
SIMILAR = 0.1  # largest relative difference of two similar amounts of free memory


def locate_sizes(about: Mapping[str, Any], modules: Sequence[nn.Module], inputs: Sequence[Any], world: World) -> Path:
    """Returns the file with the chunk sizes of these towers, for inputs of these shapes, on the devices of these ranks."""
    shapes: list[Any] = []

    def add(tensor: Tensor) -> Tensor:
        shapes.append((tensor.dtype, tensor.shape[1:]))
        return tensor

    for side in inputs:
        map_rows(add, side)
    weights = [[(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()] for module in modules]
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(list(modules)))  # without the addresses of functions
    key = repr([dict(about), layers, weights, shapes, describe_device(world), [version(name) for name in VERSIONS_OF]])
    return paths.folder() / CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def reuse_or_measure(
    path: Path, budget: float, measure: Callable[[], tuple[list[int], bool]], world: World, *, reuse: bool
) -> tuple[list[int], bool, bool]:
    """Returns chunk sizes, whether to use activation checkpointing, and whether an earlier run measured both.

    The result of `measure` is written to the file. The budget is the number of bytes that a chunk may use.
    """
    found = world.from_first(_read_sizes(path, budget) if reuse and world.rank == 0 else None)
    if found is not None:
        return *found, True
    sizes, checkpointing = measure()
    if world.rank == 0:
        text = json.dumps({"chunk_sizes": sizes, "checkpointing": checkpointing, "budget": budget})
        with suppress(OSError):  # the next run measures again
            file_io.write(path, lambda file: file.write(text.encode()), durable=False)
    return sizes, checkpointing, False


def _read_sizes(path: Path, budget: float) -> tuple[list[int], bool] | None:
    """Returns chunk sizes and activation checkpointing, or None if the file is missing, damaged or for another budget."""
    try:
        entry = json.loads(path.read_text("utf-8"))
        sizes, checkpointing, before = entry["chunk_sizes"], entry["checkpointing"], entry["budget"]
        is_valid = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes) and type(checkpointing) is bool
        return (sizes, checkpointing) if is_valid and abs(budget - before) <= SIMILAR * before else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose_fit(
    config: MemoryConfig,
    chunk_size: int | str,
    modules: Sequence[nn.Module],
    samples: Callable[[int, int], Any],
    pairs: int,
    world: World,
    about: Mapping[str, Any] | None = None,
) -> Fit:
    """Chooses chunk sizes, memory for graphs and activation checkpointing. The result is the same on all ranks.

    Turns activation checkpointing of the modules on or off accordingly.

    Args:
        config: the fractions of the free memory.
        chunk_size: a number, or "auto".
        modules: the modules of the two sides.
        samples: a function that takes a side and a number, and returns the inputs of that many samples.
        pairs: the number of pairs of a batch on this rank.
        world: the ranks.
        about: settings of the towers that change the memory of a chunk. If given, measured chunk sizes are stored and reused.
    """
    free = free_memory(world.device) // (world.local_size if world.device.type == "cpu" else 1)
    free -= _count_later_bytes(modules, samples, pairs, world.device)
    graphs = max(0.0, config.graphs * free)
    checkpointing, is_reused = config.checkpointing == "on", False
    set_checkpointing(modules, checkpointing)
    if isinstance(chunk_size, int):
        sizes = [chunk_size] * len(modules)
    elif world.device.type == "cuda":
        inputs = [samples(side, min(pairs, FIRST_TRIED)) for side in range(len(modules))]
        budget = int(world.min([config.chunk * free])[0])

        def measure() -> tuple[list[int], bool]:
            trials = [_Trial(module, inputs[side], world) for side, module in enumerate(modules)]
            if config.checkpointing == "auto":
                return _choose_checkpointing(trials, modules, pairs, budget, graphs)
            return [largest_chunk(pairs, trial, budget) for trial in trials], checkpointing

        with second_pass.preserve_generators([world.device]):
            if about is None:
                sizes, checkpointing = measure()
            else:
                path = locate_sizes({**about, "memory": replace(config, reuse=True), "pairs": pairs}, modules, inputs, world)
                sizes, checkpointing, is_reused = reuse_or_measure(path, budget, measure, world, reuse=config.reuse)
        set_checkpointing(modules, checkpointing)
    else:
        sizes = [ON_CPU] * len(modules)
    sizes = [max(1, min(size, pairs)) for size in sizes]
    minima = world.min([*sizes, graphs])
    return Fit(tuple(int(size) for size in minima[:-1]), int(minima[-1]), checkpointing, is_reused)


def _count_later_bytes(
    modules: Sequence[nn.Module], samples: Callable[[int, int], Any], pairs: int, device: torch.device
) -> int:
    """Returns the bytes that training allocates later for gradients, moments and embeddings."""
    parameters = {id(p): local(p) for module in modules for p in module.parameters() if p.requires_grad}
    parameter_bytes = sum(p.numel() * p.element_size() for p in parameters.values())
    dims = 0
    for side, module in enumerate(modules):
        with torch.no_grad(), use_evaluation_mode(module):
            dims += as_encoded(call(module, map_rows(lambda t: t.to(device), samples(side, 1))), "a tower").embeddings.shape[1]
    return OPTIMIZER_COPIES * parameter_bytes + COPIES_OF_EMBEDDINGS * pairs * dims * 4


def _choose_checkpointing(
    trials: "Sequence[_Trial]", modules: Sequence[nn.Module], pairs: int, budget: int, graphs: float
) -> tuple[list[int], bool]:
    """Returns chunk sizes, and whether to use activation checkpointing.

    Measures which choice is faster, each with the largest chunks that fit. Chunks of `FIRST_TRIED` samples keep the device
    busy. If they fit without checkpointing, nothing is measured.
    """
    results: dict[bool, tuple[float, list[int]]] = {}  # seconds per pair and chunk sizes, without and with checkpointing
    for checkpointing in (False, True):
        set_checkpointing(modules, checkpointing)
        try:
            sizes = [largest_chunk(pairs, trial, budget) for trial in trials]
        except MemoryError:  # not even one sample fits
            if checkpointing and not results:
                raise
            continue
        if not checkpointing and min(sizes) >= min(FIRST_TRIED, pairs):
            return sizes, False
        paces = [trial.pace(size) for trial, size in zip(trials, sizes, strict=True)]
        results[checkpointing] = pair_seconds(paces, pairs, graphs), sizes
    checkpointing = min(results, key=lambda choice: results[choice][0])
    return results[checkpointing][1], checkpointing


def largest_chunk(limit: int, peak: Callable[[int], int | None], budget: int) -> int:
    """Returns the largest chunk size that fits. Doubles the size while the next size fits, and halves it if memory runs out.

    Args:
        limit: the upper bound of the chunk size.
        peak: a function from a chunk size to the peak bytes of a chunk, or None if memory runs out. The result must be the same
            on all ranks.
        budget: the number of bytes that a chunk may use.
    """
    size = min(FIRST_TRIED, limit)
    while True:
        peak_bytes = peak(size)
        if peak_bytes is None:
            if size == 1:
                raise MemoryError(
                    "a chunk of one sample must fit in the memory of the device, but memory ran out. Use a smaller model or "
                    "smaller inputs, or a device with more memory"
                )
            size //= 2
            limit = size  # larger sizes have failed
        elif size >= limit or 2 * peak_bytes > budget:  # twice the samples need at most twice the bytes
            return size
        else:
            size = min(2 * size, limit)


@dataclass(frozen=True)
class Pace:
    """Seconds and bytes per sample of one tower, for chunks of one size."""

    forward: float  # seconds of a forward pass without a graph
    both: float  # seconds of a forward and backward pass, including activations that are computed again
    graph_bytes: float  # bytes of the graph that is kept between the two passes


def pair_seconds(paces: Sequence[Pace], pairs: int, graph_bytes: float) -> float:
    """Returns the seconds per pair of a step with gradient caching. Chunks with a kept graph need one forward pass less."""
    all_graphs = pairs * sum(pace.graph_bytes for pace in paces)
    share = 1 - min(1.0, graph_bytes / all_graphs) if all_graphs else 0.0  # share of the chunks that are encoded twice
    return sum(pace.both + share * pace.forward for pace in paces)


class _Trial:
    """Measures the peak memory and the pace of a forward and backward pass of a tower on CUDA."""

    def __init__(self, module: nn.Module, inputs: Any, world: World) -> None:
        self._module, self._world = module, world
        self._inputs = map_rows(lambda tensor: tensor.to(world.device), inputs)

    def __call__(self, size: int) -> int | None:
        device, peak_bytes = self._world.device, math.inf
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            forward_backward(self._module, repeat_inputs(self._inputs, size))
            peak_bytes = torch.cuda.max_memory_allocated(device) - before
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        self._module.zero_grad(set_to_none=True)
        peak_bytes = self._world.max([peak_bytes])[0]
        return None if math.isinf(peak_bytes) else int(peak_bytes)

    def pace(self, size: int) -> Pace:
        """Returns the seconds and bytes per sample for chunks of a size that fits. Each value is the maximum over ranks."""
        device, inputs = self._world.device, repeat_inputs(self._inputs, size)
        for _ in range(2):  # the first round allocates memory and chooses kernels
            with torch.no_grad():
                forward = _measure_seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()  # the cache has casts without a graph, which the next pass cannot use
            before = torch.cuda.memory_allocated(device)
            output = as_encoded(call(self._module, inputs), type(self._module).__name__).embeddings
            graph = float(torch.cuda.memory_allocated(device) - before)
            del output
            both = _measure_seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()
            self._module.zero_grad(set_to_none=True)
        return Pace(*self._world.max([forward / size, both / size, graph / size]))


def _measure_seconds(work: Callable[[], None], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def repeat_inputs(inputs: Any, size: int) -> Any:
    """Returns inputs of `size` samples, which repeat the given samples."""
    times = -(-size // count_rows(inputs, "inputs"))
    return map_rows(lambda tensor: torch.cat([tensor] * times)[:size], inputs)


# ----------------------------------------------------------------------------------------------------------------------
# Work between the backward pass and the optimizer: averages of gradients and statistics over ranks, and the gradient norm.


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Averages the gradients of parameters outside of DDP and FSDP2 over ranks. These are the scale and bias of the loss."""
    if world.group is None:
        return
    for parameter in parameters:
        if parameter.grad is None:  # the share of another rank may depend on the parameter
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=world.group)
        parameter.grad /= world.size


@torch.no_grad()
def average_batch_statistics(statistics: Sequence[Tensor], world: World) -> None:
    """Averages running statistics over ranks in one message, because each rank has updated them with its own pairs."""
    if world.group is None or not statistics:
        return
    flat = torch.cat([statistic.flatten() for statistic in statistics])
    dist.all_reduce(flat, group=world.group)
    flat /= world.size
    means = torch.split(flat, [statistic.numel() for statistic in statistics])
    for statistic, mean in zip(statistics, means, strict=True):
        statistic.copy_(mean.view_as(statistic))


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:  # ()
    """Returns the gradient norm over all parameters, which is the same on all ranks.

    The norms of sharded gradients are not reduced by DTensor, because FSDP2 may keep gradients on the host, where NCCL cannot
    reduce them.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    replicated_norm = _compute_norm([gradient for gradient in gradients if not is_sharded(gradient)], world.device)
    sharded = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    if not sharded:
        return replicated_norm
    squares = _compute_norm(sharded, world.device).square()
    dist.all_reduce(squares, group=world.group)
    return (replicated_norm.square() + squares).sqrt()


def _compute_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:  # ()
    """Returns the norm of all tensors as one vector, with few kernel launches.

    The result is on `device`. The tensors can be on the host, where FSDP2 may keep gradients.
    """
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors if tensor.numel()]
    return nn.utils.get_total_norm(wide).to(device)


# ----------------------------------------------------------------------------------------------------------------------
# One training step: gradient caching over this rank's pairs, averages over ranks, clipping, and the optimizer.


class StepInputs(NamedTuple):
    """The inputs of a batch, which data-loader workers read before its step."""

    batch: Batch
    sources: dict[int, Source]  # by the index of the side
    tokens: dict[int, Callable[[], Source]]  # functions that wait for the tokens of a side with texts

    def stop(self) -> None:
        """Stops reading the batch and frees the samples that were read. Can be called before the step of the batch, too."""
        for source in self.sources.values():
            if isinstance(source, ReplaySource):
                source.stop()


class Outcome(NamedTuple):
    """The result of a step, which is the same on all ranks."""

    loss: float  # NaN if the step is skipped
    gradient_norm: float  # before clipping; NaN before the optimizer step
    pairs: int  # number of readable pairs
    without_negatives: int = 0  # number of readable pairs without a negative in the batch
    statistics: PairStatistics = PairStatistics()  # statistics of the embeddings

    @property
    def is_skipped(self) -> bool:
        """Whether the step changes nothing, because no pair of the batch could be read and has a negative."""
        return self.without_negatives == self.pairs


@dataclass(frozen=True)
class BatchReader:
    """Reads the batches of a stage.

    Args:
        config: the settings of the run.
        dataset: the dataset of the pairs.
        towers: the towers of the stage.
        sides: the sides that are encoded in each step.
        world: the ranks.
        workers: the data-loader workers, as in `ReplaySource`.
    """

    config: TrainConfig
    dataset: Dataset
    towers: Sequence[Tower]
    sides: Sequence[int]
    world: World
    workers: int | Executor = 0

    @cached_property
    def _hold(self) -> int:
        """The host memory for the samples of a side of one batch, in bytes. The next batch gets the same amount."""
        images = [side for side in self.sides if self.dataset.sides[side] != TEXT]
        return int(self.config.memory.inputs * (available_memory() or 0) / self.world.local_size / 2) // max(1, len(images))

    def prepare(self, batch: Batch) -> StepInputs:
        """Returns the inputs of a batch. Workers start to read them, so that they are ready when the step begins."""
        sources, tokens = {}, {}
        for side in self.sides:
            source = self.dataset.source(
                batch.indices.tolist(),
                side,
                self.towers[side],
                seed=self.config.seed,
                epoch=batch.epoch,
                augment=self.config.augment,
                workers=self.workers,
                hold=self._hold,
            )
            sources[side] = source
            if not isinstance(source, ReplaySource):
                continue  # the samples are already on the device
            if self.towers[side].measure or (self.dataset.sides[side] != TEXT and self.towers[side].lengths is None):
                source.start()
            else:
                work = partial(self._tokens, source, side)
                tokens[side] = _start_in_thread(work) if isinstance(self.workers, Executor) else work
        return StepInputs(batch, sources, tokens)

    def _tokens(self, source: ReplaySource, side: int) -> Source:
        """Returns the texts of a batch as tokens. All texts are read at once, because a chunk has texts of similar length."""
        chunks = source.chunks([(0, len(source))], None)
        with close_at_the_end(chunks):
            tokens = next(chunks)
        lengths = self.towers[side].lengths
        return HostSource(tokens, lengths=None if lengths is None else lengths(tokens))


@dataclass
class Step:
    """Makes one training step for each batch.

    Args:
        config: the settings of the run.
        trained: the towers, the loss and the optimizer.
        reader: the reader of the batches.
        stored: the embeddings of a frozen side, by the index of the side.
        world: the ranks.
        fit: the chunk sizes and the memory for graphs. They are halved if memory runs out.
        stage: the stage of the run, which determines the image size and the patch dropout.
        measure: a function that measures the chunk sizes, in case memory runs out with chunk sizes of an earlier run.
    """

    config: TrainConfig
    trained: Trained
    reader: BatchReader
    stored: dict[int, StoredEmbeddings]
    world: World
    fit: Fit
    stage: Stage
    measure: Callable[[], Fit]

    def __post_init__(self) -> None:
        """Collects the running statistics."""
        statistics = [second_pass.running_statistics(tower.module) for tower in self.trained.pair.towers]
        self._statistics = list({id(value): value for side in statistics for value in side.values()}.values())

    def __call__(self, inputs: StepInputs, rate: float) -> Outcome:
        """Makes one step with this rank's part of a batch."""
        batch = inputs.batch
        for group in self.trained.optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_SCALE, 1.0)
        sources = [self._source(inputs, side) for side in self.reader.sides]
        outcome = self._retry(lambda: self._backward(batch, sources))
        if outcome.is_skipped:
            if outcome.pairs == 0:
                LOG.warning("step %d changes nothing, because none of its pairs could be read", batch.number + 1)
            self.trained.optimizer.zero_grad()
            return outcome._replace(loss=math.nan, gradient_norm=0.0)
        with phase("optimizer"):
            norm = self._update(outcome.loss, batch.number + 1)
        return outcome._replace(gradient_norm=norm)

    def _source(self, inputs: StepInputs, side: int) -> Source:
        if side not in inputs.tokens:
            batch, patches, seed = inputs.batch, self.reader.towers[side].patches, self.config.seed
            of_sample = {"seed": seed, "epoch": batch.epoch, "side": side}
            return drop_patches(inputs.sources[side], patches, self.stage.patch_dropout, batch.indices.tolist(), **of_sample)
        with phase(DATA):
            return inputs.tokens[side]()

    def _backward(self, batch: Batch, sources: Sequence[Source]) -> Outcome:
        indices = batch.indices.tolist()
        stored = {side: embeddings.rows(batch.indices).to(self.world.device) for side, embeddings in self.stored.items()}
        ids = self.reader.dataset.ids(indices) if self.config.loss.ids else None
        usable = partial(self.reader.dataset.usable, indices)
        loss_fn = ReadablePairs(self.trained.objective, self.world, usable, ids, stored, batch.indices)
        with autocast(self.config.precision, self.world.device):
            share = cached_backward(
                loss_fn,
                [(self.trained.wrapped[side], source) for side, source in zip(self.reader.sides, sources, strict=True)],
                chunk_size=[self.fit.chunk_sizes[side] for side in self.reader.sides],
                budget=self.fit.graph_bytes,
                scaler=self.trained.scaler,
            )
        average_gradients(self.trained.objective.parameters(), self.world)
        average_batch_statistics(self._statistics, self.world)
        loss, *statistics = self.world.sum([share.item(), *loss_fn.statistics.tolist()])
        mean = loss / self.world.size
        return Outcome(mean, math.nan, loss_fn.pairs, loss_fn.without_negatives, average_statistics(statistics))

    def _retry(self, work: Callable[[], Outcome]) -> Outcome:
        """Runs a step. If memory runs out, repeats it with half of the memory.

        With several ranks, this method raises an error instead, because the ranks with enough memory cannot go back.
        """
        while True:
            states = second_pass.capture_generators([self.world.device])
            statistics = [statistic.clone() for statistic in self._statistics]
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.world.size > 1 or (max(self.fit.chunk_sizes) == 1 and not self.fit.graph_bytes):
                    raise MemoryError(
                        f"memory ran out with chunks of {self.fit.chunk_sizes} samples. Continue with a smaller --chunk-size, "
                        f"or a smaller memory.graphs: {error}"
                    ) from error
            # This code is outside of the handler, because the traceback there keeps the tensors of the step alive.
            self.trained.optimizer.zero_grad()
            second_pass.restore_generators(states)
            for statistic, before in zip(self._statistics, statistics, strict=True):
                statistic.copy_(before)  # the chunks before the failure have updated the statistic
            if self.world.device.type != "cpu":
                gc.collect()  # frees tensors in frames of other threads
                torch.get_device_module(self.world.device).empty_cache()
            self.fit = self.measure() if self.fit.is_reused else self.fit.halve()
            LOG.warning("memory ran out, so the step is repeated with chunks of %s samples", self.fit.chunk_sizes)

    def _update(self, loss: float, step: int) -> float:
        optimizer, scaler = self.trained.optimizer, self.trained.scaler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm_tensor = gradient_norm(parameters, self.world)
        norm = norm_tensor.item()
        if scaler is None:  # a scaler skips a step that is not finite
            _check_finite(step, {"loss": loss, "gradient norm": norm})
        if self.config.optimizer.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.config.optimizer.clip_norm, norm_tensor)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.trained.objective.clamp()
        return norm


def _start_in_thread(work: Callable[[], Source]) -> Callable[[], Source]:
    """Starts work in a separate thread. Returns a function that waits for the result."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-texts")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future.result


class NotFiniteError(FloatingPointError):
    """Raised on all ranks if the loss or the gradient norm of a step is not finite. The step has not changed any weight."""


def _check_finite(step: int, numbers: dict[str, float]) -> None:
    """Raises an error before the optimizer step, because NaN would enter the weights and every later checkpoint."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise NotFiniteError(
                f"the {name} of step {step} is {value}. This step has not changed the weights. Try a smaller --lr, a longer "
                "--warmup or --clip-norm"
            )
