"""A block of similarities and its gradients: what the passes over tiles take and return."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting


@dataclass(frozen=True)
class Block:
    """s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j, described but never held.

    Pairs with equal ids are left out of every sum, or all others are if `only_equal_ids` is set (kernels do not know that), and
    so is the main diagonal when `skip_diagonal` is set. If ids are positives, pairs with equal ones are not left out of sums of
    softplus, but enter them as −s_ij. A limit leaves out the pairs whose product ⟨x_i, y_j⟩ is above it; where there is a
    companion, its similarity is what is compared.
    """

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    precision: str
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    row_ids: Tensor | None = None  # (N,)
    col_ids: Tensor | None = None  # (M,)
    skip_diagonal: bool = False
    ids_are_positives: bool = False
    limit: Tensor | None = None  # (N,) in the type of what it is compared with
    companion: "Block | None" = None  # the same rows and columns as another model sees them: a guide, or a teacher
    only_equal_ids: bool = False
    positives_within: bool = False  # pairs that attract are in the sums, where the scale's gradient nearly cancels

    @classmethod
    def of(cls, x: Tensor, y: Tensor, scale: Tensor | None, precision: str, **known: Any) -> "Block":
        """The block of an operator: the scale in the type of similarities, 1 if None; the precision settled for the device."""
        dtype = accumulator_dtype(x.dtype)
        factor = torch.ones((), dtype=dtype, device=x.device) if scale is None else scale.to(dtype)
        return cls(x, y, factor, by_matmul_setting(precision, x.device.type), **known)

    @property
    def N(self) -> int:
        """Rows."""
        return self.x.shape[0]

    @property
    def M(self) -> int:
        """Columns."""
        return self.y.shape[0]

    @property
    def D(self) -> int:
        """Width."""
        return self.x.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no similarity in it."""
        return self.N == 0 or self.M == 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of similarities, statistics and gradient sums."""
        return accumulator_dtype(self.x.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """A fresh accumulator."""
        return torch.zeros(shape, dtype=self.dtype, device=self.x.device)


class Needs(NamedTuple):
    """Which gradients are asked for. The order is that of the tensors every operator takes first."""

    dx: bool
    dy: bool
    dscale: bool
    drow_bias: bool = False
    dcol_bias: bool = False


class ColumnGradients(NamedTuple):
    """Sums over rows that a gradient pass adds to; None where not needed."""

    dy: Tensor | None  # (M, D), not yet multiplied by the scale
    dcol_bias: Tensor | None  # (M,)

    def zeros(self, columns: int) -> "ColumnGradients":
        """Fresh accumulators of the same kind for another block of columns."""
        return ColumnGradients(*(None if part is None else part.new_zeros(columns, *part.shape[1:]) for part in self))

    def tensors(self) -> list[Tensor]:
        """The accumulators that exist, as they travel."""
        return [part for part in self if part is not None]


class RowGradients(NamedTuple):
    """What a gradient pass has finished: some rows, summed over all columns of the block."""

    rows: slice
    dx: Tensor | None  # (n, D), not yet multiplied by the scale
    dscale: Tensor | None  # (n,) Σ_j g_ij·⟨x_i, y_j⟩; None if it is to be taken from dx
    drow_bias: Tensor | None  # (n,)


class Pairs(NamedTuple):
    """The matching pairs of a block's rows and columns, where they are not on its main diagonal: in a larger batch."""

    row_match: Tensor  # (N,) the similarity of each row's pair
    col_match: Tensor  # (M,)
    row_index: Tensor  # (N,) int64, the pair's place in the batch
    col_index: Tensor  # (M,) int64


def windows(whole: int | slice, size: int) -> Iterator[slice]:
    """[0, whole), or the rows or columns of a slice, cut into windows of `size`; the last may be shorter."""
    start, stop = (0, whole) if isinstance(whole, int) else (whole.start, whole.stop)
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def part(values: Tensor, window: slice) -> Tensor:
    """values[window], and `values` itself if that is all of it: a view takes the host several microseconds."""
    return values if window.start == 0 and window.stop == len(values) else values[window]
