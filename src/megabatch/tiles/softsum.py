"""The cross-entropy of a student's softmax under a teacher's, −Σ_j softmax(t)_j · log softmax(s)_j of each row, in one pass.

Three sums are kept: Σ exp(s), Σ exp(t), and the gap Σ_j exp(t_j)·(max s − s_j). The cross-entropy is
log Σ exp(s − max s) + gap / Σ exp(t). All terms are positive, so nothing cancels, however large s is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles.logsum import LogSum, finite_or_zero


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
        """The cross-entropies."""
        return self.student.total.log() + self.gap / self.teacher.total

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
