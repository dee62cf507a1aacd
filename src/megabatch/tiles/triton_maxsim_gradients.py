"""Gradients of Σ_t max_u ⟨q_it, d_ju⟩ in two kernels, given the winners of a strip and a weight for each query and document.

A query vector gathers its winners of all documents. A document vector adds up the query vectors that it won: a product of a
matrix of weights, 0 where it lost, with the queries (`triton_maxsim_lists`, not used yet, leaves most of the zeros out).
Each sum has one owner, so there are no atomics.
"""

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan, triton_maxsim_lists
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_maxsim_operands import MaxsimOperands, first_vector, rows_of_queries


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


@triton.jit
def _document_gradient_kernel(
    q,  # (Tq, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    d_length,  # (m,) int64 or None
    dd,  # (Td, D) float32, added to
    queries,  # n
    first_document,
    slots,
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
    j = tl.program_id(1)
    offs_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = WIDTH
    if d_length is not None:
        length = tl.load(d_length + j)
    if tl.program_id(0) * BLOCK_U >= length:
        return
    total = tl.zeros((BLOCK_U, BLOCK_D), tl.float32)
    for r in range(0, slots * SLOT, BLOCK_T):
        rows = r + tl.arange(0, BLOCK_T)
        query, vector, counts = rows_of_queries(rows, q_start, q_length, None, queries, SLOTS, SLOT, QUERY_WIDTH)
        winner = tl.load(winners + tl.cast(j, tl.int64) * slots * SLOT + rows, mask=counts, other=-1).to(tl.int32)
        weight = tl.load(weights + tl.cast(j, tl.int64) * queries + query, mask=counts, other=0.0)
        place = q + vector.to(tl.int64)[:, None] * q_stride + offs_d[None, :]
        values = tl.load(place, (winner >= 0)[:, None] & (offs_d < D)[None, :], 0.0)
        won = tl.where(offs_u[:, None] == winner[None, :], weight[None, :], 0.0)
        total = tl.dot(won.to(values.dtype), values, total, input_precision=PRECISION)
    out = dd + (first_vector(d_start, first_document, j, WIDTH) + offs_u)[:, None] * D + offs_d[None, :]
    mask = (offs_u < length)[:, None] & (offs_d < D)[None, :]
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
    q_start, q_length, q_valid, q = operands.queries(rows, operands.q.values)
    d_start, d_length = operands.d.tables(columns)
    gather, product = plan.MAXSIM_GATHER, plan.maxsim_gradient_tile(operands.block.precision, operands.block.device)
    launch(
        _query_gradient_kernel,
        (triton.cdiv(slots * operands.slot, gather.rows), triton.cdiv(D, block_d)),
        (operands.d.values, winners, weights, q_start, q_length, q_valid, d_start, operands.queries(rows, dquery)[3]),
        (n, m, columns.start, slots, operands.d.values.stride(0)),
        **operands.constants,
        BLOCK_T=gather.rows,
        BLOCK_D=block_d,
        num_warps=gather.warps,
        num_stages=gather.stages,
    )
    if operands.d.width >= plan.MAXSIM_LISTED_FROM:
        triton_maxsim_lists.add_document_gradients(operands, rows, columns, winners, weights, ddocument)
        return
    launch(
        _document_gradient_kernel,
        (triton.cdiv(operands.d.width, product.rows), m, triton.cdiv(D, block_d)),
        (q, winners, weights, q_start, q_length, d_start, d_length, ddocument),
        (n, columns.start, slots, q.stride(0)),
        **operands.constants,
        PRECISION=operands.precision,
        BLOCK_U=product.rows,
        BLOCK_T=product.columns,
        BLOCK_D=block_d,
        num_warps=product.warps,
        num_stages=product.stages,
    )
