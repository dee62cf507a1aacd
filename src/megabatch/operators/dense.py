"""The dense path: the whole matrix of logits in memory, and the gradients computed with the loss.

One tile contains all logits, so the softmax of a row or a column is complete at once. The gradient is complete as well, except
for the factor that backward multiplies by. The matrix is freed before forward returns. As on the tiled paths, neither a loss
nor its gradient loses digits if the matching pair is almost certain, and a softmax weight is at most 1 by construction.

Each function has two engines: PyTorch operations for a CPU, and Triton kernels. `fused` has the same functions for larger
batches.
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

Make = Callable[[], Tensor]  # a matrix of all logits, a new one each time
Weigh = Callable[[Make], tuple[float, Tensor]]  # → the sum of all losses, and its gradient


def cross_entropy_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,) or (N, 2)
    run: Execution,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ii over rows, and with `columns` over columns too, ÷ `divisor`; equal ids are left out."""

    if run.backend == TRITON:
        return _launch(x, y, scale, None, run, Task(MATCHES if columns else ROWS, divisor, ids))

    def weigh(make: Make) -> tuple[float, Tensor]:
        def similarities() -> Tensor:
            s = make()
            if ids is not None:
                _leave_out(s, ids)
            return s

        s = similarities()
        of_columns = _cross_entropy(s, 0, similarities) if columns else None
        total, g = _cross_entropy(s, 1, similarities, in_place=True)
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
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ij over all views i of all samples, where j is the other view of the same sample, ÷ `divisor`."""
    if run.backend == TRITON:
        return _launch(z1, z2, scale, None, run, Task(VIEWS, divisor))
    N = len(z1)

    def partners(s: Tensor, dim: int) -> Tensor:  # (2, N, 1), of (2, N, 2N): the pairs (i, N + i), then (N + i, i)
        return s.as_strided((2, N, 1), (2 * N * N - N, 2 * N + 1, 1), N)

    def weigh(make: Make) -> tuple[float, Tensor]:
        def similarities() -> Tensor:  # (2, N, 2N)
            return make().fill_diagonal_(-torch.inf).view(2, N, 2 * N)  # a view is not compared with itself

        total, g = _cross_entropy(similarities(), 2, similarities, partners, in_place=True)
        return total, g.view(2 * N, 2 * N)

    return _loss(torch.cat((z1, z2)), None, scale, None, run.precision, divisor, weigh)


Matches = Callable[[Tensor, int], Tensor]  # (matrix, dim) → a view of its matches, one entry for each sum along `dim`


def _diagonal(s: Tensor, dim: int) -> Tensor:  # (N, 1) or (1, N)
    """The matches (i, i), with `dim` kept: one call, where `diagonal` and `unsqueeze` are two."""
    N = s.shape[0]
    return s.as_strided((1, N) if dim == 0 else (N, 1), (N + 1, N + 1))


def _cross_entropy(
    s: Tensor, dim: int, again: Make, matches: Matches = _diagonal, *, in_place: bool = False
) -> tuple[float, Tensor]:
    """(Σ −log softmax(s) of the matches, its gradient); `again` forms s once more, which is rarely needed.

    The loss of a match is log(1 + others) with others = Σ exp(s − match), its gradient −others / (1 + others). Both keep their
    digits where the match is almost certain, and equal rows have the exact logarithm of their number. If a similarity is more
    than 88 above the match, the sum is not finite, and `_softmax_cross_entropy` takes over. The gradient overwrites s if
    `in_place`, because fresh memory is slow.
    """
    one, log2_e = _constants(s.dtype)
    match = matches(s, dim)
    if in_place:
        g = s.sub_(match.clone())
    else:
        g = s.sub(match)
        match = matches(g, dim)
    g.mul_(log2_e).exp2_()  # not exp: where results underflow, PyTorch's takes 60 times as long on a CPU
    match.sub_(one)  # 0, or NaN where the match is not finite
    others = g.sum(dim, keepdim=True)
    match.sub_(others)
    g.div_(others.add(one))
    total = others.double().log1p_().sum().item()
    return (total, g) if math.isfinite(total) else _softmax_cross_entropy(again(), dim, matches)


@cache
def _constants(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1 and log2 e. As numbers they would become tensors at every use, which takes 2 µs.

    Not made at import, which may happen where tensors are fake.
    """
    return torch.ones((), dtype=dtype, device="cpu"), torch.tensor(1 / math.log(2), dtype=dtype, device="cpu")


def _softmax_cross_entropy(s: Tensor, dim: int, matches: Matches) -> tuple[float, Tensor]:
    """`_cross_entropy` of any similarities, also if one is more than 88 above the match, in more time.

    The gradient of a match is minus the sum of all other probabilities, its loss log(1 + others / match).
    """
    g = s.softmax(dim)
    match = matches(g, dim)
    probability = match.clone()
    match.zero_()
    others = g.sum(dim, keepdim=True, dtype=torch.float64)
    match.sub_(others)
    total = others.div_(probability).log1p_().sum().item()
    if probability.min().item() < torch.finfo(s.dtype).tiny:  # so unlikely a match keeps its digits as a logarithm alone
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
    divisor: int,
) -> Tensor:  # ()
    """Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] ÷ `divisor`; see `primitives.sigmoid_loss` for ids."""

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

    def weigh(make: Make) -> tuple[float, Tensor]:
        s = make()
        if ids is not None and not ids_are_positives:
            _leave_out(s, ids)
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
    mean_of_rows: bool,
) -> Tensor:  # ()
    """Σ_i of the mean of −log softmax(s)_ij over the other rows j of i's label; summed, or the mean of rows.

    A row is not compared with itself.
    """

    if run.backend == TRITON:
        return _launch(z, None, scale, None, run, Task(LABELS, 0 if mean_of_rows else 1, labels))

    def weigh(make: Make) -> tuple[float, Tensor]:
        s = make()
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        marked = positive.to(s.dtype)
        count = marked.sum(1)
        each = count.clamp_min(1.0)
        g = s.fill_diagonal_(-torch.inf).softmax(1)
        peak = s.amax(1, keepdim=True)
        above_mean = torch.where(positive, s, peak).sub_(peak).sum(1).div_(each).neg_()  # the mean itself may be 10⁸
        losses = above_mean.sub_(g.amax(1).log_())
        # A sole positive may be almost certain; its gradient, its probability − 1, is then the sum of all other probabilities.
        of_positives = g * marked
        found, others = of_positives.sum(1), (g - of_positives).sum(1)
        g.addcmul_(marked, (found / each)[:, None], value=-1.0).addcmul_(marked, (others / each)[:, None], value=-1.0)
        losses = torch.where((count == 1) & (found > 0.5), (others / found).log1p_(), losses)
        has_one = count > 0
        rows = max(1, int(has_one.sum())) if mean_of_rows else 1
        g.mul_((count.clamp_max(1.0) / rows)[:, None])
        return losses.where(has_one, 0.0).sum(dtype=torch.float64).item() / rows, g

    return _loss(z, None, scale, None, run.precision, 1, weigh)


def _softplus_(s: Tensor, g: Tensor) -> Tensor:
    """log(1 + exp s), in place, as max(s, 0) + 2·atanh(q / (2 − q)) with q = sigmoid(−|s|); g is sigmoid(s).

    `F.softplus`, and `exp` where it overflows, can take ten times as long.
    """
    rest = 1.0 - g
    torch.minimum(rest, g, out=rest)  # q
    rest.div_(2.0 - rest).atanh_()
    return s.clamp_min_(0.0).add_(rest, alpha=2.0)


def _leave_out(s: Tensor, ids: Tensor) -> None:
    """Sets pairs of equal ids to −inf, but not the matching pairs."""
    s.masked_fill_(equal_ids(ids, ids).fill_diagonal_(False), -torch.inf)


def _loss(
    x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, precision: str, divisor: int, weigh: Weigh
) -> Tensor:  # ()
    if precision != FLOAT32 and torch.is_autocast_enabled("cpu"):  # `precision` settles it
        with torch.autocast("cpu", enabled=False):
            return _loss(x, y, scale, bias, precision, divisor, weigh)
    loss: Tensor = _DenseLoss.apply(x, y, scale, bias, precision, 1 / divisor, weigh, torch.is_grad_enabled())
    return loss


class _DenseLoss(torch.autograd.Function):
    """Computes gradients with the loss, for a gradient of 1 that backward is nearly always called with."""

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

        def make() -> Tensor:
            s = torch.mm(rows, columns.T).mul_(scale)
            return s if bias is None else s.add_(bias)

        total, g = weigh(make)
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
                dy = torch.mm(g.T, rows, out=products).mul_(factor)  # fresh memory is slow
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
            by = dloss.item()
        except RuntimeError:  # its values cannot be read, as under `is_grads_batched=True`
            dx, dy, dscale, dbias = (None if d is None else d * dloss for d in (dx, dy, dscale, dbias))
        else:
            if by != 1.0:
                dx, dy = (None if d is None else d * by for d in (dx, dy))
            if dscale is not None:
                dscale = _number(dscale * by, scale)
            if dbias is not None:
                dbias = _number(dbias * by, bias)
        gradients: Sequence[Tensor | None] = (dx, dy, dscale, dbias)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = refuse_second_derivative((x, y, scale, bias), gradients)
        return *gradients, None, None, None, None


def _plus_transposed(g: Tensor) -> Tensor:  # (N, N)
    """g + gᵀ. Overwrites g, in squares that stay in the cache, if it is large: 19 ms instead of 45 for 2,048 rows."""
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
    return torch.scalar_tensor(value, dtype=like.dtype, device="cpu")  # whatever the default device is


def _sum(matrix: Tensor) -> float:
    """Σ of all entries, those of rows added up in float64."""
    total: float = sum(matrix.sum(1).tolist())
    return total


# ----------------------------------------------------------------------------------------------------------------------
# The Triton engine.
#
# Forward has four launches, or three for two views of one batch, or two for a sigmoid loss and for a softmax in one direction.
# Backward has one launch, which multiplies by the incoming gradient. In half precision and up to `plan.KERNEL_MATMUL_ROWS`
# rows, the kernels compute the matmuls, except the logits of two views and of labels. Otherwise there are three cuBLAS matmuls.
# The tiled paths need more launches, and the host would need longer for these launches than the device for the work. The logits
# fit the limit of a workspace (`dispatch.Limits.dense_triton`).
#
# Weights are multiplied in the precision of the inputs, as on the tiled paths, and matches are added in float32. Gradients are
# float32 until backward multiplies them.

MATCHES, ROWS, VIEWS, LABELS, SIGMOID = range(5)  # the kinds of `kernels.small`


class Task(NamedTuple):
    """Which loss."""

    kind: int
    divisor: int  # of the loss; 0 for the number of rows that share their label
    ids: Tensor | None = None  # (N,) ids or labels, or (N, 2) ids
    ids_are_positives: bool = False  # of SIGMOID


def _launch(x: Tensor, y: Tensor | None, scale: Tensor, bias: Tensor | None, run: Execution, task: "Task") -> Tensor:  # ()
    with use_device_of(x):
        loss: Tensor = _DenseKernelLoss.apply(x, y, scale, bias, run.precision, task, torch.is_grad_enabled())
    return loss


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
