"""Cross-entropies under a teacher's softmax, of rows and of columns, from one pass over both; backward is one pass again."""

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
    share_of_mean,
    statistic,
)
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting
from megabatch.tiles.softsum import SoftSum


@torch.library.custom_op("megabatch::soft_cross_entropy", mutates_args=())
def soft_cross_entropy(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    teacher_x: Tensor,  # (N, E)
    teacher_y: Tensor,  # (M, E)
    teacher_scale: Tensor,  # ()
    precision: str,
    teacher_precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(−Σ_j p_ij log softmax_j(s)_ij, −Σ_i q_ij log softmax_i(s)_ij, share, and for backward the sums, packed).

    p and q are the teacher's softmaxes over columns and over rows.
    """
    block = _block(x, y, scale, teacher_x, teacher_y, teacher_scale, precision, teacher_precision)
    with on_its_device(x):
        team = assemble(group, backend, block, "soft cross-entropy", mean=True)
        row, col = team.passes.soft_statistics(block)
        return row.value(), col.value(), share_of_mean(x, team.share), row.pack(), col.pack()


@soft_cross_entropy.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, M = x.shape[0], y.shape[0]
    return statistic(x, N), statistic(x, M), share_of_mean(x, 1.0), statistic(x, N, 5), statistic(x, M, 5)


@torch.library.custom_op("megabatch::soft_cross_entropy_backward", mutates_args=())
def soft_cross_entropy_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    precision: str,
    teacher_precision: str,
    backend: str,
    group: str,
    row: Tensor,  # (N, 5)
    col: Tensor,  # (M, 5)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dy, dscale, nothing, nothing)."""
    block = _block(x, y, scale, teacher_x, teacher_y, teacher_scale, precision, teacher_precision)
    wanted = Needs(*needs)
    with on_its_device(x):
        team = assemble(group, backend, block, "soft cross-entropy backward", needs=wanted)
        unit = gradient_unit(block, drow, dcol, largest=team.largest)
        sums = column_sums(block, wanted)
        strips = team.passes.soft_gradients(
            block, SoftSum.unpack(row), SoftSum.unpack(col), drow / unit, dcol / unit, sums, wanted
        )
        return finish(team.local, block, strips, sums, wanted, scale=scale, unit=unit)


@soft_cross_entropy_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> Gradients:
    return empty_gradients(x, y, scale, Needs(*options[-1]))


def _block(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    precision: str,
    teacher_precision: str,
) -> Block:
    device = x.device.type
    number = teacher_scale.to(accumulator_dtype(teacher_x.dtype))
    teacher = Block(teacher_x, teacher_y, number, by_matmul_setting(teacher_precision, device))
    scale = scale.to(accumulator_dtype(x.dtype))
    return Block(x, y, scale, by_matmul_setting(precision, device), companion=teacher)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors, *output[-2:])


def _backward(ctx: Any, drow: Tensor, dcol: Tensor, *dothers: Tensor) -> tuple[Any, ...]:
    *tensors, row, col = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:3])
    gradients = apply(soft_cross_entropy_backward, *tensors, *ctx.options, row, col, drow, dcol, list(needs))
    return *asked_for(gradients, needs)[:3], None, None, None, None, None, None, None


differentiable(soft_cross_entropy, _backward, _save)
differentiable(soft_cross_entropy_backward, refuse_second_derivative)
