"""Σ_t max_u ⟨q_it, d_ju⟩ in one kernel: the products of a tile of vectors stay in registers.

A program owns a tile of query vectors and loops over documents, BLOCK_U vectors at a time. It keeps a running maximum for each
query vector, and stores their sum for each slot and document: one number for thousands of products. For backward it also stores
the winner of every query vector in each document.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan
from megabatch.tiles.tokens import LateBlock
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_maxsim_operands import MaxsimOperands, query_slots, rows_of_queries
from megabatch.tiles.triton_operands import descriptor


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
