"""Σ_t max_u ⟨q_it, d_ju⟩ and its gradient in PyTorch operations: every device and dtype.

A tile holds the products of all vectors of some queries and some documents in one reused buffer. Backward forms it again, finds
the winners (of equal products the first), overwrites it with their weights, and multiplies it with both sides.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import HALF_DTYPE, add_product, multiply_into, round_to_precision, windows
from megabatch.tiles.tokens import LateBlock

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
        multiply_into(flat, self.q, self.d.T)
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
                add_product(part, left, right)
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
