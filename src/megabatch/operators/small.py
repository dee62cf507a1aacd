"""Losses of a small batch: one matrix of similarities, and the gradients from it in the forward pass.

A loss over tiles makes hundreds of calls into PyTorch, most of them for sums that wait for further tiles. If one tile holds all
similarities, the softmax of its rows and columns is complete at once, and with it the gradient up to the factor that backward
multiplies by. The matrix is freed before forward returns. As in the passes over tiles, neither a loss nor its gradient loses
digits when the matching pair is almost certain, and a softmax weight is at most 1 by construction. Here are PyTorch operations,
for a CPU; where kernels run, `small_kernels` does the same.

Not for a process group, `torch.compile` or transforms of `torch.func`: the other operators serve these.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.operators.definition import refusing
from megabatch.operators.pair_loss import pair_loss
from megabatch.operators.small_kernels import LABELS, MATCHES, SIGMOID, Task, small_loss
from megabatch.operators.transforms import transforms_are_active
from megabatch.tiles import plan
from megabatch.tiles.backends import TRITON
from megabatch.tiles.logsum import finite_or_zero
from megabatch.tiles.precision import SOFTPLUS_IS_IDENTITY, rounded

Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]  # similarities, overwritten → losses, and the gradient of their sum


def is_small(x: Tensor, rows: int, backend: str, group: str, *, tiled: bool = False) -> bool:
    """Whether the losses here serve a batch of `rows` like x: one process, at least two rows, and all pairs fit in memory.

    On a CPU they fit in one tile of the eager backend, with kernels in a workspace. `tiled` says that with kernels there is a
    loss over tiles too; if there are more rows than those of x, these are compared with one another.
    """
    if torch.compiler.is_compiling() or group or rows < 2 or transforms_are_active():
        return False
    if backend == TRITON:
        most = plan.SMALL_ROWS if rows == len(x) else plan.SMALL_SYMMETRIC_ROWS
        return rows * rows <= plan.SMALL_PAIRS or (tiled and rows <= most)
    tile = plan.eager_tile(x.device, x.dtype)
    return x.device.type == "cpu" and rows * rows <= tile.rows * tile.columns


def small_cross_entropy(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    precision: str,
    backend: str,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ii over rows, and with `columns` over columns too, ÷ `divisor`; equal ids are left out."""
    if backend == TRITON and len(x) ** 2 > plan.SMALL_PAIRS:
        return pair_loss(x, y, scale, (ids, ids), precision, columns=columns, divisor=divisor)
    if backend == TRITON:
        return small_loss(x, y, scale, None, precision, Task(MATCHES, divisor, ids, columns))
    return _cross_entropy(x, y, scale, (ids, ids), precision, columns=columns, divisor=divisor)


def small_nt_xent_loss(z1: Tensor, z2: Tensor, scale: Tensor, precision: str, backend: str, *, divisor: int) -> Tensor:  # ()
    """Σ_i of −log softmax(s)_ij over all views i of all samples, where j is the other view of the same sample, ÷ `divisor`."""
    rows = 2 * len(z1)
    if backend == TRITON and rows**2 <= plan.SMALL_PAIRS:
        return small_loss(z1, z2, scale, None, precision, Task(LABELS, divisor))
    own = torch.arange(rows, device=z1.device)  # a view is not compared with itself
    views, partners = torch.cat((z1, z2)), torch.cat((z2, z1))
    ids = own, own.roll(len(z1))
    if backend == TRITON:
        return pair_loss(views, partners, scale, ids, precision, columns=False, divisor=divisor)
    return _cross_entropy(views, partners, scale, ids, precision, columns=False, divisor=divisor)


def _cross_entropy(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: tuple[Tensor | None, Tensor | None],  # (N,), (N,)
    precision: str,
    *,
    columns: bool,
    divisor: int,
) -> Tensor:  # ()
    def weigh(s: Tensor) -> tuple[Tensor, Tensor]:
        _leave_out(s, *ids)
        diagonal = s.diagonal()
        match = diagonal.clone()
        diagonal.fill_(-torch.inf)
        peaks = s.amax(1)
        if not columns:
            shift = finite_or_zero(peaks)
            g = s.sub_(shift[:, None]).exp_()
            losses, weight, per_unit = _negatives(shift, g.sum(1), match)
            g.mul_(per_unit[:, None])
            diagonal.sub_(weight)
            return losses, g
        shift = finite_or_zero(torch.stack((peaks, s.amax(0))))
        g = torch.sub(s, shift[0, :, None]).exp_()
        of_columns = s.sub_(shift[1]).exp_()
        losses, weight, per_unit = _negatives(shift, torch.stack((g.sum(1), of_columns.sum(0))), match)
        g.mul_(per_unit[0, :, None]).addcmul_(of_columns, per_unit[1])
        g.diagonal().sub_(weight.sum(0))
        return losses, g

    return _loss(x, y, scale, None, precision, divisor, weigh)


def _negatives(shift: Tensor, total: Tensor, match: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (N,) or (2, N) each
    """(cross-entropies of matches beside negatives that sum up to exp(shift) · total, softmax of all negatives, of a unit).

    The largest term of a sum is exp(0), so a total is at least 1, or 0 where there is no negative.
    """
    odds = shift + total.log() - torch.nan_to_num(match, torch.nan, posinf=torch.nan, neginf=-torch.inf)
    losses = F.softplus(odds, threshold=SOFTPLUS_IS_IDENTITY)
    weight = odds.sigmoid_()
    return losses, weight, weight / total.clamp_min_(1.0)


def small_sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    precision: str,
    backend: str,
    *,
    ids_are_positives: bool,
    divisor: int,
) -> Tensor:  # ()
    """The sum of `sigmoid_loss` ÷ `divisor`."""
    if backend == TRITON:
        return small_loss(x, y, scale, bias, precision, Task(SIGMOID, divisor, ids, ids_are_positives=ids_are_positives))

    def weigh(s: Tensor) -> tuple[Tensor, Tensor]:
        if ids is not None and ids_are_positives:
            signs = torch.where(ids[:, None] == ids, -1.0, 1.0).to(s.dtype)
            g = s.mul_(signs).sigmoid().mul_(signs)
        else:
            _leave_out(s, ids, ids)
            s.diagonal().neg_()
            g = s.sigmoid()
            g.diagonal().neg_()
        return _softplus_(s).sum(1), g

    return _loss(x, y, scale, bias, precision, divisor, weigh)


def small_sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    precision: str,
    backend: str,
    *,
    mean_of_rows: bool,
) -> Tensor:  # ()
    """Σ_i of the mean of −log softmax(s)_ij over the other rows j of i's label; summed, or the mean of rows.

    A row is not compared with itself.
    """
    if backend == TRITON:
        return small_loss(z, None, scale, None, precision, Task(LABELS, 0 if mean_of_rows else 1, labels))

    def weigh(s: Tensor) -> tuple[Tensor, Tensor]:
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        count = positive.sum(1).to(s.dtype)
        has_one, sole = count > 0, count == 1
        mean = torch.where(positive, s, 0.0).sum(1) / count.clamp_min(1.0)
        s.fill_diagonal_(-torch.inf).masked_fill_(positive & sole[:, None], -torch.inf)
        shift = finite_or_zero(s.amax(1))
        g = s.sub_(shift[:, None]).exp_()
        total = g.sum(1)
        several = shift + total.log() - mean  # each of several positives is far from certain
        losses, weight, per_unit = _negatives(shift, total, mean)
        rows = has_one.sum(dtype=torch.float64).clamp_min_(1.0) if mean_of_rows else 1.0
        share = (has_one / rows).to(s.dtype)
        per_unit = torch.where(sole, per_unit, 1 / total) * share
        pull = torch.where(sole, weight, 1.0) * share / count.clamp_min(1.0)
        g.mul_(per_unit[:, None]).addcmul_(positive.to(s.dtype), pull[:, None], value=-1.0)
        losses = torch.where(has_one, torch.where(sole, losses, several), 0.0)
        return losses.sum(dtype=torch.float64) / rows, g

    return _loss(z, z, scale, None, precision, 1, weigh)


def _softplus_(s: Tensor) -> Tensor:
    """log(1 + exp s), in place, as max(s, 0) + 2·atanh(1 / (1 + 2·exp|s|)): `F.softplus` can take ten times as long."""
    rest = s.abs().exp_().mul_(2.0).add_(1.0).reciprocal_().atanh_()
    return s.clamp_min_(0.0).add_(rest, alpha=2.0)


def _leave_out(s: Tensor, row_ids: Tensor | None, col_ids: Tensor | None) -> None:
    """Sets pairs of equal ids to −inf, but not the matching pairs."""
    if row_ids is not None and col_ids is not None:
        s.masked_fill_((row_ids[:, None] == col_ids).fill_diagonal_(False), -torch.inf)


def _loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, precision: str, divisor: int, weigh: Weigh) -> Tensor:
    learns = torch.is_grad_enabled()
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():  # `precision` settles it
        loss: Tensor = _SmallLoss.apply(x, y, scale, bias, precision, 1 / divisor, weigh, learns)
    return loss


class _SmallLoss(torch.autograd.Function):
    """Computes gradients with the loss, up to factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        precision: str,
        share: float,
        weigh: Weigh,
        learns: bool,
    ) -> Tensor:
        rows, columns = rounded(x, precision), rounded(y, precision)
        factor = scale.to(rows.dtype)
        s = torch.mm(rows, columns.T).mul_(factor)
        if bias is not None:
            s.add_(bias)
        losses, g = weigh(s)
        if learns:
            needs_x, needs_y, needs_scale, needs_bias, *_ = ctx.needs_input_grad
            dx = torch.mm(g, columns) if needs_x or needs_scale else None
            products = dx * rows if dx is not None and needs_scale else None
            dscale = None if products is None else products.sum(1).sum(dtype=torch.float64)
            dy = torch.mm(g.T, rows, out=products) if needs_y else None  # fresh memory is slow
            dbias = g.sum(1).sum(dtype=torch.float64) if needs_bias else None
            ctx.save_for_backward(x, y, scale, bias, dx if needs_x else None, dy, dscale, dbias)
            ctx.factors = share, factor
        return losses.sum(dtype=torch.float64).mul_(share).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        share, factor = ctx.factors
        *inputs, dx, dy, dscale, dbias = ctx.saved_tensors
        unit = dloss * share
        scaled = unit * factor
        found = zip(inputs, (dx, dy, dscale, dbias), (scaled, scaled, unit, unit), ctx.needs_input_grad, strict=False)
        gradients = [(saved * by).to(tensor.dtype) if need else None for tensor, saved, by, need in found]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = refusing(inputs, gradients)
        return *gradients, None, None, None, None
