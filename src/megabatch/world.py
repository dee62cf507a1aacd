"""Who trains: one process, or all that torchrun started; and the few small things they tell each other."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SUM, LARGEST, SMALLEST = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


@dataclass(frozen=True)
class World:
    """This process among those that share the training.

    Args:
        device: where this process works.
        group: all of them; None for a process alone.
    """

    device: torch.device
    group: Any = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def neighbours(self) -> int:
        """How many of them share this machine and its memory, as torchrun says."""
        return min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def reduced(self, values: Sequence[float], how: Any = SUM) -> list[float]:
        """The numbers of all ranks, added or the largest or smallest; the same on every rank. Exact up to 2⁵³."""
        if self.group is None:
            return [float(value) for value in values]
        numbers = torch.tensor(values, dtype=torch.float64, device=self._messages())
        dist.all_reduce(numbers, how, group=self.group)
        return [float(value) for value in numbers.tolist()]

    def everyone(self, value: Any) -> list[Any]:
        """Anything small of all ranks, by rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: Any) -> Any:
        """What the first rank has."""
        return self.everyone(value if self.rank == 0 else None)[0]

    def _messages(self) -> torch.device:
        return torch.device("cpu") if "gloo" in dist.get_backend(self.group) else self.device


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """This process, with the others if torchrun started it.

    Args:
        device: "auto" for CUDA where there is any, "cuda" or "cpu".
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError('device must be "cpu" or "auto" on this machine, got "cuda", and PyTorch finds no CUDA device')
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(place)
        return
    if place.type == "cuda":
        dist.init_process_group("nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(place, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
