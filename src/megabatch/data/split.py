"""Holds out a part of a dataset for evaluation. Names of samples decide, so it is the same in every run and on every rank.

Samples with equal ids, such as the captions of one image, stay on one side of the split. In a folder of classes, where equal
ids mean one class, each image is drawn on its own. Sources of a mixture are split together: images with one name or one path
stay on one side.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.data.dataset import Dataset
from megabatch.data.folders import Folders
from megabatch.data.ids import connected, numbered, text_id
from megabatch.data.remote import is_url
from megabatch.data.tables import Table

STEPS = 10**9  # the fraction is rounded to a multiple of 1 / STEPS


def parts(datasets: Sequence[Dataset], fraction: float) -> list[tuple[Dataset, Dataset]]:
    """The training part and the held-out part of each dataset, neither empty. About `fraction` of the samples are held out.

    Across datasets, samples with one name, one path or (in tables) one second text stay together.
    """

    def each(value: Callable[[Dataset, int], Any]) -> list[Any]:
        return [value(dataset, index) for dataset in datasets for index in range(len(dataset))]

    names, units = each(lambda dataset, index: dataset.name(index)), _units(datasets[0])
    if len(datasets) > 1:
        units = numbered([(which, unit) for which, one in enumerate(datasets) for unit in _units(one).tolist()])
        places = each(lambda one, index: _path(one, index) or (id(one), index))
        texts = each(lambda one, index: one.stored(index, 1) if isinstance(one, Table) else (id(one), index))
        for shared in (names, places, texts):
            units = connected(units, numbered(shared))
    least: dict[int, int] = {}  # the smallest key of a unit's samples decides, whatever their order
    keys, numbers = [text_id(name) for name in names], units.tolist()
    for number, key in zip(numbers, keys, strict=True):
        least[number] = min(key, least.get(number, key))
    held = iter([least[number] % STEPS < fraction * STEPS for number in numbers])
    return [_split(dataset, list(itertools.islice(held, len(dataset))), fraction) for dataset in datasets]


def _path(dataset: Dataset, index: int) -> str | None:
    """The path or address of the image; None if it has no file of its own, or if its name already is the address."""
    found = None if is_url(dataset.name(index)) else dataset.place(index)
    return found and os.path.abspath(found)


def _units(dataset: Dataset) -> Tensor:  # (samples,) int64
    """Samples with equal numbers stay together."""
    found = None if isinstance(dataset, Folders) else dataset.ids(range(len(dataset)))
    found = dataset.items() if found is None else found
    return torch.arange(len(dataset)) if found is None else found


def _split(dataset: Dataset, held: list[bool], fraction: float) -> tuple[Dataset, Dataset]:
    train, test = ([index for index, out in enumerate(held) if out is wanted] for wanted in (False, True))
    if not train or not test:
        raise ValueError(
            f"holdout must leave samples for training and for evaluation, got {fraction} of {len(dataset):,} samples"
        )
    return _part(dataset, train), _part(dataset, test)


def _part(dataset: Dataset, indices: list[int]) -> Dataset:
    return dataset.part(indices) if isinstance(dataset, Table) else Part(dataset, indices)


class Part(Dataset):
    """Some samples of a dataset.

    Args:
        dataset: the whole.
        indices: of the samples, in ascending order.
    """

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        super().__init__()
        self.whole, self.indices = dataset, torch.as_tensor(indices, dtype=torch.int64)
        self.sides, self.credits = dataset.sides, dataset.credits
        self.problems = list(getattr(dataset, "problems", ()))
        sizes = getattr(dataset, "groups", None)
        if sizes is not None and len(self) == len(dataset):
            self.groups = sizes
        elif sizes is not None:  # shards, whose samples are read together
            ends = torch.tensor(list(itertools.accumulate(sizes)))
            counts = torch.bincount(torch.bucketize(self.indices, ends, right=True), minlength=len(sizes))
            self.groups = tuple(count for count in counts.tolist() if count)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.indices)

    def read(self, index: int, side: int) -> Any:
        """As in the whole."""
        return self.whole.read(int(self.indices[self.check(index)]), side)

    def stored(self, index: int, side: int) -> Any:
        """As in the whole."""
        return self.whole.stored(int(self.indices[self.check(index)]), side)

    def name(self, index: int) -> str:
        """As in the whole."""
        return self.whole.name(int(self.indices[self.check(index)]))

    def place(self, index: int) -> str | None:
        """As in the whole."""
        return self.whole.place(int(self.indices[self.check(index)]))

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """As in the whole."""
        return self.whole.ids(self.indices[torch.as_tensor(indices, dtype=torch.int64)].tolist())

    def items(self) -> Tensor | None:  # (samples,) int64
        """As in the whole."""
        found = self.whole.items()
        return None if found is None else found[self.indices]

    def classes(self) -> Tensor | None:  # (samples,) int64
        """As in the whole."""
        found = self.whole.classes()
        return None if found is None else found[self.indices]
