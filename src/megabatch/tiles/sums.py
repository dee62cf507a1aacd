"""Partial sums that tiles add to: Σ exp(s) without overflow, and the cross-entropy of two softmaxes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Σ exp(s) without overflow, as the pair exp(shift) · total.
#
# A pair is more accurate than one logarithm. Adding to `total` costs one rounding of the sum; adding to a logarithm near
# 100 would cost a rounding of 100 each time. And softmax weights exp(s − shift) / total add up to 1, while exp(s − log)
# would carry the rounding error of the logarithm into all of them, in the same direction.


LOG_SUM_PLANES = 2  # tensors of a packed `LogSum`
SOFT_SUM_PLANES = 2 * LOG_SUM_PLANES + 1  # tensors of a packed `SoftSum`


class LogSum(NamedTuple):
    """Partial sums exp(shift) · total. An empty sum has shift = −inf and total = 0."""

    shift: Tensor  # (K,) the largest exponent so far
    total: Tensor  # (K,)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "LogSum":
        """`size` empty sums."""
        shift = torch.full((size,), -torch.inf, dtype=dtype, device=device)
        return cls(shift, torch.zeros_like(shift))

    def value(self) -> Tensor:
        """The logarithms of the sums, float64; −inf for empty sums.

        A loss subtracts a logit of the same size. At 10⁸ the steps of float32 are 8, and the difference would have no digit.
        """
        return finite_or_zero(self.shift).double() + self.total.double().log()

    @classmethod
    def unpack(cls, packed: Tensor) -> "LogSum":
        """From the (2, K) tensor that operators pass on."""
        shift, total = packed
        return cls(shift, total)

    def pack(self) -> Tensor:  # (2, K)
        """Shift and total in one tensor."""
        return torch.stack((self.shift, self.total))

    def part(self, window: slice) -> "LogSum":
        """A view of the entries in `window`."""
        return LogSum(self.shift[window], self.total[window])

    def add_(self, other: "LogSum") -> None:
        """Adds the partial sums of other terms, in place."""
        base = self._rebase_(other.shift)
        self.total.add_(other.total * (other.shift - base).exp_())

    @staticmethod
    def merge(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """`add_` for sums that come as (shift, total) from another rank."""
        LogSum(*sums).add_(LogSum(*others))

    @classmethod
    def of_exponentials(cls, s: Tensor, dim: int) -> "LogSum":
        """Σ exp(s) along `dim` of a tile, which is overwritten."""
        shift = s.amax(dim)
        return cls(shift, s.sub_(finite_or_zero(shift).unsqueeze(dim)).exp_().sum(dim))

    def add_exponentials_(self, s: Tensor, dim: int, out: Tensor) -> None:
        """Adds Σ exp(s) along `dim` of a tile, in place (online softmax).

        `out` receives exp(s − shift) and may be `s` itself.
        """
        base = self._rebase_(s.amax(dim))
        torch.sub(s, base.unsqueeze(dim), out=out).exp_()
        self.total.add_(out.sum(dim))

    def per_unit(self, weight: Tensor) -> Tensor:
        """weight / total, and 0 for empty sums: weight · softmax(s) = per_unit · exp(s − shift)."""
        return torch.where(self.total == 0, 0.0, weight / self.total)

    def softmax_factors(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (K,) each
        """(shift, total, weight / total), the factors of `weighted_softmax`."""
        return finite_or_zero(self.shift), self.total.contiguous(), self.per_unit(weight)

    def _rebase_(self, peak: Tensor) -> Tensor:
        """Raises the shift to at least `peak`. Returns the finite shift to subtract from the exponents that are added next."""
        peak = torch.maximum(self.shift, peak)
        base = finite_or_zero(peak)
        self.total.mul_((self.shift - base).exp_())
        self.shift.copy_(peak)
        return base


def weighted_softmax(s: Tensor, shift: Tensor, total: Tensor, per_unit: Tensor, *, out: Tensor) -> Tensor:
    """weight · softmax(s), with the factors of `LogSum.softmax_factors`. `out` may be `s` itself.

    Each term is capped by its sum, so a softmax is at most 1. Backward computes s again and may round it differently than
    forward: without the cap a softmax would exceed 1 by a factor of e for every nat between the two roundings.
    """
    torch.sub(s, shift, out=out).exp_()
    return torch.minimum(out, total, out=out).mul_(per_unit)


def finite_or_zero(shift: Tensor) -> Tensor:
    """0 in place of ±inf, so that exp(s − shift) of an empty sum is 0 and not NaN. NaN stays NaN."""
    return torch.nan_to_num(shift, torch.nan, posinf=0.0, neginf=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# The cross-entropy of a student's softmax under a teacher's, −Σ_j softmax(t)_j · log softmax(s)_j of each row, in one pass.
#
# Three sums are kept: Σ exp(s), Σ exp(t), and the gap Σ_j exp(t_j)·(max s − s_j). The cross-entropy is log Σ exp(s − max s)
# + gap / Σ exp(t). All terms are positive, so nothing cancels, however large s is.


class SoftSum(NamedTuple):
    """Partial sums of K rows or columns."""

    student: LogSum  # Σ exp(s)
    teacher: LogSum  # Σ exp(t)
    gap: Tensor  # (K,) Σ exp(t − teacher.shift)·(student.shift − s)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "SoftSum":
        """`size` empty sums."""
        student, teacher = (LogSum.empty(size, dtype=dtype, device=device) for _ in range(2))
        return cls(student, teacher, torch.zeros_like(teacher.total))

    @classmethod
    def unpack(cls, packed: Tensor) -> "SoftSum":
        """From the (K, 5) tensor that the ring sends and operators pass on."""
        student_shift, student, teacher_shift, teacher, gap = packed.unbind(1)
        return cls(LogSum(student_shift, student), LogSum(teacher_shift, teacher), gap)

    def pack(self) -> Tensor:  # (K, 5)
        """All sums in one tensor."""
        return torch.stack((*self.student, *self.teacher, self.gap), 1)

    def part(self, window: slice) -> "SoftSum":
        """A view of the entries in `window`."""
        return SoftSum(self.student.part(window), self.teacher.part(window), self.gap[window])

    def value(self) -> Tensor:
        """Returns the cross-entropies in the dtype of the sums.

        They are computed in float64, because some CPUs round a float32 logarithm to the second-nearest number.
        """
        return (self.student.total.double().log() + self.gap.double() / self.teacher.total).to(self.gap.dtype)

    def add_(self, other: "SoftSum") -> None:
        """Adds the partial sums of other terms, in place."""
        shift = torch.maximum(self.student.shift, other.student.shift)
        self._raise_(shift)
        gap = other.gap + other.teacher.total * _rise(other.student.shift, shift)
        self._scale_to_(torch.maximum(self.teacher.shift, other.teacher.shift))
        self.gap.add_(gap * (other.teacher.shift - finite_or_zero(self.teacher.shift)).exp_())
        self.student.add_(other.student)
        self.teacher.add_(other.teacher)

    @staticmethod
    def merge(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """`add_` for sums that come packed, (K, 5), from another rank."""
        SoftSum.unpack(sums[0]).add_(SoftSum.unpack(others[0]))

    def add_tile_(self, s: Tensor, t: Tensor, dim: int, spare: Tensor, other: Tensor) -> None:
        """Adds a tile along `dim`. s and t stay unchanged; `spare` and `other`, of their shape, are overwritten."""
        self._raise_(torch.maximum(self.student.shift, s.amax(dim)))
        self._scale_to_(torch.maximum(self.teacher.shift, t.amax(dim)))
        self.teacher.add_exponentials_(t, dim=dim, out=other)
        below = torch.sub(finite_or_zero(self.student.shift).unsqueeze(dim), s, out=spare)
        self.gap.add_(other.mul_(below).sum(dim))
        self.student.add_exponentials_(s, dim=dim, out=spare)

    def _raise_(self, shift: Tensor) -> None:
        """Raises the student's shift to `shift`, which changes the gap too."""
        self.gap.add_(self.teacher.total * _rise(self.student.shift, shift))
        self.student.total.mul_((self.student.shift - finite_or_zero(shift)).exp_())
        self.student.shift.copy_(shift)

    def _scale_to_(self, shift: Tensor) -> None:
        """Raises the teacher's shift to `shift`."""
        factor = (self.teacher.shift - finite_or_zero(shift)).exp_()
        self.gap.mul_(factor)
        self.teacher.total.mul_(factor)
        self.teacher.shift.copy_(shift)


def _rise(low: Tensor, high: Tensor) -> Tensor:
    """high − low, and 0 for an empty sum, whose shift is −inf."""
    return torch.where(low == -torch.inf, 0.0, high - low)


# ----------------------------------------------------------------------------------------------------------------------
# The k best candidates of each row: larger values first, and among equal values the smaller index first.
#
# The order of two candidates depends on nothing else, so parts can be merged in any order. A value of −inf or NaN is not a
# candidate, and its index becomes −1.

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
