"""Σ exp(s) that cannot overflow: exp(shift) · total, entry by entry.

A sum is kept as this pair, not as one logarithm. Adding to `total` costs one rounding of the *sum*, adding to a logarithm
near 100 would cost a rounding of 100 every time; and softmax weights exp(s − shift) / total add up to 1, while exp(s − log)
would carry the rounding of the logarithm into every one of them, all in the same direction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LogSum(NamedTuple):
    """Partial sums exp(shift) · total; nothing summed yet is shift = −inf, total = 0."""

    shift: Tensor  # (K,) the largest exponent so far
    total: Tensor  # (K,)

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> "LogSum":
        """`size` sums of nothing."""
        shift = torch.full((size,), -torch.inf, dtype=dtype, device=device)
        return cls(shift, torch.zeros_like(shift))

    def value(self) -> Tensor:
        """The logarithms of the sums; −inf where nothing was summed."""
        return finite_or_zero(self.shift) + self.total.log()

    @classmethod
    def unpack(cls, packed: Tensor) -> "LogSum":
        """From (2, K), as operators pass it on."""
        shift, total = packed
        return cls(shift, total)

    def pack(self) -> Tensor:  # (2, K)
        """Both in one tensor."""
        return torch.stack((self.shift, self.total))

    def part(self, window: slice) -> "LogSum":
        """A view of some entries: adding to it adds to these."""
        return LogSum(self.shift[window], self.total[window])

    def add_(self, other: "LogSum") -> None:
        """Merges the partial sums of another set of terms into these, in place."""
        base = self._rebase_(other.shift)
        self.total.add_(other.total * (other.shift - base).exp_())

    @staticmethod
    def merge(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """`add_` for sums that come as (shift, total) from another rank."""
        LogSum(*sums).add_(LogSum(*others))

    def add_exponentials_(self, s: Tensor, dim: int, out: Tensor) -> None:
        """Adds Σ exp(s) along `dim` of a tile, in place. The exponentials are left in `out`, which may be `s` itself."""
        base = self._rebase_(s.amax(dim))
        torch.sub(s, base.unsqueeze(dim), out=out).exp_()
        self.total.add_(out.sum(dim))

    def per_unit(self, weight: Tensor) -> Tensor:
        """weight / total, and 0 where nothing was summed: what exp(s − shift) is multiplied by to be weight · softmax."""
        return torch.where(self.total == 0, 0.0, weight / self.total)

    def softmax_factors(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (K,) each
        """(shift, total, weight / total): what `weighted_softmax` takes."""
        return finite_or_zero(self.shift), self.total.contiguous(), self.per_unit(weight)

    def _rebase_(self, peak: Tensor) -> Tensor:
        """Raises the shift to at least `peak` and returns what to subtract from exponents that are added next."""
        peak = torch.maximum(self.shift, peak)
        base = finite_or_zero(peak)
        self.total.mul_((self.shift - base).exp_())
        self.shift.copy_(peak)
        return base


def weighted_softmax(s: Tensor, shift: Tensor, total: Tensor, per_unit: Tensor, *, out: Tensor) -> Tensor:
    """weight · softmax(s), where the factors come from `LogSum.softmax_factors`; `out` may be `s` itself.

    A term is at most its sum, so that a softmax is at most 1. Backward forms s anew and may round it differently than forward
    did: without the minimum a softmax would exceed 1 by a factor of exp(1) for every nat between the two roundings.
    """
    torch.sub(s, shift, out=out).exp_()
    return torch.minimum(out, total, out=out).mul_(per_unit)


def finite_or_zero(shift: Tensor) -> Tensor:
    """0 in place of ±inf, so that exp(s − shift) of an empty sum is 0 and not NaN; NaN stays."""
    return torch.where(shift.isinf(), 0.0, shift)
