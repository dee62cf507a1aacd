"""The cross-entropy of matching pairs over tiles, by kernels, with its gradients computed in the forward pass.

As with a sigmoid loss, the gradient is known up to one factor before backward is called. Computed at once, it needs no sums in
a form that other operations can differentiate, and a step makes a third of the calls into PyTorch: with all of them, the host
takes longer than an H200 up to 32k pairs. The products are those of `logsumexp` and its backward. Until backward multiplies
them by the factor, gradients are kept in the type of the inputs, or in float32 for float16.

For one process, without offsets, limits or further negatives; `logsumexp` serves everything else.
"""

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
        loss: Tensor = _PairLoss.apply(x, y, scale, *ids, precision, columns, divisor, torch.is_grad_enabled())
    return loss


class _PairLoss(torch.autograd.Function):
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
        needs = Needs(*ctx.needs_input_grad[:3]) if learns else Needs(False, False, False)
        pairs = PairVectors.empty(block)
        operands = exponent_operands(block, pairs.products)
        tile = softmax_tile(operands, block)
        write_sums(operands, block, pairs.row, pairs.col if columns else None)
        losses = pair_statistics(operands, block, tile, pairs, columns=columns)
        sums = WholeGradients(None, None, None)
        if any(needs):
            sums = whole_gradients(StripTask(operands, block, tile, SOFTMAX_KINDS, pairs.weights), needs)
        half = torch.float16 in (x.dtype, y.dtype)  # a gradient may leave its range before backward multiplies it
        dtypes = (torch.float32, torch.float32) if half else (x.dtype, y.dtype)
        loss, dx, dy, dscale = finish_pairs(operands, block, sums, needs, pairs, losses, divisor=divisor, dtypes=dtypes)
        if any(needs):
            ctx.save_for_backward(x, y, scale, dx, dy, dscale)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        x, y, scale, dx, dy, dscale = ctx.saved_tensors
        parts = 0 if dscale is None else len(dscale)
        return *multiplied((x, y, scale), ctx.needs_input_grad, dloss, dx, dy, dscale, parts), *(None,) * 6
