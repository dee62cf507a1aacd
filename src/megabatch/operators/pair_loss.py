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

from megabatch.operators.gradients import column_sums, finish
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
        from megabatch.tiles import triton_backend, triton_backward, triton_logsumexp, triton_pair_statistics
        from megabatch.tiles.triton_gradient import StripTask
        from megabatch.tiles.triton_operands import exponent_operands

        block = Block.of(x, y, scale, precision, row_ids=row_ids, col_ids=col_ids, skip_diagonal=True)
        operands = exponent_operands(block)
        tile = triton_backward.softmax_tile(operands, block)
        row, col = triton_logsumexp.totals(operands, block, columns=columns)
        products = triton_backend.matching_products(block)
        found = triton_pair_statistics.pair_statistics(operands, block, tile, products, row, col)
        needs = Needs(*ctx.needs_input_grad[:3]) if learns else Needs(False, False, False)
        if any(needs):
            task = StripTask(operands, block, tile, triton_backward.SOFTMAX_KINDS, found.weights)
            sums = column_sums(block, needs)
            dx, dy, dscale, *_ = finish(
                triton_backend,
                block,
                triton_backward.gradient_strips(task, sums, needs),
                sums,
                needs,
                scale=scale,
                unit=torch.full((), 1 / (divisor * found.unit), dtype=block.dtype, device=x.device),
                dmatch=found.dmatch,
                products=products,
                dtype=torch.float32 if torch.float16 in (x.dtype, y.dtype) else None,
            )
            ctx.save_for_backward(x, y, scale, dx if needs.dx else None, dy if needs.dy else None, dscale)
        return found.loss.div_(divisor).to(block.dtype)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        x, y, scale, *gradients = ctx.saved_tensors
        return *multiplied((x, y, scale), ctx.needs_input_grad, dloss, *gradients), *(None,) * 6
