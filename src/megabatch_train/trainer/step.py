"""One training step: forward, backward, averaging over ranks, clipping, and the optimizer; embeddings of a frozen side."""

import gc
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import file_io
from megabatch.cached import HostSource, ReplaySource, Source, batchnorm, randomness
from megabatch.cached.memory import is_sharded, local
from megabatch.cached.replay import checksum
from megabatch.cached.step import cached_backward
from megabatch.cached.streaming import DATA, close_at_the_end, phase
from megabatch.world import World
from megabatch_train.data.dataset import IMAGE, Dataset
from megabatch_train.data.order import Batch
from megabatch_train.evaluation.embedding import embed
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.tower import Pair
from megabatch_train.trainer.build import Trained, autocast
from megabatch_train.trainer.chunk_size import Fit, input_bytes
from megabatch_train.trainer.config import TrainConfig
from megabatch_train.trainer.health import PairStatistics, average_statistics
from megabatch_train.trainer.loss import ReadablePairs

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
# Embeddings of a frozen side. They are the same in every epoch, so without augmentation they are computed once and stored in
# the run's folder; later epochs and resumed runs read them.


ROWS = 1 << 16  # per file: small enough for memory, large enough to keep the number of files low


class KeptEmbeddings:
    """Embeddings of one side of a whole dataset, on disk, without augmentation.

    Args:
        folder: shared by all ranks; existing files are used if they come from the same tower.
        dataset: to encode.
        side: 0 or 1.
        pair: the towers.
        chunk_size: samples encoded at once.
        workers: as for `Dataset.source`.
        world: the ranks, each of which encodes a part.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        side: int,
        pair: Pair,
        *,
        chunk_size: int,
        workers: Any,
        world: World,
    ) -> None:
        tower = pair.towers[side]
        self._places = [
            folder / f"{_fingerprint(tower.module, dataset)}_{start:010d}.pt" for start in range(0, len(dataset), ROWS)
        ]
        for number, place in enumerate(self._places):
            if number % world.size == world.rank and not _whole(place):
                rows = range(number * ROWS, min((number + 1) * ROWS, len(dataset)))
                LOG.info("encoding samples %d to %d of %d once, with a frozen tower", rows.start, rows.stop - 1, len(dataset))
                found = embed(tower, dataset, side, rows, chunk_size=chunk_size, workers=workers).cpu()
                failures = {index: dataset.failures[index] for index in rows if index in dataset.failures}
                file_io.write(place, partial(torch.save, {"embeddings": found, "failures": failures}))
        world.gather_objects(None)  # a barrier: all blocks are written
        self._blocks: list[Tensor] = []
        for place in self._places:
            block = torch.load(place, mmap=True, weights_only=True)
            self._blocks.append(block["embeddings"])
            dataset.failures |= {index: reason for index, reason in block["failures"].items() if index not in dataset.failures}

    def rows(self, indices: Tensor) -> Tensor:  # (n,) int64 -> (n, D)
        """Embeddings of these samples."""
        result = self._blocks[0].new_empty(len(indices), self._blocks[0].shape[1])
        blocks = indices // ROWS
        for number in sorted(set(blocks.tolist())):
            here = blocks == number
            result[here] = self._blocks[number][indices[here] - number * ROWS]
        return result


def _fingerprint(module: nn.Module, dataset: Dataset) -> str:
    """Checksum of the number of samples and of the frozen weights."""
    value = zlib.crc32(f"{len(dataset)}".encode())
    fixed = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    for name, tensor in (*fixed, *module.named_buffers()):
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        value = zlib.crc32(f"{name} {checksum(whole)}".encode(), value)
    return f"{value:08x}"


def _whole(place: Path) -> bool:
    try:
        torch.load(place, mmap=True, weights_only=True)
    except Exception:  # missing or damaged: it is written again
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# One training step: the cached step over this rank's pairs, averaged and clipped gradients, and the optimizer.


LOG = logging.getLogger("megabatch")


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
