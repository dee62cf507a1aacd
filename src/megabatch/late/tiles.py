"""Blocks of late interaction, and the engine in PyTorch operations that computes Σ_t max_u ⟨q_it, d_ju⟩ and its gradient."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import (
    HALF_DTYPE,
    accumulator_dtype,
    add_matmul,
    by_matmul_setting,
    matmul_into,
    round_to_precision,
    windows,
)


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


# ----------------------------------------------------------------------------------------------------------------------
# The engine in PyTorch operations.
#
# A tile holds the matmul of all vectors of some queries and some documents in one reused buffer. Backward forms it again, finds
# the argmax of each query vector (the first of equal values), overwrites the tile with weights, and multiplies it with both
# sides.

Weigh = Callable[[Tensor, slice, slice], Tensor]  # Σ_t max_u of a tile (n, m), its rows and columns → the gradient of it


class Kept(NamedTuple):
    """What forward keeps for backward, if all of it fits in a workspace."""

    scores: Tensor  # (M, N) Σ_t max_u
    winners: Tensor  # (M, rows), as the kernels of the backend arrange them

    def of_documents(self, items: slice) -> "Kept":
        """The scores and winners of some documents."""
        return Kept(self.scores[items], self.winners[items])


class _Products:
    """Products of vectors, (n, Lq, m, Ld), overwritten by the gradient."""

    products: Tensor
    query_valid: Tensor | None  # (n, Lq)

    def largest(self) -> tuple[Tensor, Tensor]:  # (n, m), (n, Lq, m) int64
        """(Σ_t max_u, the winners u)."""
        largest, winners = self.products.max(3)
        if self.query_valid is not None:
            largest = largest.masked_fill(~self.query_valid[:, :, None], 0.0)
        return largest.sum(1), winners

    def sums(self) -> Tensor:  # (n, m)
        """Σ_t max_u."""
        largest = self.products.amax(3)
        if self.query_valid is not None:
            largest.masked_fill_(~self.query_valid[:, :, None], 0.0)
        return largest.sum(1)

    def put_weights(self, g: Tensor, winners: Tensor) -> None:  # (n, m), (n, Lq, m)
        """Overwrites the products: the gradient of a sum at its winners, 0 elsewhere."""
        weights = g[:, None, :].expand(winners.shape)
        if self.query_valid is not None:
            weights = weights.masked_fill(~self.query_valid[:, :, None], 0.0)
        self.products.zero_().scatter_(3, winners[..., None], weights[..., None])


class _MaxsimTile(_Products):
    """The products of the vectors of some queries (n) with those of some documents (m)."""

    def __init__(self, block: LateBlock, rows: slice, columns: slice, room: Tensor) -> None:
        query, self.query_valid = block.query.pad(rows)
        document, self.document_valid = block.document.pad(columns)
        self.q = round_to_precision(query.flatten(0, 1), block.precision)
        self.d = round_to_precision(document.flatten(0, 1), block.precision)
        self.shape = query.shape[0], query.shape[1], document.shape[0], document.shape[1]
        flat = room[: len(self.q) * len(self.d)].view(len(self.q), len(self.d))
        matmul_into(flat, self.q, self.d.T)
        self.flat, self.products = flat, flat.view(self.shape)  # (n, Lq, m, Ld)
        if self.document_valid is not None:
            self.products.masked_fill_(~self.document_valid, -torch.inf)


def _windows(block: LateBlock) -> tuple[list[slice], list[slice]]:
    """The queries and the documents of each tile."""
    size = plan.eager_tile(block.device, block.dtype)
    pairs = max(1, size.rows * size.columns // (block.query.width * block.document.width))
    size = plan.TileSize(max(1, int(pairs**0.5)), max(1, int(pairs**0.5))).fit_to(block.N, block.M)
    return list(windows(block.N, size.rows)), list(windows(block.M, size.columns))


def _room(block: LateBlock) -> Tensor:
    rows, columns = _windows(block)
    most = (rows[0].stop * block.query.width) * (columns[0].stop * block.document.width)
    return torch.empty(most, dtype=block.dtype, device=block.device)


def room_to_keep(block: LateBlock) -> Kept | None:
    """None: products are formed again."""
    return None


def score_tiles(block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """(rows, columns, Σ_t max_u) of each tile."""
    room = _room(block)
    row_windows, column_windows = _windows(block)
    for rows in row_windows:
        for columns in column_windows:
            yield rows, columns, _MaxsimTile(block, rows, columns, room).sums()


def add_gradients(
    block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u."""
    room = _room(block)
    row_windows, column_windows = _windows(block)
    for rows in row_windows:
        for columns in column_windows:
            tile = _MaxsimTile(block, rows, columns, room)
            largest, winners = tile.largest()
            tile.put_weights(weigh(largest, rows, columns), winners)
            n, Lq, m, Ld = tile.shape
            factor = tile.flat.to(tile.q.dtype) if tile.q.dtype in HALF_DTYPE.values() else tile.flat
            for tokens, items, shape, left, right in (
                (block.query, rows, (n, Lq, -1), factor, tile.d),
                (block.document, columns, (m, Ld, -1), factor.T, tile.q),
            ):
                part = block.zeros(len(left), right.shape[1])
                add_matmul(part, left, right)
                tokens.add_(dquery if tokens is block.query else ddocument, items, part.view(shape))


def pair_tiles(block: LateBlock) -> Iterator[tuple[slice, "_MaxsimPairs"]]:
    """Each query with its own documents: M / N of them, one query's after another's."""
    each = block.M // max(block.N, 1)
    size = plan.eager_tile(block.device, block.dtype)
    of_a_query = each * block.document.width * max(block.query.width, block.query.D)  # products, or values of the documents
    count = max(1, size.rows * size.columns // max(1, of_a_query))
    for rows in windows(block.N, count):
        yield rows, _MaxsimPairs(block, rows, slice(rows.start * each, rows.stop * each))


class _MaxsimPairs(_Products):
    """The products of the vectors of some queries (n) with those of their own documents (K each)."""

    def __init__(self, block: LateBlock, rows: slice, columns: slice) -> None:
        self.block, self.rows, self.columns = block, rows, columns
        query, self.query_valid = block.query.pad(rows)
        document, valid = block.document.pad(columns)
        n, Lq, D = query.shape
        self.shape = n, Lq, len(document) // n, document.shape[1]
        self.q = round_to_precision(query.flatten(0, 1), block.precision).view(n, Lq, D)
        self.d = round_to_precision(document.flatten(0, 1), block.precision).view(n, -1, D)
        factors = self.q, self.d.mT
        on_device = self.q.dtype != block.dtype  # CUDA multiplies half-precision factors into float32
        products = torch.bmm(*factors, out_dtype=block.dtype) if on_device else torch.bmm(*factors)
        self.products = products.view(self.shape)  # (n, Lq, K, Ld)
        if valid is not None:
            self.products.masked_fill_(~valid.view(n, 1, *self.shape[2:]), -torch.inf)

    def add_gradients(self, g: Tensor, winners: Tensor, dquery: Tensor, ddocument: Tensor) -> None:  # (n, K), (n, Lq, K)
        """Adds the gradients of the vectors, given the gradient of each Σ_t max_u; no weight is rounded to half precision."""
        self.put_weights(g, winners)
        n, Lq, K, Ld = self.shape
        weights, dtype = self.products.view(n, Lq, K * Ld), self.block.dtype
        self.block.query.add_product_(dquery, self.rows, weights, self.d.to(dtype))
        self.block.document.add_product_(ddocument, self.columns, weights.mT, self.q.to(dtype))
