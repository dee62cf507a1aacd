"""Σ exp(s) without overflow, as the pair exp(shift) · total.

A pair is more accurate than one logarithm. Adding to `total` costs one rounding of the sum; adding to a logarithm near 100
would cost a rounding of 100 each time. And softmax weights exp(s − shift) / total add up to 1, while exp(s − log) would carry
the rounding error of the logarithm into all of them, in the same direction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
        """The logarithms of the sums; −inf for empty sums."""
        return finite_or_zero(self.shift) + self.total.log()

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
