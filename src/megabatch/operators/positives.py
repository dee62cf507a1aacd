"""Similarities with the other rows of a label: their mean needs no matrix, only sums over labels (`tiles.positives`)."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import on_its_device, refuse_second_derivative, share_of_mean, statistic
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.ring.lap import Tensors
from megabatch.tiles.backends import EAGER
from megabatch.tiles.block import Block
from megabatch.tiles.positives import SameId
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting, rounded


@torch.library.custom_op("megabatch::positives", mutates_args=())
def positives(
    z: Tensor,  # (N, D)
    scale: Tensor,  # ()
    labels: Tensor,  # (N,)
    precision: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean of s_ij over the other rows j of i's label, or 0; how many they are; ids that only sole partners share; share).

    A sum over the rows here that have a positive, times `share`, is this rank's part of the mean over all such rows.
    """
    block = _block(z, scale, labels, precision)
    labels = labels.long().contiguous()
    with on_its_device(z):
        team = assemble(group, EAGER, block, "positives")
        number = torch.arange(block.N, device=z.device) * team.size + team.rank  # no other row of any rank has the same
        values = rounded(z, block.precision)
        products = torch.zeros(block.N, dtype=torch.float64, device=z.device)
        count, partner = torch.full_like(number, -1), -number  # the row itself is not one of its positives

        def look(here: Tensors, own: bool) -> None:
            others, ids, numbers = here
            same = SameId(labels, ids)
            count.add_(same.count)
            partner.add_(same.whole_numbers(numbers))
            for part, sums in same.sums(others):
                mine = values[:, part].double()
                products.add_((mine * (sums - mine if own else sums)).sum(1))

        team.visit([values, labels, number], look)
        sole = torch.where(count == 1, torch.minimum(number, partner), number)
        anchors = team.total((count > 0).sum()).double()
        mean = products / count.clamp_min(1) * scale
        return mean.to(block.dtype), count, sole, team.size / anchors.clamp_min(1)


@positives.register_fake
def _(z: Tensor, scale: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, sole = (z.new_empty(z.shape[0], dtype=torch.int64) for _ in range(2))
    return statistic(z, z.shape[0]), count, sole, share_of_mean(z, 1.0)


@torch.library.custom_op("megabatch::positives_backward", mutates_args=())
def positives_backward(
    z: Tensor,
    scale: Tensor,
    labels: Tensor,
    precision: str,
    group: str,
    count: Tensor,  # (N,)
    dmean: Tensor,  # (N,)
) -> tuple[Tensor, Tensor]:
    """(dz, dscale): dz_i = scale · Σ_{j∈P(i)} (w_i + w_j)·z_j, where w = dmean / count."""
    block = _block(z, scale, labels, precision)
    labels = labels.long().contiguous()
    with on_its_device(z):
        team = assemble(group, EAGER, block, "positives backward")
        values, weight = rounded(z, block.precision), (dmean / count.clamp_min(1)).double()[:, None]
        dz = block.zeros(block.N, block.D)
        products = torch.zeros(block.N, dtype=torch.float64, device=z.device)

        def look(here: Tensors, own: bool) -> None:
            others, ids, weights = here
            same = SameId(labels, ids)
            for part, sums in same.sums(others):
                mine = values[:, part].double()
                sums = sums - mine if own else sums
                products.add_((mine * sums).sum(1))
                dz[:, part] += (weight * sums).to(dz.dtype)
            for part, sums in same.sums(others, weights):
                mine = weight * values[:, part].double()
                dz[:, part] += (sums - mine if own else sums).to(dz.dtype)

        team.visit([values, labels, weight], look)
        dscale = (weight[:, 0] * products).sum().to(scale.dtype)
        return (dz * block.scale).to(z.dtype), dscale


@positives_backward.register_fake
def _(z: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(scale)


def _block(z: Tensor, scale: Tensor, labels: Tensor, precision: str) -> Block:
    scale = scale.to(accumulator_dtype(z.dtype))
    return Block(z, z, scale, by_matmul_setting(precision, z.device.type), row_ids=labels, col_ids=labels)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (z, scale, labels), ctx.options = inputs[:3], inputs[3:]
    _mean, count, sole, _share = output
    ctx.mark_non_differentiable(count, sole)
    ctx.save_for_backward(z, scale, labels, count)


def _backward(ctx: Any, dmean: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    z, scale, labels, count = ctx.saved_tensors
    dz, dscale = apply(positives_backward, z, scale, labels, *ctx.options, count, dmean)
    needs_z, needs_scale = ctx.needs_input_grad[:2]
    return dz if needs_z else None, dscale if needs_scale else None, None, None, None


differentiable(positives, _backward, _save)
differentiable(positives_backward, refuse_second_derivative)
