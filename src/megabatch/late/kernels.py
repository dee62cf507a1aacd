"""Σ_t max_u ⟨q_it, d_ju⟩ and its gradient by kernels: what `maxsim` does in PyTorch operations.

Backward works on strips of queries and documents. The kernel of the scores stores the winners of the strip, PyTorch operations
turn the scores into weights, and kernels add up the gradients. The winners exist for one strip at a time. If those of the whole
block take no more memory than a strip's, forward may keep them and the scores for backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.late import gradient_kernels
from megabatch.late.maxsim import Kept, Weigh
from megabatch.late.score_kernels import MaxsimOperands, empty_winners, query_slots, sums, winner_dtype
from megabatch.tiles import plan
from megabatch.tiles.block import windows
from megabatch.tiles.tokens import LateBlock, TokenRows


def room_to_keep(block: LateBlock) -> Kept | None:
    """Uninitialised scores and winners of the block; None if the winners are too many."""
    slot, slots = query_slots(block)
    if not kernel_plan.maxsim_is_kept(block.N * slot * slots, block.M, winner_dtype(block).itemsize):
        return None
    scores = torch.empty(block.M, block.N, dtype=torch.float32, device=block.device)
    return Kept(scores, empty_winners(block, block.N, block.M))


def score_tiles(block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """(rows, columns, Σ_t max_u) of each strip; fills `kept`."""
    operands = MaxsimOperands(block)
    strip = kernel_plan.MAXSIM_SCORES if kept is None else plan.TileSize(block.N, kernel_plan.MAXSIM_DOCUMENTS)
    # The maxima ignore NaN. Sums of 0·values bring it back, query by query and document by document.
    of_queries, of_documents = _poison(block.query), _poison(block.document)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            part = None if kept is None else kept.of_documents(columns)
            room = (None, None) if part is None else (part.winners, part.scores)
            yield rows, columns, sums(operands, rows, columns, *room).add_(of_queries[rows, None]).add_(of_documents[columns])


def add_gradients(
    block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u.

    A score with NaN has made the sums of its row and column NaN, so its weight is NaN whatever the score is here.
    """
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
            gradient_kernels.add_gradients(operands, rows, columns, winners, g, dquery, ddocument)


def _poison(tokens: TokenRows) -> Tensor:  # (N,)
    """0 for each item; NaN where one of its valid vectors has a value that is not finite."""
    plain = tokens.valid is None and tokens.lengths is None
    values = tokens.values.reshape(tokens.count, -1) if plain else tokens.values
    each: Tensor = torch.linalg.vector_norm(values, torch.inf, dim=1, dtype=torch.float32)  # a sum could overflow
    each.mul_(0.0)
    if tokens.valid is not None:
        each.masked_fill_(~tokens.valid, 0.0)
    if plain:
        return each
    if tokens.lengths is None:
        return each.view(tokens.count, tokens.width).sum(1)
    return each.new_zeros(tokens.count).index_add_(0, tokens.owners(), each)
