"""Ids of samples: one integer per sample, equal where samples belong together."""

import hashlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def numbered(values: Sequence[Hashable]) -> Tensor:  # (n,) int64
    """Equal numbers for equal values, from 0 on in the order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64)


def connected(first: Tensor, second: Tensor) -> Tensor:  # (n,), (n,) int64 -> (n,) int64
    """Connected components: equal ids for rows that share a number in `first` or in `second`, directly or through others."""
    parent = list(range(len(first)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for side in (first, second):
        seen: dict[int, int] = {}
        for row, value in enumerate(side.tolist()):
            a, b = root(row), root(seen.setdefault(value, row))
            parent[max(a, b)] = min(a, b)
    return torch.tensor([root(row) for row in range(len(first))], dtype=torch.int64)


def text_id(text: str) -> int:
    """63-bit hash of a text; two texts collide with probability 10⁻¹⁹."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1
