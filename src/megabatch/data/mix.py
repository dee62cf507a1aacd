"""Several datasets as one, in given proportions: "3 * photos/*.tar + 1 * drawings.csv".

An epoch has as many samples as all sources together, and each source has its share of them. A source whose share is larger than
itself is repeated; one whose share is smaller goes on in the next epoch where it stopped. `Order` decides which samples these
are, from the seed and the number of the epoch alone. Without weights, an epoch has each sample once.
"""

import bisect
import glob
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.data.dataset import Dataset
from megabatch.data.ids import text_id
from megabatch.data.order import Mixture

BETWEEN = " + "
_WEIGHT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*\*(\s*)(.*)", re.DOTALL)


def parsed(spec: str) -> tuple[list[str], list[float] | None]:
    """The names of the sources, and their weights; None if none has one."""
    specs = [part.strip() for part in spec.split(BETWEEN)]
    found = [_weighted(part) for part in specs]
    if any(found) and not all(found):
        raise ValueError(f'every source or none must have a weight, as in "3 * photos.csv + 1 * drawings.csv", got {spec!r}')
    names = [part[1] for part in found if part] or specs
    if not all(names):
        raise ValueError(f"every source must have a name, got {spec!r}")
    return names, [part[0] for part in found if part] or None


def _weighted(spec: str) -> tuple[float, str] | None:
    """A weight and the name of its source; None without a weight, as in "3*.csv" if files match this pattern."""
    found = _WEIGHT.fullmatch(spec)
    if found is None or (not found[2] and glob.glob(spec)):
        return None
    return float(found[1]), found[3]


class Mix(Dataset):
    """The samples of several datasets, one after another.

    Args:
        sources: of one kind of pairs.
        weights: share of each source in an epoch; they need not sum to one (default: its number of samples).
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        for source in sources:
            if tuple(source.sides) != tuple(sources[0].sides):
                told = " and ".join(" to ".join(one.sides) for one in (sources[0], source))
                raise ValueError(f"sources that are mixed must have the same sides, got {told}")
            if columns := getattr(source, "negative_columns", ()):
                raise ValueError(
                    f"sources that are mixed must be pairs, got hard negatives in the column {columns[0]}; --columns without "
                    "negative=… leaves them out"
                )
        self.sources, self.sides = list(sources), sources[0].sides
        self.credits = tuple(dict.fromkeys(line for source in sources for line in source.credits))
        self.problems = [problem for source in sources for problem in getattr(source, "problems", ())]
        self._ends = list(itertools.accumulate(map(len, sources)))
        parts = tuple(getattr(source, "groups", len(source)) for source in sources)
        self.groups = Mixture(parts, tuple(map(float, weights or map(len, sources))))

    def __len__(self) -> int:
        """The number of samples of all sources."""
        return self._ends[-1]

    def read(self, index: int, side: int) -> Any:
        """As in its source."""
        source, own = self._find(index)
        return self.sources[source].read(own, side)

    def stored(self, index: int, side: int) -> Any:
        """As in its source."""
        source, own = self._find(index)
        return self.sources[source].stored(own, side)

    def name(self, index: int) -> str:
        """As in its source."""
        source, own = self._find(index)
        return self.sources[source].name(own)

    def place(self, index: int) -> str | None:
        """As in its source."""
        source, own = self._find(index)
        return self.sources[source].place(own)

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """As in the sources. A sample without an id gets one, because a repeated sample may be in a batch twice."""
        found = torch.as_tensor(indices, dtype=torch.int64).clone()
        numbers = torch.bucketize(found, torch.tensor(self._ends), right=True)
        for number, source in enumerate(self.sources):
            here = numbers == number
            own = found[here] - (self._ends[number] - len(source))
            known = source.ids(own.tolist())
            found[here] = (own if known is None else known) ^ text_id(str(number))  # sources have no id in common
        return found

    def items(self) -> Tensor | None:  # (samples,) int64
        """As in the sources."""
        return self._joined([source.items() for source in self.sources])

    def classes(self) -> Tensor | None:  # (samples,) int64
        """As in the sources."""
        return self._joined([source.classes() for source in self.sources])

    def _joined(self, found: list[Tensor | None]) -> Tensor | None:
        """One id per sample of all sources. Sources share none; a sample of a source without ids has one of its own."""
        if all(ids is None for ids in found):
            return None
        joined, first = [], 0
        for source, ids in zip(self.sources, found, strict=True):
            # Numbered from 0 on: a part of a dataset keeps the ids of the whole, which may be any numbers.
            own = torch.arange(len(source)) if ids is None else torch.unique(ids, return_inverse=True)[1]
            joined.append(first + own)
            first += len(source)
        return torch.cat(joined)

    def _find(self, index: int) -> tuple[int, int]:
        source = bisect.bisect_right(self._ends, self.check(index))
        return source, index - (self._ends[source - 1] if source else 0)
