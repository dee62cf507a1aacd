"""Batches that are not drawn from all samples at random: batches of one source each, and of groups of hard negatives."""

import hashlib
import json
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch.cached.replay import sample_seed
from megabatch_train.data.dataset import TEXT, Dataset, ReadingProgress
from megabatch_train.data.loader import Mixture, Order


@dataclass(frozen=True)
class MiningConfig:
    """How groups of hard negatives are mined during training."""

    every: int = 0  # steps between two searches for groups with the current weights; 0 keeps the groups of batch_groups
    group_size: int = 32  # pairs in a group, independent of the batch size
    neighbors: int = 32  # hard negatives of each pair that the groups are made from
    range_min: int = 0  # number of most similar texts that are skipped, because they are probably unlabeled matches
    absolute_margin: float | None = None  # exclude texts that are more similar than the match minus this number
    relative_margin: float | None = None  # exclude texts above the similarity of the match minus this fraction of it

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, least in (("every", 0), ("group_size", 2), ("neighbors", 1), ("range_min", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"mining.{name} must be at least {least}, got {getattr(self, name)}")


# ----------------------------------------------------------------------------------------------------------------------
# Batches of one source of a mixture each. An epoch has as many batches of each source as its share, up to one batch.
#
# The sources take turns: after any number of batches, each source has had its share of them, up to one batch. Within an epoch,
# the turns are shuffled. Each source continues where its last batch has stopped, in its own order.


@dataclass(frozen=True)
class SourceOrder(Order):
    """Batches that have samples of one source of a mixture each. The arguments are those of `Order`."""

    def __post_init__(self) -> None:
        """Checks the values."""
        super().__post_init__()
        if not isinstance(self.samples, Mixture):
            raise ValueError(
                'batches must be "random" or "mined" for data that is not a mixture, such as "3 * a.csv + 1 * b.csv", '
                'got "source"'
            )
        for number, (part, weight) in enumerate(zip(self.samples.parts, self.samples.weights, strict=True), 1):
            size = Order(part, 1).batches_per_epoch
            if weight and size < self.batch_size:
                raise ValueError(
                    f'batch_size must be at most {size:,}, the number of samples of source {number}, with batches = "source", '
                    f"got {self.batch_size:,}"
                )

    def epoch(self, epoch: int) -> Tensor:  # (batches_per_epoch · batch_size,) int64
        """Returns the sample indices of all batches of an epoch."""
        assert isinstance(self.samples, Mixture), "checked at the beginning"
        turns = _Turns.of(tuple(self.samples.shares()))
        before, after = (turns.count(number * self.batches_per_epoch) for number in (epoch, epoch + 1))
        numbers = torch.tensor([end - begin for begin, end in zip(before, after, strict=True)])
        sources = torch.arange(len(numbers)).repeat_interleave(numbers)
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
        sources = sources[torch.randperm(len(sources), generator=generator)]
        batches, first = torch.empty(len(sources), self.batch_size, dtype=torch.int64), 0
        for number, part in enumerate(self.samples.parts):
            own = Order(part, 1, sample_seed(self.seed, number), window=self.window)
            begin, count = before[number] * self.batch_size, int(numbers[number]) * self.batch_size
            batches[sources == number] = first + own.stretch(begin, count).view(-1, self.batch_size)
            first += own.batches_per_epoch
        return batches.flatten()


class _Turns:
    """A sequence of sources in which each source has its share of every beginning, up to one turn.

    Each turn goes to the source whose share would be exceeded first among the sources that are behind their share.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._shares, self._total = shares, sum(shares)
        self._counts = [0] * len(shares)
        self._saved = {0: tuple(self._counts)}  # numbers of turns that were asked for, and the counts after them
        self._done = 0

    @staticmethod
    @lru_cache(maxsize=8)
    def of(shares: tuple[int, ...]) -> "_Turns":
        """Returns the sequence of these shares, which continues where the last call stopped."""
        return _Turns(shares)

    def count(self, turns: int) -> tuple[int, ...]:
        """Returns how many of the first turns each source has."""
        while self._done < turns:
            self._done += 1
            behind = [
                (-(-(count + 1) * self._total // share), number)
                for number, (count, share) in enumerate(zip(self._counts, self._shares, strict=True))
                if count * self._total < share * self._done
            ]
            self._counts[min(behind)[1]] += 1
            if self._done == turns:
                self._saved[turns] = tuple(self._counts)
        if turns not in self._saved:  # an earlier number that was not asked for before
            return _Turns(self._shares).count(turns)
        return self._saved[turns]


# ----------------------------------------------------------------------------------------------------------------------
# Batches of whole groups. In each epoch, groups are shuffled and put into batches one after another. If a group does not fit
# into the rest of a batch, a waiting part of another group fills this rest, or else the group is cut. So a batch has at most a
# few parts of groups, and every sample is in an epoch once.


@dataclass(frozen=True)
class GroupOrder(Order):
    """Batches of whole groups, as far as the batch size allows it. The other arguments are those of `Order`.

    Args:
        group_of: (samples,) the number of each sample's group. Without it, samples are shuffled.
        current: an epoch that began with other groups, and all sample indices in its order.
    """

    group_of: Tensor | None = field(default=None, compare=False, repr=False)
    current: tuple[int, Tensor] | None = field(default=None, compare=False, repr=False)

    def epoch(self, epoch: int) -> Tensor:  # (samples,) int64
        """Returns all sample indices in the order of an epoch."""
        if self.current is not None and self.current[0] == epoch:
            return self.current[1]
        if self.group_of is None:
            return super().epoch(epoch)
        seed = sample_seed(self.seed, epoch)
        return order_groups(self.group_of, self.batch_size, torch.Generator().manual_seed(seed))

    def regroup(self, group_of: Tensor, number: int, group_rest: Callable[[Tensor], Tensor]) -> "GroupOrder":
        """Returns an order that has new groups from a batch on. The samples of the batches before it do not come again.

        Args:
            group_of: (samples,) the new groups.
            number: number of the first batch with new groups, from the start of the run.
            group_rest: a function from the samples that are left in the epoch, in ascending order, to their groups.
        """
        epoch, position = divmod(number, self.batches_per_epoch)
        if position == 0:
            return replace(self, group_of=group_of, current=None)
        before = self.epoch(epoch)
        done, rest = before[: position * self.batch_size], before[position * self.batch_size :].sort().values
        generator = torch.Generator().manual_seed(sample_seed(sample_seed(self.seed, epoch), position))
        rest = rest[order_groups(group_rest(rest), self.batch_size, generator)]
        return replace(self, group_of=group_of, current=(epoch, torch.cat([done, rest])))


def order_groups(group_of: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:  # (n,) int64 → (n,) int64
    """Returns the numbers from 0 to n − 1 in a random order, whose batches have whole groups where possible."""
    shuffled = torch.randperm(len(group_of), generator=generator)
    members = shuffled[group_of[shuffled].argsort(stable=True)]  # group by group, each group shuffled
    _, sizes = torch.unique_consecutive(group_of[members], return_counts=True)
    starts = sizes.cumsum(0) - sizes
    turns = torch.randperm(len(sizes), generator=generator)
    pieces = _fill_batches(starts[turns].tolist(), sizes[turns].tolist(), batch_size)
    begin, length = torch.tensor(pieces, dtype=torch.int64).view(-1, 2).unbind(1)
    offset = (length.cumsum(0) - length - begin).repeat_interleave(length)
    return members[torch.arange(len(members)) - offset]


def _fill_batches(starts: Sequence[int], sizes: Sequence[int], batch_size: int) -> list[tuple[int, int]]:
    """Returns parts of groups, (start, length), in an order that fills one batch after another."""
    pieces: list[tuple[int, int]] = []
    waiting: list[tuple[int, int]] = []  # (length, start) of parts, shortest first
    groups, free = zip(starts, sizes, strict=True), batch_size
    following = next(groups, None)
    while following is not None or waiting:
        fitting = bisect_right(waiting, (free, math.inf))
        if following is not None and (following[1] <= free or not fitting):
            (start, length), following = following, next(groups, None)
        else:
            length, start = waiting.pop(fitting - 1)  # the longest part that fits, or else the longest part
        taken = min(length, free)
        pieces.append((start, taken))
        if taken < length:
            insort(waiting, (length - taken, start + taken))
        free = free - taken or batch_size
    return pieces


# ----------------------------------------------------------------------------------------------------------------------
# The file of groups that `megabatch mine --batches` writes. It belongs to one dataset.

GROUPS, _ABOUT = "groups", "megabatch.groups"


def fingerprint(dataset: Dataset) -> str:
    """Returns a checksum of the names and the texts of all samples. It does not depend on the folder of the data."""
    total, progress = hashlib.blake2b(digest_size=16), ReadingProgress("samples checksummed", len(dataset))
    texts = [side for side in (0, 1) if dataset.sides[side] == TEXT]
    for index in range(len(dataset)):
        parts = (dataset.name(index), *(dataset.key(index, side) for side in texts))
        total.update("\0".join(parts).encode("utf-8", "surrogatepass") + b"\1")
        progress.tell(index + 1)
    return total.hexdigest()


def write_groups(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Writes tensors and their description to a file."""
    safetensors = extras.load("safetensors.torch", purpose="Writing groups of pairs")
    data = safetensors.save({name: tensor.contiguous() for name, tensor in tensors.items()}, {_ABOUT: json.dumps(about)})
    file_io.write(path, lambda file: file.write(data))


def read_groups(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the tensors and the description that `write_groups` wrote. Any other file raises an error."""
    safetensors = extras.load("safetensors", purpose="Reading groups of pairs")
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {})[_ABOUT])
        groups = tensors[GROUPS]
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"batch_groups must be a file that `megabatch mine --batches` wrote, got {path}") from error
    if groups.dtype != torch.int64 or groups.dim() != 1 or (len(groups) and int(groups.min()) < 0):
        raise ValueError(
            f"batch_groups must have a group of at least 0 for each pair, got {groups.dtype} {tuple(groups.shape)}"
        )
    return tensors, about


def read_groups_of(path: Path, dataset: Dataset) -> Tensor:  # (samples,) int64
    """Returns the groups of a dataset. A file for another dataset raises an error."""
    tensors, about = read_groups(path)
    groups = tensors[GROUPS]
    if len(groups) != len(dataset):
        raise ValueError(
            f"batch_groups must be a file for the training data, which has {len(dataset):,} pairs, got {path} for "
            f"{len(groups):,} pairs of {about.get('data')}; `megabatch mine --batches` writes one"
        )
    if about.get("samples") != fingerprint(dataset):
        raise ValueError(
            f"batch_groups must be a file for the training data, got {path} for other pairs, of {about.get('data')}: the "
            "names, the texts or their order differ"
        )
    return groups
