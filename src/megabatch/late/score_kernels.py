"""Kernels that compute the scores of late interaction, and the operands that they read."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import descriptor, operand
from megabatch.tiles.block import FLOAT32
from megabatch.tiles.tokens import LateBlock, TokenRows

# ----------------------------------------------------------------------------------------------------------------------
# Queries and documents as the late-interaction kernels read them.
#
# A query takes one slot of SLOT rows of a tile, a power of two, or several if it is longer than a tile. Items that all have
# the same number of vectors need no tables: where one begins is arithmetic, and no load has to wait for a table.


@triton.jit
def rows_of_queries(
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
def first_vector(d_start, first_document, j, WIDTH: tl.constexpr):
    """The first vector of a document, int64."""
    start = (first_document + j).to(tl.int64) * WIDTH
    if d_start is not None:
        start = tl.load(d_start + j)
    return start


@dataclass(frozen=True)
class TokenSide:
    """The queries, or the documents."""

    values: Tensor  # (T, D) rounded
    width: int
    starts: Tensor | None  # (N,) int64; None if each item has `width` vectors
    lengths: Tensor | None  # (N,) int64
    valid: Tensor | None  # (T,) int8

    @classmethod
    def of(cls, tokens: TokenRows, precision: str) -> "TokenSide":
        """Rounded to `precision`."""
        valid = None if tokens.valid is None else tokens.valid.to(torch.int8)
        starts = None if tokens.lengths is None else tokens.starts()
        return cls(operand(tokens.values, precision), tokens.width, starts, tokens.lengths, valid)

    def tables(self, items: slice) -> tuple[Tensor | None, Tensor | None]:
        """(starts, lengths) of some items; None if all have the same length."""
        if self.starts is None or self.lengths is None:
            return None, None
        return self.starts[items], self.lengths[items]


def query_slots(block: LateBlock) -> tuple[int, int]:
    """(rows of a slot, slots of a query)."""
    tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
    slot = min(tile.rows, max(16, triton.next_power_of_2(block.query.width)))
    return slot, triton.cdiv(block.query.width, slot)


class MaxsimOperands:
    """A block as the kernels read it."""

    def __init__(self, block: LateBlock) -> None:
        self.block = block
        self.q, self.d = (TokenSide.of(side, block.precision) for side in (block.query, block.document))
        self.tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
        self.slot, self.slots = query_slots(block)
        self.block_d = min(self.tile.width, max(16, triton.next_power_of_2(block.query.D)))
        self.precision = "ieee" if block.precision == FLOAT32 else "tf32"

    def queries(self, rows: slice, vectors: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """(starts, lengths, valid, vectors): from the first vector of the queries on, if these need no starts."""
        first = rows.start * self.q.width if self.q.starts is None else 0
        valid = self.q.valid
        if first:
            valid, vectors = None if valid is None else valid[first:], vectors[first:]
        return *self.q.tables(rows), valid, vectors

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time arguments of every kernel; a width is 0 if tables tell where items begin."""
        widths = {"WIDTH": self.d.width if self.d.starts is None else 0, "QUERY_WIDTH": self.q.width}
        return {"D": self.block.query.D, **widths, "SLOTS": self.slots, "SLOT": self.slot}


# ----------------------------------------------------------------------------------------------------------------------
# Σ_t max_u ⟨q_it, d_ju⟩ in one kernel: the products of a tile of vectors stay in registers.
#
# A program owns a tile of query vectors and loops over documents, BLOCK_U vectors at a time. It keeps a running maximum for
# each query vector, and stores their sum for each slot and document: one number for thousands of products. For backward it
# also stores the winner of every query vector in each document.


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
    QUERY_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    _, vector, counts = rows_of_queries(rows, q_start, q_length, q_valid, queries, SLOTS, SLOT, QUERY_WIDTH)
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


def sums(
    operands: MaxsimOperands, rows: slice, columns: slice, winners: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # (n, m)
    """Σ_t max_u of a strip, where a product with NaN never is the largest; in the (m, n) `out` if given.

    Writes the winners if asked to.
    """
    n, m = rows.stop - rows.start, columns.stop - columns.start
    slots, tile, device = n * operands.slots, operands.tile, operands.block.device
    one = operands.slots == 1
    found = out if out is not None and one else torch.empty(m, slots, dtype=torch.float32, device=device)
    tiles = triton.cdiv(slots * operands.slot, tile.rows)
    splits = max(1, min(m, -(-8 * kernel_plan.multiprocessors(device) // tiles)))
    each = triton.cdiv(m, splits)
    q_start, q_length, q_valid, q = operands.queries(rows, operands.q.values)
    launch(
        _maxsim_kernel,
        (tiles, triton.cdiv(m, each)),
        (
            q,
            descriptor(operands.d.values, tile.columns, operands.block_d),
            q_start,
            q_length,
            q_valid,
            *operands.d.tables(columns),
            operands.d.valid,
            found,
            winners,
        ),
        (n, m, columns.start, each, slots, q.stride(0)),
        **operands.constants,
        PRECISION=operands.precision,
        BLOCK_T=tile.rows,
        BLOCK_U=tile.columns,
        BLOCK_D=operands.block_d,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return found.T if one else torch.sum(found.view(m, n, operands.slots), 2, out=out).T


def winner_dtype(block: LateBlock) -> torch.dtype:
    """The type of a winner's number within its document."""
    return torch.int16 if block.document.width < 2**15 else torch.int32


def empty_winners(block: LateBlock, queries: int, documents: int) -> Tensor:  # (m, rows)
    """Room for the winners of a strip."""
    slot, slots = query_slots(block)
    return torch.empty(documents, queries * slot * slots, dtype=winner_dtype(block), device=block.device)
