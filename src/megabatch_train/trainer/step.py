"""One training step: forward, backward, averaging over ranks, clipping, and the optimizer; embeddings of a frozen side."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.cached import HostSource, ReplaySource, Source, batchnorm, randomness
from megabatch.cached.memory import COPIES_OF_EMBEDDINGS, available_memory, free_memory, is_sharded, local
from megabatch.cached.step import cached_backward
from megabatch.cached.streaming import DATA, close_at_the_end, count_rows, map_rows, phase
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World
from megabatch_train.data.dataset import IMAGE, Dataset
from megabatch_train.data.order import Batch
from megabatch_train.evaluation.embedding import use_evaluation_mode
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.tower import forward_backward, set_checkpointing
from megabatch_train.trainer.build import Trained, autocast
from megabatch_train.trainer.config import MemoryConfig, TrainConfig
from megabatch_train.trainer.health import PairStatistics, average_statistics
from megabatch_train.trainer.loss import KeptEmbeddings, ReadablePairs

# ----------------------------------------------------------------------------------------------------------------------
# Memory of a step: the chunk size of each tower, activation checkpointing, and the memory budget for kept graphs.
#
# The chunk size doubles while the next size surely fits into its fraction of the free memory. This fraction is small, because a
# chunk only needs to keep the device busy. The rest of the memory is better spent on kept graphs, which save second forward
# passes. If memory runs out in training, chunk size and budget are halved and the step is repeated. Checkpoints store both,
# because another chunk size rounds differently, and a resumed run should be bitwise identical.
#
# Activation checkpointing costs one more forward pass, but allows larger chunks and more kept graphs. The trainer measures
# which is faster if chunks without it are too small to keep the device busy.

LOG = logging.getLogger("megabatch")
ON_CPU = 256  # samples: enough for two cores (docs/log.md, "Emoji"), and little memory
FIRST_TRIED = 32  # samples, on CUDA
OPTIMIZER_COPIES = 3  # of the parameters, allocated in the first step: gradients and two moments


@dataclass(frozen=True)
class Fit:
    """Chunk sizes, memory for graphs, and whether activations are computed again."""

    chunk_sizes: tuple[int, ...]  # of each side
    graph_bytes: int
    checkpointing: bool = False

    def halve(self) -> "Fit":
        """Half of both, after a step ran out of memory."""
        return replace(
            self, chunk_sizes=tuple(max(1, size // 2) for size in self.chunk_sizes), graph_bytes=self.graph_bytes // 2
        )


def what_fits(
    config: MemoryConfig,
    chunk_size: int | str,
    modules: Sequence[nn.Module],
    samples: Callable[[int, int], Any],
    pairs: int,
    world: World,
) -> Fit:
    """Chunk sizes for towers, memory for graphs and activation checkpointing, the same on all ranks.

    Checkpointing of the modules is left on or off accordingly.

    Args:
        config: fractions of the free memory.
        chunk_size: a number, or "auto".
        modules: of the two sides.
        samples: (side, count) → inputs of that many samples.
        pairs: of a batch on this rank.
        world: the ranks.
    """
    free = free_memory(world.device) // (1 if world.device.type == "cuda" else world.local_size)
    free -= _bytes_to_come(modules, samples, pairs, world.device)
    graphs = max(0.0, config.graphs * free)
    checkpointing = config.checkpointing == "on"
    set_checkpointing(modules, checkpointing)
    if isinstance(chunk_size, int):
        sizes = [chunk_size] * len(modules)
    elif world.device.type == "cuda":
        with randomness.preserve_generators([world.device]):
            trials = [_Trial(module, samples(side, min(pairs, FIRST_TRIED)), world) for side, module in enumerate(modules)]
            budget = int(config.chunk * free)
            if config.checkpointing == "auto":
                sizes, checkpointing = _faster(trials, modules, pairs, budget, graphs)
                set_checkpointing(modules, checkpointing)
            else:
                sizes = [largest_chunk(pairs, trial, budget) for trial in trials]
    else:
        sizes = [ON_CPU] * len(modules)
    sizes = [max(1, min(size, pairs)) for size in sizes]
    least = world.min([*sizes, graphs])
    return Fit(tuple(int(size) for size in least[:-1]), int(least[-1]), checkpointing)


def _bytes_to_come(modules: Sequence[nn.Module], samples: Callable[[int, int], Any], pairs: int, device: torch.device) -> int:
    """Bytes that training still allocates beside graphs and activations: gradients, moments, embeddings."""
    parameters = {id(p): local(p) for module in modules for p in module.parameters() if p.requires_grad}
    learned = sum(p.numel() * p.element_size() for p in parameters.values())
    with torch.no_grad(), use_evaluation_mode(modules[0]):
        output = call(modules[0], map_rows(lambda tensor: tensor.to(device), samples(0, 1)))
    width = as_encoded(output, type(modules[0]).__name__).embeddings.shape[1]
    return OPTIMIZER_COPIES * learned + COPIES_OF_EMBEDDINGS * len(modules) * pairs * width * 4


def _faster(
    trials: "Sequence[_Trial]", modules: Sequence[nn.Module], pairs: int, budget: int, graphs: float
) -> tuple[list[int], bool]:
    """Chunk sizes, and whether activation checkpointing is faster, measured with the sizes that fit with and without it.

    Chunks of `FIRST_TRIED` samples keep the device busy. Where they fit without checkpointing, nothing is measured.
    """
    found: dict[bool, tuple[float, list[int]]] = {}
    for checkpointing in (False, True):
        set_checkpointing(modules, checkpointing)
        try:
            sizes = [largest_chunk(pairs, trial, budget) for trial in trials]
        except MemoryError:  # not even one sample fits
            if checkpointing and not found:
                raise
            continue
        if not checkpointing and min(sizes) >= min(FIRST_TRIED, pairs):
            return sizes, False
        paces = [trial.pace(size) for trial, size in zip(trials, sizes, strict=True)]
        found[checkpointing] = pair_seconds(paces, pairs, graphs), sizes
    checkpointing = min(found, key=lambda way: found[way][0])
    return found[checkpointing][1], checkpointing


def largest_chunk(most: int, peak: Callable[[int], int | None], budget: int) -> int:
    """The largest chunk size that fits: doubles while the next size would fit, halves if the first does not.

    Args:
        most: upper bound.
        peak: size → peak bytes of a chunk; None if memory runs out. The same on all ranks.
        budget: bytes.
    """
    size = min(FIRST_TRIED, most)
    while True:
        used = peak(size)
        if used is None:
            if size == 1:
                raise MemoryError("a chunk of one sample must fit into memory, and does not")
            size //= 2
            most = size  # larger sizes have failed
        elif size >= most or 2 * used > budget:  # bytes grow no faster than samples
            return size
        else:
            size = min(2 * size, most)


@dataclass(frozen=True)
class Pace:
    """Seconds and bytes of one sample, of one tower in chunks of one size."""

    forward: float  # without a graph
    both: float  # a forward and a backward pass, and what is computed again
    graph_bytes: float  # kept between them


def pair_seconds(paces: Sequence[Pace], pairs: int, graph_bytes: float) -> float:
    """Seconds of one pair in a cached step: chunks whose graph is kept have one forward pass less."""
    needed = pairs * sum(pace.graph_bytes for pace in paces)
    again = 1 - min(1.0, graph_bytes / needed) if needed else 0.0
    return sum(pace.both + again * pace.forward for pace in paces)


class _Trial:
    """Peak memory of a forward and backward pass of n samples, and their pace, on CUDA."""

    def __init__(self, module: nn.Module, inputs: Any, world: World) -> None:
        self._module, self._world = module, world
        self._inputs = map_rows(lambda tensor: tensor.to(world.device), inputs)

    def __call__(self, size: int) -> int | None:
        device, used = self._world.device, math.inf
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            forward_backward(self._module, repeat_inputs(self._inputs, size))
            used = torch.cuda.max_memory_allocated(device) - before
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        self._module.zero_grad(set_to_none=True)
        used = self._world.max([used])[0]
        return None if math.isinf(used) else int(used)

    def pace(self, size: int) -> Pace:
        """Seconds and bytes of one sample in chunks of a size that fits; the slowest rank's."""
        device, inputs = self._world.device, repeat_inputs(self._inputs, size)
        for _ in range(2):  # the first time allocates memory and chooses kernels
            with torch.no_grad():
                forward = _seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()  # of casts without a graph
            before = torch.cuda.memory_allocated(device)
            output = as_encoded(call(self._module, inputs), type(self._module).__name__).embeddings
            graph = float(torch.cuda.memory_allocated(device) - before)
            del output
            both = _seconds(lambda: forward_backward(self._module, inputs), device)
            torch.clear_autocast_cache()
            self._module.zero_grad(set_to_none=True)
        return Pace(*self._world.max([forward / size, both / size, graph / size]))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def repeat_inputs(inputs: Any, size: int) -> Any:
    """Inputs of `size` samples: the given ones, again and again."""
    times = -(-size // count_rows(inputs, "inputs"))
    return map_rows(lambda tensor: torch.cat([tensor] * times)[:size], inputs)


def input_bytes(config: MemoryConfig, world: World) -> int:
    """Host memory for the samples of one batch on this rank, while the next batch has as much."""
    return int(config.inputs * (available_memory() or 0) / world.local_size / 2)


# ----------------------------------------------------------------------------------------------------------------------
# Between the backward pass and the optimizer: gradients and statistics averaged over ranks, gradient norm, clipping.


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Averages over ranks the gradients of parameters outside of DDP and FSDP2: scale and bias of the loss."""
    if world.group is None:
        return
    for parameter in parameters:
        if parameter.grad is None:  # another rank's share of the loss may depend on it
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=world.group)
        parameter.grad /= world.size


@torch.no_grad()
def average_batch_statistics(statistics: Sequence[Tensor], world: World) -> None:
    """Averages running statistics over ranks, in one message: each rank has updated its own with its own pairs."""
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
    """The gradient norm over all parameters, the same on all ranks.

    The norm of a DTensor is not reduced by DTensor itself, because FSDP2 may keep gradients on the host, where NCCL cannot.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = _norm_of([gradient for gradient in gradients if not is_sharded(gradient)], world.device)
    sharded = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    if not sharded:
        return whole
    squares = _norm_of(sharded, world.device).square()
    dist.all_reduce(squares, group=world.group)
    return (whole.square() + squares).sqrt()


def _norm_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:  # ()
    """Of all tensors as one vector, in a few launches on a GPU. On `device`, though FSDP2 may keep gradients on the host."""
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors if tensor.numel()]
    return nn.utils.get_total_norm(wide).to(device)


# ----------------------------------------------------------------------------------------------------------------------
# One training step: the cached step over this rank's pairs, averaged and clipped gradients, and the optimizer.


class StepInputs(NamedTuple):
    """The inputs of a batch, which readers read ahead of its step."""

    batch: Batch
    sources: dict[int, Source]  # by the index of the side
    tokens: dict[int, Callable[[], Source]]  # of the sides with texts; waits for them

    def stop(self) -> None:
        """Ends the reading of the batch, after its step or without one, and frees what was read."""
        for source in self.sources.values():
            if isinstance(source, ReplaySource):
                source.stop()


class Outcome(NamedTuple):
    """Result of a step, the same on all ranks."""

    loss: float  # NaN if no pair could be read
    gradient_norm: float  # before clipping; NaN before the optimizer step
    pairs: int  # that could be read
    without_negatives: int = 0  # pairs of them without a negative in the batch
    statistics: PairStatistics = PairStatistics()  # of the embeddings


@dataclass
class Step:
    """Makes one training step for each batch.

    Args:
        config: of the run.
        trained: towers, loss and optimizer.
        dataset: of the pairs.
        known: embeddings of a frozen side, by the index of the side.
        world: the ranks.
        fit: chunk sizes and memory for graphs; halved if memory runs out.
        workers: readers of samples, as for `ReplaySource`.
    """

    config: TrainConfig
    trained: Trained
    dataset: Dataset
    known: dict[int, KeptEmbeddings]
    world: World
    fit: Fit
    workers: int | Executor = 0

    def __post_init__(self) -> None:
        """Finds the running statistics, which are averaged over ranks."""
        found = [batchnorm.running_statistics(tower.module) for tower in self.trained.pair.towers]
        self._statistics = list({id(value): value for side in found for value in side.values()}.values())
        self._sides = [side for side in (0, 1) if side not in self.known]
        images = [side for side in self._sides if self.dataset.sides[side] == IMAGE]
        self._hold = input_bytes(self.config.memory, self.world) // max(1, len(images))

    def prepare(self, batch: Batch) -> StepInputs:
        """The inputs of a batch. Readers begin to read them, so that they are there when the batch is due."""
        sources, tokens = {}, {}
        for side in self._sides:
            source = self.dataset.source(
                batch.indices.tolist(),
                side,
                self.trained.pair.towers[side],
                seed=self.config.seed,
                epoch=batch.epoch,
                augment=self.config.augment,
                workers=self.workers,
                hold=self._hold,
            )
            sources[side] = source
            if not isinstance(source, ReplaySource):
                continue  # on the device already
            if self.dataset.sides[side] == IMAGE:
                source.start()
            else:
                work = partial(self._tokens, source, side)
                tokens[side] = _begin_in_thread(work) if isinstance(self.workers, Executor) else work
        return StepInputs(batch, sources, tokens)

    def __call__(self, inputs: StepInputs, rate: float) -> Outcome:
        """One step with this rank's part of a batch."""
        batch = inputs.batch
        for group in self.trained.optimizer.param_groups:
            group["lr"] = rate
        sources = [self._source(inputs, side) for side in self._sides]
        outcome = self._retry(lambda: self._backward(batch, sources))
        if outcome.pairs == 0:
            LOG.warning("step %d changes nothing: none of its pairs could be read", batch.number + 1)
            self.trained.optimizer.zero_grad()
            return Outcome(math.nan, 0.0, 0)
        with phase("optimizer"):
            norm = self._update(outcome.loss, batch.number + 1)
        return outcome._replace(gradient_norm=norm)

    def _source(self, inputs: StepInputs, side: int) -> Source:
        if side not in inputs.tokens:
            return inputs.sources[side]
        with phase(DATA):
            return inputs.tokens[side]()

    def _tokens(self, source: ReplaySource, side: int) -> Source:
        """The texts of a batch as tokens. All are read at once, because chunks are made of texts of similar length."""
        whole = source.chunks([(0, len(source))], None)
        with close_at_the_end(whole):
            tokens = next(whole)
        lengths = self.trained.pair.towers[side].lengths
        return HostSource(tokens, lengths=None if lengths is None else lengths(tokens))

    def _backward(self, batch: Batch, sources: Sequence[Source]) -> Outcome:
        indices = batch.indices.tolist()
        known = {side: kept.rows(batch.indices).to(self.world.device) for side, kept in self.known.items()}
        ids = self.dataset.ids(indices) if self.config.loss.ids else None
        usable = partial(self.dataset.usable, indices)
        loss_fn = ReadablePairs(self.trained.objective, self.world, usable, ids, known, batch.indices)
        with autocast(self.config.precision, self.world.device):
            share = cached_backward(
                loss_fn,
                [(self.trained.called[side], source) for side, source in zip(self._sides, sources, strict=True)],
                chunk_size=[self.fit.chunk_sizes[side] for side in self._sides],
                budget=self.fit.graph_bytes,
                scaler=self.trained.scaler,
            )
        average_gradients(self.trained.objective.parameters(), self.world)
        average_batch_statistics(self._statistics, self.world)
        loss, *statistics = self.world.sum([share.item(), *loss_fn.statistics.tolist()])
        mean = loss / self.world.size
        return Outcome(mean, math.nan, loss_fn.pairs, loss_fn.without_negatives, average_statistics(statistics))

    def _retry(self, work: Callable[[], Outcome]) -> Outcome:
        """Repeats a step that ran out of memory with half the memory; for one process, since other ranks cannot go back."""
        while True:
            states = randomness.capture([self.world.device])
            statistics = [statistic.clone() for statistic in self._statistics]
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.world.size > 1 or (max(self.fit.chunk_sizes) == 1 and not self.fit.graph_bytes):
                    raise MemoryError(
                        f"memory ran out with chunks of {self.fit.chunk_sizes} samples; continue with a smaller --chunk-size, "
                        f"or a smaller memory.graphs: {error}"
                    ) from error
            # Outside of the handler, whose traceback keeps the tensors of the step alive.
            self.trained.optimizer.zero_grad()
            randomness.restore(states)
            for statistic, before in zip(self._statistics, statistics, strict=True):
                statistic.copy_(before)  # the chunks before the failure have updated it
            self.fit = self.fit.halve()
            LOG.warning("memory ran out; the step is done again with chunks of %s samples", self.fit.chunk_sizes)
            if self.world.device.type == "cuda":
                gc.collect()  # frames of other threads
                torch.cuda.empty_cache()

    def _update(self, loss: float, step: int) -> float:
        optimizer, scaler = self.trained.optimizer, self.trained.scaler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler is not None:
            scaler.unscale_(optimizer)
        length = gradient_norm(parameters, self.world)
        norm = length.item()
        if scaler is None:  # a scaler skips such steps itself
            _check_finite(step, {"loss": loss, "gradient norm": norm})
        if self.config.optimizer.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.config.optimizer.clip_norm, length)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.trained.objective.clamp()
        return norm


def _begin_in_thread(work: Callable[[], Source]) -> Callable[[], Source]:
    """Begins to work in a thread of its own. Returns a function that waits for the result."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-texts")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future.result


class NotFiniteError(FloatingPointError):
    """The loss or the gradient norm of a step is not finite. All ranks raise it, and no weight has changed."""


def _check_finite(step: int, numbers: dict[str, float]) -> None:
    """Raises before the optimizer step: NaN would enter the weights, and every later checkpoint."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise NotFiniteError(
                f"the {name} of step {step} is {value}; the weights are as they were before it. A smaller learning rate, a "
                "longer warm-up or optimizer.clip_norm may help"
            )
