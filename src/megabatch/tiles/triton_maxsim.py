"""Σ_t max_u ⟨q_it, d_ju⟩ and its gradient in kernels: the products of a tile of vectors stay in registers.

A query takes one slot of SLOT rows of a tile, a power of two, or several if it is longer than a tile. A program owns a tile of
slots and loops over documents, BLOCK_U vectors at a time. It keeps a running maximum for each query vector, and stores their
sum for each slot and document: one number for thousands of products.

Backward works on strips of queries and documents. The same kernel stores the winner of every query vector in each document of
the strip (int16), PyTorch operations turn the sums into weights, and two kernels add up the gradients. A query vector gathers
its winners of all documents. A document vector adds up the query vectors that it won: a product of a matrix of weights, 0 where
it lost, with the queries. Each sum has one owner, so there are no atomics. The winners exist for one strip at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import windows
from megabatch.tiles.maxsim import Weigh
from megabatch.tiles.precision import FLOAT32
from megabatch.tiles.tokens import LateBlock, Tokens
from megabatch.tiles.triton_operands import descriptor, operand


@triton.jit
def _rows_of_queries(
    rows,
    q_start,  # (n,) int64, or None if all queries have WIDTH vectors
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    queries,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(query of each row, its vector, whether it counts) for rows in the order of slots."""
    slot = rows // SLOT
    query = slot // SLOTS
    token = (slot % SLOTS) * SLOT + rows % SLOT
    exists = query < queries
    if q_start is None:
        counts = exists & (token < WIDTH)
        vector = query * WIDTH + token
    else:
        counts = exists & (token < tl.load(q_length + query, mask=exists, other=0))
        vector = tl.load(q_start + query, mask=exists, other=0) + token
    if q_valid is not None:
        counts = counts & (tl.load(q_valid + vector, mask=counts, other=0) != 0)
    return query, vector, counts


@triton.jit
def _best_of_tile(
    q,  # (BLOCK_T, BLOCK_D), used if the whole width fits
    q_rows,  # (BLOCK_T,) pointers
    counts,  # (BLOCK_T,)
    d_desc,  # (Td, D)
    d_valid,  # (Td,) or None
    first,  # of the vectors of this tile
    left,  # vectors of the document from there on
    best,  # (BLOCK_T,) so far
    winner,  # (BLOCK_T,) so far
    u,
    D: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile reaches beyond its document
    WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Running maxima, and winners, with one more tile of document vectors."""
    s = tl.zeros((BLOCK_T, BLOCK_U), tl.float32)
    if D <= BLOCK_D:
        s = tl.dot(q, d_desc.load([first, 0]).T, s, input_precision=PRECISION)
    else:
        for d in range(0, D, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            part = tl.load(q_rows[:, None] + offs_d[None, :], counts[:, None] & (offs_d < D)[None, :], 0.0)
            s = tl.dot(part, d_desc.load([first, d]).T, s, input_precision=PRECISION)
    offs_u = tl.arange(0, BLOCK_U)
    if not WHOLE:
        s = tl.where((offs_u < left)[None, :], s, -float("inf"))
    if d_valid is not None:
        valid = tl.load(d_valid + first + offs_u, mask=offs_u < left, other=0)
        s = tl.where((valid != 0)[None, :], s, -float("inf"))
    largest = tl.max(s, 1)
    if WINNERS:
        at = tl.min(tl.where(s == largest[:, None], offs_u[None, :], BLOCK_U), 1)
        winner = tl.where(largest > best, u + at, winner)
    return tl.maximum(best, largest), winner


@triton.jit
def _maxsim_kernel(
    q,  # (Tq, D)
    d_desc,  # (Td, D)
    q_start,  # (n,) int64, of the queries of this launch; None if all have QUERY_WIDTH vectors
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64, of the documents of this launch; None if all have WIDTH vectors
    d_length,  # (m,) int64 or None
    d_valid,  # (Td,) int8 or None
    sums,  # (m, slots)
    winners,  # (m, rows) int16 or int32, or None
    queries,  # n
    documents,  # m
    first_document,
    documents_each,
    slots,
    q_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    _, vector, counts = _rows_of_queries(rows, q_start, q_length, q_valid, queries, SLOTS, SLOT, QUERY_WIDTH)
    q_rows = q + vector.to(tl.int64) * q_stride
    offs_d = tl.arange(0, BLOCK_D)
    mine = tl.load(q_rows[:, None] + offs_d[None, :], counts[:, None] & (offs_d < D)[None, :], 0.0)
    offs_slot = tl.program_id(0) * (BLOCK_T // SLOT) + tl.arange(0, BLOCK_T // SLOT)
    WINNERS: tl.constexpr = winners is not None
    none = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    nobody = tl.full((BLOCK_T,), -1, tl.int32)
    begin = tl.program_id(1) * documents_each
    end = tl.minimum(begin + documents_each, documents)
    best, winner = none, nobody
    if d_start is None:
        TILES: tl.constexpr = (WIDTH + BLOCK_U - 1) // BLOCK_U
        for k in range(begin * TILES, end * TILES):
            j, u = k // TILES, (k % TILES) * BLOCK_U
            best, winner = tl.where(u == 0, none, best), tl.where(u == 0, nobody, winner)
            first = (first_document + j) * WIDTH + u
            best, winner = _best_of_tile(
                mine, q_rows, counts, d_desc, d_valid, first, WIDTH - u, best, winner, u,
                D, WIDTH % BLOCK_U == 0, WINNERS, PRECISION, BLOCK_T, BLOCK_U, BLOCK_D,
            )  # fmt: skip
            total = tl.sum(tl.where(counts, best, 0.0).reshape(BLOCK_T // SLOT, SLOT), 1)
            last = u + BLOCK_U >= WIDTH
            tl.store(sums + tl.cast(j, tl.int64) * slots + offs_slot, total, mask=(offs_slot < slots) & last)
            if WINNERS:
                found = tl.where(counts, winner, -1).to(winners.dtype.element_ty)
                tl.store(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, found, mask=(rows < slots * SLOT) & last)
    else:
        for j in range(begin, end):
            start, length = tl.load(d_start + j).to(tl.int32), tl.load(d_length + j).to(tl.int32)
            best, winner = none, nobody
            for u in range(0, length, BLOCK_U):
                best, winner = _best_of_tile(
                    mine, q_rows, counts, d_desc, d_valid, start + u, length - u, best, winner, u,
                    D, False, WINNERS, PRECISION, BLOCK_T, BLOCK_U, BLOCK_D,
                )  # fmt: skip
            total = tl.sum(tl.where(counts, best, 0.0).reshape(BLOCK_T // SLOT, SLOT), 1)
            tl.store(sums + tl.cast(j, tl.int64) * slots + offs_slot, total, mask=offs_slot < slots)
            if WINNERS:
                found = tl.where(counts, winner, -1).to(winners.dtype.element_ty)
                tl.store(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, found, mask=rows < slots * SLOT)


@triton.jit
def _query_gradient_kernel(
    d,  # (Td, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64
    dq,  # (Tq, D) float32, added to
    queries,  # n
    documents,  # m
    slots,
    d_stride,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    query, vector, counts = _rows_of_queries(rows, q_start, q_length, q_valid, queries, SLOTS, SLOT, QUERY_WIDTH)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.range(documents, loop_unroll_factor=4):  # gathers of several documents in flight
        winner = tl.load(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, mask=counts, other=-1).to(tl.int64)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, mask=counts, other=0.0)
        won = counts & (winner >= 0)
        place = tl.load(d_start + j) + winner
        values = tl.load(d + place[:, None] * d_stride + offs_d[None, :], won[:, None] & (offs_d < D)[None, :], 0.0)
        total += tl.where(won, weight, 0.0)[:, None] * values.to(tl.float32)
    out = dq + vector.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = counts[:, None] & (offs_d < D)[None, :]
    tl.store(out, tl.load(out, mask, 0.0) + total, mask)


@triton.jit
def _document_gradient_kernel(
    q,  # (Tq, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    d_start,  # (m,) int64
    d_length,  # (m,) int64
    dd,  # (Td, D) float32, added to
    queries,  # n
    slots,
    q_stride,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    j = tl.program_id(1)
    offs_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(d_length + j)
    if tl.program_id(0) * BLOCK_U >= length:
        return
    total = tl.zeros((BLOCK_U, BLOCK_D), tl.float32)
    for r in range(0, slots * SLOT, BLOCK_T):
        rows = r + tl.arange(0, BLOCK_T)
        query, vector, counts = _rows_of_queries(rows, q_start, q_length, None, queries, SLOTS, SLOT, QUERY_WIDTH)
        winner = tl.load(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, mask=counts, other=-1).to(tl.int32)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, mask=counts, other=0.0)
        place = q + vector.to(tl.int64)[:, None] * q_stride + offs_d[None, :]
        values = tl.load(place, (winner >= 0)[:, None] & (offs_d < D)[None, :], 0.0)
        won = tl.where(offs_u[:, None] == winner[None, :], weight[None, :], 0.0)
        total = tl.dot(won.to(values.dtype), values, total, input_precision=PRECISION)
    out = dd + (tl.load(d_start + j) + offs_u)[:, None] * D + offs_d[None, :]
    mask = (offs_u < length)[:, None] & (offs_d < D)[None, :]
    tl.store(out, tl.load(out, mask, 0.0) + total, mask)


@dataclass(frozen=True)
class _Side:
    """Items as kernels read them."""

    values: Tensor  # (T, D) rounded
    starts: Tensor  # (N,) int64
    lengths: Tensor  # (N,) int64
    valid: Tensor | None  # (T,) int8
    width: int
    uniform: bool

    @classmethod
    def of(cls, tokens: Tokens, precision: str) -> "_Side":
        valid = None if tokens.valid is None else tokens.valid.to(torch.int8)
        values = operand(tokens.values, precision)
        return cls(values, tokens.starts(), tokens.all_lengths(), valid, tokens.width, tokens.lengths is None)


class _Operands:
    """A block as the kernels read it, and the launches."""

    def __init__(self, block: LateBlock) -> None:
        self.block = block
        self.q, self.d = (_Side.of(side, block.precision) for side in (block.query, block.document))
        self.tile = plan.maxsim_tile(block.precision, block.device, block.query.D)
        self.slot = min(self.tile.rows, max(16, triton.next_power_of_2(self.q.width)))
        self.slots = triton.cdiv(self.q.width, self.slot)  # of a query
        self.block_d = min(self.tile.width, max(16, triton.next_power_of_2(block.query.D)))
        self.precision = "ieee" if block.precision == FLOAT32 else "tf32"
        # The maxima ignore NaN. Sums of 0·values bring it back, query by query and document by document.
        self.poison = [_poison(side) for side in (block.query, block.document)]

    def _queries(self, rows: slice, *others: Tensor) -> tuple[Tensor | None, ...]:
        """(starts, lengths, valid, vectors, others): from the first vector of the queries on, if starts are not needed."""
        if not self.q.uniform:
            return self.q.starts[rows], self.q.lengths[rows], self.q.valid, self.q.values, *others
        first = rows.start * self.q.width
        return (
            None,
            None,
            None if self.q.valid is None else self.q.valid[first:],
            *(part[first:] for part in (self.q.values, *others)),
        )

    def sums(self, rows: slice, columns: slice, winners: Tensor | None = None) -> Tensor:  # (n, m)
        """Σ_t max_u of a strip; writes the winners if asked to."""
        n, m = rows.stop - rows.start, columns.stop - columns.start
        slots, tile = n * self.slots, self.tile
        sums = torch.empty(m, slots, dtype=torch.float32, device=self.block.device)
        tiles = triton.cdiv(slots * self.slot, tile.rows)
        splits = max(1, min(m, -(-8 * plan.multiprocessors(self.block.device) // tiles)))
        each = triton.cdiv(m, splits)
        uniform = self.d.uniform
        starts, lengths, valid, values = self._queries(rows)
        _maxsim_kernel[(tiles, triton.cdiv(m, each))](
            values,
            descriptor(self.d.values, tile.columns, self.block_d),
            starts,
            lengths,
            valid,
            None if uniform else self.d.starts[columns],
            None if uniform else self.d.lengths[columns],
            self.d.valid,
            sums,
            winners,
            n,
            m,
            columns.start,
            each,
            slots,
            self.q.values.stride(0),
            D=self.block.query.D,
            WIDTH=self.d.width if uniform else 0,
            SLOTS=self.slots,
            SLOT=self.slot,
            QUERY_WIDTH=self.q.width,
            PRECISION=self.precision,
            BLOCK_T=tile.rows,
            BLOCK_U=tile.columns,
            BLOCK_D=self.block_d,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        largest = sums.view(m, n, self.slots).sum(2).T
        return largest + self.poison[0][rows, None] + self.poison[1][columns]

    def winners(self, rows: slice, columns: slice) -> Tensor:  # (m, rows)
        """Room for the winners of a strip."""
        shape = columns.stop - columns.start, (rows.stop - rows.start) * self.slots * self.slot
        dtype = torch.int16 if self.d.width < 2**15 else torch.int32
        return torch.empty(shape, dtype=dtype, device=self.block.device)

    def add_gradients(self, rows: slice, columns: slice, winners: Tensor, g: Tensor, dquery: Tensor, ddocument: Tensor) -> None:
        """Adds the gradients of a strip, given those of its sums, (n, m)."""
        weights = g.T.contiguous()
        m, n = weights.shape
        D, slots, block_d = self.block.query.D, n * self.slots, self.block_d
        shared = {"D": D, "SLOTS": self.slots, "SLOT": self.slot, "QUERY_WIDTH": self.q.width, "BLOCK_D": block_d}
        starts, lengths, valid, values, dvalues = self._queries(rows, dquery)
        gather, product = plan.MAXSIM_GATHER, plan.maxsim_gradient_tile(self.block.precision, self.block.device)
        _query_gradient_kernel[(triton.cdiv(slots * self.slot, gather.rows), triton.cdiv(D, block_d))](
            self.d.values,
            winners,
            weights,
            starts,
            lengths,
            valid,
            self.d.starts[columns],
            dvalues,
            n,
            m,
            slots,
            self.d.values.stride(0),
            BLOCK_T=gather.rows,
            num_warps=gather.warps,
            num_stages=gather.stages,
            **shared,
        )
        _document_gradient_kernel[(triton.cdiv(self.d.width, product.rows), m, triton.cdiv(D, block_d))](
            values,
            winners,
            weights,
            starts,
            lengths,
            self.d.starts[columns],
            self.d.lengths[columns],
            ddocument,
            n,
            slots,
            self.q.values.stride(0),
            PRECISION=self.precision,
            BLOCK_U=product.rows,
            BLOCK_T=product.columns,
            num_warps=product.warps,
            num_stages=product.stages,
            **shared,
        )


def _poison(tokens: Tokens) -> Tensor:  # (N,)
    """0 for each item; NaN where one of its valid vectors has a value that is not finite."""
    largest: Tensor = torch.linalg.vector_norm(tokens.values, torch.inf, dim=1, dtype=torch.float32)  # a sum could overflow
    each = largest * 0.0
    if tokens.valid is not None:
        each = each.masked_fill(~tokens.valid, 0.0)
    if tokens.lengths is None:
        return each.view(tokens.count, tokens.width).sum(1)
    return each.new_zeros(tokens.count).index_add_(0, tokens.owners(), each)


def score_tiles(block: LateBlock) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """(rows, columns, Σ_t max_u) of each strip."""
    operands, strip = _Operands(block), plan.MAXSIM_SCORES
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            yield rows, columns, operands.sums(rows, columns)


def add_gradients(block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u."""
    operands = _Operands(block)
    strip = plan.maxsim_strip(operands.slots * operands.slot)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            winners = operands.winners(rows, columns)
            g = weigh(operands.sums(rows, columns, winners), rows, columns)
            operands.add_gradients(rows, columns, winners, g, dquery, ddocument)
