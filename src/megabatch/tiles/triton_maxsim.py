"""Σ_t max_u ⟨q_it, d_ju⟩ and its gradient by kernels: what `maxsim` does in PyTorch operations.

Backward works on strips of queries and documents. The kernel of the scores stores the winners of the strip, PyTorch operations
turn the scores into weights, and two kernels add up the gradients. The winners exist for one strip at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.tiles import plan, triton_maxsim_gradients
from megabatch.tiles.block import windows
from megabatch.tiles.maxsim import Weigh
from megabatch.tiles.tokens import LateBlock, Tokens
from megabatch.tiles.triton_maxsim_operands import MaxsimOperands
from megabatch.tiles.triton_maxsim_scores import empty_winners, sums


def score_tiles(block: LateBlock) -> Iterator[tuple[slice, slice, Tensor]]:  # (n, m)
    """(rows, columns, Σ_t max_u) of each strip."""
    operands, strip = MaxsimOperands(block), plan.MAXSIM_SCORES
    # The maxima ignore NaN. Sums of 0·values bring it back, query by query and document by document.
    of_queries, of_documents = _poison(block.query), _poison(block.document)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            yield rows, columns, sums(operands, rows, columns).add_(of_queries[rows, None]).add_(of_documents[columns])


def add_gradients(block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor) -> None:  # (Tq, D), (Td, D)
    """Adds the gradients of all vectors, given the gradient of each Σ_t max_u.

    A score with NaN has made the sums of its row and column NaN, so its weight is NaN whatever the score is here.
    """
    operands = MaxsimOperands(block)
    strip = plan.maxsim_strip(operands.slots * operands.slot)
    for rows in windows(block.N, strip.rows):
        for columns in windows(block.M, strip.columns):
            winners = empty_winners(operands, rows, columns)
            g = weigh(sums(operands, rows, columns, winners), rows, columns)
            triton_maxsim_gradients.add_gradients(operands, rows, columns, winners, g, dquery, ddocument)


def _poison(tokens: Tokens) -> Tensor:  # (N,)
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
