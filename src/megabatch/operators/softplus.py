"""Row sums of softplus over the similarities; backward is a second pass, because every row may have a weight of its own."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import (
    Gradients,
    asked_for,
    column_sums,
    empty_gradients,
    finish,
    gradient_unit,
    on_its_device,
    refuse_second_derivative,
    statistic,
)
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting


@torch.library.custom_op("megabatch::softplus", mutates_args=())
def softplus(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    row_bias: Tensor,  # (N,)
    precision: str,
    backend: str,
    group: str,
) -> Tensor:
    """Σ_j log(1 + exp s_ij), one sum a row."""
    block = _block(x, y, scale, row_bias, precision)
    with on_its_device(x):
        return assemble(group, backend, block, "softplus").walks.softplus_sums(block)


@softplus.register_fake
def _(x: Tensor, *options: Any) -> Tensor:
    return statistic(x, x.shape[0])


@torch.library.custom_op("megabatch::softplus_backward", mutates_args=())
def softplus_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_bias: Tensor,
    precision: str,
    backend: str,
    group: str,
    dtotal: Tensor,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dy, dscale, drow_bias, nothing)."""
    block = _block(x, y, scale, row_bias, precision)
    wanted = Needs(*needs)
    with on_its_device(x):
        team = assemble(group, backend, block, "softplus backward", needs=wanted)
        unit = gradient_unit(block, dtotal, largest=team.largest)
        sums = column_sums(block, wanted)
        strips = team.walks.softplus_gradients(block, dtotal / unit, sums, wanted)
        return finish(team.local, block, strips, sums, wanted, scale=scale, unit=unit)


@softplus_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> Gradients:
    return empty_gradients(x, y, scale, Needs(*options[-1]))


def _block(x: Tensor, y: Tensor, scale: Tensor, row_bias: Tensor, precision: str) -> Block:
    return Block(x, y, scale.to(accumulator_dtype(x.dtype)), by_matmul_setting(precision, x.device.type), row_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.options = inputs[:4], inputs[4:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dtotal: Tensor) -> tuple[Any, ...]:
    needs = Needs(*ctx.needs_input_grad[:4])
    gradients = apply(softplus_backward, *ctx.saved_tensors, *ctx.options, dtotal, list(needs))
    return *asked_for(gradients, needs)[:4], None, None, None


differentiable(softplus, _backward, _save)
differentiable(softplus_backward, refuse_second_derivative)
