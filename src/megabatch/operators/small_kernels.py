"""Losses of a small batch by kernels: all similarities in memory once, and the gradients computed with the loss.

A step is three library products and four launches (two for a sigmoid loss), and backward multiplies by the incoming gradient.
With one pass over tiles after another, the host would take longer to launch the work than the device to do it. The
similarities fit the limit of a workspace (`plan.SMALL_PAIRS`) and are freed before forward returns.

Weights are multiplied in the precision of the inputs, as in the passes over tiles, and matches are added in float32. Until
backward multiplies them, gradients are kept in the type of the inputs, or in float32 for float16.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import refusing
from megabatch.tiles.precision import FLOAT16, HALF_DTYPE, TF32, multiply_into, rounded

MATCHES, LABELS, SIGMOID = 0, 1, 2  # the kinds of `tiles.triton_small`


class Task(NamedTuple):
    """Which loss."""

    kind: int
    divisor: int  # of the loss; 0 for the number of rows that share their label
    ids: Tensor | None = None  # (N,) ids or labels
    columns: bool = False  # of MATCHES: columns as well as rows
    ids_are_positives: bool = False  # of SIGMOID


def small_loss(x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, precision: str, task: Task) -> Tensor:  # ()
    """The loss of pairs (x_i, y_i); of LABELS, x and y are rows of one set, and without y x is the whole set."""
    learns, device = torch.is_grad_enabled(), x.device
    settled = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    away = device.type == "cuda" and torch.cuda.current_device() != device.index
    with settled, torch.cuda.device(device) if away else nullcontext():
        loss: Tensor = _SmallLoss.apply(x, y, scale, bias, precision, task, learns)
    return loss


class _SmallLoss(torch.autograd.Function):
    """Computes gradients with the loss, up to the factor that backward gets."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        scale: Tensor,
        bias: Tensor | None,
        precision: str,
        task: Task,
        learns: bool,
    ) -> Tensor:
        from megabatch.tiles import triton_small

        needs = ctx.needs_input_grad[:4] if learns else (False,) * 4
        if task.kind == LABELS:
            rows = columns = rounded(x if y is None else torch.cat((x, y)), precision)
            sides = needs[0] or needs[1], False
        else:
            assert y is not None
            rows, columns, sides = rounded(x, precision), rounded(y, precision), needs[:2]
        N, D = rows.shape
        products = torch.empty(N, N, dtype=torch.float32, device=x.device)
        multiply_into(products, rows, columns.T)
        ids = None if task.ids is None else task.ids.contiguous()
        period = len(x) if task.kind == LABELS and ids is None else None
        pairs = triton_small.Pairs(task.kind, products, scale, bias, ids, period, task.ids_are_positives)
        half = HALF_DTYPE.get(precision)
        how = triton_small.Rounding(2.0**14 if precision == FLOAT16 else 1.0, precision == TF32)
        weights = None
        if any(sides):
            weights = products if half is None else torch.empty_like(products, dtype=half)
        tile_sums = None
        if task.kind == SIGMOID:
            found, tile_sums = triton_small.sigmoid_weights(pairs, weights, how)
        else:
            found = triton_small.statistics(pairs, columns=task.columns)
            if any(needs):
                tile_sums = triton_small.softmax_weights(pairs, found, weights, how)
        sums: list[Tensor | None] = [None, None]
        dx = dy = packed = None
        if weights is not None:
            whole = torch.empty(sum(sides), N, D, dtype=torch.float32, device=x.device)
            sums = _unpacked(whole, sides)
            for out, a, b in zip(sums, (weights, weights.T), (columns, rows), strict=True):
                if out is not None:
                    multiply_into(out, a, b)
            is_kept_in_half = x.dtype == torch.bfloat16 and (y is None or y.dtype == x.dtype)
            packed = torch.empty_like(whole, dtype=x.dtype) if is_kept_in_half else whole
            dx, dy = _unpacked(packed, sides)
        loss = torch.empty((), dtype=torch.float32, device=x.device)
        dscale = torch.empty_like(scale) if needs[2] else None
        dbias = torch.empty_like(bias) if bias is not None and needs[3] else None
        results = triton_small.Results(loss, dx, dy, dscale, dbias)
        triton_small.finish(pairs, found, tile_sums, (rows, columns), sums, results, divisor=task.divisor, unit=how.unit)
        if learns:
            ctx.save_for_backward(x, y, scale, bias, packed, dscale, dbias)
            ctx.sides = sides
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, packed, dscale, dbias = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]
        if packed is not None:
            scaled = packed * dloss
            found = list(scaled[0].split(len(inputs[0]))) if len(scaled[0]) > len(inputs[0]) else _unpacked(scaled, ctx.sides)
        found += [None if saved is None else saved * dloss for saved in (dscale, dbias)]
        gradients = [
            gradient.to(value.dtype) if gradient is not None and need else None
            for value, gradient, need in zip(inputs, found, ctx.needs_input_grad, strict=False)
        ]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = refusing(inputs, gradients)
        return *gradients, None, None, None


def _unpacked(packed: Tensor, sides: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of x and y in one tensor, (1 or 2, N, D), as a list of two."""
    entries = iter(packed.unbind(0))
    return [next(entries) if side else None for side in sides]
