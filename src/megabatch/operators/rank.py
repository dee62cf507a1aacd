"""The rank of each matching pair in its row and in its column; no gradient."""

import torch
from torch import Tensor

from megabatch.operators.definition import define
from megabatch.operators.matching import Inputs
from megabatch.operators.team import assemble
from megabatch.operators.transforms import loop_under_vmap
from megabatch.tiles.block import Block


def _shapes(given: Inputs) -> tuple[Tensor, Tensor]:
    row, col = (given.x.new_empty(given.x.shape[0], dtype=torch.int64) for _ in range(2))
    return row, col


@define(Inputs, results=2, fake=_shapes)
def rank(given: Inputs) -> tuple[Tensor, Tensor]:
    """How many entries of its row, and of its column, come before the matching pair: (N,) and (N,) int64."""
    block = Block.of(given.x, given.y, None, given.precision)
    return assemble(given.group, given.backend, block, "rank").passes.rank_counts(block)


loop_under_vmap(rank)
