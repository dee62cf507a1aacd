"""The fused path on one GPU: the Triton kernels compute the loss and its gradients in the forward pass, in few launches.

With all calls into PyTorch that `fused` makes, a step with up to 32k pairs is launch-bound on an H200. Here a step makes a
third of these calls, because `kernels.pairs` computes all vectors of the pairs in one launch. The matmuls are the same. Until
backward multiplies the gradients by the gradient of the loss, they are stored in the dtype of the inputs, or in float32 if the
inputs are float16.

This module supports one process outside of `torch.compile` and `torch.func`. `dense` and `fused` have the same functions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.dispatch import Execution
from megabatch.operators.autograd import scale_gradients, use_device_of
from megabatch.tiles.block import Block, Needs, by_matmul_setting, round_to_precision
from megabatch.tiles.plan import SameId


def cross_entropy_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    run: Execution,
    *,
    columns: bool,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of −log softmax(s)_ii over rows, or with `columns` over both directions.

    Pairs with equal ids are excluded.
    """
    divisor = (len(x) if mean else 1) * (2 if columns else 1)
    return _compute_cross_entropy(x, y, scale, (ids, ids), run, columns=columns, divisor=divisor)


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of the losses of all samples.

    The loss of a sample is the mean of −log softmax(s)_ij over its two views i. View j is the other view.
    """
    own = torch.arange(2 * len(z1), device=z1.device)  # a view is not compared with itself
    ids, divisor = (own, own.roll(len(z1))), 2 * (len(z1) if mean else 1)
    return _compute_cross_entropy(torch.cat((z1, z2)), torch.cat((z2, z1)), scale, ids, run, columns=False, divisor=divisor)


def sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    run: Execution,
    *,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of the losses of all rows i that share their label.

    The loss of row i is the mean of −log softmax(s)_ij over the other rows j with its label. A row is not compared with itself.
    """
    with use_device_of(z):
        loss: Tensor = _Labels.apply(z, scale, labels, run.precision, mean, torch.is_grad_enabled())
    return loss


def sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    run: Execution,
    *,
    ids_are_positives: bool,
    mean: bool,
) -> Tensor:  # ()
    """Returns the sum, or with `mean` the mean, of softplus(−s_ii) + Σ_{j≠i} softplus(s_ij) over all rows i.

    `primitives.sigmoid_loss` explains ids.
    """
    positives, divisor = ids_are_positives and ids is not None, len(x) if mean else 1
    with use_device_of(x):
        loss: Tensor = _Sigmoid.apply(x, y, scale, bias, ids, run.precision, positives, divisor, torch.is_grad_enabled())
    return loss


def _compute_cross_entropy(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: tuple[Tensor | None, Tensor | None],  # of rows and of columns
    run: Execution,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    with use_device_of(x):
        loss: Tensor = _CrossEntropy.apply(x, y, scale, *ids, run.precision, columns, divisor, torch.is_grad_enabled())
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        row_ids: Tensor | None,
        col_ids: Tensor | None,
        precision: str,
        columns: bool,
        divisor: int,
        learns: bool,
    ) -> Tensor:
        from megabatch.kernels.gradient import SOFTMAX_KINDS, GradientSums, StripTask, strip_tile, sum_gradients
        from megabatch.kernels.logsumexp import write_sums
        from megabatch.kernels.operands import exponent_operands
        from megabatch.kernels.pairs import PairVectors, finish_pairs, pair_statistics

        block = Block.of(x, y, scale, precision, row_ids=row_ids, col_ids=col_ids, skip_diagonal=True)
        needs = Needs(*ctx.needs_input_grad[:3]) if learns else _NOTHING
        pairs = PairVectors.empty(block)
        operands = exponent_operands(block, pairs.matches.products)
        tile = strip_tile(block)
        write_sums(operands, block, pairs.row, pairs.col if columns else None)
        losses = pair_statistics(operands, block, tile, pairs, columns=columns)
        sums = GradientSums(None, None, None)
        if any(needs):
            sums = sum_gradients(StripTask(operands, block, tile, SOFTMAX_KINDS, pairs.weights), needs)
        loss, *gradients = finish_pairs(operands, block, sums, needs, pairs.matches, losses, divisor)
        if any(needs):
            ctx.save_for_backward(x, y, scale, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, dx, dy, numbers = ctx.saved_tensors
        return *_scale_gradients(inputs, ctx.needs_input_grad, dloss, dx, dy, numbers), *(None,) * 6


class _Labels(torch.autograd.Function):
    """The rows are compared with each other. In place of a matching row, each row has the mean of its positives."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor, labels: Tensor, precision: str, mean: bool, learns: bool) -> Tensor:
        from megabatch.kernels.gradient import SOFTMAX_KINDS, GradientSums, StripTask, strip_tile, sum_gradients
        from megabatch.kernels.logsumexp import write_sums
        from megabatch.kernels.operands import exponent_operands
        from megabatch.kernels.pairs import MatchGradients, PairVectors, finish_pairs, pair_statistics

        positives = Positives.of(round_to_precision(z, by_matmul_setting(precision, z.device.type)), labels)
        ids = {"row_ids": positives.sole, "col_ids": positives.sole}
        block = Block.of(z, z, scale, precision, **ids, positives_within=True)
        needs_z, needs_scale = ctx.needs_input_grad[:2] if learns else (False, False)
        pairs, count = PairVectors.empty(block), positives.number
        pairs.matches.products[: len(z)] = positives.products
        operands, tile = exponent_operands(block), strip_tile(block)
        write_sums(operands, block, pairs.row, None)
        losses = pair_statistics(operands, block, tile, pairs, columns=False, count=count)
        sums, needs = GradientSums(None, None, None), Needs(needs_z, False, needs_scale)
        matches = pairs.matches
        if needs_z or needs_scale:
            task = StripTask(operands, block, tile, SOFTMAX_KINDS, pairs.weights)
            sums = sum_gradients(task, Needs(needs_z, needs_z, needs_scale))
            if sums.dx is not None and sums.dy is not None:  # every row is also a column
                sums = GradientSums(sums.dx.add_(sums.dy), None, sums.dscale)
            # z_i is in the mean of its own positives, and in the means of its positives. Each product is in two rows of dz.
            own = matches.dmatch[: len(z)]
            dmatch = own + torch.where(count == 1, own[positives.partner], own)
            matches = MatchGradients(0.5 * matches.products, dmatch, matches.unit)
        loss, dz, _, numbers = finish_pairs(replace(operands, y=positives.mean), block, sums, needs, matches, losses, 1)
        weight = 1 / (count > 0).sum().clamp_min(1) if mean else torch.ones_like(loss)
        if needs_z or needs_scale:
            ctx.save_for_backward(z, scale, dz, numbers, weight)
        return loss * weight

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        z, scale, dz, numbers, weight = ctx.saved_tensors
        needs_z, needs_scale, *_ = ctx.needs_input_grad
        inputs, needs = (z, None, scale), (needs_z, False, needs_scale)
        dz, _, dscale = _scale_gradients(inputs, needs, dloss * weight, dz, None, numbers)
        return dz, dscale, *(None,) * 4


class Positives(NamedTuple):
    """The positives of each row, which are the other rows with its label."""

    mean: Tensor  # (N, D) float32
    products: Tensor  # (N,) float64: the mean dot product of the row and its positives, 0 for a row without positives
    number: Tensor  # (N,) of positives
    partner: Tensor  # (N,) the positive of a row with exactly one, and the row itself for other rows
    sole: Tensor  # (N,) ids that are equal only for two rows that are each other's only positive

    @classmethod
    def of(cls, values: Tensor, labels: Tensor) -> "Positives":
        """Returns the positives of the rows of `values`, (N, D)."""
        labels, index = labels.long().contiguous(), torch.arange(len(values), device=values.device)
        same = SameId(labels, labels)
        count = same.count - 1
        partner = torch.where(count == 1, same.integer_sums(index) - index, index)
        divisor = count.clamp_min(1)[:, None]
        mean = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        products = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        for part, sums in same.sums(values):
            own = values[:, part].double()
            of_others = (sums - own) / divisor
            products += (own * of_others).sum(1)
            mean[:, part] = of_others
        return cls(mean, products, count, partner, torch.minimum(index, partner))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids: Tensor | None,
        precision: str,
        ids_are_positives: bool,
        divisor: int,
        learns: bool,
    ) -> Tensor:
        from megabatch.kernels.gradient import SIGMOID, RowSums, StripTask, Weights, strip_tile, sum_gradients
        from megabatch.kernels.operands import logit_operands
        from megabatch.kernels.pairs import SigmoidVectors, finish_pairs, write_matches

        vectors = SigmoidVectors.empty(x, precision)
        by_ids = {"row_ids": ids, "col_ids": ids, "ids_are_positives": ids_are_positives}
        block = Block.of(x, y, scale, precision, row_bias=vectors.offset, skip_diagonal=True, **by_ids)
        needs = Needs(*ctx.needs_input_grad[:4]) if learns else _NOTHING
        operands = logit_operands(block, vectors.constants)
        write_matches(operands, block, bias, vectors)
        weights = Weights(None if vectors.matches.unit == 1.0 else vectors.weight)
        task = StripTask(operands, block, strip_tile(block), (SIGMOID,), weights)
        row_dbias = vectors.dbias if needs.drow_bias else None
        sums = sum_gradients(task, needs, RowSums(vectors.losses, row_dbias))
        loss, *gradients = finish_pairs(
            operands, block, sums, needs, vectors.matches, vectors.losses, divisor, row_dbias=row_dbias
        )
        if any(needs):
            ctx.save_for_backward(x, y, scale, bias, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, dx, dy, numbers = ctx.saved_tensors
        return *_scale_gradients(inputs, ctx.needs_input_grad, dloss, dx, dy, numbers), *(None,) * 5


_NOTHING = Needs(False, False, False)


def _scale_gradients(
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    dloss: Tensor,  # ()
    dx: Tensor | None,  # (N, D)
    dy: Tensor | None,  # (N, D)
    numbers: Tensor | None,  # (parts + 1,) parts of dscale, then dbias
) -> list[Tensor | None]:
    return scale_gradients(inputs, needs, dloss, dx, dy, numbers, 0 if numbers is None else len(numbers) - 1)
