"""Operators without a gradient: retrieval ranks of matching pairs, and the k largest logits of each row."""

from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.operators.autograd import define, loop_under_vmap, passes_for, statistic
from megabatch.tiles.block import Block, RankTargets

# ----------------------------------------------------------------------------------------------------------------------
# Counts how many entries of a row or column come before a given entry. This operator has no gradient.


class RankInputs(NamedTuple):
    """The embeddings, and the entry of each row and column whose retrieval rank is counted.

    The entries are None if row i belongs to column i. Rows and columns are numbered over all ranks.
    """

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    row_match: Tensor | None  # (N,) the similarity of each row's entry
    col_match: Tensor | None  # (M,)
    row_target: Tensor | None  # (N,) int64, the column of each row's entry
    col_target: Tensor | None  # (M,) int64, the row of each column's entry
    precision: str
    backend: str
    group: str

    def targets(self) -> RankTargets | None:
        """Returns the entries, or None if they are not given. Rows and columns are numbered as on this rank."""
        match, target = (self.row_match, self.col_match), (self.row_target, self.col_target)
        if match[0] is None or match[1] is None or target[0] is None or target[1] is None:
            return None
        index = [torch.arange(side.shape[0], device=side.device) for side in (self.x, self.y)]
        return RankTargets(match[0], match[1], target[0], target[1], index[0], index[1])


def _rank_shapes(given: RankInputs) -> tuple[Tensor, Tensor]:
    row, col = (side.new_empty(side.shape[0], dtype=torch.int64) for side in (given.x, given.y))
    return row, col


@define(RankInputs, results=2, fake=_rank_shapes)
def rank(given: RankInputs) -> tuple[Tensor, Tensor]:
    """Counts the entries that come before the entry of each row, and before the entry of each column: (N,), (M,) int64."""
    block, targets = Block.of(given.x, given.y, None, given.precision), given.targets()
    ranked = "matching pairs" if targets is None else "given entries"
    return passes_for(given.group, given.backend, block, "rank", terms={"the set of ranked entries": ranked}).tiles.rank_counts(
        block, targets
    )


loop_under_vmap(rank)


# ----------------------------------------------------------------------------------------------------------------------
# The k largest similarities of each row. This operator has no gradient.


class TopkInputs(NamedTuple):
    """The embeddings. Pairs with equal ids are excluded, and so are pairs with a dot product above the limit of their row."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None  # (N,)
    skip_diagonal: bool
    precision: str
    backend: str
    group: str


def _shapes(given: TopkInputs, k: int) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0], k), given.x.new_empty(given.x.shape[0], k, dtype=torch.int64)


@define(TopkInputs, "int k", results=2, fake=_shapes)
def topk(given: TopkInputs, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest dot products of each row, (N, k), and their columns, (N, k) int64."""
    block = Block.of(
        given.x,
        given.y,
        None,
        given.precision,
        row_ids=given.row_ids,
        col_ids=given.col_ids,
        limit=given.limit,
        skip_diagonal=given.skip_diagonal,
    )
    return passes_for(given.group, given.backend, block, "topk", terms={"k": k}).tiles.topk(block, k)


loop_under_vmap(topk)
