"""The products of matching pairs alone, ⟨x_i, y_i⟩, without a pass over their block: O(N·D), forward and backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import share_of_mean, statistic
from megabatch.operators.team import assemble
from megabatch.tiles import plan
from megabatch.tiles.block import Block, windows
from megabatch.tiles.matching import rank_noise
from megabatch.tiles.precision import by_matmul_setting, rounded


class Inputs(NamedTuple):
    """Row i of x belongs to row i of y."""

    x: Tensor  # (N, D)
    y: Tensor  # (N, D)
    precision: str
    backend: str
    group: str


def _shapes(given: Inputs) -> tuple[Tensor, ...]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0]), share_of_mean(given.x, 1.0)


@define(Inputs, results=3, fake=_shapes)
def matching(given: Inputs) -> tuple[Tensor, ...]:
    """(⟨x_i, y_i⟩, what rounding may do to it, share): from the same rounded inputs as tiles, (N,), (N,) and ()."""
    block = Block.of(given.x, given.y, None, given.precision)
    team = assemble(given.group, given.backend, block, "matching pairs", mean=bool(given.group))
    by_row, by_column = rank_noise(block)
    return team.local.matching_products(block), by_row * by_column, share_of_mean(given.x, team.share)


def _gradient_shapes(given: Inputs, *arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given.x), torch.empty_like(given.y)


@define(Inputs, "Tensor dproducts, bool[] needs", results=2, fake=_gradient_shapes)
def matching_backward(given: Inputs, dproducts: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    """(dx, dy)."""
    x, y = given.x, given.y
    precision = by_matmul_setting(given.precision, x.device.type)
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    for rows in windows(len(x), plan.rows_at_once(x.device, x.shape[1])):
        for out, other in ((dx, y), (dy, x)):
            out[rows] = dproducts[rows, None] * rounded(other[rows], precision).to(dproducts.dtype)
    return dx, dy


derivative(matching, matching_backward, Inputs, learned=2, results=1, whole=False)
