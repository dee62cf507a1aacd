"""Losses of a small batch by kernels: all similarities in memory once, and the gradients computed with the loss.

A step is four launches (three for two views of one batch, two for a sigmoid loss, and for rows alone), and one more in
backward, which multiplies by the incoming gradient. In half precision and up to `plan.SMALL_PRODUCT_ROWS` rows the kernels form
the products, except the similarities of two views and of rows alone; otherwise there are three library products.
With one pass over tiles after another, the host would take longer to launch the work than the device to do it. The
similarities fit the limit of a workspace (`plan.SMALL_PAIRS`) and are freed before forward returns.

Weights are multiplied in the precision of the inputs, as in the passes over tiles, and matches are added in float32. Until
backward multiplies them, gradients are kept in float32.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import refusing
from megabatch.tiles.precision import rounded

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
    kind = device.type
    rounds, elsewhere = torch.is_autocast_enabled(kind), kind == "cuda" and torch.cuda.current_device() != device.index
    if not rounds and not elsewhere:
        return _AS_IT_IS
    found = ExitStack()
    if rounds:
        found.enter_context(torch.autocast(kind, enabled=False))
    if elsewhere:
        found.enter_context(torch.cuda.device(device))
    return found


_AS_IT_IS = nullcontext()


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
        from megabatch.tiles.triton_launcher import kinds
        from megabatch.tiles.triton_small_launches import Form, launches_of

        kind = task.kind
        needs = ctx.needs_input_grad[:4] if learns else (False,) * 4
        if kind in (VIEWS, LABELS):
            rows = columns = rounded(x if y is None else torch.cat((x, y)), precision)
        else:
            assert y is not None
            rows, columns = rounded(x, precision), rounded(y, precision)
        ids = None if task.ids is None else task.ids.contiguous()
        layout = rows.shape, rows.stride(), columns.stride(), rows.device, kinds(rows, columns, scale, bias, ids)
        launches = launches_of(Form(kind, task.divisor, task.ids_are_positives, precision, needs, *layout))
        *formed, products = launches.operands(rows, columns)
        weights = launches.weights(products)
        work, sums, loss = launches.room()
        if kind == SIGMOID:
            launches.sigmoid_weights(*formed, products, weights, scale, bias, ids, work, sums)
        else:
            if kind in (ROWS, VIEWS):
                launches.rows(products, weights, scale, ids, work, sums)
            else:
                launches.partial_sums(*formed, products, scale, ids, work)
                launches.combine(products, scale, work, sums)
            if launches.learns and kind != ROWS:
                launches.softmax_weights(products, weights, scale, ids, work, sums)
        dx, dy = launches.gradients(weights, rows, columns)
        launches.finish(rows, columns, weights if launches.multiplies else None, dx, dy, work, sums, scale, loss)
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
    from megabatch.tiles.triton_launcher import kinds
    from megabatch.tiles.triton_small_gradients import multiply

    found: list[Tensor | None] = [
        torch.empty_like(value, memory_format=torch.contiguous_format) if value is not None and need else None
        for value, need in zip(inputs, needs, strict=False)
    ]
    first, x_count, y_count = inputs[0], *(0 if out is None else out.numel() for out in found[:2])
    assert first is not None
    y_first = 0
    if dy is None and y_count > 0:
        dy, y_first = dx, first.numel()
    given = dloss.device, tuple([None if out is None else out.dtype for out in found]), kinds(dx, dy, numbers, dloss)
    outs = found if len(found) == 4 else [*found, None]
    multiply(x_count, y_count, y_first, scale_parts, given)(dx, dy, numbers, dloss, *outs)
    return refusing(inputs, found) if torch.is_grad_enabled() else found  # enabled by create_graph=True
