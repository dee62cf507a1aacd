"""Datasets: pairs whose two sides can be read by index, any number of times.

A batch is a list of sample indices. `source` turns it into the inputs of one tower for `cached_backward`. Readers read samples
ahead of their chunk. A sample waits in host memory for the second pass, or is read again if memory is short. Its randomness
depends only on (seed, epoch, sample, side), not on its position in a batch or on the reader, so a run can be repeated with any
number of ranks and readers.

An unreadable sample does not end a run. A blank takes its place, `failures` records its index and the reason, and `usable`
tells the loss which pairs to skip.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megabatch.cached.replay import Checked, ReplaySource, checksum, sample_seed
from megabatch.cached.sources import Source

if TYPE_CHECKING:
    from megabatch.data.crops import TrainingImages

IMAGE, TEXT = "image", "text"
BLANK_SIZE = 8  # pixels of the grey image in place of an unreadable one; towers resize it


class UnreadableSampleError(Exception):
    """A sample is missing or damaged; it is then skipped."""


class Preparation(Protocol):
    """Preprocessing of a tower."""

    @property
    def prepare(self) -> Callable[[Any, torch.Generator | None], Any]:
        """Preprocesses one sample, augmented if there is a generator. An image is (3, H, W) uint8, a text a str."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Collates results of `prepare` into the inputs of a chunk."""

    @property
    def training_images(self) -> "TrainingImages | None":
        """Faster preprocessing of training images, used instead of `prepare` and `collate`; None if there is none."""


class Dataset(ABC):
    """Pairs that are read by index. Subclasses define `__len__`, `read` and `name`."""

    sides: tuple[str, str] = (IMAGE, TEXT)  # the kinds of the two sides
    credits: tuple[str, ...] = ()  # attribution for images of the data

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}  # index → why the sample could not be read

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, index: int, side: int) -> Any:
        """Side 0 or 1 of a sample: an image as (3, H, W) uint8, a text as str. The same every time.

        Raises:
            UnreadableSampleError: it is missing or damaged, with the file's name and the reason.
        """

    def stored(self, index: int, side: int) -> Any:
        """The sample as it is stored: an image that is still encoded (`images.Encoded`), or the same as `read`."""
        return self.read(index, side)

    @abstractmethod
    def name(self, index: int) -> str:
        """The name of a sample, for messages and contact sheets."""

    def place(self, index: int) -> str | None:
        """The path or address of the image of a sample; None if it has no file of its own."""
        return None

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """An id per sample; samples with equal ids are not each other's negatives. None if all differ."""
        return None

    def items(self) -> Tensor | None:  # (samples,) int64
        """For evaluation, an id per sample; samples with equal ids have the same first side. None if all differ."""
        return None

    def classes(self) -> Tensor | None:  # (samples,) int64
        """For evaluation, the class of each sample; samples of one class have the same second side. None without classes."""
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
        hold: int = 0,
    ) -> Source:
        """One side of some samples as a source of a tower's inputs, identical each time they are read.

        Args:
            indices: of the samples.
            side: 0 or 1.
            preparation: preprocessing of the tower; a `towers.Tower` is one.
            seed: of the run.
            epoch: each epoch augments differently.
            augment: False for evaluation.
            workers: as for `ReplaySource`.
            hold: as for `ReplaySource`.
        """
        if side not in (0, 1):
            raise ValueError(f"side must be 0 or 1, got {side!r}")
        own = sample_seed(sample_seed(seed, epoch), side)
        fast = getattr(preparation, "training_images", None) if augment else None  # a user's own preparation may have none
        if fast is None:
            read = _Read(self, side, preparation.prepare, own if augment else None)
            return ReplaySource(indices, read, workers=workers, collate=_Collate(self, preparation.collate), hold=hold)
        read_image, finish = _ReadImage(self, side, fast, own), _FinishImages(self, fast)
        return ReplaySource(indices, read_image, workers=workers, finish=finish, hold=hold)

    def usable(self, indices: Sequence[int]) -> Tensor:  # (n,) bool
        """Mask of the samples without a failure so far; final once both sides have been read."""
        return torch.tensor([index not in self.failures for index in indices], dtype=torch.bool)

    def check(self, index: int) -> int:
        """Returns the index, or raises an IndexError with the valid range."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}")
        return index


class _Failure(str):
    """Why a sample could not be read. Its repr is constant, because replay compares the repr of both readings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "failure"


@dataclass
class _Read:
    """Reads and preprocesses one side of a sample; picklable for workers."""

    dataset: Dataset
    side: int
    prepare: Callable[[Any, torch.Generator | None], Any]
    seed: int | None

    def __call__(self, index: int, generator: torch.Generator) -> tuple[int, Any, _Failure | None]:
        failure = None
        try:
            sample = self.dataset.read(int(index), self.side)
        except UnreadableSampleError as error:
            sample, failure = blank(self.dataset.sides[self.side]), _Failure(error)
        if self.seed is None:
            return index, self.prepare(sample, None), failure
        # Seeded by the sample's index instead of its position in the batch.
        generator.manual_seed(sample_seed(self.seed, int(index)))
        return index, self.prepare(sample, generator), failure


@dataclass
class _ReadImage:
    """The same for images in training. The checksum is of the stored image, not of the crop."""

    dataset: Dataset
    side: int
    images: "TrainingImages"
    seed: int

    def __call__(self, index: int, generator: torch.Generator) -> Checked:
        own = sample_seed(self.seed, int(index))
        try:
            stored, failure = self.dataset.stored(int(index), self.side), None
            crop = self.images.read(stored, generator.manual_seed(own))
        except UnreadableSampleError as error:
            stored, failure = blank(self.dataset.sides[self.side]), _Failure(error)
            crop = self.images.read(stored, generator.manual_seed(own))
        return Checked((index, crop, failure), checksum(stored))


@dataclass
class _Collate:
    """Collates a chunk and records failures, in the main process, since workers may be other processes."""

    dataset: Dataset
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[tuple[int, Any, _Failure | None]]) -> Any:
        _note_failures(self.dataset, samples)
        return self.collate([inputs for _, inputs, _ in samples])


@dataclass
class _FinishImages:
    """The same for images in training, on the tower's device."""

    dataset: Dataset
    images: "TrainingImages"

    def __call__(self, samples: list[tuple[int, Any, _Failure | None]], device: torch.device | None) -> Any:
        _note_failures(self.dataset, samples)
        return self.images.inputs([crop for _, crop, _ in samples], device)


def _note_failures(dataset: Dataset, samples: list[tuple[int, Any, _Failure | None]]) -> None:
    for index, _, failure in samples:
        if failure is not None:
            dataset.failures.setdefault(int(index), str(failure))


def blank(kind: str) -> Any:
    """The replacement for an unreadable sample: a grey image, or an empty text."""
    return torch.full((3, BLANK_SIZE, BLANK_SIZE), 127, dtype=torch.uint8) if kind == IMAGE else ""
