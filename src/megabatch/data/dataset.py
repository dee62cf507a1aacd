"""What a dataset is: samples that can be read again, by number, with two sides, a caption and an id each.

A batch is a list of sample numbers. `source` turns it into the inputs of one tower for `cached_backward`: nothing is held, a
sample is read and augmented when its chunk is due, and once more for the second pass. Its randomness follows from
(seed, epoch, sample, side) alone, not from where in a batch the sample is or who reads it, so any run can be repeated from a
sample number on any number of ranks and workers.

A sample that cannot be read is not the end of a run. A blank takes its place, the dataset keeps its number and the reason
(`failures`), and `usable` says which pairs of a batch a loss should leave out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megabatch.cached.replay import ReplaySource, sample_seed

IMAGE, TEXT = "image", "text"
BLANK_SIZE = 8  # pixels of the grey image that stands for one that cannot be read; a tower brings it to its own size


class UnreadableSampleError(Exception):
    """A sample that is missing or damaged; a dataset raises it and goes on without the sample."""


class Preparation(Protocol):
    """What a tower does to samples before it encodes them."""

    def prepare(self, sample: Any, generator: torch.Generator | None) -> Any:
        """One sample's inputs; augmented with `generator`, as it is without. An image is (3, H, W) uint8, a text a str."""

    def collate(self, samples: list[Any]) -> Any:
        """The inputs of a chunk, made of what `prepare` returned."""


class Dataset(ABC):
    """Pairs that are read by number. A subclass says how many there are and how to read one side of one."""

    sides: tuple[str, str] = (IMAGE, TEXT)  # the kinds of the two sides
    credits: tuple[str, ...] = ()  # whom a picture made of it has to name

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}  # sample number: why it could not be read

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, index: int, side: int) -> Any:
        """Side 0 or 1 of a sample: an image as (3, H, W) uint8, a text as str. The same every time.

        Raises:
            UnreadableSampleError: it is missing or damaged, with the file's name and the reason.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a sample is, for messages and sheets."""

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """One number for each sample; samples with the same number are not each other's negatives. None: all differ."""
        return None

    def items(self) -> Tensor | None:  # (samples,) int64
        """For evaluation, one number for each sample: those with the same number share their first side. None: all differ."""
        return None

    def source(
        self,
        indices: Sequence[int],
        side: int,
        preparation: Preparation,
        *,
        seed: int = 0,
        epoch: int = 0,
        augment: bool = True,
        workers: int | Executor = 0,
    ) -> ReplaySource:
        """One side of some samples as a tower's inputs, read when they are due and each time the same.

        Args:
            indices: sample numbers.
            side: 0 or 1.
            preparation: what the tower does to samples; a `towers.Tower` is one.
            seed: of the run.
            epoch: changes the augmentation, as the seed does.
            augment: whether samples are augmented; False for evaluation.
            workers: as for `ReplaySource`.
        """
        if side not in (0, 1):
            raise ValueError(f"side must be 0 or 1, got {side!r}")
        read = _Read(self, side, preparation, sample_seed(sample_seed(seed, epoch), side) if augment else None)
        return ReplaySource(indices, read, workers=workers, collate=_Collate(self, preparation))

    def usable(self, indices: Sequence[int]) -> Tensor:  # (n,) bool
        """Which of the samples have not failed so far. Complete for a batch once both sides have been read."""
        return torch.tensor([index not in self.failures for index in indices], dtype=torch.bool)

    def check(self, index: int) -> int:
        """The number of a sample as it is, or an IndexError that says what there is."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}")
        return index


class _Failure(str):
    """Why a sample could not be read. Prints alike whatever the reason, because what prints is compared by a second reading."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "failure"


@dataclass
class _Read:
    """Reads and prepares one side of a sample; travels to workers."""

    dataset: Dataset
    side: int
    preparation: Preparation
    seed: int | None

    def __call__(self, index: int, generator: torch.Generator) -> tuple[int, Any, _Failure | None]:
        failure = None
        try:
            sample = self.dataset.read(int(index), self.side)
        except UnreadableSampleError as error:
            sample, failure = blank(self.dataset.sides[self.side]), _Failure(error)
        if self.seed is None:
            return index, self.preparation.prepare(sample, None), failure
        # The sample's own seed instead of that of its place in the batch.
        generator.manual_seed(sample_seed(self.seed, int(index)))
        return index, self.preparation.prepare(sample, generator), failure


@dataclass
class _Collate:
    """Notes what failed, where the dataset is known: a worker may be another process."""

    dataset: Dataset
    preparation: Preparation

    def __call__(self, samples: list[tuple[int, Any, _Failure | None]]) -> Any:
        for index, _, failure in samples:
            if failure is not None:
                self.dataset.failures.setdefault(int(index), str(failure))
        return self.preparation.collate([inputs for _, inputs, _ in samples])


def blank(kind: str) -> Any:
    """What stands for a sample that cannot be read: grey, or nothing said."""
    return torch.full((3, BLANK_SIZE, BLANK_SIZE), 127, dtype=torch.uint8) if kind == IMAGE else ""
