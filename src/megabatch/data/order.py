"""Which samples are in which batch: a shuffle that follows from (seed, epoch), cut into batches, shared out over ranks.

Batches are numbered through all epochs, and batch number b is known without those before it. So a run continues in the middle
of an epoch from one number, and the batches are the same on one rank as on eight: rank r has a stretch of each of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.cached.replay import sample_seed


class Batch(NamedTuple):
    """This rank's shard of one batch."""

    number: int  # of the batch, from the start of the run
    epoch: int
    indices: Tensor  # (n,) int64 sample indices


@dataclass(frozen=True)
class Order:
    """Shuffled batches of samples. The last, incomplete batch of an epoch is dropped.

    Args:
        samples: number of samples; or the size of each shard. Shards are then shuffled, and samples within `window` shards
            at a time, so that few shards are read at once.
        batch_size: pairs in a batch, over all ranks.
        seed: of the run.
        rank: of this process.
        world_size: number of ranks that each batch is split over.
        window: shards whose samples are shuffled together.
    """

    samples: int | tuple[int, ...]
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    window: int = 16

    def __post_init__(self) -> None:
        """Checks the values."""
        total = self.samples if isinstance(self.samples, int) else sum(self.samples)
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
        """Complete batches in an epoch."""
        return (self.samples if isinstance(self.samples, int) else sum(self.samples)) // self.batch_size

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches `start` to `stop - 1`, or without end."""
        number, known, order = start, None, torch.empty(0)
        first = self.rank * self.batch_size // self.world_size
        last = (self.rank + 1) * self.batch_size // self.world_size
        while stop is None or number < stop:
            epoch, position = divmod(number, self.batches_per_epoch)
            if epoch != known:
                known, order = epoch, self.epoch(epoch)
            begin = position * self.batch_size
            yield Batch(number, epoch, order[begin + first : begin + last])
            number += 1

    def epoch(self, epoch: int) -> Tensor:  # (samples,) int64
        """All sample indices in the order of an epoch."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
        if isinstance(self.samples, int):
            return torch.randperm(self.samples, generator=generator)
        sizes = torch.tensor(self.samples, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        groups = torch.randperm(len(sizes), generator=generator).tolist()
        parts = []
        for window in range(0, len(groups), self.window):
            together = groups[window : window + self.window]
            members = torch.cat([torch.arange(int(starts[g]), int(starts[g] + sizes[g])) for g in together])
            parts.append(members[torch.randperm(len(members), generator=generator)])
        return torch.cat(parts)
