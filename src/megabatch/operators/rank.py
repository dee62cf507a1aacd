"""The rank of each matching pair in its row and in its column; no gradient."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import on_its_device
from megabatch.operators.team import assemble
from megabatch.operators.transforms import loop_under_vmap
from megabatch.tiles.block import Block
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting


@torch.library.custom_op("megabatch::rank", mutates_args=())
def rank(x: Tensor, y: Tensor, precision: str, backend: str, group: str) -> tuple[Tensor, Tensor]:
    """How many entries of its row, and of its column, come before the matching pair: (N,) and (N,) int64."""
    one = torch.ones((), dtype=accumulator_dtype(x.dtype), device=x.device)
    block = Block(x, y, one, by_matmul_setting(precision, x.device.type))
    with on_its_device(x):
        return assemble(group, backend, block, "rank").passes.rank_counts(block)


@rank.register_fake
def _(x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(y.shape[0], dtype=torch.int64)


loop_under_vmap(rank)
