"""The products of matching pairs alone, ⟨x_i, y_i⟩, without a pass over their block: O(N·D), forward and backward."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import on_its_device, refuse_second_derivative, share_of_mean, statistic
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.tiles import plan
from megabatch.tiles.block import Block, windows
from megabatch.tiles.matching import rank_noise
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting, rounded


@torch.library.custom_op("megabatch::matching", mutates_args=())
def matching(x: Tensor, y: Tensor, precision: str, backend: str, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """(⟨x_i, y_i⟩, what rounding may do to it, share): from the same rounded inputs as tiles, (N,), (N,) and ()."""
    one = torch.ones((), dtype=accumulator_dtype(x.dtype), device=x.device)
    block = Block(x, y, one, by_matmul_setting(precision, x.device.type))
    with on_its_device(x):
        team = assemble(group, backend, block, "matching pairs", mean=bool(group))
        by_row, by_column = rank_noise(block)
        return team.local.matching_products(block), by_row * by_column, share_of_mean(x, team.share)


@matching.register_fake
def _(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    N = x.shape[0]
    return statistic(x, N), statistic(x, N), share_of_mean(x, 1.0)


@torch.library.custom_op("megabatch::matching_backward", mutates_args=())
def matching_backward(x: Tensor, y: Tensor, precision: str, dproducts: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dy)."""
    precision = by_matmul_setting(precision, x.device.type)
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    with on_its_device(x):
        for rows in windows(len(x), plan.rows_at_once(x.device, x.shape[1])):
            for out, other in ((dx, y), (dy, x)):
                out[rows] = dproducts[rows, None] * rounded(other[rows], precision).to(dproducts.dtype)
    return dx, dy


@matching_backward.register_fake
def _(x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, ctx.precision, *_ = inputs
    ctx.save_for_backward(x, y)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dproducts: Tensor | None, *dothers: Tensor | None) -> tuple[Any, ...]:
    if dproducts is None:
        return None, None, None, None, None
    gradients = apply(matching_backward, *ctx.saved_tensors, ctx.precision, dproducts)
    asked = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if need else None for gradient, need in asked), None, None, None


differentiable(matching, _backward, _save)
differentiable(matching_backward, refuse_second_derivative)
