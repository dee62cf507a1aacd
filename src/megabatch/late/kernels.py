"""The Triton engine of late interaction, with the functions of `late.tiles`. It computes all sums without atomics."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import descriptor, operand
from megabatch.late.tiles import Kept, LateBlock, TokenRows, Weigh
from megabatch.tiles import plan
from megabatch.tiles.block import FLOAT32, windows

# ----------------------------------------------------------------------------------------------------------------------
# The layout in which the late-interaction kernels read queries and documents.
#
# A query takes one slot of a tile, or several slots if it is longer than a tile. A slot has SLOT rows, a power of two. If all
# items have the same number of vectors, the kernels compute where an item begins. Otherwise they load its start from a table
# first.


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
    """Returns the query of each row, the index of its vector, and whether the vector exists and is valid.

    Rows are numbered in the order of the slots.
    """
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
    """Returns the index of the first vector of a document, int64."""
    start = tl.cast(first_document + j, tl.int64) * WIDTH
    if d_start is not None:
        start = tl.load(d_start + j)
    return start


@dataclass(frozen=True)
class TokenSide:
    """The queries, or the documents."""

    values: Tensor  # (T, D) rounded
    max_length: int
    starts: Tensor | None  # (N,) int64; None if each item has `max_length` vectors
    lengths: Tensor | None  # (N,) int64
    valid: Tensor | None  # (T,) int8

    @classmethod
    def of(cls, tokens: TokenRows, precision: str) -> "TokenSide":
        """Returns the side with its vectors rounded to `precision`."""
        valid = None if tokens.valid is None else tokens.valid.to(torch.int8)
        starts = None if tokens.lengths is None else tokens.starts()
        return cls(operand(tokens.values, precision), tokens.max_length, starts, tokens.lengths, valid)

    def tables(self, items: slice) -> tuple[Tensor | None, Tensor | None]:
        """Returns the starts and the lengths of some items. Both are None if all items have the same length."""
        if self.starts is None or self.lengths is None:
            return None, None
        return self.starts[items], self.lengths[items]


def query_slots(block: LateBlock) -> tuple[int, int]:
    """Returns the number of rows in a slot, and the number of slots of a query."""
    tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
    slot = min(tile.rows, max(16, 1 << (block.query.max_length - 1).bit_length()))
    return slot, plan.tiles(block.query.max_length, slot)


class MaxsimOperands:
    """The inputs of the kernels for one block."""

    def __init__(self, block: LateBlock) -> None:
        self.block = block
        self.q, self.d = (TokenSide.of(side, block.precision) for side in (block.query, block.document))
        self.tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
        self.slot, self.slots = query_slots(block)
        self.block_d = min(self.tile.dims, max(16, 1 << (block.query.D - 1).bit_length()))
        self.precision = "ieee" if block.precision == FLOAT32 else "tf32"

    def queries(self, rows: slice, vectors: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Returns (starts, lengths, valid, vectors) for the queries in `rows`.

        If there are no starts, `valid` and `vectors` begin at the first of these queries.
        """
        first = rows.start * self.q.max_length if self.q.starts is None else 0
        valid = self.q.valid
        if first:
            valid, vectors = None if valid is None else valid[first:], vectors[first:]
        return *self.q.tables(rows), valid, vectors

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time arguments of every kernel. WIDTH is the number of vectors of a document, or 0 with starts."""
        lengths = {"WIDTH": self.d.max_length if self.d.starts is None else 0, "QUERY_WIDTH": self.q.max_length}
        return {"D": self.block.query.D, **lengths, "SLOTS": self.slots, "SLOT": self.slot}


# ----------------------------------------------------------------------------------------------------------------------
# Σ_t max_u ⟨q_it, d_ju⟩ in one kernel. The dot products of a tile of vectors stay in registers.
#
# A program owns a tile of query vectors and loops over documents, BLOCK_U vectors at a time. It has a running maximum for each
# query vector. For each slot and document, it stores the sum of the maxima, which is one number for thousands of dot products.
# For backward, it also stores the argmax of every query vector in each document. In this file, `winners` are these argmax
# indices, which count from the first vector of the document. An index of −1 means that there is no argmax.


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_of_slots(best, counts, BLOCK_T: tl.constexpr, SLOT: tl.constexpr):
    """Returns Σ_t max_u of each slot. It is −inf for a document without vectors, even if the query has no vectors."""
    nothing = tl.where(best == -float("inf"), best, 0.0)
    return tl.sum(tl.where(counts, best, nothing).reshape(BLOCK_T // SLOT, SLOT), 1)


@triton.jit
def best_of_tile(
    q,  # (BLOCK_T, BLOCK_D), used if D is at most BLOCK_D
    q_rows,  # (BLOCK_T,) pointers
    counts,  # (BLOCK_T,) whether the query vector exists and is valid
    d_desc,  # (Td, D)
    d_valid,  # (Td,) or None
    first,  # the index of the first vector of this tile
    left,  # the number of vectors from the first one of this tile to the end of the document
    best,  # (BLOCK_T,) maxima over the previous tiles
    winner,  # (BLOCK_T,) their argmax
    u,  # the number of the first vector of this tile within its document
    D: tl.constexpr,
    WHOLE: tl.constexpr,  # whether no tile extends beyond its document
    WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the running maxima and their argmax after one more tile of document vectors."""
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
    largest = tl.reduce(s, 1, _maximum)
    if WINNERS:
        at = tl.min(tl.where(s == largest[:, None], offs_u[None, :], BLOCK_U), 1)
        winner = tl.where(largest > best, u + at, tl.where(largest == largest, winner, u))
    return _maximum(best, largest), winner


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
            best, winner = best_of_tile(
                mine, q_rows, counts, d_desc, d_valid, first, WIDTH - u, best, winner, u,
                D, WIDTH % BLOCK_U == 0, WINNERS, PRECISION, BLOCK_T, BLOCK_U, BLOCK_D,
            )  # fmt: skip
            total = sum_of_slots(best, counts, BLOCK_T, SLOT)
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
                best, winner = best_of_tile(
                    mine, q_rows, counts, d_desc, d_valid, start + u, length - u, best, winner, u,
                    D, False, WINNERS, PRECISION, BLOCK_T, BLOCK_U, BLOCK_D,
                )  # fmt: skip
            total = sum_of_slots(best, counts, BLOCK_T, SLOT)
            tl.store(sums + tl.cast(j, tl.int64) * slots + offs_slot, total, mask=offs_slot < slots)
            if WINNERS:
                found = tl.where(counts, winner, -1).to(winners.dtype.element_ty)
                tl.store(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, found, mask=rows < slots * SLOT)


def sums_of_slots(
    operands: MaxsimOperands, rows: slice, columns: slice, winners: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # (m, slots of all queries)
    """Returns Σ_t max_u of a strip for each slot. A maximum is NaN if a dot product is NaN.

    If `out` is given, the result is written to it. If `winners` is given, the argmax indices are written to it.
    """
    n, m = rows.stop - rows.start, columns.stop - columns.start
    slots, tile, device = n * operands.slots, operands.tile, operands.block.device
    result = torch.empty(m, slots, dtype=torch.float32, device=device) if out is None else out
    tiles = plan.tiles(slots * operands.slot, tile.rows)
    splits = max(1, min(m, -(-8 * kernel_plan.multiprocessors(device) // tiles)))
    each = plan.tiles(m, splits)
    q_start, q_length, q_valid, q = operands.queries(rows, operands.q.values)
    launch(
        _maxsim_kernel,
        (tiles, plan.tiles(m, each)),
        (
            q,
            descriptor(operands.d.values, tile.columns, operands.block_d),
            q_start,
            q_length,
            q_valid,
            *operands.d.tables(columns),
            operands.d.valid,
            result,
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
    return result


def sums(
    operands: MaxsimOperands, rows: slice, columns: slice, winners: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # (n, m)
    """Returns Σ_t max_u of a strip. If `out`, (m, n), is given, the result is written to it. See `sums_of_slots`."""
    if operands.slots == 1:
        return sums_of_slots(operands, rows, columns, winners, out).T
    parts = sums_of_slots(operands, rows, columns, winners)
    return torch.sum(parts.view(len(parts), -1, operands.slots), 2, out=out).T


def winner_dtype(block: LateBlock) -> torch.dtype:
    """Returns the dtype of argmax indices within a document."""
    return torch.int16 if block.document.max_length < 2**15 else torch.int32


def empty_winners(block: LateBlock, queries: int, documents: int) -> Tensor:  # (m, rows)
    """Returns uninitialized memory for the argmax indices of a strip."""
    slot, slots = query_slots(block)
    return torch.empty(documents, queries * slot * slots, dtype=winner_dtype(block), device=block.device)


# ----------------------------------------------------------------------------------------------------------------------
# The gradients of documents, from one list of query vectors for each part of a document.
#
# The gradient of a document vector is a weighted sum of the query vectors whose argmax it is. In a matmul with all query
# vectors, nearly all weights would be 0, because a query vector has one argmax in a document. So the query vectors of a strip
# are sorted by the part of the document that contains their argmax, and each part multiplies only its own list. The sort takes
# two launches: the first one counts, and the second one writes the lists. Each list is in the order of the query vectors, so
# the sums are deterministic.

_CHUNK = 2048  # query vectors that one program of `_count_kernel` or `_list_kernel` processes


@triton.jit
def _find_parts(winners, j, offs_t, rows, BLOCK_U: tl.constexpr):
    """Returns the part of document j that contains the argmax of each query vector, or −1 if there is no argmax."""
    winner = tl.load(winners + tl.cast(j, tl.int64) * rows + offs_t, offs_t < rows, -1).to(tl.int32)
    return tl.where(winner >= 0, winner // BLOCK_U, -1)


@triton.jit
def _count_kernel(
    winners,  # (m, rows)
    counts,  # (m, parts, chunks) int32
    rows,
    parts,
    chunks,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Counts, for each part of a document, the query vectors of a chunk whose argmax is in this part."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    chosen = _find_parts(winners, j, chunk * BLOCK_T + tl.arange(0, BLOCK_T), rows, BLOCK_U)
    for part in range(parts):
        tl.store(counts + (j * parts + part) * chunks + chunk, tl.sum((chosen == part).to(tl.int32), 0))


@triton.jit
def _list_kernel(
    winners,  # (m, rows)
    ends,  # (m, parts, chunks) int32, the index in `listed` after the last entry of each chunk
    listed,  # (entries,) int32, the query vectors in all lists, one list after another
    rows,
    parts,
    chunks,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Writes the query vectors of a chunk to the lists of the parts that contain their argmax."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    offs_t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
    chosen = _find_parts(winners, j, offs_t, rows, BLOCK_U)
    for part in range(parts):
        mine = (chosen == part).to(tl.int32)
        end = tl.load(ends + (j * parts + part) * chunks + chunk)
        place = end - tl.sum(mine, 0) + tl.cumsum(mine, 0) - 1
        tl.store(listed + place, offs_t, mine != 0)


@triton.jit
def _listed_gradient_kernel(
    q,  # (Tq, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    listed,  # (entries,) int32
    ends,  # (m, parts, chunks) int32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    d_length,  # (m,) int64 or None
    dd,  # (Td, D) float32 accumulator
    queries,  # n
    first_document,
    rows,
    parts,
    chunks,
    q_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    part, j = tl.program_id(0), tl.program_id(1)
    offs_u = part * BLOCK_U + tl.arange(0, BLOCK_U)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    first_end = (j * parts + part) * chunks
    begin = tl.load(ends + first_end - 1, first_end > 0, 0)
    end = tl.load(ends + first_end + chunks - 1)
    if begin == end:
        return
    total = tl.zeros((BLOCK_U, BLOCK_D), tl.float32)
    for r in range(begin, end, BLOCK_T):
        place = r + tl.arange(0, BLOCK_T)
        inside = place < end
        row = tl.load(listed + place, inside, 0)
        query, vector, _ = rows_of_queries(row, q_start, q_length, None, queries, SLOTS, SLOT, QUERY_WIDTH)
        winner = tl.load(winners + tl.cast(j, tl.int64) * rows + row, inside, -1).to(tl.int32)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, inside, 0.0)
        source = q + vector.to(tl.int64)[:, None] * q_stride + offs_d[None, :]
        values = tl.load(source, inside[:, None] & (offs_d < D)[None, :], 0.0)
        won = tl.where(offs_u[:, None] == winner[None, :], weight[None, :], 0.0)
        total = tl.dot(won.to(values.dtype), values, total, input_precision=PRECISION)
    length = WIDTH
    if d_length is not None:
        length = tl.load(d_length + j)
    out = dd + (first_vector(d_start, first_document, j, WIDTH) + offs_u)[:, None] * D + offs_d[None, :]
    mask = (offs_u < length)[:, None] & (offs_d < D)[None, :]
    tl.store(out, tl.load(out, mask, 0.0) + total, mask)


def add_document_gradients(
    operands: MaxsimOperands,
    rows: slice,
    columns: slice,
    winners: Tensor,  # (m, rows of all slots)
    weights: Tensor,  # (m, n)
    ddocument: Tensor,  # (Td, D) accumulator
) -> None:
    """Adds the gradients of the documents of a strip. In each launch, the lists of all documents fit in the workspace."""
    documents_per_launch = min(kernel_plan.MAXSIM_DOCUMENTS, max(1, kernel_plan.MAXSIM_LIST_ENTRIES // winners.shape[1]))
    for window in windows(len(winners), documents_per_launch):
        part = slice(columns.start + window.start, columns.start + window.stop)
        _add_documents(operands, rows, part, winners[window], weights[window], ddocument)


def _add_documents(
    operands: MaxsimOperands, rows: slice, columns: slice, winners: Tensor, weights: Tensor, ddocument: Tensor
) -> None:
    (m, n), count, device = weights.shape, winners.shape[1], winners.device
    tile = kernel_plan.maxsim_listed_tile(operands.block.precision, operands.block.device)
    parts, chunks = plan.tiles(operands.d.max_length, tile.rows), plan.tiles(count, _CHUNK)
    sizes, blocks = (count, parts, chunks), {"BLOCK_T": _CHUNK, "BLOCK_U": tile.rows}
    counts = torch.empty(m * parts * chunks, dtype=torch.int32, device=device)
    launch(_count_kernel, (chunks, m), (winners, counts), sizes, **blocks)
    ends = counts.cumsum(0, dtype=torch.int32)
    listed = torch.empty(m * count, dtype=torch.int32, device=device)
    launch(_list_kernel, (chunks, m), (winners, ends, listed), sizes, **blocks)
    q_start, q_length, _, q = operands.queries(rows, operands.q.values)
    launch(
        _listed_gradient_kernel,
        (parts, m, plan.tiles(operands.block.query.D, operands.block_d)),
        (q, winners, weights, listed, ends, q_start, q_length, *operands.d.tables(columns), ddocument),
        (n, columns.start, *sizes, q.stride(0)),
        **operands.constants,
        PRECISION=operands.precision,
        BLOCK_U=tile.rows,
        BLOCK_T=tile.columns,
        BLOCK_D=operands.block_d,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of Σ_t max_u ⟨q_it, d_ju⟩, given the argmax indices of a strip and a weight for each query and document.
#
# The gradient of a query vector is a weighted sum of the document vectors at its argmax indices. The gradient of a document
# vector is computed by the kernels above. One program computes each sum, so there are no atomics.


@triton.jit
def _query_gradient_kernel(
    d,  # (Td, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    dq,  # (Tq, D) float32 accumulator
    queries,  # n
    documents,  # m
    first_document,
    slots,
    d_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    query, vector, counts = rows_of_queries(rows, q_start, q_length, q_valid, queries, SLOTS, SLOT, QUERY_WIDTH)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.range(documents, loop_unroll_factor=4):  # so the loads of several documents overlap
        winner = tl.load(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, mask=counts, other=-1).to(tl.int64)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, mask=counts, other=0.0)
        won = counts & (winner >= 0)
        place = first_vector(d_start, first_document, j, WIDTH) + winner
        values = tl.load(d + place[:, None] * d_stride + offs_d[None, :], won[:, None] & (offs_d < D)[None, :], 0.0)
        total += tl.where(won, weight, 0.0)[:, None] * values.to(tl.float32)
    out = dq + vector.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = counts[:, None] & (offs_d < D)[None, :]
    tl.store(out, tl.load(out, mask, 0.0) + total, mask)


def add_strip_gradients(
    operands: MaxsimOperands,
    rows: slice,
    columns: slice,
    winners: Tensor,  # (m, rows)
    g: Tensor,  # (n, m)
    dquery: Tensor,  # (Tq, D) accumulator
    ddocument: Tensor,  # (Td, D) accumulator
) -> None:
    """Adds the gradients of the vectors of a strip, given the gradients g of its scores."""
    weights = g.T.contiguous()
    m, n = weights.shape
    D, slots, block_d = operands.block.query.D, n * operands.slots, operands.block_d
    q_start, q_length, q_valid, dq = operands.queries(rows, dquery)
    d_start, _ = operands.d.tables(columns)
    gather = kernel_plan.MAXSIM_GATHER
    launch(
        _query_gradient_kernel,
        (plan.tiles(slots * operands.slot, gather.rows), plan.tiles(D, block_d)),
        (operands.d.values, winners, weights, q_start, q_length, q_valid, d_start, dq),
        (n, m, columns.start, slots, operands.d.values.stride(0)),
        **operands.constants,
        BLOCK_T=gather.rows,
        BLOCK_D=block_d,
        num_warps=gather.warps,
        num_stages=gather.stages,
    )
    add_document_gradients(operands, rows, columns, winners, weights, ddocument)


# ----------------------------------------------------------------------------------------------------------------------
# The functions of an engine. `late.tiles` contains the same functions in PyTorch operations.
#
# Backward processes strips of queries and documents. The kernel of the scores stores the argmax indices of the strip, PyTorch
# operations turn the scores into weights, and kernels add the gradients. Only the indices of one strip exist at a time. If the
# indices of the full block fit in a workspace, forward may store them and the scores for backward
# (`kernels.plan.maxsim_is_kept`).


def allocate_kept(block: LateBlock) -> Kept | None:
    """Returns uninitialized memory for the scores and argmax indices of the block, or None if there are too many indices."""
    slot, slots = query_slots(block)
    if not kernel_plan.maxsim_is_kept(block.N * slot * slots, block.M, winner_dtype(block).itemsize):
        return None
    scores = torch.empty(block.M, block.N, dtype=torch.float32, device=block.device)
    return Kept(scores, empty_winners(block, block.N, block.M))


def score_tiles(block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """Yields (rows, columns, Σ_t max_u) of each strip. Writes the scores and argmax indices to `kept` if it is given."""
    operands = MaxsimOperands(block)
    strip = kernel_plan.MAXSIM_SCORES.fit_to(block.N, block.M)
    strip = strip if kept is None else plan.TileSize(block.N, kernel_plan.MAXSIM_DOCUMENTS)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            part = None if kept is None else kept.of_documents(columns)
            out = (None, None) if part is None else (part.winners, part.scores)
            yield rows, columns, sums(operands, rows, columns, *out)


def add_gradients(
    block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u."""
    operands = MaxsimOperands(block)
    slot, slots = query_slots(block)
    strip = kernel_plan.maxsim_strip(slot * slots) if kept is None else plan.TileSize(block.N, kernel_plan.MAXSIM_DOCUMENTS)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            if kept is None:
                winners = empty_winners(block, rows.stop - rows.start, columns.stop - columns.start)
                scores = sums(operands, rows, columns, winners)
            else:
                part = kept.of_documents(columns)
                scores, winners = part.scores.T, part.winners
            g = weigh(scores, rows, columns)
            add_strip_gradients(operands, rows, columns, winners, g, dquery, ddocument)
