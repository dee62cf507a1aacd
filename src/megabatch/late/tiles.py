"""Blocks of late interaction, and the PyTorch engine that computes Σ_t max_u ⟨q_it, d_ju⟩ and its gradient."""

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
    """The concatenated vectors of N items."""

    values: Tensor  # (T, D)
    max_length: int  # number of vectors of the longest item
    lengths: Tensor | None = None  # (N,) int64, at least 1; None if each item has `max_length` vectors
    valid: Tensor | None = None  # (T,) bool; None if all vectors are valid

    @property
    def count(self) -> int:
        """The number of items, N."""
        return len(self.values) // self.max_length if self.lengths is None else len(self.lengths)

    @property
    def D(self) -> int:
        """Embedding dimension."""
        return self.values.shape[1]

    def starts(self) -> Tensor:  # (N,) int64
        """Returns the index of the first vector of each item."""
        if self.lengths is None:
            return torch.arange(self.count, device=self.values.device) * self.max_length
        return self.lengths.cumsum(0) - self.lengths

    def all_lengths(self) -> Tensor:  # (N,) int64
        """Returns the number of vectors of each item, including invalid vectors."""
        if self.lengths is None:
            return torch.full((self.count,), self.max_length, device=self.values.device)
        return self.lengths

    def owners(self) -> Tensor:  # (T,) int64
        """Returns the item of each vector."""
        items = torch.arange(self.count, device=self.values.device)
        if self.lengths is None:
            return items.repeat_interleave(self.max_length)
        return items.repeat_interleave(self.lengths, output_size=len(self.values))

    def counts(self) -> Tensor:  # (N,) int64
        """Returns the number of valid vectors of each item."""
        if self.valid is None:
            return self.all_lengths()
        if self.lengths is None:
            return self.valid.view(self.count, self.max_length).sum(1)
        return torch.zeros(self.count, dtype=torch.int64, device=self.valid.device).index_add_(
            0, self.owners(), self.valid.long()
        )

    def weights(self) -> Tensor:  # (N,)
        """Returns 1 ÷ the number of valid vectors of each item, by which `normalize` multiplies scores."""
        return 1 / self.counts().clamp_min(1).to(accumulator_dtype(self.values.dtype))

    def part(self, items: slice) -> tuple["TokenRows", slice]:
        """Returns some items, and the slice of their vectors. If items are packed on a GPU, the host waits for the slice."""
        if self.lengths is None:
            window = slice(items.start * self.max_length, items.stop * self.max_length)
        else:
            window = slice(*(int(self.lengths[:edge].sum()) for edge in (items.start, items.stop)))
        lengths = None if self.lengths is None else self.lengths[items]
        return TokenRows(
            self.values[window], self.max_length, lengths, None if self.valid is None else self.valid[window]
        ), window

    def places(self, items: slice) -> tuple[Tensor, Tensor] | None:  # (n, L) int64, (n, L) bool
        """Returns the indices of the vectors of some items, and a mask of the indices that exist.

        Returns None for padded items, because their vectors are a plain view.
        """
        if self.lengths is None:
            return None
        step = torch.arange(self.max_length, device=self.values.device)
        present = step < self.lengths[items, None]
        return (self.starts()[items, None] + step).masked_fill(~present, 0), present

    def pad(self, items: slice) -> tuple[Tensor, Tensor | None]:  # (n, L, D), (n, L) bool
        """Returns some items with zeros in place of invalid vectors, and a mask of valid vectors, or None if all are valid."""
        places = self.places(items)
        if places is None:
            window = slice(items.start * self.max_length, items.stop * self.max_length)
            shape = items.stop - items.start, self.max_length
            values = self.values[window].view(*shape, self.D)
            valid = None if self.valid is None else self.valid[window].view(shape)
        else:
            index, present = places
            values, valid = self.values[index], present if self.valid is None else present & self.valid[index]
        return values if valid is None else values.masked_fill(~valid[..., None], 0.0), valid

    def add_(self, sums: Tensor, items: slice, values: Tensor) -> None:  # (T, D), (n, L, D)
        """Adds the values of some items, in the layout of `pad`, to the accumulator of all vectors."""
        places = self.places(items)
        if places is None:
            sums[items.start * self.max_length : items.stop * self.max_length] += values.reshape(-1, self.D)
        else:
            index, present = places
            sums[index[present]] += values[present]

    def add_matmul_(self, sums: Tensor, items: slice, left: Tensor, right: Tensor) -> None:  # (T, D), (b, l, r), (b, r, D)
        """Adds b matmuls to the accumulator. Their b·l rows in total are the vectors of the items, in the layout of `pad`."""
        if self.lengths is None:
            part = sums[items.start * self.max_length : items.stop * self.max_length]
            part.view(*left.shape[:2], self.D).baddbmm_(left, right)
        else:
            self.add_(sums, items, torch.bmm(left, right).view(-1, self.max_length, self.D))


@dataclass(frozen=True)
class LateBlock:
    """Describes the scores s_ij = scale·weight_i·Σ_t max_u ⟨q_it, d_ju⟩ over valid vectors, and does not store them.

    Some pairs are excluded from every sum: pairs with equal ids, the main diagonal if `skip_diagonal` is set, and pairs with a
    document that has no valid vector.
    """

    query: TokenRows  # N items
    document: TokenRows  # M items
    scale: Tensor  # ()
    precision: str
    weight: Tensor | None = None  # (N,)
    row_ids: Tensor | None = None  # (N,)
    col_ids: Tensor | None = None  # (M,)
    skip_diagonal: bool = False
    first_column: int = 0  # the column of the first document in the matrix whose main diagonal is excluded

    @classmethod
    def of(cls, query: TokenRows, document: TokenRows, scale: Tensor, precision: str, **fields: Any) -> "LateBlock":
        """Returns the block of an operator. Converts the scale to the dtype of scores, and reads the matmul setting."""
        device = query.values.device.type
        dtype = accumulator_dtype(query.values.dtype)
        return cls(query, document, scale.to(dtype), by_matmul_setting(precision, device), **fields)

    @property
    def N(self) -> int:
        """Number of queries."""
        return self.query.count

    @property
    def M(self) -> int:
        """Number of documents."""
        return self.document.count

    @property
    def is_empty(self) -> bool:
        """Whether the block has no scores."""
        return self.N == 0 or self.M == 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores, statistics and gradient sums."""
        return accumulator_dtype(self.query.values.dtype)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.query.values.device

    def zeros(self, *shape: int) -> Tensor:
        """Returns a new accumulator."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def of_documents(self, items: slice) -> tuple["LateBlock", slice]:
        """Returns the block of some documents, and the slice of their vectors."""
        document, vectors = self.document.part(items)
        ids = None if self.col_ids is None else self.col_ids[items]
        return replace(self, document=document, col_ids=ids, first_column=self.first_column + items.start), vectors

    def pairs(self, items: slice) -> tuple["LateBlock", slice]:
        """Returns the block of some queries and the documents with the same numbers, and the slice of the queries' vectors."""
        query, vectors = self.query.part(items)
        document, _ = self.document.part(items)
        weight = None if self.weight is None else self.weight[items]
        return LateBlock(query, document, self.scale, self.precision, weight), vectors

    def factors(self, rows: slice) -> Tensor:  # (n, 1) or ()
        """Returns scale·weight_i, by which Σ_t max_u is multiplied."""
        return self.scale if self.weight is None else self.scale * self.weight[rows, None]


# ----------------------------------------------------------------------------------------------------------------------
# The engine in PyTorch operations.
#
# A tile contains the dot products of all vectors of some queries and documents, in one reused buffer. Backward computes the
# tile again, finds the argmax of each query vector (the first of equal values), overwrites the tile with weights, and
# multiplies it with both sides.

Weigh = Callable[[Tensor, slice, slice], Tensor]  # (Σ_t max_u of a tile (n, m), rows, columns) → gradient of Σ_t max_u


class Kept(NamedTuple):
    """The scores and argmax indices that forward stores for backward, if they fit in a workspace."""

    scores: Tensor  # (M, N) Σ_t max_u
    winners: Tensor  # (M, rows), in the layout of the kernels

    def of_documents(self, items: slice) -> "Kept":
        """Returns the scores and argmax indices of some documents."""
        return Kept(self.scores[items], self.winners[items])


class _Products:
    """Dot products of vectors, (n, Lq, m, Ld). Backward overwrites them with weights."""

    products: Tensor
    query_valid: Tensor | None  # (n, Lq)

    def largest(self) -> tuple[Tensor, Tensor]:  # (n, m), (n, Lq, m) int64
        """Returns (Σ_t max_u, the argmax u of each query vector)."""
        largest, winners = self.products.max(3)
        if self.query_valid is not None:
            largest = largest.masked_fill(~self.query_valid[:, :, None], 0.0)
        return largest.sum(1), winners

    def sums(self) -> Tensor:  # (n, m)
        """Returns Σ_t max_u."""
        largest = self.products.amax(3)
        if self.query_valid is not None:
            largest.masked_fill_(~self.query_valid[:, :, None], 0.0)
        return largest.sum(1)

    def put_weights(self, g: Tensor, winners: Tensor) -> None:  # (n, m), (n, Lq, m)
        """Overwrites the dot products with weights: the gradient of a score at its argmax indices, and 0 elsewhere."""
        weights = g[:, None, :].expand(winners.shape)
        if self.query_valid is not None:
            weights = weights.masked_fill(~self.query_valid[:, :, None], 0.0)
        self.products.zero_().scatter_(3, winners[..., None], weights[..., None])


class _MaxsimTile(_Products):
    """The dot products of the vectors of n queries and m documents."""

    def __init__(self, block: LateBlock, rows: slice, columns: slice, buffer: Tensor) -> None:
        query, self.query_valid = block.query.pad(rows)
        document, self.document_valid = block.document.pad(columns)
        self.q = round_to_precision(query.flatten(0, 1), block.precision)
        self.d = round_to_precision(document.flatten(0, 1), block.precision)
        self.shape = query.shape[0], query.shape[1], document.shape[0], document.shape[1]
        flat = buffer[: len(self.q) * len(self.d)].view(len(self.q), len(self.d))
        matmul_into(flat, self.q, self.d.T)
        self.flat, self.products = flat, flat.view(self.shape)  # (n, Lq, m, Ld)
        if self.document_valid is not None:
            self.products.masked_fill_(~self.document_valid, -torch.inf)


def _windows(block: LateBlock) -> tuple[list[slice], list[slice]]:
    """Returns the windows of queries and of documents that form the tiles."""
    size = plan.eager_tile(block.device, block.dtype)
    pairs = max(1, size.rows * size.columns // (block.query.max_length * block.document.max_length))
    size = plan.TileSize(max(1, int(pairs**0.5)), max(1, int(pairs**0.5))).fit_to(block.N, block.M)
    return list(windows(block.N, size.rows)), list(windows(block.M, size.columns))


def _tile_buffer(block: LateBlock) -> Tensor:
    rows, columns = _windows(block)
    elements = (rows[0].stop * block.query.max_length) * (columns[0].stop * block.document.max_length)
    return torch.empty(elements, dtype=block.dtype, device=block.device)


def allocate_kept(block: LateBlock) -> Kept | None:
    """Returns None, because this engine computes everything again in backward."""
    return None


def score_tiles(block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """Yields (rows, columns, Σ_t max_u) of each tile."""
    buffer = _tile_buffer(block)
    row_windows, column_windows = _windows(block)
    for rows in row_windows:
        for columns in column_windows:
            yield rows, columns, _MaxsimTile(block, rows, columns, buffer).sums()


def add_gradients(
    block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u."""
    buffer = _tile_buffer(block)
    row_windows, column_windows = _windows(block)
    for rows in row_windows:
        for columns in column_windows:
            tile = _MaxsimTile(block, rows, columns, buffer)
            largest, winners = tile.largest()
            tile.put_weights(weigh(largest, rows, columns), winners)
            n, Lq, m, Ld = tile.shape
            weights = tile.flat.to(tile.q.dtype) if tile.q.dtype in HALF_DTYPE.values() else tile.flat
            for tokens, items, shape, left, right in (
                (block.query, rows, (n, Lq, -1), weights, tile.d),
                (block.document, columns, (m, Ld, -1), weights.T, tile.q),
            ):
                part = block.zeros(len(left), right.shape[1])
                add_matmul(part, left, right)
                tokens.add_(dquery if tokens is block.query else ddocument, items, part.view(shape))


def pair_tiles(block: LateBlock) -> Iterator[tuple[slice, "_MaxsimPairs"]]:
    """Yields some queries with their own M / N documents each. The documents are in the order of the queries."""
    K = block.M // max(block.N, 1)
    size = plan.eager_tile(block.device, block.dtype)
    elements = K * block.document.max_length * max(block.query.max_length, block.query.D)  # of a query
    count = max(1, size.rows * size.columns // max(1, elements))
    for rows in windows(block.N, count):
        yield rows, _MaxsimPairs(block, rows, slice(rows.start * K, rows.stop * K))


class _MaxsimPairs(_Products):
    """The dot products of the vectors of n queries and their own K documents each."""

    def __init__(self, block: LateBlock, rows: slice, columns: slice) -> None:
        self.block, self.rows, self.columns = block, rows, columns
        query, self.query_valid = block.query.pad(rows)
        document, valid = block.document.pad(columns)
        n, Lq, D = query.shape
        self.shape = n, Lq, len(document) // n, document.shape[1]
        self.q = round_to_precision(query.flatten(0, 1), block.precision).view(n, Lq, D)
        self.d = round_to_precision(document.flatten(0, 1), block.precision).view(n, -1, D)
        factors = self.q, self.d.mT
        widens = self.q.dtype != block.dtype  # CUDA multiplies half-precision inputs into a float32 result
        products = torch.bmm(*factors, out_dtype=block.dtype) if widens else torch.bmm(*factors)
        self.products = products.view(self.shape)  # (n, Lq, K, Ld)
        if valid is not None:
            self.products.masked_fill_(~valid.view(n, 1, *self.shape[2:]), -torch.inf)

    def add_gradients(self, g: Tensor, winners: Tensor, dquery: Tensor, ddocument: Tensor) -> None:  # (n, K), (n, Lq, K)
        """Adds the gradients of the vectors, given the gradient of each Σ_t max_u. Weights stay in the accumulator dtype."""
        self.put_weights(g, winners)
        n, Lq, K, Ld = self.shape
        weights, dtype = self.products.view(n, Lq, K * Ld), self.block.dtype
        self.block.query.add_matmul_(dquery, self.rows, weights, self.d.to(dtype))
        self.block.document.add_matmul_(ddocument, self.columns, weights.mT, self.q.to(dtype))
