"""The cross-entropy of a student's softmax under a teacher's, row by row: −Σ_j softmax(t)_j · log softmax(s)_j, in one pass.

What is kept is Σ exp(s), Σ exp(t), and how far below its largest s the teacher looks: Σ_j exp(t_j)·(max s − s_j). All terms
are positive, so nothing cancels, whatever the size of s.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles.logsum import LogSum, finite_or_zero


class SoftSum(NamedTuple):
    """Partial sums of some rows or columns."""

    student: LogSum  # Σ exp(s)
    teacher: LogSum  # Σ exp(t)
    gap: Tensor  # (K,) Σ exp(t − teacher.shift)·(student.shift − s)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "SoftSum":
        """`size` sums of nothing."""
        student, teacher = (LogSum.empty(size, dtype=dtype, device=device) for _ in range(2))
        return cls(student, teacher, torch.zeros_like(teacher.total))

    @classmethod
    def unpack(cls, packed: Tensor) -> "SoftSum":
        """From (K, 5), as it travels and as operators pass it on."""
        student_shift, student, teacher_shift, teacher, gap = packed.unbind(1)
        return cls(LogSum(student_shift, student), LogSum(teacher_shift, teacher), gap)

    def pack(self) -> Tensor:  # (K, 5)
        """All in one tensor."""
        return torch.stack((*self.student, *self.teacher, self.gap), 1)

    def part(self, window: slice) -> "SoftSum":
        """A view of some entries: adding to it adds to these."""
        return SoftSum(self.student.part(window), self.teacher.part(window), self.gap[window])

    def value(self) -> Tensor:
        """The cross-entropies."""
        return self.student.total.log() + self.gap / self.teacher.total

    def add_(self, other: "SoftSum") -> None:
        """Merges the partial sums of another set of terms into these, in place."""
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
        """Adds a tile along `dim`; s and t are left as they are, two buffers of their shape are overwritten."""
        self._raise_(torch.maximum(self.student.shift, s.amax(dim)))
        self._scale_to_(torch.maximum(self.teacher.shift, t.amax(dim)))
        self.teacher.add_exponentials_(t, dim=dim, out=other)
        below = torch.sub(finite_or_zero(self.student.shift).unsqueeze(dim), s, out=spare)
        self.gap.add_(other.mul_(below).sum(dim))
        self.student.add_exponentials_(s, dim=dim, out=spare)

    def _raise_(self, shift: Tensor) -> None:
        """The gap as seen from `shift`; the student's sum itself follows when something is added to it."""
        self.gap.add_(self.teacher.total * _rise(self.student.shift, shift))
        self.student.total.mul_((self.student.shift - finite_or_zero(shift)).exp_())
        self.student.shift.copy_(shift)

    def _scale_to_(self, shift: Tensor) -> None:
        factor = (self.teacher.shift - finite_or_zero(shift)).exp_()
        self.gap.mul_(factor)
        self.teacher.total.mul_(factor)
        self.teacher.shift.copy_(shift)


def _rise(low: Tensor, high: Tensor) -> Tensor:
    """high − low, and 0 where nothing was summed at `low`."""
    return torch.where(low == -torch.inf, 0.0, high - low)
