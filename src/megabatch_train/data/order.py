"""The batches of a run: each epoch is shuffled by (seed, epoch), cut into batches, and each batch is split over ranks.

Batches are numbered across all epochs. Each batch depends only on the seed and its number, so a run can continue in the
middle of an epoch. Batches do not depend on the number of ranks, because each rank has a contiguous part of every batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.cached.replay import sample_seed


class Batch(NamedTuple):
    """The shard of one batch on this rank."""

    number: int  # number of the batch, from the start of the run
    epoch: int
    indices: Tensor  # (n,) int64 sample indices


@dataclass(frozen=True)
class Mixture:
    """A mixture of several sources. Samples are numbered one source after another.

    Args:
        parts: the number of samples of each source, or the sizes of its shards.
        weights: share of each source in an epoch. The weights need not sum to one.
    """

    parts: "tuple[int | tuple[int, ...] | Mixture, ...]"
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Checks the values."""
        valid = len(self.weights) == len(self.parts) and all(0 <= weight < math.inf for weight in self.weights)
        if not valid or not any(self.weights):
            raise ValueError(
                f"weights must be a number of at least 0 for each of {len(self.parts)} sources, got {self.weights}"
            )

    def shares(self) -> list[int]:
        """Returns how many samples of each source an epoch has. An epoch has as many samples as all sources together."""
        total, whole = sum(map(_count, self.parts)), sum(self.weights)
        exact = [total * weight / whole for weight in self.weights]
        counts = [int(share) for share in exact]
        for number in sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
            counts[number] += 1  # the largest fractions round up
        return counts


def _count(samples: "int | tuple[int, ...] | Mixture") -> int:
    if isinstance(samples, Mixture):
        return sum(map(_count, samples.parts))
    return samples if isinstance(samples, int) else sum(samples)


@dataclass(frozen=True)
class Order:
    """Shuffled batches of samples. The last, incomplete batch of an epoch is dropped.

    Args:
        samples: number of samples, or the sizes of shards, or a mixture. Shards are shuffled first. Then samples are shuffled
            within `window` shards at a time, so that only a few shards are read at once. Each source of a mixture is shuffled
            like this on its own, and the sources alternate at random.
        batch_size: number of pairs in a batch, over all ranks.
        seed: seed of the run.
        rank: number of this process.
        world_size: number of ranks that each batch is split over.
        window: number of shards whose samples are shuffled together.
    """

    samples: int | tuple[int, ...] | Mixture
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    window: int = 16

    def __post_init__(self) -> None:
        """Checks the values."""
        total = _count(self.samples)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if total < self.batch_size:
            raise ValueError(f"batch_size must be at most the number of samples, {total}, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    @property
    def batches_per_epoch(self) -> int:
        """The number of complete batches in an epoch."""
        return _count(self.samples) // self.batch_size

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yields the batches `start` to `stop - 1`. Without `stop`, the batches never end."""
        number, current, order = start, None, torch.empty(0)
        first = self.rank * self.batch_size // self.world_size
        last = (self.rank + 1) * self.batch_size // self.world_size
        while stop is None or number < stop:
            epoch, position = divmod(number, self.batches_per_epoch)
            if epoch != current:
                current, order = epoch, self.epoch(epoch)
            begin = position * self.batch_size
            yield Batch(number, epoch, order[begin + first : begin + last])
            number += 1

    def epoch(self, epoch: int) -> Tensor:  # (samples,) int64
        """Returns all sample indices in the order of an epoch."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
        if isinstance(self.samples, int):
            return torch.randperm(self.samples, generator=generator)
        if isinstance(self.samples, Mixture):
            return self._mix(self.samples, epoch, generator)
        sizes = torch.tensor(self.samples, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        groups = torch.randperm(len(sizes), generator=generator).tolist()
        parts = []
        for window in range(0, len(groups), self.window):
            together = groups[window : window + self.window]
            members = torch.cat([torch.arange(int(starts[g]), int(starts[g] + sizes[g])) for g in together])
            parts.append(members[torch.randperm(len(members), generator=generator)])
        return torch.cat(parts)

    def _mix(self, mixture: Mixture, epoch: int, generator: torch.Generator) -> Tensor:  # (samples,) int64
        shares = mixture.shares()
        turns = torch.arange(len(shares)).repeat_interleave(torch.tensor(shares))
        turns = turns[torch.randperm(len(turns), generator=generator)]
        samples, first = torch.empty_like(turns), 0
        for number, (part, share) in enumerate(zip(mixture.parts, shares, strict=True)):
            own = Order(part, 1, sample_seed(self.seed, number), window=self.window)
            samples[turns == number] = first + own.stretch(epoch * share, share)
            first += _count(part)
        return samples

    def stretch(self, start: int, count: int) -> Tensor:  # (count,) int64
        """Returns samples `start` to `start + count - 1` of the sequence of all epochs."""
        size, end, pieces = _count(self.samples), start + count, [torch.empty(0, dtype=torch.int64)]
        for epoch in range(start // size, -(-end // size)):
            pieces.append(self.epoch(epoch)[max(start - epoch * size, 0) : end - epoch * size])
        return torch.cat(pieces)
