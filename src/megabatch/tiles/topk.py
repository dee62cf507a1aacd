"""The k best of some candidates: larger values first, and of equal values the smaller index.

The order of two candidates depends on nothing else, so the best of parts can be merged in any order. A candidate whose value is
−inf or NaN is none: its index becomes −1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOST_OF_THE_BEST = 1024  # k at most
LARGEST_INDEX = 2**32 - 1  # an index takes half of a key


class Best(NamedTuple):
    """The best candidates of each row, sorted; −inf and −1 where a row has fewer."""

    values: Tensor  # (n, k)
    indices: Tensor  # (n, k) int64

    @classmethod
    def none(cls, rows: int, k: int, like: Tensor) -> "Best":
        """k places without a candidate, for values of the dtype of `like`."""
        values = like.new_full((rows, k), -torch.inf)
        return cls(values, torch.full_like(values, -1, dtype=torch.int64))

    def merge(self, other: "Best") -> "Best":
        """The k best of both, k being as many as this one has."""
        pairs = zip(self, other, strict=True)
        values, indices = (torch.cat(parts, 1) for parts in pairs)
        return best(values, indices, self.values.shape[1])


def best(values: Tensor, indices: Tensor, k: int) -> Best:  # (n, m), (n, m) or (m,) → (n, k)
    """The k best candidates of each row; all of them, in order, if there are no more than k."""
    indices, few = indices.expand(values.shape), max(0, k - values.shape[1])
    if values.dtype == torch.float64:
        found = _sort(values.nan_to_num(-torch.inf, torch.inf, -torch.inf), indices, k)
    else:
        keys = _keys(values, indices)
        found = _from_keys(keys.topk(min(k, keys.shape[1]), dim=1).values)
    indices = found.indices.masked_fill(found.values == -torch.inf, -1)
    if not few:
        return Best(found.values, indices)
    missing = Best.none(len(values), few, values)
    return Best(torch.cat((found.values, missing.values), 1), torch.cat((indices, missing.indices), 1))


def best_columns(values: Tensor, first: int, k: int, before: Best | None = None) -> Best:  # (n, m) → (n, k)
    """The k best of neighbouring columns and of `before`; may replace NaN in `values` by −inf.

    The k groups of columns with the largest maxima hold the k best columns: a column in another group comes after all k
    maxima, because groups are runs of columns. So only √(m·k) candidates or so are ordered by index as well as by value, and
    fewer if many groups have no column above the k-th of `before`.

    Args:
        values: the columns.
        first: the index of the first column.
        k: at most this many are found.
        before: the k best of columns with smaller indices.
    """
    m = values.shape[1]
    size, columns = _group_size(m, k), torch.arange(m, device=values.device)
    if size < 2:
        found = best(values, first + columns, k)
        return found if before is None else before.merge(found)
    maxima = _maxima(values, size)
    wanted = k
    if before is not None and values.is_cpu:  # on another device the host would have to wait for the number
        is_better = maxima > before.values[:, -1:]
        wanted = min(k, int(is_better.sum(1).amax()))
        if wanted == 0:
            return before
        maxima.masked_fill_(~is_better, -torch.inf)
    chosen = best(maxima, torch.arange(maxima.shape[1], device=values.device), wanted).indices
    among = chosen[:, :, None] * size + columns[:size]  # negative if there is no such group
    among = among.where((among >= 0) & (among < m), -1).flatten(1)
    candidates, indices = values.gather(1, among.clamp_min(0)).masked_fill_(among < 0, -torch.inf), first + among
    if before is not None:
        candidates, indices = torch.cat((before.values, candidates), 1), torch.cat((before.indices, indices), 1)
    return best(candidates, indices, k)


def _maxima(values: Tensor, size: int) -> Tensor:  # (n, m) → (n, groups)
    """The maxima of groups of columns, the last of which may be smaller; NaN in `values` is replaced by −inf first."""
    if not values.is_cpu:
        values.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    n, m = values.shape
    whole = m // size * size
    maxima = values[:, :whole].view(n, -1, size).amax(2)
    if whole < m:
        maxima = torch.cat((maxima, values[:, whole:].amax(1, keepdim=True)), 1)
    if values.is_cpu and maxima.isnan().any():  # a maximum shows it, in fewer passes over the values
        return _maxima(values.nan_to_num_(-torch.inf, torch.inf, -torch.inf), size)
    return maxima


def _group_size(m: int, k: int) -> int:
    """Columns of a group: about √(m / k), and a power of two.

    From 32 on, PyTorch takes the maxima of groups with vector instructions: 128 × 8,192 values on one core, ms for groups of
    16 / 22 / 32 / 64: 1.15 / 1.31 / 0.18 / 0.09.
    """
    size = 1 << max(0, int((m / k) ** 0.5).bit_length() - 1)
    return 32 if size == 16 else size


def _sort(values: Tensor, indices: Tensor, k: int) -> Best:
    indices, order = indices.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return Best(values[:, :k], indices.gather(1, order[:, :k]))


def _keys(values: Tensor, indices: Tensor) -> Tensor:  # int64
    """One integer for each candidate that orders as (value, −index): float32 bits above, the index below."""
    values = (values + 0.0).nan_to_num(-torch.inf, torch.inf, -torch.inf)  # −0 equals 0, but has other bits
    bits = values.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (LARGEST_INDEX - (indices & LARGEST_INDEX))


def _from_keys(keys: Tensor) -> Best:
    ordered = (keys >> 32).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return Best(bits.view(torch.float32), LARGEST_INDEX - (keys & LARGEST_INDEX))
