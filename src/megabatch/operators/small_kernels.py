"""Losses of a small batch by kernels: all similarities in memory once, and the gradients computed with the loss.

A step is three library products and four launches (two for a sigmoid loss, and for rows alone), and backward, one launch,
multiplies by the incoming gradient.
With one pass over tiles after another, the host would take longer to launch the work than the device to do it. The
similarities fit the limit of a workspace (`plan.SMALL_PAIRS`) and are freed before forward returns.

Weights are multiplied in the precision of the inputs, as in the passes over tiles, and matches are added in float32. Until
backward multiplies them, gradients are kept in float32.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import refusing
from megabatch.tiles.precision import FLOAT16, HALF_DTYPE, TF32, multiply_into, rounded

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = range(5)  # the kinds of `tiles.triton_small_device`


class Task(NamedTuple):
    """Which loss."""

    kind: int
    divisor: int  # of the loss; 0 for the number of rows that share their label
    ids: Tensor | None = None  # (N,) ids or labels
    ids_are_positives: bool = False  # of SIGMOID


def small_loss(x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, precision: str, task: Task) -> Tensor:  # ()
    """The loss of pairs (x_i, y_i); of LABELS, x is the whole set, and there is no y."""
    with settled(x):
        loss: Tensor = _SmallLoss.apply(x, y, scale, bias, precision, task, torch.is_grad_enabled())
    return loss


def settled(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched where x is, and autocast, which the precision has settled, is off."""
    device = x.device
    found = ExitStack()
    if torch.is_autocast_enabled(device.type):
        found.enter_context(torch.autocast(device.type, enabled=False))
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        found.enter_context(torch.cuda.device(device))
    return found


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
        from megabatch.tiles import triton_small, triton_small_gradients
        from megabatch.tiles.triton_launcher import kinds

        kind, device = task.kind, x.device
        needs = ctx.needs_input_grad[:4] if learns else (False,) * 4
        if kind in (VIEWS, LABELS):
            rows = columns = rounded(x if y is None else torch.cat((x, y)), precision)
            sides = needs[0] or needs[1], False
        else:
            assert y is not None
            rows, columns, sides = rounded(x, precision), rounded(y, precision), needs[:2]
        N, D = rows.shape
        half, unit = HALF_DTYPE.get(precision), 2.0**14 if precision == FLOAT16 else 1.0
        products = torch.empty((N, N), dtype=torch.float32, device=device)
        multiply_into(products, rows, columns.T)
        weights = None
        if sides[0] or sides[1]:
            weights = products if half is None else torch.empty((N, N), dtype=half, device=device)
        ids = None if task.ids is None else task.ids.contiguous()
        of_scale, of_bias = kinds(scale, bias)
        given = device, half, weights is None, of_scale, of_bias, *kinds(ids)
        form = triton_small.Form(kind, N, any(needs), task.ids_are_positives, unit, precision == TF32, given)
        launches = triton_small.launches(form)
        work, sums = launches.room(device)
        if kind == SIGMOID:
            launches.sigmoid_weights(products, weights, scale, bias, ids, work, sums)
        else:
            if kind in (ROWS, VIEWS):
                launches.rows(products, weights, scale, ids, work, sums)
            else:
                launches.partial_sums(products, scale, ids, work)
                launches.combine(products, scale, work, sums)
            if any(needs) and kind != ROWS:
                launches.softmax_weights(products, weights, scale, ids, work, sums)
        dx = dy = None
        if weights is not None and sides[0]:
            dx = torch.empty((N, D), dtype=torch.float32, device=device)
            multiply_into(dx, weights, columns)
        if weights is not None and sides[1]:
            dy = torch.empty((N, D), dtype=torch.float32, device=device)
            multiply_into(dy, weights.T, rows)
        loss = torch.empty((), dtype=torch.float32, device=device)
        strides = *rows.stride(), *columns.stride()
        finish = triton_small_gradients.finish(
            triton_small_gradients.FinishForm(
                *(kind, N, D, sides, any(needs), strides, launches.programs, launches.tiles, task.divisor, unit),
                given=(device, of_scale, *kinds(rows, columns)),
            )
        )
        finish(rows, columns, dx, dy, work, sums, scale, loss)
        if learns:
            ctx.save_for_backward(x, y, scale, bias, dx, dy, sums)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        *inputs, dx, dy, sums = ctx.saved_tensors
        return *multiplied(inputs, ctx.needs_input_grad, dloss, dx, dy, sums), None, None, None


def multiplied(
    inputs: Sequence[Tensor | None],  # x, y, scale, and perhaps a bias
    needs: Sequence[bool],
    dloss: Tensor,  # ()
    dx: Tensor | None,
    dy: Tensor | None,  # if None where y needs a gradient, the rows of dx beyond those of x
    numbers: Tensor | None,  # d scale in parts, d bias, …
    scale_parts: int = 1,
) -> list[Tensor | None]:
    """The gradients of all inputs that need one, times `dloss`, in one launch."""
    from megabatch.tiles import triton_small_gradients
    from megabatch.tiles.triton_launcher import kinds

    found: list[Tensor | None] = [
        torch.empty(value.shape, dtype=value.dtype, device=value.device) if value is not None and need else None
        for value, need in zip(inputs, needs, strict=False)
    ]
    first, x_count, y_count = inputs[0], *(0 if out is None else out.numel() for out in found[:2])
    assert first is not None
    y_first = 0
    if dy is None and y_count > 0:
        dy, y_first = dx, first.numel()
    given = dloss.device, tuple(None if out is None else out.dtype for out in found), *kinds(dx, dy, numbers, dloss)
    outs = found if len(found) == 4 else [*found, None]
    triton_small_gradients.multiply(x_count, y_count, y_first, scale_parts, given)(dx, dy, numbers, dloss, *outs)
    return refusing(inputs, found) if torch.is_grad_enabled() else found  # enabled by create_graph=True
