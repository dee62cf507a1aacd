"""Kernels that compute the gradients of late interaction without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.launch import launch
from megabatch.late.score_kernels import MaxsimOperands, first_vector, rows_of_queries
from megabatch.tiles.block import windows

# ----------------------------------------------------------------------------------------------------------------------
# The gradients of documents, from lists of the query vectors that each part of a document won.
#
# A document vector adds up the query vectors that it won: a product of a matrix of weights, 0 where it lost, with the
# queries. Nearly every weight is 0, because a query vector has one winner in a document. So the query vectors of a strip
# are sorted by the part of the document that holds their winner, in two launches (counts, then places), and a part
# multiplies its own list. The order within a list is the order of the query vectors, so sums are deterministic.

_CHUNK = 2048  # query vectors that a program of the first two kernels sorts


@triton.jit
def _find_parts(winners, j, offs_t, rows, BLOCK_U: tl.constexpr):
    """The part of document j that each query vector chose; −1 if none."""
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
    """How many query vectors of a chunk chose each part of a document."""
    chunk, j = tl.program_id(0), tl.program_id(1)
    chosen = _find_parts(winners, j, chunk * BLOCK_T + tl.arange(0, BLOCK_T), rows, BLOCK_U)
    for part in range(parts):
        tl.store(counts + (j * parts + part) * chunks + chunk, tl.sum((chosen == part).to(tl.int32), 0))


@triton.jit
def _list_kernel(
    winners,  # (m, rows)
    ends,  # (m, parts, chunks) int32, of the chunk's entries
    listed,  # (entries,) int32
    rows,
    parts,
    chunks,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Writes the query vectors of a chunk into the lists of the parts that they chose."""
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
    dd,  # (Td, D) float32, added to
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
    ddocument: Tensor,  # (Td, D) added to
) -> None:
    """Adds the documents' gradients of a strip, as many documents at a time as their lists fit into the workspace."""
    at_once = min(kernel_plan.MAXSIM_DOCUMENTS, max(1, kernel_plan.MAXSIM_LIST_ENTRIES // winners.shape[1]))
    for some in windows(len(winners), at_once):
        part = slice(columns.start + some.start, columns.start + some.stop)
        _add(operands, rows, part, winners[some], weights[some], ddocument)


def _add(operands: MaxsimOperands, rows: slice, columns: slice, winners: Tensor, weights: Tensor, ddocument: Tensor) -> None:
    (m, n), count, device = weights.shape, winners.shape[1], winners.device
    tile = kernel_plan.maxsim_listed_tile(operands.block.precision, operands.block.device)
    parts, chunks = triton.cdiv(operands.d.width, tile.rows), triton.cdiv(count, _CHUNK)
    sizes, blocks = (count, parts, chunks), {"BLOCK_T": _CHUNK, "BLOCK_U": tile.rows}
    counts = torch.empty(m * parts * chunks, dtype=torch.int32, device=device)
    launch(_count_kernel, (chunks, m), (winners, counts), sizes, **blocks)
    ends = counts.cumsum(0, dtype=torch.int32)
    listed = torch.empty(m * count, dtype=torch.int32, device=device)
    launch(_list_kernel, (chunks, m), (winners, ends, listed), sizes, **blocks)
    q_start, q_length, _, q = operands.queries(rows, operands.q.values)
    launch(
        _listed_gradient_kernel,
        (parts, m, triton.cdiv(operands.block.query.D, operands.block_d)),
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
# Gradients of Σ_t max_u ⟨q_it, d_ju⟩, given the winners of a strip and a weight for each query and document.
#
# A query vector gathers its winners of all documents. A document vector adds up the query vectors that it won
# (`gradient_kernels`). Each sum has one owner, so there are no atomics.


@triton.jit
def _query_gradient_kernel(
    d,  # (Td, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    dq,  # (Tq, D) float32, added to
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
    for j in tl.range(documents, loop_unroll_factor=4):  # gathers of several documents in flight
        winner = tl.load(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, mask=counts, other=-1).to(tl.int64)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, mask=counts, other=0.0)
        won = counts & (winner >= 0)
        place = first_vector(d_start, first_document, j, WIDTH) + winner
        values = tl.load(d + place[:, None] * d_stride + offs_d[None, :], won[:, None] & (offs_d < D)[None, :], 0.0)
        total += tl.where(won, weight, 0.0)[:, None] * values.to(tl.float32)
    out = dq + vector.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = counts[:, None] & (offs_d < D)[None, :]
    tl.store(out, tl.load(out, mask, 0.0) + total, mask)


def add_gradients(
    operands: MaxsimOperands,
    rows: slice,
    columns: slice,
    winners: Tensor,  # (m, rows)
    g: Tensor,  # (n, m)
    dquery: Tensor,  # (Tq, D) added to
    ddocument: Tensor,  # (Td, D) added to
) -> None:
    """Adds the gradients of a strip, given those of its sums."""
    weights = g.T.contiguous()
    m, n = weights.shape
    D, slots, block_d = operands.block.query.D, n * operands.slots, operands.block_d
    q_start, q_length, q_valid, dq = operands.queries(rows, dquery)
    d_start, _ = operands.d.tables(columns)
    gather = kernel_plan.MAXSIM_GATHER
    launch(
        _query_gradient_kernel,
        (triton.cdiv(slots * operands.slot, gather.rows), triton.cdiv(D, block_d)),
        (operands.d.values, winners, weights, q_start, q_length, q_valid, d_start, dq),
        (n, m, columns.start, slots, operands.d.values.stride(0)),
        **operands.constants,
        BLOCK_T=gather.rows,
        BLOCK_D=block_d,
        num_warps=gather.warps,
        num_stages=gather.stages,
    )
    add_document_gradients(operands, rows, columns, winners, weights, ddocument)
