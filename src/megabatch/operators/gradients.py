"""From the sums of a pass to gradients: what the backward functions of all operators share.

A pass leaves out the scale, and the matching pairs where they are kept apart. A matching pair is usually the largest entry of
its row, and its gradient nearly cancels against the rest of the row; a half-precision tile would not survive that. So it is
added here in full precision, before anything is rounded to the type of the inputs.
"""

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor

from megabatch.tiles.backends import RowWork
from megabatch.tiles.block import FLOAT16, Block, ColumnGradients, Needs, RowGradients, accumulator_dtype
from megabatch.tiles.tokens import LateBlock

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dx, dy, dscale, drow_bias, dcol_bias; empty where not needed


def fill_mean_weight(x: Tensor, mean_weight: float) -> Tensor:  # ()
    """The factor from a sum over local pairs to this rank's part of a mean; float64, because every loss contains it."""
    return torch.full((), mean_weight, dtype=torch.float64, device=x.device)


def statistic(x: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor of the type that sums over x are kept in."""
    return x.new_empty(shape, dtype=accumulator_dtype(x.dtype))


def logit(x: Tensor, *shape: int) -> Tensor:
    """An uninitialised float64 tensor, for logits and logsumexps, of which losses take differences (`LogSum.value`)."""
    return x.new_empty(shape, dtype=torch.float64)


def empty_gradients(x: Tensor, y: Tensor, scale: Tensor, needs: Needs, dtype: torch.dtype | None = None) -> Gradients:
    """Uninitialised gradients of the right shapes; those of x and y in `dtype`, or in their own."""
    return (
        x.new_empty(x.shape if needs.dx else (0,), dtype=dtype),
        y.new_empty(y.shape if needs.dy else (0,), dtype=dtype),
        torch.empty_like(scale),
        statistic(x, x.shape[0] if needs.drow_bias else 0),
        statistic(x, y.shape[0] if needs.dcol_bias else 0),
    )


def column_sums(block: Block, needs: Needs) -> ColumnGradients:
    """The accumulators that a gradient pass adds to."""
    return ColumnGradients(
        dy=block.zeros(block.M, block.D) if needs.dy else None,
        dcol_bias=block.zeros(block.M) if needs.dcol_bias else None,
    )


def choose_grad_scale(
    block: Block | LateBlock, *weights: Tensor | None, largest: Callable[[Tensor], Tensor] | None = None
) -> Tensor:  # ()
    """The factor that gradients are divided by inside tiles: a power of two that makes the largest weight about 1.

    For fp16 it becomes 2¹⁴. A softmax of a million columns spreads that to 2⁻⁶, still far from where fp16 begins to lose
    digits, and the largest entry of a tile, two such weights, is still within its range. Sums that pass from rank to rank have
    to be in the same unit everywhere: there, `largest` finds the largest of all ranks' weights.
    """
    sizes = [w.abs().amax() for w in weights if w is not None and w.numel()]
    size = torch.stack(sizes).amax() if len(sizes) > 1 else sizes[0] if sizes else torch.zeros_like(block.scale)
    size = size.to(block.dtype)  # one type on all ranks: gradients of logsumexps are float64, and a rank may have none
    if largest is not None:
        size = largest(size)
    grad_scale = size.log2().ceil().exp2()
    grad_scale = torch.where((size > 0) & grad_scale.isfinite(), grad_scale, 1.0)
    if block.precision == FLOAT16:
        grad_scale = grad_scale / 2**14
    return grad_scale.clamp_min(torch.finfo(grad_scale.dtype).tiny)  # nothing can be divided by less


@overload
def divide_gradient(gradient: Tensor, grad_scale: Tensor) -> Tensor: ...


@overload
def divide_gradient(gradient: Tensor | None, grad_scale: Tensor) -> Tensor | None: ...


def divide_gradient(gradient: Tensor | None, grad_scale: Tensor) -> Tensor | None:
    """`gradient` as the tiles see it, in the type of the unit."""
    return None if gradient is None else (gradient / grad_scale).to(grad_scale.dtype)


def finish(
    local: RowWork,
    block: Block,
    strips: Iterable[RowGradients],
    sums: ColumnGradients,
    needs: Needs,
    *,
    scale: Tensor,  # () as the operator was given it
    grad_scale: Tensor,  # ()
    dmatch: Tensor | None = None,  # (N,) gradient of s_ii where the diagonal is kept apart, in units
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Runs the pass and turns its sums into gradients: adds the diagonal, multiplies by scale and unit, rounds once."""
    dx, dy, dscale, drow_bias, dcol_bias = empty_gradients(block.x, block.y, scale, needs._replace(dy=False), dtype)
    factor = block.scale * grad_scale
    products: Tensor | None = None  # of the matching pairs, if needed
    of_rows = torch.zeros_like(dscale, dtype=torch.float64)  # one number of all rows: every digit of it can be had
    for rows, dx_rows, dscale_rows, drow_bias_rows in strips:
        if dscale_rows is not None and dmatch is not None:
            products = local.matching_products(block) if products is None else products
            dscale_rows.addcmul_(dmatch[rows], products[rows])
        if dx_rows is not None:
            from_dx = local.finish_rows(
                dx_rows,
                dx[rows] if needs.dx else None,
                factor,
                own=block.x[rows] if needs.dscale and dscale_rows is None else None,
                partners=block.y[rows],
                dmatch=None if dmatch is None else dmatch[rows],
                precision=block.precision,
            )
            dscale_rows = from_dx if dscale_rows is None else dscale_rows
        if dscale_rows is not None:
            of_rows += dscale_rows.sum(dtype=torch.float64)
        if drow_bias_rows is not None:
            drow_bias[rows] = drow_bias_rows
    dscale.copy_(of_rows * grad_scale)
    if sums.dy is not None:
        final = dtype or block.y.dtype
        dy = sums.dy if sums.dy.dtype == final else torch.empty_like(sums.dy, dtype=final)
        local.finish_rows(sums.dy, dy, factor, own=None, partners=block.x, dmatch=dmatch, precision=block.precision)
    if sums.dcol_bias is not None:
        dcol_bias = sums.dcol_bias
    for dbias in (drow_bias, dcol_bias):
        if dbias.numel():
            if dmatch is not None:
                dbias += dmatch
            dbias *= grad_scale
    return dx, dy, dscale, drow_bias, dcol_bias
