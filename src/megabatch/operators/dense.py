"""The dense path: the whole matrix of logits in memory, and the gradients computed with the loss.

One tile contains all logits, so the softmax of a row or a column is complete at once. The gradient is complete as well, except
for the factor that backward multiplies by. The matrix is freed before forward returns. As on the tiled paths, neither a loss
nor its gradient loses digits if the matching pair is almost certain, and a softmax weight is at most 1 by construction.

Each function has two engines: PyTorch operations for a CPU, and Triton kernels. `one_gpu` and `fused` have the same functions
for larger batches.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.dispatch import Execution
from megabatch.operators.autograd import refuse_second_derivative, scale_gradients, use_device_of
from megabatch.tiles import plan
from megabatch.tiles.block import FLOAT32, TRITON, equal_ids, round_to_precision, windows

FormLogits = Callable[[], Tensor]  # returns a new matrix of all logits
Weigh = Callable[[FormLogits], tuple[float, Tensor]]  # returns the sum of all losses, and its gradient


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
    if run.backend == TRITON:
        return _launch(x, y, scale, None, run, Task(MATCHES if columns else ROWS, divisor, ids))

    def weigh(form_logits: FormLogits) -> tuple[float, Tensor]:
        def compute_logits() -> Tensor:
            s = form_logits()
            if ids is not None:
                _mask_equal_ids(s, ids)
            return s

        s = compute_logits()
        of_columns = _cross_entropy(s, 0, compute_logits) if columns else None
        total, g = _cross_entropy(s, 1, compute_logits, in_place=True)
        if of_columns is not None:
            total, g = total + of_columns[0], g.add_(of_columns[1])
        return total, g

    return _loss(x, y, scale, None, run.precision, divisor, weigh)


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
    N = len(z1)
    divisor = 2 * (N if mean else 1)
    if run.backend == TRITON:
        return _launch(z1, z2, scale, None, run, Task(VIEWS, divisor))

    def partners(s: Tensor, dim: int) -> Tensor:  # (2, N, 1), of (2, N, 2N): the pairs (i, N + i), then (N + i, i)
        return s.as_strided((2, N, 1), (2 * N * N - N, 2 * N + 1, 1), N)

    def weigh(form_logits: FormLogits) -> tuple[float, Tensor]:
        def compute_logits() -> Tensor:  # (2, N, 2N)
            return form_logits().fill_diagonal_(-torch.inf).view(2, N, 2 * N)  # a view is not compared with itself

        total, g = _cross_entropy(compute_logits(), 2, compute_logits, partners, in_place=True)
        return total, g.view(2 * N, 2 * N)

    return _loss(torch.cat((z1, z2)), None, scale, None, run.precision, divisor, weigh)


Matches = Callable[[Tensor, int], Tensor]  # (matrix, dim) → a view of its matching pairs, one entry for each sum along `dim`


def _diagonal(s: Tensor, dim: int) -> Tensor:  # (N, 1) or (1, N)
    """Returns a view of the pairs (i, i), with `dim` kept. This is one call, and `diagonal` with `unsqueeze` would be two."""
    N = s.shape[0]
    return s.as_strided((1, N) if dim == 0 else (N, 1), (N + 1, N + 1))


def _cross_entropy(
    s: Tensor, dim: int, form_logits: FormLogits, matches: Matches = _diagonal, *, in_place: bool = False
) -> tuple[float, Tensor]:
    """Returns Σ −log softmax(s) of the matching pairs, and its gradient. `form_logits` forms s again, which is rarely needed.

    Let m be the logit of a matching pair, and others = Σ exp(s − m) over the other entries. The loss of the pair is
    log(1 + others), and its gradient is −others / (1 + others). Both are accurate even if the match is almost certain, and n
    equal entries give exactly log n. If a logit is more than 88 above m, the sum is not finite, and `_softmax_cross_entropy`
    computes the loss instead. With `in_place`, the gradient overwrites s, because writing to new memory is slow.
    """
    one, log2_e = _constants(s.dtype)
    match = matches(s, dim)
    if in_place:
        g = s.sub_(match.clone())
    else:
        g = s.sub(match)
        match = matches(g, dim)
    g.mul_(log2_e).exp2_()  # not exp, because PyTorch's exp takes 60 times as long on a CPU if results underflow
    match.sub_(one)  # 0, or NaN if the match is not finite
    others = g.sum(dim, keepdim=True)
    match.sub_(others)
    g.div_(others.add(one))
    total = others.double().log1p_().sum().item()
    return (total, g) if math.isfinite(total) else _softmax_cross_entropy(form_logits(), dim, matches)


@cache
def _constants(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns 1 and log2 e as tensors, because PyTorch would convert numbers to tensors at every use, which takes 2 µs.

    They are not created at import, because a program may import this module inside a FakeTensorMode.
    """
    return torch.ones((), dtype=dtype, device="cpu"), torch.tensor(1 / math.log(2), dtype=dtype, device="cpu")


def _softmax_cross_entropy(s: Tensor, dim: int, matches: Matches) -> tuple[float, Tensor]:
    """Computes `_cross_entropy` for all logits, even if one is more than 88 above the match. It takes longer.

    Let p be the probability of the match, and others the sum of all other probabilities. The gradient of the match is −others,
    and its loss is log(1 + others / p).
    """
    g = s.softmax(dim)
    match = matches(g, dim)
    probability = match.clone()
    match.zero_()
    others = g.sum(dim, keepdim=True, dtype=torch.float64)
    match.sub_(others)
    total = others.div_(probability).log1p_().sum().item()
    if probability.min().item() < torch.finfo(s.dtype).tiny:  # such a small probability is only accurate as a logarithm
        total = (s.logsumexp(dim, keepdim=True) - matches(s, dim)).sum(dtype=torch.float64).item()
    return total, g


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
    divisor = len(x) if mean else 1
    if run.backend == TRITON:
        return _launch(x, y, scale, bias, run, Task(SIGMOID, divisor, ids, ids_are_positives=ids_are_positives))

    def weigh_rows(s: Tensor, rows: slice) -> tuple[float, Tensor]:
        if ids is not None and ids_are_positives:
            signs = torch.where(equal_ids(ids[rows], ids), -1.0, 1.0).to(s.dtype)
            g = s.mul_(signs).sigmoid()
            total = _sum(_softplus_(s, g))
            return total, g.mul_(signs)
        s.diagonal(rows.start).neg_()
        g = s.sigmoid()
        total = _sum(_softplus_(s, g))
        g.diagonal(rows.start).neg_()
        return total, g

    def weigh(form_logits: FormLogits) -> tuple[float, Tensor]:
        s = form_logits()
        if ids is not None and not ids_are_positives:
            _mask_equal_ids(s, ids)
        if len(s) <= plan.SIGMOID_CPU:
            return weigh_rows(s, slice(0, len(s)))
        total = 0.0
        for rows in windows(len(s), plan.SIGMOID_CPU):
            of_rows, g = weigh_rows(s[rows], rows)
            total += of_rows
            s[rows] = g
        return total, s

    return _loss(x, y, scale, bias, run.precision, divisor, weigh)


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

    if run.backend == TRITON:
        return _launch(z, None, scale, None, run, Task(LABELS, 0 if mean else 1, labels))

    def weigh(form_logits: FormLogits) -> tuple[float, Tensor]:
        s = form_logits()
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        marked = positive.to(s.dtype)
        count = marked.sum(1)
        divisor = count.clamp_min(1.0)
        g = s.fill_diagonal_(-torch.inf).softmax(1)
        peak = s.amax(1, keepdim=True)
        # Differences from the peak are averaged, because the mean of s may be 10⁸.
        below_peak = torch.where(positive, s, peak).sub_(peak).sum(1).div_(divisor).neg_()
        losses = below_peak.sub_(g.amax(1).log_())
        # The only positive of a row may be almost certain. Its gradient is its probability − 1. It is computed as minus the sum
        # of all other probabilities, because that sum is accurate.
        of_positives = g * marked
        certainty, others = of_positives.sum(1), (g - of_positives).sum(1)
        g.addcmul_(marked, (certainty / divisor)[:, None], value=-1.0).addcmul_(marked, (others / divisor)[:, None], value=-1.0)
        losses = torch.where((count == 1) & (certainty > 0.5), (others / certainty).log1p_(), losses)
        has_positive = count > 0
        rows = max(1, int(has_positive.sum())) if mean else 1
        g.mul_((count.clamp_max(1.0) / rows)[:, None])
        return losses.where(has_positive, 0.0).sum(dtype=torch.float64).item() / rows, g

    return _loss(z, None, scale, None, run.precision, 1, weigh)


def _softplus_(s: Tensor, g: Tensor) -> Tensor:
    """Computes log(1 + exp s) in place, as max(s, 0) + 2·atanh(q / (2 − q)), where q = sigmoid(−|s|) and g = sigmoid(s).

    `F.softplus` and an `exp` that overflows can take ten times as long.
    """
    q = 1.0 - g
    torch.minimum(q, g, out=q)
    q.div_(2.0 - q).atanh_()
    return s.clamp_min_(0.0).add_(q, alpha=2.0)


def _mask_equal_ids(s: Tensor, ids: Tensor) -> None:
    """Sets pairs of equal ids to −inf, but not the matching pairs."""
    s.masked_fill_(equal_ids(ids, ids).fill_diagonal_(False), -torch.inf)


def _loss(
    x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, precision: str, divisor: int, weigh: Weigh
) -> Tensor:  # ()
    if precision != FLOAT32 and torch.is_autocast_enabled("cpu"):  # `precision` already includes autocast
        with torch.autocast("cpu", enabled=False):
            return _loss(x, y, scale, bias, precision, divisor, weigh)
    loss: Tensor = _DenseLoss.apply(x, y, scale, bias, precision, 1 / divisor, weigh, torch.is_grad_enabled())
    return loss


class _DenseLoss(torch.autograd.Function):
    """Computes gradients with the loss, for dloss = 1, which is the usual argument of backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        scale: Tensor,
        bias: Tensor | None,
        precision: str,
        share: float,
        weigh: Weigh,
        learns: bool,
    ) -> Tensor:
        rows, columns = x, x if y is None else y
        if precision != FLOAT32:
            rows = round_to_precision(x, precision)
            columns = rows if y is None else round_to_precision(y, precision)

        def form_logits() -> Tensor:
            s = torch.mm(rows, columns.T).mul_(scale)
            return s if bias is None else s.add_(bias)

        total, g = weigh(form_logits)
        if learns:
            needs_x, needs_y, needs_scale, needs_bias, *_ = ctx.needs_input_grad
            dx = dy = products = dscale = dbias = None
            factor = _number(scale.item() * share, g)
            if y is None:
                g = _plus_transposed(g)
            if needs_x or needs_scale:
                dx = torch.mm(g, columns)
                if needs_scale:
                    products = dx * rows
                    dscale = _sum(products) * (share if y is not None else share / 2)
                dx.mul_(factor)
            if needs_y:
                dy = torch.mm(g.T, rows, out=products).mul_(factor)  # reuses memory, because new memory is slow
            if needs_bias:
                dbias = _sum(g) * share
            ctx.save_for_backward(x, y, scale, bias, dx if needs_x else None, dy)
            ctx.numbers = dscale, dbias
        return _number(total * share, g)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        x, y, scale, bias, dx, dy = ctx.saved_tensors
        dscale, dbias = ctx.numbers
        try:
            factor = dloss.item()
        except RuntimeError:  # with `is_grads_batched=True` the values of dloss cannot be read
            dx, dy, dscale, dbias = (None if d is None else d * dloss for d in (dx, dy, dscale, dbias))
        else:
            if factor != 1.0:
                dx, dy = (None if d is None else d * factor for d in (dx, dy))
            if dscale is not None:
                dscale = _number(dscale * factor, scale)
            if dbias is not None:
                dbias = _number(dbias * factor, bias)
        gradients: Sequence[Tensor | None] = (dx, dy, dscale, dbias)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = refuse_second_derivative((x, y, scale, bias), gradients)
        return *gradients, None, None, None, None


def _plus_transposed(g: Tensor) -> Tensor:  # (N, N)
    """Returns g + gᵀ. Overwrites a large g in squares that stay in the cache, in 19 ms instead of 45 for 2,048 rows."""
    N, size = len(g), plan.TRANSPOSED_CPU
    if size >= N:
        return g + g.T
    for rows in windows(N, size):
        square = g[rows, rows]
        square.copy_(square + square.T)
        for columns in windows(slice(rows.stop, N), size):
            upper, lower = g[rows, columns], g[columns, rows]
            lower.copy_(upper.add_(lower.T).T)
    return g


def _number(value: float, like: Tensor) -> Tensor:  # ()
    return torch.scalar_tensor(value, dtype=like.dtype, device="cpu")  # independent of the default device


def _sum(matrix: Tensor) -> float:
    """Returns the sum of all entries. The sums of rows are added in float64."""
    total: float = sum(matrix.sum(1).tolist())
    return total


# ----------------------------------------------------------------------------------------------------------------------
# The Triton engine.
#
# Forward has four launches. Two views of one batch need three, and a sigmoid loss or a softmax in one direction needs two.
# Backward has one launch, which multiplies by the incoming gradient. In half precision and up to `plan.KERNEL_MATMUL_ROWS`
# rows, the kernels compute the matmuls, except the logits of two views and of losses in one direction. In all other cases there
# are three cuBLAS matmuls. The tiled paths need more launches, so small batches would be launch-bound on them. The logits fit
# the limit of a workspace (`dispatch.Limits.dense_triton`).
#
# Weights are multiplied in the precision of the inputs, as on the tiled paths, and matching pairs are added in float32.
# Gradients are float32 until backward multiplies them by the incoming gradient.

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = range(5)  # the kinds of `kernels.small`


class Task(NamedTuple):
    """The loss to compute."""

    kind: int
    divisor: int  # divides the loss; 0 means the number of rows that share their label
    ids: Tensor | None = None  # (N,) ids or labels, or (N, 2) ids
    ids_are_positives: bool = False  # only for SIGMOID


def _launch(x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, run: Execution, task: "Task") -> Tensor:  # ()
    with use_device_of(x):
        loss: Tensor = _DenseKernelLoss.apply(x, y, scale, bias, run.precision, task, torch.is_grad_enabled())
    return loss


class _DenseKernelLoss(torch.autograd.Function):
    """Computes gradients with the loss. Backward multiplies them by the incoming gradient."""

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
        work, sums, loss = launches.allocate()
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
