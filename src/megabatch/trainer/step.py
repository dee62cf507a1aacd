"""One training step: the cached step over this rank's pairs, averaged and clipped gradients, and the optimizer."""

import gc
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from megabatch.cached import HostSource, ReplaySource, Source, batchnorm, randomness
from megabatch.cached.backward import cached_backward
from megabatch.cached.streaming import closed_at_the_end
from megabatch.cached.timing import DATA, phase
from megabatch.data.dataset import IMAGE, Dataset
from megabatch.data.order import Batch
from megabatch.machine import ran_out_of_memory
from megabatch.trainer import gradients
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.fit import Fit, input_bytes
from megabatch.trainer.locked_side import KeptEmbeddings
from megabatch.trainer.objective import ReadablePairs
from megabatch.trainer.precision import autocast
from megabatch.trainer.trained import Trained
from megabatch.world import World

LOG = logging.getLogger("megabatch")


class Inputs(NamedTuple):
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
    gradient_norm: float  # before clipping
    pairs: int  # that could be read


@dataclass
class Step:
    """Makes one training step for each batch.

    Args:
        config: of the run.
        trained: towers, loss and optimizer.
        dataset: of the pairs.
        known: embeddings of a locked side, by the index of the side.
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

    def prepare(self, batch: Batch) -> Inputs:
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
                tokens[side] = _begun(work) if isinstance(self.workers, Executor) else work
        return Inputs(batch, sources, tokens)

    def __call__(self, inputs: Inputs, rate: float) -> Outcome:
        """One step with this rank's part of a batch."""
        batch = inputs.batch
        for group in self.trained.optimizer.param_groups:
            group["lr"] = rate
        sources = [self._source(inputs, side) for side in self._sides]
        loss, pairs = self._retried(lambda: self._backward(batch, sources))
        if pairs == 0:
            LOG.warning("step %d changes nothing: none of its pairs could be read", batch.number + 1)
            self.trained.optimizer.zero_grad()
            return Outcome(math.nan, 0.0, 0)
        with phase("optimizer"):
            norm = self._update(loss, batch.number + 1)
        return Outcome(loss, norm, pairs)

    def _source(self, inputs: Inputs, side: int) -> Source:
        if side not in inputs.tokens:
            return inputs.sources[side]
        with phase(DATA):
            return inputs.tokens[side]()

    def _tokens(self, source: ReplaySource, side: int) -> Source:
        """The texts of a batch as tokens. All are read at once, because chunks are made of texts of similar length."""
        whole = source.chunks([(0, len(source))], None)
        with closed_at_the_end(whole):
            tokens = next(whole)
        lengths = self.trained.pair.towers[side].lengths
        return HostSource(tokens, lengths=None if lengths is None else lengths(tokens))

    def _backward(self, batch: Batch, sources: Sequence[Source]) -> tuple[float, int]:
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
        gradients.average(self.trained.objective.parameters(), self.world)
        gradients.average_statistics(self._statistics, self.world)
        return self.world.sum([share.item()])[0] / self.world.size, loss_fn.pairs

    def _retried(self, work: Callable[[], tuple[float, int]]) -> tuple[float, int]:
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
            self.fit = self.fit.halved()
            LOG.warning("memory ran out; the step is done again with chunks of %s samples", self.fit.chunk_sizes)
            if self.world.device.type == "cuda":
                gc.collect()  # frames of other threads
                torch.cuda.empty_cache()

    def _update(self, loss: float, step: int) -> float:
        optimizer, scaler = self.trained.optimizer, self.trained.scaler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler is not None:
            scaler.unscale_(optimizer)
        length = gradients.norm(parameters, self.world)
        norm = length.item()
        if scaler is None:  # a scaler skips such steps itself
            _check_finite(step, {"loss": loss, "gradient norm": norm})
        if self.config.optimizer.clip_norm:
            gradients.clip(parameters, length, self.config.optimizer.clip_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.trained.objective.clamp()
        return norm


def _begun(work: Callable[[], Source]) -> Callable[[], Source]:
    """Begins to work in a thread of its own. Returns a function that waits for the result."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-texts")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future.result


def _check_finite(step: int, numbers: dict[str, float]) -> None:
    """Raises before the optimizer step: NaN would enter the weights, and every later checkpoint."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} of step {step} is {value}; the weights are as they were before it. A smaller learning rate, a "
                "longer warm-up or optimizer.clip_norm may help"
            )
