"""The k largest products of each row; no gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import define
from megabatch.operators.gradients import statistic
from megabatch.operators.team import assemble
from megabatch.operators.transforms import loop_under_vmap
from megabatch.tiles.block import Block


class Inputs(NamedTuple):
    """Pairs with equal ids are left out, and pairs whose product is above the limit of their row."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None  # (N,)
    skip_diagonal: bool
    precision: str
    backend: str
    group: str


def _shapes(given: Inputs, k: int) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0], k), given.x.new_empty(given.x.shape[0], k, dtype=torch.int64)


@define(Inputs, "int k", results=2, fake=_shapes)
def topk(given: Inputs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest products of each row, and the columns they belong to: (N, k), and (N, k) int64."""
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
    return assemble(given.group, given.backend, block, "topk", terms={"k": k}).passes.topk(block, k)


loop_under_vmap(topk)
