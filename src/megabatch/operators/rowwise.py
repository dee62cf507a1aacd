"""Operators with O(N·D) operations and no tiles: dot products of matching pairs, means over positives, and sums over ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.autograd import (
    apply,
    define,
    derivative,
    differentiable,
    fill_mean_weight,
    logit,
    passes_for,
    statistic,
)
from megabatch.ring.lap import Tensors
from megabatch.ring.ranks import Ranks, agree
from megabatch.tiles import plan
from megabatch.tiles.block import EAGER, TRITON, Block, by_matmul_setting, round_logits, round_to_precision, windows
from megabatch.tiles.eager import rank_noise
from megabatch.tiles.sums import exact_dtype, to_exact
from megabatch.tiles.symmetric import SameId

# ----------------------------------------------------------------------------------------------------------------------
# The dot products of matching pairs, ⟨x_i, y_i⟩, without a pass over a block: O(N·D), forward and backward.


class MatchingInputs(NamedTuple):
    """The embeddings. Row i of x belongs to row i of y."""

    x: Tensor  # (N, D)
    y: Tensor  # (N, D)
    precision: str
    backend: str
    group: str


def _matching_shapes(given: MatchingInputs) -> tuple[Tensor, ...]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0]), fill_mean_weight(given.x, 1.0)


@define(MatchingInputs, results=3, fake=_matching_shapes)
def matching(given: MatchingInputs) -> tuple[Tensor, ...]:
    """Returns ⟨x_i, y_i⟩, (N,), a bound on the rounding error of each, (N,), and mean_weight, ().

    The dot products have the same rounded inputs as the tiles.
    """
    block = Block.of(given.x, given.y, None, given.precision)
    passes = passes_for(given.group, given.backend, block, "matching pairs", mean=bool(given.group))
    by_row, by_column = rank_noise(block)
    return passes.local.matching_products(block), by_row * by_column, fill_mean_weight(given.x, passes.mean_weight)


def _matching_gradient_shapes(given: MatchingInputs, *arguments: Any) -> tuple[Tensor, Tensor]:
    return given.x.new_empty(given.x.shape), given.y.new_empty(given.y.shape)


@define(MatchingInputs, "Tensor dproducts, bool[] needs", results=2, fake=_matching_gradient_shapes)
def matching_backward(given: MatchingInputs, dproducts: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    """Returns (dx, dy)."""
    x, y = given.x, given.y
    precision = by_matmul_setting(given.precision, x.device.type)
    dx, dy = x.new_empty(x.shape), y.new_empty(y.shape)
    for rows in windows(len(x), plan.rows_at_once(x.device, x.shape[1])):
        for out, other in ((dx, y), (dy, x)):
            out[rows] = dproducts[rows, None] * round_to_precision(other[rows], precision).to(dproducts.dtype)
    return dx, dy


derivative(matching, matching_backward, MatchingInputs, learned=2, results=1, materialize=False)


# ----------------------------------------------------------------------------------------------------------------------
# The mean logit of a row and the other rows with its label. It needs no matrix, only sums over labels (`tiles.plan`).


class PositivesInputs(NamedTuple):
    """The embeddings and labels. Rows with equal labels are positives of each other."""

    z: Tensor  # (N, D)
    scale: Tensor  # ()
    labels: Tensor  # (N,)
    precision: str
    backend: str  # the engine of the logits that the mean is compared with
    group: str

    def block(self) -> Block:
        """Returns the description of the logits, which are never computed."""
        return Block.of(self.z, self.z, self.scale, self.precision, row_ids=self.labels, col_ids=self.labels)


def _shapes(given: PositivesInputs) -> tuple[Tensor, ...]:
    z, N = given.z, given.z.shape[0]
    count, sole = (z.new_empty(N, dtype=torch.int64) for _ in range(2))
    return logit(z, N), sole, fill_mean_weight(z, 1.0), count


@define(PositivesInputs, results=4, fake=_shapes)
def positives(given: PositivesInputs) -> tuple[Tensor, ...]:
    """Returns (mean, partner_ids, mean_weight, count), for the other rows j with the label of row i.

    - mean: the mean of s_ij over these rows j in `exact_dtype`, or 0 without such rows.
    - partner_ids: ids that are equal only for two rows that are each other's only positive.
    - mean_weight: (Σ over local rows with a positive) · mean_weight is this rank's part of the mean over all such rows.
    - count: the number of rows j.
    """
    block, labels = given.block(), given.labels.long().contiguous()
    passes = passes_for(given.group, EAGER, block, "positives")
    number = torch.arange(block.N, device=given.z.device) * passes.size + passes.rank  # unique over all ranks
    values = round_to_precision(given.z, block.precision)
    products = torch.zeros(block.N, dtype=exact_dtype(given.z.device), device=given.z.device)
    count, partner = torch.full_like(number, -1), -number  # negative, because the sums below include the row itself

    def visit_block(here: Tensors, own: bool) -> None:
        others, ids, numbers = here
        same = SameId(labels, ids)
        count.add_(same.count)
        partner.add_(same.integer_sums(numbers))
        for part, sums in same.sums(others):
            mine = to_exact(values[:, part])
            products.add_((mine * (sums - mine if own else sums)).sum(1))

    passes.visit([values, labels, number], visit_block)
    sole = torch.where(count == 1, torch.minimum(number, partner), number)
    anchors = to_exact(passes.total((count > 0).sum()))
    mean = (products / count.clamp_min(1)).to(block.dtype)
    logits = round_logits(mean, given.scale, block.precision, by_kernels=given.backend == TRITON)
    return logits, sole, passes.size / anchors.clamp_min(1), count


def _gradient_shapes(given: PositivesInputs, count: Tensor, dmean: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return given.z.new_empty(given.z.shape), torch.empty_like(given.scale)


@define(PositivesInputs, "Tensor count, Tensor dmean, bool[] needs", results=2, fake=_gradient_shapes)
def positives_backward(
    given: PositivesInputs,
    count: Tensor,  # (N,)
    dmean: Tensor,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Returns (dz, dscale), where dz_i = scale · Σ_{j∈P(i)} (w_i + w_j)·z_j and w = dmean / count."""
    block, labels = given.block(), given.labels.long().contiguous()
    passes = passes_for(given.group, EAGER, block, "positives backward")
    values, weight = round_to_precision(given.z, block.precision), to_exact(dmean / count.clamp_min(1))[:, None]
    dz = block.zeros(block.N, block.D)
    products = torch.zeros(block.N, dtype=exact_dtype(given.z.device), device=given.z.device)

    def visit_block(here: Tensors, own: bool) -> None:
        others, ids, weights = here
        same = SameId(labels, ids)
        for part, sums in same.sums(others):
            mine = to_exact(values[:, part])
            sums = sums - mine if own else sums
            products.add_((mine * sums).sum(1))
            dz[:, part] += (weight * sums).to(dz.dtype)
        for part, sums in same.sums(others, weights):
            mine = weight * to_exact(values[:, part])
            dz[:, part] += (sums - mine if own else sums).to(dz.dtype)

    passes.visit([values, labels, weight], visit_block)
    dscale = (weight[:, 0] * products).sum().to(given.scale.dtype)
    return (dz * block.scale).to(given.z.dtype), dscale


derivative(positives, positives_backward, PositivesInputs, learned=2, results=1, saved=1)


# ----------------------------------------------------------------------------------------------------------------------
# The sum of a vector over all ranks of a group. Its gradient is the sum of the gradients of all ranks.


@torch.library.custom_op("megabatch::total", mutates_args=())
def total(values: Tensor, group: str) -> Tensor:  # (K,)
    """Returns Σ over ranks. The ranks are added in their order, so the result is bitwise identical on all of them."""
    if not group:
        return values.clone()
    ranks = Ranks.at(group, "sum over ranks", values.device)
    agree(ranks, {"the length": len(values), "the dtype": values.dtype}, 0, 0)
    return torch.stack(ranks.all_gather(values.contiguous())).sum(0)


@total.register_fake
def _(values: Tensor, group: str) -> Tensor:
    return torch.empty_like(values)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
    return apply(total, dtotal, ctx.group), None


differentiable(total, _backward, _save)
