"""Losses of matching pairs over tiles, by kernels, with their gradients computed in the forward pass.

The gradient is known up to one factor before backward is called. Computed at once, it needs no sums in a form that other
operations can differentiate, and a step makes a third of the calls into PyTorch: with all of them, the host takes longer than
an H200 up to 32k pairs. The products of a cross-entropy are those of `logsumexp` and its backward, the products of a sigmoid
loss those of `sigmoid_loss`. Until backward multiplies them by the factor, gradients are kept in the type of the inputs, or in
float32 for float16.

For one process, without offsets, limits or further negatives; `logsumexp` and `sigmoid_loss` serve everything else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.operators.small_kernels import multiplied, settled
from megabatch.tiles.block import Block, Needs


def pair_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: tuple[Tensor | None, Tensor | None],  # (N,), (N,)
    precision: str,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ii over rows, and with `columns` over columns too, ÷ `divisor`; equal ids are left out."""
    with settled(x):
        loss: Tensor = _CrossEntropy.apply(x, y, scale, *ids, precision, columns, divisor, torch.is_grad_enabled())
    return loss


def sigmoid_pair_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    precision: str,
    *,
    ids_are_positives: bool,
    divisor: int,
) -> Tensor:  # ()
    """The sum of `sigmoid_loss` ÷ `divisor`."""
    positives = ids_are_positives and ids is not None
    with settled(x):
        loss: Tensor = _Sigmoid.apply(x, y, scale, bias, ids, precision, positives, divisor, torch.is_grad_enabled())
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
        from megabatch.tiles.triton_backward import SOFTMAX_KINDS, WholeGradients, softmax_tile, whole_gradients
        from megabatch.tiles.triton_gradient import StripTask
        from megabatch.tiles.triton_logsumexp import write_sums
        from megabatch.tiles.triton_operands import exponent_operands
        from megabatch.tiles.triton_pair_gradients import finish_pairs
        from megabatch.tiles.triton_pair_statistics import PairVectors, pair_statistics

        block = Block.of(x, y, scale, precision, row_ids=row_ids, col_ids=col_ids, skip_diagonal=True)
        needs = Needs(*ctx.needs_input_grad[:3]) if learns else _NOTHING
        pairs = PairVectors.empty(block)
        operands = exponent_operands(block, pairs.matches.products)
        tile = softmax_tile(operands, block)
        write_sums(operands, block, pairs.row, pairs.col if columns else None)
        losses = pair_statistics(operands, block, tile, pairs, columns=columns)
        sums = WholeGradients(None, None, None)
        if any(needs):
            sums = whole_gradients(StripTask(operands, block, tile, SOFTMAX_KINDS, pairs.weights), needs)
        loss, *gradients = finish_pairs(operands, block, sums, needs, pairs.matches, losses, divisor)
        if any(needs):
            ctx.save_for_backward(x, y, scale, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, dx, dy, numbers = ctx.saved_tensors
        return *_multiplied(inputs, ctx.needs_input_grad, dloss, dx, dy, numbers), *(None,) * 6


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
        from megabatch.tiles.triton_backward import sigmoid_tile, whole_gradients
        from megabatch.tiles.triton_gradient import SIGMOID, RowSums, StripTask, Weights
        from megabatch.tiles.triton_operands import similarity_operands
        from megabatch.tiles.triton_pair_gradients import finish_pairs
        from megabatch.tiles.triton_sigmoid_pairs import SigmoidVectors, write_matches

        vectors = SigmoidVectors.empty(x, precision)
        known = {"row_ids": ids, "col_ids": ids, "ids_are_positives": ids_are_positives}
        block = Block.of(x, y, scale, precision, row_bias=vectors.offset, skip_diagonal=True, **known)
        needs = Needs(*ctx.needs_input_grad[:4]) if learns else _NOTHING
        operands = similarity_operands(block, vectors.constants)
        write_matches(operands, block, bias, vectors)
        weights = Weights(None if vectors.matches.unit == 1.0 else vectors.weight)
        task = StripTask(operands, block, sigmoid_tile(operands, block), (SIGMOID,), weights)
        row_dbias = vectors.dbias if needs.drow_bias else None
        sums = whole_gradients(task, needs, RowSums(vectors.losses, row_dbias))
        loss, *gradients = finish_pairs(
            operands, block, sums, needs, vectors.matches, vectors.losses, divisor, row_dbias=row_dbias
        )
        if any(needs):
            ctx.save_for_backward(x, y, scale, bias, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, dx, dy, numbers = ctx.saved_tensors
        return *_multiplied(inputs, ctx.needs_input_grad, dloss, dx, dy, numbers), *(None,) * 5


_NOTHING = Needs(False, False, False)


def _multiplied(
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    dloss: Tensor,  # ()
    dx: Tensor | None,  # (N, D)
    dy: Tensor | None,  # (N, D)
    numbers: Tensor | None,  # (parts + 1,) d scale in parts, d bias
) -> list[Tensor | None]:
    return multiplied(inputs, needs, dloss, dx, dy, numbers, 0 if numbers is None else len(numbers) - 1)
