"""The base class of datasets, ids of samples that are not each other's negatives, and a progress log for slow reading."""

import hashlib
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.cached.replay import Checked, ReplaySource, checksum, sample_seed
from megabatch.cached.sources import Source
from megabatch_train.data.loader import Mixture

LOG = logging.getLogger("megabatch")

if TYPE_CHECKING:
    from megabatch_train.data.media.images import TrainingImages

# ----------------------------------------------------------------------------------------------------------------------
# A progress log for work on many samples or files.

SECONDS = 5.0  # between two log lines


class ReadingProgress:
    """Logs the progress and the remaining time every few seconds.

    Args:
        description: noun and participle for the log, such as "images embedded".
        total: total number of units.
    """

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total = description, total
        self._began = self._last = time.monotonic()

    def tell(self, done: int) -> None:
        """Logs the progress if the last log line is old enough."""
        now = time.monotonic()
        if done < self._total and now - self._last >= SECONDS:
            self._last, left = now, (now - self._began) / done * (self._total - done)
            left_text = timedelta(seconds=round(left))
            LOG.info("%s of %s %s, %s left", f"{done:,}", f"{self._total:,}", self._description, left_text)


# ----------------------------------------------------------------------------------------------------------------------
# Ids of samples. Each sample has one or two integers, and samples that belong together have equal ids.


def number_values(values: Sequence[Hashable]) -> Tensor:  # (n,) int64
    """Returns equal numbers for equal values, counted from 0 in the order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64)


def find_components(first: Tensor, second: Tensor) -> Tensor:  # (n,), (n,) int64 -> (n,) int64
    """Returns equal ids for rows that share a number in `first` or in `second`, directly or through other rows."""
    parent = list(range(len(first)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for side in (first, second):
        first_row: dict[int, int] = {}
        for row, value in enumerate(side.tolist()):
            a, b = root(row), root(first_row.setdefault(value, row))
            parent[max(a, b)] = min(a, b)
    return torch.tensor([root(row) for row in range(len(first))], dtype=torch.int64)


def relate(first: Tensor, second: Tensor) -> Tensor:  # (n,), (n,) int64 -> (n,) or (n, 2) int64
    """Returns ids that agree for rows that share a number in `first` or in `second`. Indirect links do not count.

    One id per row is enough if all rows of each connected component share a number. Otherwise, each row gets both numbers, and
    two rows belong together if they agree in one of the two columns.
    """
    groups = find_components(first, second)
    chained = _differ_within(groups, first) & _differ_within(groups, second)
    return torch.stack([first, second], dim=1) if bool(chained.any()) else groups


def _differ_within(groups: Tensor, numbers: Tensor) -> Tensor:  # (n,), (n,) int64 -> (n,) bool
    """Returns, for each group id from 0 to n − 1, whether the rows of the group have different numbers."""
    least = torch.full_like(numbers, torch.iinfo(torch.int64).max).scatter_reduce(0, groups, numbers, "amin")
    largest = torch.full_like(numbers, -1).scatter_reduce(0, groups, numbers, "amax")
    return least < largest


def components(ids: Tensor) -> Tensor:  # (n,) or (n, 2) int64 -> (n,) int64
    """Returns one id per row. Rows that belong together, directly or through other rows, have equal ids."""
    return ids if ids.dim() == 1 else find_components(ids[:, 0], ids[:, 1])


def count_others(ids: Tensor) -> Tensor:  # (n,) or (n, 2) int64 -> (n,) int64
    """Returns the number of rows that do not belong together with each row."""
    if ids.dim() == 1:
        return len(ids) - _count_equal(ids)
    first, second = (torch.unique(column, return_inverse=True)[1] for column in ids.unbind(1))
    both = first * len(ids) + second
    return len(ids) - _count_equal(first) - _count_equal(second) + _count_equal(both)


def _count_equal(values: Tensor) -> Tensor:  # (n,) -> (n,) int64
    """Returns how many rows equal each row, including the row itself."""
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    counts: Tensor = sizes[group]
    return counts


def first_places(numbers: Tensor) -> Tensor:  # (n,) int64 -> (K,) int64
    """Returns the index of the first occurrence of each number from 0 to K − 1."""
    places = torch.arange(len(numbers))
    return torch.full((int(numbers.max()) + 1,), len(numbers)).scatter_reduce(0, numbers, places, "amin")


def distinct_samples(dataset: "Dataset", side: int) -> Sequence[int]:
    """Returns the first sample of each item (side 0) or of each document (side 1), in ascending order."""
    ids = dataset.documents() if side else dataset.items()
    if ids is None or not len(ids):
        return range(len(dataset))
    distinct: list[int] = first_places(torch.unique(ids, return_inverse=True)[1]).sort().values.tolist()
    return distinct


def text_id(text: str) -> int:
    """Returns a 63-bit hash of a text. The probability that two texts collide is 10⁻¹⁹."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1


# ----------------------------------------------------------------------------------------------------------------------
# Datasets of pairs. Both sides of a pair can be read by index, any number of times.
#
# A batch is a list of sample indices. `source` turns it into the inputs of one tower for `cached_backward`. Data-loader
# workers read samples before their chunk is encoded. For the second pass, a sample is kept in host memory, or is read again
# if memory is short. Its randomness depends only on (seed, epoch, sample, side), and not on its position in a batch or on the
# worker. Therefore a run can be repeated with any number of ranks and workers.
#
# An unreadable sample does not end a run. A blank sample replaces it, `failures` records its index and the reason, and
# `usable` returns a mask of the pairs that the loss uses.


IMAGE, TEXT, AUDIO = "image", "text", "audio"
MIXED = "image+text"  # each sample has an image, a text or both, as `Content`
VALUE, FILE = "value", "file"  # for towers of the user: the value of a table's column, and the contents of a file
STORED_IN_FILES = (IMAGE, AUDIO, FILE)  # kinds whose column contains paths, URLs or the bytes of files
MOST_REPLACEMENTS = 100  # number of samples that are tried to replace an unreadable sample without a blank
BLANK_SIZE = 8  # pixels of the gray image that replaces an unreadable one; towers resize it
BLANK_RATE = 8_000  # samples of the silence that replaces an unreadable recording, which takes one second


class UnreadableSampleError(Exception):
    """A sample is missing or damaged. The run skips it."""


@dataclass(frozen=True)
class StoredFile:
    """The contents of a file."""

    data: bytes
    name: str  # name for error messages


@dataclass(frozen=True)
class Audio:
    """A recording with one channel."""

    samples: Tensor  # (n,) float32, from −1 to 1
    rate: int  # samples per second


class Content(NamedTuple):
    """A sample that can have a text and an image."""

    text: str = ""
    image: Any = None  # (3, H, W) uint8, an `images.EncodedImage` as it is stored, or None

    def __str__(self) -> str:
        """Returns the text, or else the name of the image."""
        return self.text or str(getattr(self.image, "name", None) or "an image")


class Preparation(Protocol):
    """The preprocessing of a tower."""

    @property
    def prepare(self) -> Callable[[Any, torch.Generator | None], Any]:
        """Preprocesses one sample, and augments it if a generator is given. `Dataset.read` describes samples."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Collates results of `prepare` into the inputs of a chunk."""

    @property
    def training_images(self) -> "TrainingImages | None":
        """The faster preprocessing that replaces `prepare` and `collate` for training images; None if there is none."""


class Dataset(ABC):
    """A dataset of pairs that are read by index. Subclasses define `__len__`, `read` and `name`."""

    sides: tuple[str, str] = (IMAGE, TEXT)  # kinds of the two sides
    credits: tuple[str, ...] = ()  # attribution for the images
    problems: Sequence[str] = ()  # missing parts of the data, such as shards or rows without a caption
    groups: tuple[int, ...] | Mixture | None = None  # sizes of the groups that are read together; None if there are none
    negative_columns: tuple[str, ...] = ()  # names of a table's columns of hard negatives
    label_column: str | None = None  # name of a table's column of labels

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}  # index → why the sample could not be read

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def read(self, index: int, side: int) -> Any:
        """Reads one side (0 or 1) of a sample. Every call returns the same value.

        An image is a (3, H, W) uint8 tensor, a text is a str, a recording is an `Audio`, a file is a `StoredFile`, a sample of
        a mixed side is a `Content`, and a value is any object.

        Raises:
            UnreadableSampleError: the sample is missing or damaged. The message has the file name and the reason.
        """

    def read_stored(self, index: int, side: int) -> Any:
        """Returns the result of `read` with images and recordings that are still encoded (`StoredFile`)."""
        return self.read(index, side)

    @abstractmethod
    def name(self, index: int) -> str:
        """Returns the name of a sample for messages and contact sheets."""

    def place(self, index: int) -> str | None:
        """Returns the path or URL of the image of a sample; None if the image is not a separate file."""
        return None

    def key(self, index: int, side: int) -> str:
        """Returns a text that identifies one side of a sample, without reading a file: the text itself, a path or a name."""
        return self.place(index) or self.name(index)

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) or (n, 2) int64
        """Returns an id per sample. Samples with equal ids are not each other's negatives. None means that all ids differ.

        If there are two ids per sample, samples that agree in one of the two columns are not each other's negatives.
        """
        return None

    def items(self) -> Tensor | None:  # (samples,) int64
        """Returns an id per sample for evaluation. Equal ids mean equal first sides. None means that all ids differ."""
        return None

    def documents(self) -> Tensor | None:  # (samples,) int64
        """Returns an id per sample for evaluation. Equal ids mean equal second sides. None means that all ids differ."""
        return None

    def scores(self) -> Tensor | None:  # (samples,) float64
        """Returns the given similarity of the two texts of each sample, NaN if it is unknown; None for data without scores."""
        return None

    def part(self, indices: Sequence[int]) -> "Dataset":
        """Returns a dataset of some samples, given by indices in ascending order. The samples keep their ids."""
        return Part(self, indices)

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
        """Returns a source of tower inputs for one side of some samples. Each reading gives the same inputs.

        Args:
            indices: sample indices.
            side: 0 or 1.
            preparation: preprocessing of the tower, such as a `towers.Tower`.
            seed: seed of the run.
            epoch: number of the epoch, because each epoch augments differently.
            augment: False for evaluation.
            workers: as for `ReplaySource`.
            hold: as for `ReplaySource`.
        """
        if side not in (0, 1):
            raise ValueError(f"side must be 0 or 1, got {side!r}")
        own = sample_seed(sample_seed(seed, epoch), side)
        fast = getattr(preparation, "training_images", None) if augment else None  # a user-defined preparation may have none
        if fast is None:
            read = _Read(self, side, preparation.prepare, own if augment else None)
            measure = getattr(preparation, "measure", None)
            length = None if measure is None else _Measure(self, side, measure)
            collate = _Collate(self, preparation.collate)
            return ReplaySource(indices, read, workers=workers, collate=collate, hold=hold, length=length)
        read_image, finish = _ReadImage(self, side, fast, own), _FinishImages(self, fast)
        return ReplaySource(indices, read_image, workers=workers, finish=finish, hold=hold)

    def usable(self, indices: Sequence[int]) -> Tensor:  # (n,) bool
        """Returns a mask of the samples without a failure so far. It is final after both sides were read."""
        return torch.tensor([index not in self.failures for index in indices], dtype=torch.bool)

    def check(self, index: int) -> int:
        """Returns the index if it is valid. Otherwise raises an IndexError that contains the valid range."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}")
        return index


class Wrapper(Dataset):
    """A dataset that contains the samples of one or more other datasets. Subclasses define `__len__` and `find`."""

    @abstractmethod
    def find(self, index: int) -> tuple[Dataset, int]:
        """Returns the dataset that has a sample, and the index of the sample there."""

    def read(self, index: int, side: int) -> Any:
        """Reads a sample from its dataset."""
        dataset, own = self.find(index)
        return dataset.read(own, side)

    def read_stored(self, index: int, side: int) -> Any:
        """Reads a sample as its dataset stores it."""
        dataset, own = self.find(index)
        return dataset.read_stored(own, side)

    def name(self, index: int) -> str:
        """Returns the name of a sample in its dataset."""
        dataset, own = self.find(index)
        return dataset.name(own)

    def place(self, index: int) -> str | None:
        """Returns the path or URL that its dataset has for the image of a sample."""
        dataset, own = self.find(index)
        return dataset.place(own)

    def key(self, index: int, side: int) -> str:
        """Returns the key of a sample in its dataset."""
        dataset, own = self.find(index)
        return dataset.key(own, side)


class Part(Wrapper):
    """Some samples of a dataset.

    Args:
        dataset: the full dataset.
        indices: indices of the samples, in ascending order.
    """

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        super().__init__()
        self.whole, self.indices = dataset, torch.as_tensor(indices, dtype=torch.int64)
        self.sides, self.credits = dataset.sides, dataset.credits
        self.problems, sizes = dataset.problems, dataset.groups
        if sizes is not None and len(self) == len(dataset):
            self.groups = sizes
        elif sizes is not None:  # shards, whose samples are read together
            assert not isinstance(sizes, Mixture), "a mixture is made of parts"
            ends = torch.tensor(list(itertools.accumulate(sizes)))
            counts = torch.bincount(torch.bucketize(self.indices, ends, right=True), minlength=len(sizes))
            self.groups = tuple(count for count in counts.tolist() if count)

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.indices)

    def find(self, index: int) -> tuple[Dataset, int]:
        """Returns the full dataset, and the index of the sample there."""
        return self.whole, int(self.indices[self.check(index)])

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) or (n, 2) int64
        """Returns the ids of the full dataset for these samples."""
        return self.whole.ids(self.indices[torch.as_tensor(indices, dtype=torch.int64)].tolist())

    def items(self) -> Tensor | None:  # (samples,) int64
        """Returns the items of the full dataset for these samples."""
        items = self.whole.items()
        return None if items is None else items[self.indices]

    def documents(self) -> Tensor | None:  # (samples,) int64
        """Returns the documents of the full dataset for these samples."""
        documents = self.whole.documents()
        return None if documents is None else documents[self.indices]


class _Failure(str):
    """The reason why a sample could not be read. Its repr is constant because replay compares the reprs of two readings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "failure"


@dataclass
class _Read:
    """Reads and preprocesses one side of a sample. Workers can pickle it."""

    dataset: Dataset
    side: int
    prepare: Callable[[Any, torch.Generator | None], Any]
    seed: int | None

    def __call__(self, index: int, generator: torch.Generator) -> Any:
        stand_in, failure = False, None
        try:
            sample = self.dataset.read(int(index), self.side)
        except UnreadableSampleError as error:
            sample, stand_in, failure = self._replacement(), True, _Failure(error)
        # The seed depends on the sample index, and not on the position in the batch.
        own = None if self.seed is None else generator.manual_seed(sample_seed(self.seed, int(index)))
        try:
            prepared = self.prepare(sample, own)
        except UnreadableSampleError as error:  # a tower of the user can refuse a sample
            if stand_in:
                raise
            prepared, failure = self.prepare(self._replacement(), None), _Failure(error)
        if isinstance(sample, Audio):  # the checksum of the recording, because features can depend on the number of threads
            return Checked((index, prepared, failure), checksum(sample))
        return index, prepared, failure

    def _replacement(self) -> Any:
        """Returns a blank. If the kind has none or the tower refuses it, returns the first sample that can be prepared."""
        blanks = [] if self.dataset.sides[self.side] in (VALUE, FILE) else [blank(self.dataset.sides[self.side])]
        reason = ""
        for number in range(len(blanks) + min(len(self.dataset), MOST_REPLACEMENTS)):
            try:
                sample = blanks[0] if number < len(blanks) else self.dataset.read(number - len(blanks), self.side)
                self.prepare(sample, None)
                return sample
            except UnreadableSampleError as error:
                reason = str(error)
        raise ValueError(f"one of the first {MOST_REPLACEMENTS} samples must be readable, got none: {reason}")


@dataclass
class _Measure:
    """Returns the number of tokens of one side of a sample."""

    dataset: Dataset
    side: int
    measure: Callable[[Any], int]

    def __call__(self, index: int) -> int:
        try:
            return self.measure(self.dataset.read_stored(int(index), self.side))
        except UnreadableSampleError:
            return self.measure(blank(self.dataset.sides[self.side]))


@dataclass
class _ReadImage:
    """Reads and crops one training image. The checksum is computed from the stored image, not from the crop."""

    dataset: Dataset
    side: int
    images: "TrainingImages"
    seed: int

    def __call__(self, index: int, generator: torch.Generator) -> Checked:
        own = sample_seed(self.seed, int(index))
        try:
            stored, failure = self.dataset.read_stored(int(index), self.side), None
            crop = self.images.read(stored, generator.manual_seed(own))
        except UnreadableSampleError as error:
            stored, failure = blank(self.dataset.sides[self.side]), _Failure(error)
            crop = self.images.read(stored, generator.manual_seed(own))
        return Checked((index, crop, failure), checksum(stored))


@dataclass
class _Collate:
    """Collates a chunk and records failures. It runs in the main process because workers may be other processes."""

    dataset: Dataset
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[tuple[int, Any, _Failure | None]]) -> Any:
        _note_failures(self.dataset, samples)
        return self.collate([inputs for _, inputs, _ in samples])


@dataclass
class _FinishImages:
    """Finishes a chunk of training images on the device of the tower, and records failures."""

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
    """Returns the replacement for an unreadable sample: a gray image, a silent recording, or an empty text."""
    if kind == AUDIO:
        return Audio(torch.zeros(BLANK_RATE), BLANK_RATE)
    if kind in (VALUE, FILE):
        raise ValueError(f"kind must be {IMAGE}, {AUDIO}, {TEXT} or {MIXED}, which have blanks, got {kind}")
    return torch.full((3, BLANK_SIZE, BLANK_SIZE), 127, dtype=torch.uint8) if kind == IMAGE else ""


def name_sides(sides: Sequence[str]) -> tuple[str, str]:
    """Returns the names of two sides in metrics: the kinds, or "query" and "text" for equal or mixed sides."""
    return (sides[0], sides[1]) if sides[0] != sides[1] and MIXED not in sides else ("query", "text")
