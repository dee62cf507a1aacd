"""The dense path of late interaction: all scores and argmax indices of a small batch in memory, in few launches.

Forward has three launches: the scores with their argmax indices, the losses with the weights of the scores, and the sum of the
losses. A loss of both directions needs one more. Backward has three: lists of the argmax indices, and the gradients of queries
and of documents. Over strips, a step needs tens of launches, so a small batch would be launch-bound.

The last section computes the scores of given candidates, which has one launch as well.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.device import cross_entropy, finite_or_zero
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import descriptor
from megabatch.kernels.plan import KernelTile
from megabatch.kernels.small import softmax_of
from megabatch.late.kernels import (
    MaxsimOperands,
    best_of_tile,
    empty_winners,
    first_vector,
    query_slots,
    rows_of_queries,
    sum_of_slots,
    sums_of_slots,
)
from megabatch.late.tiles import LateBlock, TokenRows
from megabatch.operators.autograd import is_batched, refuse_second_derivative, use_device_of
from megabatch.tiles import plan

# ----------------------------------------------------------------------------------------------------------------------
# Losses and weights, from the scores of all pairs.
#
# A line is a query, or in the second direction a document. Scores and weights are stored as (documents, queries). As in
# `kernels.small`, a loss is log(1 + others), and computations with one number for each line are in float64. Weights are
# d loss / d Σ_t max_u, divided by the scale and by the share of a loss in the result.


@triton.jit
def _load_tile(sums, scale, factors, ids, offs_n, offs_m, N, IS_COLUMN: tl.constexpr, SLOTS: tl.constexpr):
    """Returns Σ_t max_u of a tile, 0 for documents without vectors, the factors of t, and t, −inf for excluded pairs."""
    inside = (offs_n < N)[:, None] & (offs_m < N)[None, :]
    query, document = offs_n[:, None], offs_m[None, :]
    if IS_COLUMN:
        query, document = offs_m[None, :], offs_n[:, None]
    place = (document * N + query) * SLOTS
    s = tl.load(sums + place, inside, -float("inf"))
    for slot in tl.static_range(1, SLOTS):
        s += tl.load(sums + place + slot, inside, -float("inf"))
    factor = tl.load(scale).to(tl.float32)
    if factors is not None:
        factor = factor * tl.load(factors + query, query < N, 0.0)
    missing = s == -float("inf")
    s = tl.where(missing, 0.0, s)
    excluded = missing | (offs_n[:, None] == offs_m[None, :])
    if ids is not None:
        excluded = excluded | (tl.load(ids + query, query < N, 0) == tl.load(ids + document, document < N, 0))
    return s, tl.where(excluded, -float("inf"), s * factor), place // SLOTS, inside


@triton.jit
def _loss_kernel(
    sums,  # (N documents, N queries, SLOTS)
    scale,  # ()
    factors,  # (N,) the factor of each query, or None
    ids,  # (N,) or None
    weights,  # (N, N), or None
    parts,  # (2 planes, programs) float64: losses and dscale
    N,
    IS_COLUMN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the losses of some lines and their weights. The weights of both directions are added."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    peak, total = tl.full((BLOCK_N,), -float("inf"), tl.float32), tl.zeros((BLOCK_N,), tl.float64)
    for first in range(0, N, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M)
        _, t, _, _ = _load_tile(sums, scale, factors, ids, offs_n, offs_m, N, IS_COLUMN, SLOTS)
        before, peak = peak, tl.maximum(peak, tl.max(t, 1))
        shift = finite_or_zero(peak)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(t - shift[:, None]), 1)
    place = (offs_n * N + offs_n) * SLOTS
    product = tl.load(sums + place, mask, 0.0)
    for slot in tl.static_range(1, SLOTS):
        product += tl.load(sums + place + slot, mask, 0.0)
    own_factor = tl.full((BLOCK_N,), 1.0, tl.float32)
    if factors is not None:
        own_factor = tl.load(factors + offs_n, mask, 0.0)
    missing = product == -float("inf")
    match = tl.where(missing, product, product * (tl.load(scale).to(tl.float32) * own_factor))
    alone = missing & (total == 0.0)  # so that the loss is infinite and not NaN
    loss, weight = cross_entropy(tl.where(alone, 0.0, peak), tl.where(alone, 1.0, total), match)
    per_unit = tl.where(total == 0.0, 0.0, weight / tl.where(total == 0.0, 1.0, total))
    programs = tl.num_programs(0)
    tl.store(parts + tl.program_id(0), tl.sum(tl.where(mask, loss, 0.0), 0))
    if weights is None:
        return
    of_scale = tl.where(mask & ~missing & (weight != 0.0), -weight * own_factor * product, 0.0)
    for first in range(0, N, BLOCK_M):
        offs_m = first + tl.arange(0, BLOCK_M)
        s, t, to, inside = _load_tile(sums, scale, factors, ids, offs_n, offs_m, N, IS_COLUMN, SLOTS)
        g = softmax_of(t, finite_or_zero(peak), total.to(tl.float32), per_unit.to(tl.float32), 1)
        if factors is not None:
            query = offs_n[:, None]
            if IS_COLUMN:
                query = offs_m[None, :]
            g *= tl.load(factors + query, query < N, 0.0)
        of_scale += tl.sum(tl.where(g == 0.0, 0.0, g * s), 1)
        g = tl.where(offs_n[:, None] == offs_m[None, :], -(weight.to(tl.float32) * own_factor)[:, None], g)
        if weights is not None:
            if IS_COLUMN:
                g += tl.load(weights + to, inside, 0.0)
            tl.store(weights + to, g, inside)
    tl.store(parts + programs + tl.program_id(0), tl.sum(of_scale, 0))


@triton.jit
def _total_kernel(
    parts,  # (planes, programs) float64: losses and dscale of each direction
    loss,  # () float32
    dscale,  # () float64
    programs,
    share,
    DIRECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the sums of all programs."""
    offs = tl.arange(0, BLOCK)
    total, of_scale = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for direction in tl.static_range(DIRECTIONS):
        for first in range(0, programs, BLOCK):
            mask = first + offs < programs
            total += tl.load(parts + 2 * direction * programs + first + offs, mask, 0.0)
            of_scale += tl.load(parts + (2 * direction + 1) * programs + first + offs, mask, 0.0)
    tl.store(loss, (tl.sum(total, 0) * share).to(loss.dtype.element_ty))
    tl.store(dscale, tl.sum(of_scale, 0) * share)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients. One program computes each sum, in a fixed order, and there are no atomics.
#
# The gradient of a query vector reads one vector of each document. For the gradient of documents, each part of a document has a
# list of the query vectors whose argmax it contains, as in `late.kernels`. Here, one launch writes all lists: the program of a
# part counts the argmax indices in earlier parts of its document, which is where its list begins.


@triton.jit
def _part_list_kernel(
    winners,  # (m, rows)
    listed,  # (m, rows) int32, the lists of the parts of each document
    bounds,  # (m, parts, 2) int32, where each list begins and ends
    rows,
    parts,
    BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    part, j = tl.program_id(0), tl.program_id(1)
    base, low = winners + tl.cast(j, tl.int64) * rows, part * BLOCK_U
    earlier = tl.zeros((BLOCK_T,), tl.int32)
    for first in range(0, rows, BLOCK_T):
        offs = first + tl.arange(0, BLOCK_T)
        winner = tl.load(base + offs, offs < rows, -1).to(tl.int32)
        earlier += ((winner >= 0) & (winner < low)).to(tl.int32)
    end = j * rows + tl.sum(earlier, 0)
    tl.store(bounds + (j * parts + part) * 2, end)
    for first in range(0, rows, BLOCK_T):
        offs = first + tl.arange(0, BLOCK_T)
        winner = tl.load(base + offs, offs < rows, -1).to(tl.int32)
        mine = ((winner >= low) & (winner < low + BLOCK_U)).to(tl.int32)
        tl.store(listed + end + tl.cumsum(mine, 0) - 1, offs, mine != 0)
        end += tl.sum(mine, 0)
    tl.store(bounds + (j * parts + part) * 2 + 1, end)


@triton.jit
def _document_kernel(
    q,  # (Tq, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    listed,  # (m, rows) int32
    bounds,  # (m, parts, 2) int32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    d_length,  # (m,) int64 or None
    scale,  # ()
    dloss,  # ()
    dd,  # (Td, D)
    queries,
    rows,
    parts,
    q_stride,
    share,
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
    begin, end = tl.load(bounds + (j * parts + part) * 2), tl.load(bounds + (j * parts + part) * 2 + 1)
    total = tl.zeros((BLOCK_U, BLOCK_D), tl.float32)
    for r in range(begin, end, BLOCK_T):
        place = r + tl.arange(0, BLOCK_T)
        inside = place < end
        row = tl.load(listed + place, inside, 0)
        query, vector, _ = rows_of_queries(row, q_start, q_length, None, queries, SLOTS, SLOT, QUERY_WIDTH)
        winner = tl.load(winners + tl.cast(j, tl.int64) * rows + row, inside, -1).to(tl.int32)
        weight = tl.load(weights + j * queries + query, inside, 0.0)
        source = q + vector.to(tl.int64)[:, None] * q_stride + offs_d[None, :]
        values = tl.load(source, inside[:, None] & (offs_d < D)[None, :], 0.0)
        won = tl.where(offs_u[:, None] == winner[None, :], weight[None, :], 0.0)
        total = tl.dot(won.to(values.dtype), values, total, input_precision=PRECISION)
    length = WIDTH
    if d_length is not None:
        length = tl.load(d_length + j)
    factor = tl.load(scale).to(tl.float32) * tl.load(dloss).to(tl.float32) * share
    out = dd + (first_vector(d_start, 0, j, WIDTH) + offs_u)[:, None] * D + offs_d[None, :]
    tl.store(out, (total * factor).to(dd.dtype.element_ty), (offs_u < length)[:, None] & (offs_d < D)[None, :])


@triton.jit
def _query_kernel(
    d,  # (Td, D)
    winners,  # (m, rows)
    weights,  # (m, n) float32
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    scale,  # ()
    dloss,  # ()
    dq,  # (Tq, D)
    queries,
    documents,
    rows,
    d_stride,
    share,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    query, vector, exists = rows_of_queries(offs, q_start, q_length, None, queries, SLOTS, SLOT, QUERY_WIDTH)
    counts = exists
    if q_valid is not None:
        counts = exists & (tl.load(q_valid + vector, exists, 0) != 0)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for j in tl.range(documents, loop_unroll_factor=4):  # so the loads of several documents overlap
        winner = tl.load(winners + tl.cast(j, tl.int64) * rows + offs, mask=counts, other=-1).to(tl.int64)
        weight = tl.load(weights + j * queries + query, mask=counts, other=0.0)
        won = counts & (winner >= 0)
        place = first_vector(d_start, 0, j, WIDTH) + winner
        values = tl.load(d + place[:, None] * d_stride + offs_d[None, :], won[:, None] & (offs_d < D)[None, :], 0.0)
        total += tl.where(won, weight, 0.0)[:, None] * values.to(tl.float32)
    factor = tl.load(scale).to(tl.float32) * tl.load(dloss).to(tl.float32) * share
    out = dq + vector.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(out, (total * factor).to(dq.dtype.element_ty), exists[:, None] & (offs_d < D)[None, :])


# ----------------------------------------------------------------------------------------------------------------------
# The loss.


def loss_of_pairs(block: LateBlock, ids: Tensor | None, share: float, *, symmetric: bool) -> Tensor:  # ()
    """Returns `share` · Σ of the cross-entropies of all queries, and of all documents if `symmetric`. Document i is the match.

    Args:
        block: the scores. Its ids are not used.
        ids: (N,) integers. Pairs with equal ids are excluded, except the matches.
        share: a factor of all losses.
        symmetric: whether to add the losses of the documents.
    """
    values = block.query.values, block.document.values
    with use_device_of(values[0]):
        result: Tensor = _LateLoss.apply(
            *(*values, block.scale, block, None if ids is None else ids.long(), share, symmetric, torch.is_grad_enabled())
        )
    return result


class _LateLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # (Tq, D)
        document: Tensor,  # (Td, D)
        scale: Tensor,  # ()
        block: LateBlock,
        ids: Tensor | None,  # (N,)
        share: float,
        symmetric: bool,
        learns: bool,
    ) -> Tensor:  # ()
        N, device = block.N, block.device
        learns = learns and any(ctx.needs_input_grad[:3])
        winners = empty_winners(block, N, N) if learns else None
        everything = slice(0, N)
        sums = sums_of_slots(MaxsimOperands(block), everything, everything, winners)
        weights = torch.empty(N, N, dtype=torch.float32, device=device) if learns else None
        tile, directions = kernel_plan.MAXSIM_LOSS, 2 if symmetric else 1
        programs = plan.tiles(N, tile.rows)
        parts = torch.empty(directions, 2, programs, dtype=torch.float64, device=device)
        for direction in range(directions):
            launch(
                _loss_kernel,
                (programs,),
                (sums, scale, block.weight, ids, weights, parts[direction]),
                (N,),
                IS_COLUMN=direction == 1,
                SLOTS=query_slots(block)[1],
                BLOCK_N=tile.rows,
                BLOCK_M=tile.columns,
                num_warps=tile.warps,
                enable_fp_fusion=False,
            )
        loss = torch.empty((), dtype=torch.float32, device=device)
        dscale = torch.empty((), dtype=torch.float64, device=device)
        launch(_total_kernel, (1,), (parts, loss, dscale), (programs, share), DIRECTIONS=directions, BLOCK=64, num_warps=2)
        if learns:
            ctx.save_for_backward(query, document, scale, winners, weights, dscale)
            ctx.share, ctx.precision = share, block.precision
            ctx.sides = [(side.max_length, side.lengths, side.valid) for side in (block.query, block.document)]
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        query, document, scale, winners, weights, dscale = ctx.saved_tensors
        queries, documents = (TokenRows(values, *side) for values, side in zip((query, document), ctx.sides, strict=True))
        block, batched = LateBlock(queries, documents, scale, ctx.precision), is_batched(dloss)
        upstream = torch.ones_like(dscale) if batched else dloss  # kernels cannot read a batch
        with use_device_of(query):
            needs = ctx.needs_input_grad[:2]
            gradients: list[Tensor | None] = [*_vector_gradients(block, winners, weights, upstream, ctx.share, needs)]
        gradients.append(dscale.to(scale.dtype) if ctx.needs_input_grad[2] else None)
        if batched:
            gradients[:2] = [None if part is None else part * dloss.to(part.dtype) for part in gradients[:2]]
        if gradients[2] is not None:
            gradients[2] = gradients[2] * dloss.to(scale.dtype)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = refuse_second_derivative((query, document, scale), gradients)
        return *gradients, None, None, None, None, None


def _vector_gradients(
    block: LateBlock, winners: Tensor, weights: Tensor, dloss: Tensor, share: float, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:  # (Tq, D), (Td, D)
    operands, N, rows = MaxsimOperands(block), block.N, winners.shape[1]
    D, scale, everything = block.query.D, block.scale, slice(0, block.N)
    steps = plan.tiles(D, operands.block_d)
    q_start, q_length, q_valid, q = operands.queries(everything, operands.q.values)
    d, dquery, ddocument = operands.d.values, None, None
    if needs[0]:
        dquery = torch.empty(block.query.values.shape, dtype=block.query.values.dtype, device=block.device)
        tile = kernel_plan.MAXSIM_SMALL_GATHER
        launch(
            _query_kernel,
            (plan.tiles(rows, tile.rows), steps),
            (d, winners, weights, q_start, q_length, q_valid, operands.d.starts, scale, dloss, dquery),
            (N, N, rows, d.stride(0), share),
            **operands.constants,
            **_sizes(tile, BLOCK_T=tile.rows, BLOCK_D=operands.block_d),
        )
    if needs[1]:
        ddocument = torch.empty(block.document.values.shape, dtype=block.document.values.dtype, device=block.device)
        tile = kernel_plan.maxsim_small_listed_tile(block.precision, block.device)
        parts = plan.tiles(block.document.max_length, tile.rows)
        listed = torch.empty(N, rows, dtype=torch.int32, device=block.device)
        bounds = torch.empty(N, parts, 2, dtype=torch.int32, device=block.device)
        scan = kernel_plan.MAXSIM_SCAN
        launch(
            _part_list_kernel,
            (parts, N),
            (winners, listed, bounds),
            (rows, parts),
            **_sizes(scan, BLOCK_T=scan.columns, BLOCK_U=tile.rows),
        )
        launch(
            _document_kernel,
            (parts, N, steps),
            (
                q,
                winners,
                weights,
                listed,
                bounds,
                q_start,
                q_length,
                operands.d.starts,
                operands.d.lengths,
                scale,
                dloss,
                ddocument,
            ),
            (N, rows, parts, q.stride(0), share),
            **operands.constants,
            PRECISION=operands.precision,
            **_sizes(tile, BLOCK_U=tile.rows, BLOCK_T=tile.columns, BLOCK_D=operands.block_d),
        )
    return dquery, ddocument


def _sizes(tile: KernelTile, **blocks: int) -> dict[str, int]:
    return {**blocks, "num_warps": tile.warps, "num_stages": tile.stages}


# ----------------------------------------------------------------------------------------------------------------------
# The scores of candidates. A program computes the scores of one slot of a query with some of its candidates.


@triton.jit
def _candidate_kernel(
    q,  # (Tq, D)
    d_desc,  # (Td, D)
    q_start,  # (n,) int64 or None
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    d_start,  # (m,) int64, or None if all documents have WIDTH vectors
    d_length,  # (m,) int64 or None
    d_valid,  # (Td,) int8 or None
    candidates,  # (n, k) int64, negative for none
    sums,  # (n, k, SLOTS)
    queries,
    k,
    candidates_each,
    q_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot = tl.program_id(0)
    query = tl.cast(slot // SLOTS, tl.int64)
    rows = slot * SLOT + tl.arange(0, SLOT)
    _, vector, counts = rows_of_queries(rows, q_start, q_length, q_valid, queries, SLOTS, SLOT, QUERY_WIDTH)
    q_rows, offs_d = q + vector.to(tl.int64) * q_stride, tl.arange(0, BLOCK_D)
    mine = tl.load(q_rows[:, None] + offs_d[None, :], counts[:, None] & (offs_d < D)[None, :], 0.0)
    nobody = tl.full((SLOT,), -1, tl.int32)
    begin = tl.program_id(1) * candidates_each
    for c in range(begin, tl.minimum(begin + candidates_each, k)):
        j = tl.load(candidates + query * k + c)
        document = tl.maximum(j, 0)
        length = WIDTH
        if d_length is not None:
            length = tl.load(d_length + document).to(tl.int32)
        start, length = first_vector(d_start, 0, document, WIDTH).to(tl.int32), tl.where(j < 0, 0, length)
        best = tl.full((SLOT,), -float("inf"), tl.float32)
        for u in range(0, length, BLOCK_U):
            best, _ = best_of_tile(
                mine, q_rows, counts, d_desc, d_valid, start + u, length - u, best, nobody, u,
                D, False, False, PRECISION, SLOT, BLOCK_U, BLOCK_D,
            )  # fmt: skip
        tl.store(sums + (query * k + c) * SLOTS + slot % SLOTS + tl.arange(0, 1), sum_of_slots(best, counts, SLOT, SLOT))


def candidate_scores(block: LateBlock, candidates: Tensor) -> Tensor:  # (N, K) int64
    """Returns the scores of each query with its candidates, and −inf for negative numbers and documents without vectors."""
    N, K = candidates.shape
    with use_device_of(block.query.values):
        operands, candidates = MaxsimOperands(block), candidates.contiguous()
        sums = torch.empty(N, K, operands.slots, dtype=torch.float32, device=block.device)
        programs = N * operands.slots
        splits = max(1, min(K, -(-16 * kernel_plan.multiprocessors(block.device) // programs)))
        each = plan.tiles(K, splits)
        q_start, q_length, q_valid, q = operands.queries(slice(0, N), operands.q.values)
        tile = operands.tile
        launch(
            _candidate_kernel,
            (programs, plan.tiles(K, each)),
            (
                *(q, descriptor(operands.d.values, tile.columns, operands.block_d), q_start, q_length, q_valid),
                *(operands.d.starts, operands.d.lengths, operands.d.valid, candidates, sums),
            ),
            (N, K, each, q.stride(0)),
            **operands.constants,
            PRECISION=operands.precision,
            BLOCK_U=tile.columns,
            BLOCK_D=operands.block_d,
            num_warps=4 if operands.slot <= 64 else tile.warps,
            num_stages=tile.stages,
        )
        scores = sums.squeeze(2) if operands.slots == 1 else sums.sum(2)
    return scores if block.weight is None else scores.mul_(block.weight[:, None])
