"""Similarities with the other rows of a label: their mean needs no matrix, only sums over labels (`tiles.positives`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import share_of_mean, statistic
from megabatch.operators.team import assemble
from megabatch.ring.lap import Tensors
from megabatch.tiles.backends import EAGER
from megabatch.tiles.block import Block
from megabatch.tiles.positives import SameId
from megabatch.tiles.precision import rounded


class Inputs(NamedTuple):
    """Rows with equal labels are positives of each other."""

    z: Tensor  # (N, D)
    scale: Tensor  # ()
    labels: Tensor  # (N,)
    precision: str
    group: str

    def block(self) -> Block:
        """The similarities; none of them is formed."""
        return Block.of(self.z, self.z, self.scale, self.precision, row_ids=self.labels, col_ids=self.labels)


def _shapes(given: Inputs) -> tuple[Tensor, ...]:
    z, N = given.z, given.z.shape[0]
    count, sole = (z.new_empty(N, dtype=torch.int64) for _ in range(2))
    return statistic(z, N), sole, share_of_mean(z, 1.0), count


@define(Inputs, results=4, fake=_shapes)
def positives(given: Inputs) -> tuple[Tensor, ...]:
    """(mean of s_ij over the other rows j of i's label, or 0; ids that only sole partners share; share; how many rows j).

    A sum over the rows here that have a positive, times `share`, is this rank's part of the mean over all such rows.
    """
    block, labels = given.block(), given.labels.long().contiguous()
    team = assemble(given.group, EAGER, block, "positives")
    number = torch.arange(block.N, device=given.z.device) * team.size + team.rank  # no other row of any rank has the same
    values = rounded(given.z, block.precision)
    products = torch.zeros(block.N, dtype=torch.float64, device=given.z.device)
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
    mean = products / count.clamp_min(1) * given.scale
    return mean.to(block.dtype), sole, team.size / anchors.clamp_min(1), count


def _gradient_shapes(given: Inputs, count: Tensor, dmean: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given.z), torch.empty_like(given.scale)


@define(Inputs, "Tensor count, Tensor dmean, bool[] needs", results=2, fake=_gradient_shapes)
def positives_backward(
    given: Inputs,
    count: Tensor,  # (N,)
    dmean: Tensor,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """(dz, dscale): dz_i = scale · Σ_{j∈P(i)} (w_i + w_j)·z_j, where w = dmean / count."""
    block, labels = given.block(), given.labels.long().contiguous()
    team = assemble(given.group, EAGER, block, "positives backward")
    values, weight = rounded(given.z, block.precision), (dmean / count.clamp_min(1)).double()[:, None]
    dz = block.zeros(block.N, block.D)
    products = torch.zeros(block.N, dtype=torch.float64, device=given.z.device)

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
    dscale = (weight[:, 0] * products).sum().to(given.scale.dtype)
    return (dz * block.scale).to(given.z.dtype), dscale


derivative(positives, positives_backward, Inputs, learned=2, results=1, saved=1)
