"""The dense path with Triton kernels: all logits in memory once, and the gradients computed with the loss.

A step has four launches (three for two views of one batch, two for a sigmoid loss and for rows in one direction), and one more
in backward, which multiplies by the incoming gradient. In half precision and up to `plan.SMALL_PRODUCT_ROWS` rows the kernels
compute the matmuls, except the logits of two views and of labels. Otherwise there are three cuBLAS matmuls.
With one pass over tiles after another, the host would take longer to launch the work than the device to do it. The logits fit
the limit of a workspace (`dispatch.Limits.dense_triton`) and are freed before forward returns.

Weights are multiplied in the precision of the inputs, as in the passes over tiles, and matches are added in float32. Until
backward multiplies them, gradients are kept in float32.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.autograd import refuse_second_derivative
from megabatch.tiles.block import round_to_precision

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = range(5)  # the kinds of `kernels.small`


class Task(NamedTuple):
    """Which loss."""

    kind: int
    divisor: int  # of the loss; 0 for the number of rows that share their label
    ids: Tensor | None = None  # (N,) ids or labels, or (N, 2) ids
    ids_are_positives: bool = False  # of SIGMOID


def cross_entropy_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    precision: str,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ii over rows, and with `columns` over columns too, ÷ `divisor`; equal ids are excluded."""
    return _compute(x, y, scale, None, precision, Task(MATCHES if columns else ROWS, divisor, ids))


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: Tensor,  # ()
    precision: str,
    *,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ij over all views i of all samples, where j is the other view of the same sample, ÷ `divisor`."""
    return _compute(z1, z2, scale, None, precision, Task(VIEWS, divisor))


def sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    precision: str,
    *,
    mean_of_rows: bool,
) -> Tensor:  # ()
    """Σ_i of the mean of −log softmax(s)_ij over the other rows j of i's label; summed, or the mean of rows."""
    return _compute(z, None, scale, None, precision, Task(LABELS, 0 if mean_of_rows else 1, labels))


def sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    precision: str,
    *,
    ids_are_positives: bool,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] ÷ `divisor`; see `primitives.sigmoid_loss` for ids."""
    return _compute(x, y, scale, bias, precision, Task(SIGMOID, divisor, ids, ids_are_positives=ids_are_positives))


def _compute(x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, precision: str, task: Task) -> Tensor:  # ()
    with use_device_of(x):
        loss: Tensor = _DenseKernelLoss.apply(x, y, scale, bias, precision, task, torch.is_grad_enabled())
    return loss


def use_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x the current one and disables autocast, because the precision is already chosen."""
    device = x.device
    kind = device.type
    rounds, elsewhere = torch.is_autocast_enabled(kind), kind == "cuda" and torch.cuda.current_device() != device.index
    if not rounds and not elsewhere:
        return _UNCHANGED
    found = ExitStack()
    if rounds:
        found.enter_context(torch.autocast(kind, enabled=False))
    if elsewhere:
        found.enter_context(torch.cuda.device(device))
    return found


_UNCHANGED = nullcontext()


class _DenseKernelLoss(torch.autograd.Function):
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
        from megabatch.kernels.launch import kinds
        from megabatch.kernels.operands import pack_ids
        from megabatch.kernels.small_gradients import Form, launches_of

        kind = task.kind
        needs = ctx.needs_input_grad[:4] if learns else (False,) * 4
        if kind in (VIEWS, LABELS):
            rows = columns = round_to_precision(x if y is None else torch.cat((x, y)), precision)
        else:
            assert y is not None
            rows, columns = round_to_precision(x, precision), round_to_precision(y, precision)
        ids = None if task.ids is None else task.ids.contiguous() if task.ids.dim() == 1 else pack_ids(task.ids)
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
        return *scale_gradients(inputs, ctx.needs_input_grad, dloss, dx, dy, sums), None, None, None


def scale_gradients(
    inputs: Sequence[Tensor | None],  # x, y, scale, and perhaps a bias
    needs: Sequence[bool],
    dloss: Tensor,  # ()
    dx: Tensor | None,
    dy: Tensor | None,  # if None where y needs a gradient, the rows of dx beyond those of x
    numbers: Tensor | None,  # d scale in parts, d bias, …
    scale_parts: int = 1,
) -> list[Tensor | None]:
    """The gradients of all inputs that need one, times `dloss`, in one launch."""
    from megabatch.kernels.launch import kinds
    from megabatch.kernels.small_gradients import multiply

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
    return refuse_second_derivative(inputs, found) if torch.is_grad_enabled() else found  # enabled by create_graph=True
