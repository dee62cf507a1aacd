"""Hard negatives of a table: further texts that a step encodes with the second side of its pairs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.sources import Source
from megabatch.data.dataset import Dataset, Preparation
from megabatch.data.tables import Table


class WithNegatives(Dataset):
    """A table whose second side has, after the texts of the samples, the hard negatives of these samples.

    Args:
        table: with columns of negatives.
    """

    def __init__(self, table: Table) -> None:
        self.table, self.sides, self.failures = table, table.sides, table.failures

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.table)

    def read(self, index: int, side: int) -> Any:
        """As the table's."""
        return self.table.read(index, side)

    def name(self, index: int) -> str:
        """As the table's."""
        return self.table.name(index)

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """As the table's."""
        return self.table.ids(indices)

    def source(self, indices: Sequence[int], side: int, preparation: Preparation, **options: Any) -> Source:
        """The second side is longer by the negatives, in the order of `Table.negatives_of`."""
        further = self.table.negatives_of(indices).tolist() if side == 1 else []
        return self.table.source([*indices, *further], side, preparation, **options)

    def owners(self, indices: Sequence[int]) -> Tensor:  # (m,) int64
        """The position in `indices` of the sample that each negative belongs to."""
        counts = [self.table.negative_count(index) for index in indices]
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    def negative_ids(self, indices: Sequence[int]) -> Tensor:  # (m,) int64
        """The id of the samples that have the same text on their second side; else a number that no sample has."""
        return self.table.negative_ids(self.table.negatives_of(indices))
