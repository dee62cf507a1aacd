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
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting


@torch.library.custom_op("megabatch::softplus", mutates_args=())
def softplus(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    row_bias: Tensor,  # (N,)
    ids: Tensor | None,  # (N,) of rows and of columns
    ids_are_positives: bool,
    apart: bool,
    precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """(Σ_j log(1 + exp s_ij), s_ii). The second is empty, and the pairs (i, i) are in the sums, unless they are kept apart.

    Pairs with equal ids are left out of the sums; or they are positives, and enter them as softplus(−s_ij).
    """
    block = softplus_block(x, y, scale, row_bias, ids, ids_are_positives, apart, precision)
    with on_its_device(x):
        team = assemble(group, backend, block, "softplus", mean=apart)
        match = matching_similarities(block, team.local.matching_products(block)) if apart else block.zeros(0)
        return team.passes.softplus_sums(block), match


@softplus.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *_, apart, _precision, _backend, _group = options
    return statistic(x, x.shape[0]), statistic(x, x.shape[0] if apart else 0)


@torch.library.custom_op("megabatch::softplus_backward", mutates_args=())
def softplus_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_bias: Tensor,
    ids: Tensor | None,
    ids_are_positives: bool,
    apart: bool,
    precision: str,
    backend: str,
    group: str,
    dtotal: Tensor,  # (N,)
    dmatch: Tensor,  # (N,) or (0,)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dy, dscale, drow_bias, nothing)."""
    block = softplus_block(x, y, scale, row_bias, ids, ids_are_positives, apart, precision)
    wanted = Needs(*needs)
    with on_its_device(x):
        team = assemble(group, backend, block, "softplus backward", needs=wanted)
        unit = gradient_unit(block, dtotal, largest=team.largest)
        sums = column_sums(block, wanted)
        strips = team.passes.softplus_gradients(block, dtotal / unit, sums, wanted)
        own = dmatch / unit if apart else None
        return finish(team.local, block, strips, sums, wanted, scale=scale, unit=unit, dmatch=own)


@softplus_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> Gradients:
    return empty_gradients(x, y, scale, Needs(*options[-1]))


def softplus_block(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_bias: Tensor,
    ids: Tensor | None,
    ids_are_positives: bool,
    apart: bool,
    precision: str,
) -> Block:
    """The similarities that softplus is summed over."""
    return Block(
        x,
        y,
        scale.to(accumulator_dtype(x.dtype)),
        by_matmul_setting(precision, x.device.type),
        row_bias,
        row_ids=ids,
        col_ids=ids,
        skip_diagonal=apart,
        ids_are_positives=ids_are_positives and ids is not None,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dtotal: Tensor, dmatch: Tensor) -> tuple[Any, ...]:
    needs = Needs(*ctx.needs_input_grad[:4])
    gradients = apply(softplus_backward, *ctx.saved_tensors, *ctx.options, dtotal, dmatch, list(needs))
    return *asked_for(gradients, needs)[:4], *(None,) * (1 + len(ctx.options))


differentiable(softplus, _backward, _save)
differentiable(softplus_backward, refuse_second_derivative)
