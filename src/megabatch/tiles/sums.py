"""Partial sums that tiles add to: Σ exp(s) without overflow, and the cross-entropy of two softmaxes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WITH_FLOAT64 = ("cpu", "cuda", "meta")  # device types on which every device computes in float64


def exact_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of logits and logsumexps that a loss subtracts: float64, or float32 where float64 may be missing.

    Apple GPUs and many Intel GPUs have no float64. There, a difference of two logits has the rounding error of a float32 logit.
    """
    return torch.float64 if device.type in _WITH_FLOAT64 else torch.float32


def to_exact(values: Tensor) -> Tensor:
    """Converts to `exact_dtype`."""
    return values.to(exact_dtype(values.device))


# ----------------------------------------------------------------------------------------------------------------------
# Σ exp(s) without overflow, as the pair exp(shift) · total.
#
# A pair is more accurate than one logarithm, for two reasons. Adding to `total` causes a rounding error relative to the sum,
# while adding to a logarithm near 100 would cause a rounding error relative to 100 each time. Softmax weights
# exp(s − shift) / total add up to 1, while the rounding error of the logarithm would change all weights exp(s − log) in the
# same direction.


LOG_SUM_PLANES = 2  # tensors of a packed `LogSum`
SOFT_SUM_PLANES = 2 * LOG_SUM_PLANES + 1  # tensors of a packed `SoftSum`


class LogSum(NamedTuple):
    """Partial sums exp(shift) · total. An empty sum has shift = −inf and total = 0."""

    shift: Tensor  # (K,) the largest exponent of the terms that have been added
    total: Tensor  # (K,)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "LogSum":
        """Returns `size` empty sums."""
        shift = torch.full((size,), -torch.inf, dtype=dtype, device=device)
        return cls(shift, torch.zeros_like(shift))

    def value(self) -> Tensor:
        """Returns the logarithms of the sums in `exact_dtype`, and −inf for empty sums.

        A loss subtracts a logit of the same size. At 10⁸, neighboring float32 numbers differ by 8, so a difference in float32
        would have no correct digit.
        """
        return to_exact(finite_or_zero(self.shift)) + to_exact(self.total).log()

    @classmethod
    def unpack(cls, packed: Tensor) -> "LogSum":
        """Returns the sums in a (2, K) tensor, which is the format of operators."""
        shift, total = packed
        return cls(shift, total)

    def pack(self) -> Tensor:  # (2, K)
        """Returns shift and total in one tensor."""
        return torch.stack((self.shift, self.total))

    def part(self, window: slice) -> "LogSum":
        """Returns a view of the entries in `window`."""
        return LogSum(self.shift[window], self.total[window])

    def add_(self, other: "LogSum") -> None:
        """Adds the partial sums of other terms, in place."""
        base = self._rebase_(other.shift)
        self.total.add_(other.total * (other.shift - base).exp_())

    @staticmethod
    def merge(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Adds sums that another rank has sent as (shift, total)."""
        LogSum(*sums).add_(LogSum(*others))

    @classmethod
    def of_exponentials(cls, s: Tensor, dim: int) -> "LogSum":
        """Returns Σ exp(s) along `dim` of a tile. Overwrites the tile."""
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
        """Returns weight / total, and 0 for empty sums, so that weight · softmax(s) = per_unit · exp(s − shift)."""
        return torch.where(self.total == 0, 0.0, weight / self.total)

    def softmax_factors(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (K,) each
        """Returns (shift, total, weight / total), the factors of `weighted_softmax`."""
        return finite_or_zero(self.shift), self.total.contiguous(), self.per_unit(weight)

    def _rebase_(self, peak: Tensor) -> Tensor:
        """Raises the shift to at least `peak`. Returns the finite shift that the caller subtracts from further exponents."""
        peak = torch.maximum(self.shift, peak)
        base = finite_or_zero(peak)
        self.total.mul_((self.shift - base).exp_())
        self.shift.copy_(peak)
        return base


def weighted_softmax(s: Tensor, shift: Tensor, total: Tensor, per_unit: Tensor, *, out: Tensor) -> Tensor:
    """Returns weight · softmax(s), with the factors of `LogSum.softmax_factors`. `out` may be `s` itself.

    Each term is capped by its sum, so a softmax is at most 1. The backward pass computes s again and may round it differently.
    Without the cap, a softmax would exceed 1 by a factor of e for every nat between the two rounded values.
    """
    torch.sub(s, shift, out=out).exp_()
    return torch.minimum(out, total, out=out).mul_(per_unit)


def finite_or_zero(shift: Tensor) -> Tensor:
    """Replaces ±inf by 0, so that exp(s − shift) of an empty sum is 0 and not NaN. NaN stays NaN."""
    return torch.nan_to_num(shift, torch.nan, posinf=0.0, neginf=0.0)


# Above this value, log1p(exp(s)) − s is smaller than the rounding error of s, even in float64.
SOFTPLUS_IS_IDENTITY = 50.0


def exact_softplus(values: Tensor) -> Tensor:
    """Computes log(1 + exp(values)) to full float64 precision. PyTorch's default threshold gives only nine digits."""
    return F.softplus(values, threshold=SOFTPLUS_IS_IDENTITY)


def less_match(negatives: Tensor, match: Tensor, dtype: torch.dtype) -> Tensor:  # (N,)
    """Returns negatives − match, which have the `exact_dtype`, rounded to `dtype`. It is NaN where the match is +inf.

    Without NaN, the loss of such a pair would be 0, so a run whose matmuls overflow would seem to have a perfect loss.
    """
    overflow = match.detach().clamp_min(0.0) * 0.0  # NaN where the match is +inf, elsewhere 0
    return (negatives - match + overflow).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The cross-entropy of a student's softmax under a teacher's, −Σ_j softmax(t)_j · log softmax(s)_j of each row, in one pass.
#
# The pass computes three sums: Σ exp(s), Σ exp(t), and the gap Σ_j exp(t_j)·(max s − s_j). The cross-entropy is
# log Σ exp(s − max s) + gap / Σ exp(t). All terms are positive, so no terms cancel, even if s is large.


class SoftSum(NamedTuple):
    """Partial sums of K rows or columns."""

    student: LogSum  # Σ exp(s)
    teacher: LogSum  # Σ exp(t)
    gap: Tensor  # (K,) Σ exp(t − teacher.shift)·(student.shift − s)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "SoftSum":
        """Returns `size` empty sums."""
        student, teacher = (LogSum.empty(size, dtype=dtype, device=device) for _ in range(2))
        return cls(student, teacher, torch.zeros_like(teacher.total))

    @classmethod
    def unpack(cls, packed: Tensor) -> "SoftSum":
        """Returns the sums in a (K, 5) tensor, which is the format of messages and operators."""
        student_shift, student, teacher_shift, teacher, gap = packed.unbind(1)
        return cls(LogSum(student_shift, student), LogSum(teacher_shift, teacher), gap)

    def pack(self) -> Tensor:  # (K, 5)
        """Returns all sums in one tensor."""
        return torch.stack((*self.student, *self.teacher, self.gap), 1)

    def part(self, window: slice) -> "SoftSum":
        """Returns a view of the entries in `window`."""
        return SoftSum(self.student.part(window), self.teacher.part(window), self.gap[window])

    def value(self) -> Tensor:
        """Returns the cross-entropies in the dtype of the sums.

        They are computed in `exact_dtype`, because some CPUs round a float32 logarithm to the second-nearest number.
        """
        return (to_exact(self.student.total).log() + to_exact(self.gap) / self.teacher.total).to(self.gap.dtype)

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
        """Adds sums that another rank has sent in one (K, 5) tensor."""
        SoftSum.unpack(sums[0]).add_(SoftSum.unpack(others[0]))

    def add_tile_(self, s: Tensor, t: Tensor, dim: int, spare: Tensor, other: Tensor) -> None:
        """Adds a tile along `dim`. s and t stay unchanged. `spare` and `other` have their shape and are overwritten."""
        self._raise_(torch.maximum(self.student.shift, s.amax(dim)))
        self._scale_to_(torch.maximum(self.teacher.shift, t.amax(dim)))
        self.teacher.add_exponentials_(t, dim=dim, out=other)
        below = torch.sub(finite_or_zero(self.student.shift).unsqueeze(dim), s, out=spare)
        self.gap.add_(other.mul_(below).sum(dim))
        self.student.add_exponentials_(s, dim=dim, out=spare)

    def _raise_(self, shift: Tensor) -> None:
        """Raises the student's shift to `shift`, which also changes the gap."""
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
    """Returns high − low, and 0 for an empty sum, which has a shift of −inf."""
    return torch.where(low == -torch.inf, 0.0, high - low)


# ----------------------------------------------------------------------------------------------------------------------
# The k best candidates of each row: larger values first, and among equal values the smaller index first.
#
# The order of two candidates depends only on their values and indices, so parts can be merged in any order. A value of −inf or
# NaN is not a candidate, and its index becomes −1.

MAX_K = 1024
LARGEST_INDEX = 2**32 - 1  # an index takes half of a 64-bit key


class Best(NamedTuple):
    """The best candidates of each row, sorted. A row with fewer than k candidates ends with values −inf and indices −1."""

    values: Tensor  # (n, k)
    indices: Tensor  # (n, k) int64

    @classmethod
    def none(cls, rows: int, k: int, like: Tensor) -> "Best":
        """Returns `rows` rows without candidates, with values in the dtype of `like`."""
        values = like.new_full((rows, k), -torch.inf)
        return cls(values, torch.full_like(values, -1, dtype=torch.int64))

    def merge(self, other: "Best") -> "Best":
        """Returns the k best candidates of both, where k is the number of columns of `self`."""
        pairs = zip(self, other, strict=True)
        values, indices = (torch.cat(parts, 1) for parts in pairs)
        return best(values, indices, self.values.shape[1])


def best(values: Tensor, indices: Tensor, k: int) -> Best:  # (n, m), (n, m) or (m,) → (n, k)
    """Returns the k best candidates of each row, sorted. If there are fewer than k candidates, it returns all of them."""
    indices, shortage = indices.expand(values.shape), max(0, k - values.shape[1])
    if values.dtype == torch.float64:
        largest = _sort(values.nan_to_num(-torch.inf, torch.inf, -torch.inf), indices, k)
    else:
        keys = _keys(values, indices)
        largest = _from_keys(keys.topk(min(k, keys.shape[1]), dim=1).values)
    indices = largest.indices.masked_fill(largest.values == -torch.inf, -1)
    if not shortage:
        return Best(largest.values, indices)
    missing = Best.none(len(values), shortage, values)
    return Best(torch.cat((largest.values, missing.values), 1), torch.cat((indices, missing.indices), 1))


def best_columns(values: Tensor, first: int, k: int, before: Best | None = None) -> Best:  # (n, m) → (n, k)
    """Returns the k best of consecutive columns and of `before`. May replace NaN in `values` by −inf.

    The k groups of columns with the largest maxima contain the k best columns, because a column in another group comes after
    all k maxima. Groups consist of consecutive columns, so this is also true for ties. So only about √(m·k) candidates are
    sorted by value and index, and fewer if many groups have no column above the k-th value of `before`.

    Args:
        values: the columns.
        first: the index of the first column.
        k: the maximum number of results for each row.
        before: the k best of columns with smaller indices.
    """
    m = values.shape[1]
    size, columns = _group_size(m, k), torch.arange(m, device=values.device)
    if size < 2:
        here = best(values, first + columns, k)
        return here if before is None else before.merge(here)
    maxima = _maxima(values, size)
    groups = k
    if before is not None and values.is_cpu:  # on other devices the host would have to wait for the number
        is_better = maxima > before.values[:, -1:]
        groups = min(k, int(is_better.sum(1).amax()))
        if groups == 0:
            return before
        maxima.masked_fill_(~is_better, -torch.inf)
    chosen = best(maxima, torch.arange(maxima.shape[1], device=values.device), groups).indices
    offsets = chosen[:, :, None] * size + columns[:size]  # negative if a row has fewer groups
    offsets = offsets.where((offsets >= 0) & (offsets < m), -1).flatten(1)
    candidates, indices = values.gather(1, offsets.clamp_min(0)).masked_fill_(offsets < 0, -torch.inf), first + offsets
    if before is not None:
        candidates, indices = torch.cat((before.values, candidates), 1), torch.cat((before.indices, indices), 1)
    return best(candidates, indices, k)


def _maxima(values: Tensor, size: int) -> Tensor:  # (n, m) → (n, groups)
    """Replaces NaN in `values` by −inf and returns the maxima of groups of columns. The last group may be smaller."""
    if not values.is_cpu:
        values.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    n, m = values.shape
    whole = m // size * size
    maxima = values[:, :whole].view(n, -1, size).amax(2)
    if whole < m:
        maxima = torch.cat((maxima, values[:, whole:].amax(1, keepdim=True)), 1)
    if values.is_cpu and maxima.isnan().any():  # the maximum of a group with NaN is NaN, and there are fewer maxima
        return _maxima(values.nan_to_num_(-torch.inf, torch.inf, -torch.inf), size)
    return maxima


def _group_size(m: int, k: int) -> int:
    """Returns the number of columns in a group, a power of two near √(m / k).

    For groups of at least 32, PyTorch computes maxima with vector instructions. 128 × 8,192 values on one core take 1.15 / 1.31
    / 0.18 / 0.09 ms with groups of 16 / 22 / 32 / 64.
    """
    size = 1 << max(0, int((m / k) ** 0.5).bit_length() - 1)
    return 32 if size == 16 else size


def _sort(values: Tensor, indices: Tensor, k: int) -> Best:
    indices, order = indices.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return Best(values[:, :k], indices.gather(1, order[:, :k]))


def _keys(values: Tensor, indices: Tensor) -> Tensor:  # int64
    """Returns one integer for each candidate that sorts as (value, −index). The float32 bits are above the index."""
    values = (values + 0.0).nan_to_num(-torch.inf, torch.inf, -torch.inf)  # + 0.0 turns −0, which has different bits, into 0
    bits = values.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (LARGEST_INDEX - (indices & LARGEST_INDEX))


def _from_keys(keys: Tensor) -> Best:
    ordered = (keys >> 32).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return Best(bits.view(torch.float32), LARGEST_INDEX - (keys & LARGEST_INDEX))
