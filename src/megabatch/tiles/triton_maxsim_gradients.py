"""Gradients of Σ_t max_u ⟨q_it, d_ju⟩, given the winners of a strip and a weight for each query and document.

A query vector gathers its winners of all documents. A document vector adds up the query vectors that it won
(`triton_maxsim_lists`). Each sum has one owner, so there are no atomics.
"""

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan, triton_maxsim_lists
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
    triton_maxsim_lists.add_document_gradients(operands, rows, columns, winners, weights, ddocument)
