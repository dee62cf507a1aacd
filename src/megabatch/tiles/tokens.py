"""Items of many vectors, such as the tokens of a text, and the similarities of late interaction between two sets of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megabatch.tiles.block import accumulator_dtype, by_matmul_setting


@dataclass(frozen=True)
class TokenRows:
    """Items of up to `width` vectors each, one item after another."""

    values: Tensor  # (T, D)
    width: int  # vectors of the longest item
    lengths: Tensor | None = None  # (N,) int64, at least 1; None if each item has `width`
    valid: Tensor | None = None  # (T,) bool; None if all are

    @property
    def count(self) -> int:
        """N, the number of items."""
        return len(self.values) // self.width if self.lengths is None else len(self.lengths)

    @property
    def D(self) -> int:
        """Width of a vector."""
        return self.values.shape[1]

    def starts(self) -> Tensor:  # (N,) int64
        """The first vector of each item."""
        if self.lengths is None:
            return torch.arange(self.count, device=self.values.device) * self.width
        return self.lengths.cumsum(0) - self.lengths

    def all_lengths(self) -> Tensor:  # (N,) int64
        """The number of vectors of each item, valid or not."""
        if self.lengths is None:
            return torch.full((self.count,), self.width, device=self.values.device)
        return self.lengths

    def owners(self) -> Tensor:  # (T,) int64
        """The item of each vector."""
        items = torch.arange(self.count, device=self.values.device)
        if self.lengths is None:
            return items.repeat_interleave(self.width)
        return items.repeat_interleave(self.lengths, output_size=len(self.values))

    def counts(self) -> Tensor:  # (N,) int64
        """The number of valid vectors of each item."""
        if self.valid is None:
            return self.all_lengths()
        if self.lengths is None:
            return self.valid.view(self.count, self.width).sum(1)
        return torch.zeros(self.count, dtype=torch.int64, device=self.valid.device).index_add_(
            0, self.owners(), self.valid.long()
        )

    def part(self, items: slice) -> tuple["TokenRows", slice]:
        """Some items, and the place of their vectors. Of packed items, a GPU tells the host where they begin."""
        if self.lengths is None:
            window = slice(items.start * self.width, items.stop * self.width)
        else:
            window = slice(*(int(self.lengths[:edge].sum()) for edge in (items.start, items.stop)))
        lengths = None if self.lengths is None else self.lengths[items]
        return TokenRows(self.values[window], self.width, lengths, None if self.valid is None else self.valid[window]), window

    def places(self, items: slice) -> tuple[Tensor, Tensor] | None:  # (n, width) int64, (n, width) bool
        """Where the vectors of some items are, and which of these places they have; None if that is a plain view."""
        if self.lengths is None:
            return None
        step = torch.arange(self.width, device=self.values.device)
        present = step < self.lengths[items, None]
        return (self.starts()[items, None] + step).masked_fill(~present, 0), present

    def pad(self, items: slice) -> tuple[Tensor, Tensor | None]:  # (n, width, D), (n, width) bool
        """Some items, zeros in place of invalid vectors, and which of their vectors are valid; None if all are."""
        places = self.places(items)
        if places is None:
            window = slice(items.start * self.width, items.stop * self.width)
            shape = items.stop - items.start, self.width
            values = self.values[window].view(*shape, self.D)
            valid = None if self.valid is None else self.valid[window].view(shape)
        else:
            index, present = places
            values, valid = self.values[index], present if self.valid is None else present & self.valid[index]
        return values if valid is None else values.masked_fill(~valid[..., None], 0.0), valid

    def add_(self, sums: Tensor, items: slice, values: Tensor) -> None:  # (T, D), (n, width, D)
        """Adds to the accumulator of all vectors the values of some items, as `pad` arranges them."""
        places = self.places(items)
        if places is None:
            sums[items.start * self.width : items.stop * self.width] += values.reshape(-1, self.D)
        else:
            index, present = places
            sums[index[present]] += values[present]

    def add_product_(self, sums: Tensor, items: slice, left: Tensor, right: Tensor) -> None:  # (T, D), (b, l, r), (b, r, D)
        """Adds b products of matrices: as many vectors as the items have, one item after another."""
        if self.lengths is None:
            part = sums[items.start * self.width : items.stop * self.width]
            part.view(*left.shape[:2], self.D).baddbmm_(left, right)
        else:
            self.add_(sums, items, torch.bmm(left, right).view(-1, self.width, self.D))


@dataclass(frozen=True)
class LateBlock:
    """s_ij = scale·weight_i·Σ_t max_u ⟨q_it, d_ju⟩ over valid vectors, described but never held.

    Pairs with equal ids are left out of every sum, and so are the main diagonal if `skip_diagonal` is set and items of
    `document` without a valid vector.
    """

    query: TokenRows  # N items
    document: TokenRows  # M items
    scale: Tensor  # ()
    precision: str
    weight: Tensor | None = None  # (N,)
    row_ids: Tensor | None = None  # (N,)
    col_ids: Tensor | None = None  # (M,)
    skip_diagonal: bool = False
    first_column: int = 0  # of the main diagonal's matrix, of which this may be some columns

    @classmethod
    def of(cls, query: TokenRows, document: TokenRows, scale: Tensor, precision: str, **known: Any) -> "LateBlock":
        """The block of an operator: the scale in the type of similarities, the precision settled for the device."""
        device = query.values.device.type
        dtype = accumulator_dtype(query.values.dtype)
        return cls(query, document, scale.to(dtype), by_matmul_setting(precision, device), **known)

    @property
    def N(self) -> int:
        """Queries."""
        return self.query.count

    @property
    def M(self) -> int:
        """Documents."""
        return self.document.count

    @property
    def is_empty(self) -> bool:
        """Whether there is no similarity in it."""
        return self.N == 0 or self.M == 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of similarities, statistics and gradient sums."""
        return accumulator_dtype(self.query.values.dtype)

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.query.values.device

    def zeros(self, *shape: int) -> Tensor:
        """A fresh accumulator."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def of_documents(self, items: slice) -> tuple["LateBlock", slice]:
        """The block of some documents, and the place of their vectors."""
        document, place = self.document.part(items)
        ids = None if self.col_ids is None else self.col_ids[items]
        return replace(self, document=document, col_ids=ids, first_column=self.first_column + items.start), place

    def pairs(self, items: slice) -> tuple["LateBlock", slice]:
        """The block of some queries and the documents of the same numbers, and the place of the queries' vectors."""
        query, place = self.query.part(items)
        document, _ = self.document.part(items)
        weight = None if self.weight is None else self.weight[items]
        return LateBlock(query, document, self.scale, self.precision, weight), place

    def factors(self, rows: slice) -> Tensor:  # (n, 1) or ()
        """What Σ_t max_u is multiplied by."""
        return self.scale if self.weight is None else self.scale * self.weight[rows, None]
