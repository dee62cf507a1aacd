"""Losses of a batch against itself: NT-Xent (SimCLR) for two views of each sample, and SupCon for labels."""

from typing import Any, Literal

import torch
from torch import Tensor

from megabatch import checks, primitives
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.primitives import (
    SEPARATE,
    cross_entropy,
    describe_loss,
    execution,
    log_add,
    logsumexp,
    mean_positive_logits,
    number,
    pairs,
    positives_logsumexp,
    reduce_losses,
    symmetric_logsumexp,
    widen_float16,
)

# ----------------------------------------------------------------------------------------------------------------------
# The loss of SimCLR. Each view of a sample finds the other view among all views of all samples.


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: float | Tensor = 10.0,
    *,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the normalized-temperature cross-entropy of SimCLR without storing a large 2N×2N matrix of logits.

    Each dot product is computed once.

    It has the same value and gradients as

        z = torch.cat((z1, z2))
        logits = (scale * z @ z.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z1)))

    The loss is never negative and can be differentiated once. Its dtype is float32, or float64 for float64 inputs. See
    `pairwise_logsumexp` for the precision. If a gradient is needed, the forward pass computes it, except with
    `reduction="none"`.

    Examples:
        ```python
        loss = mb.nt_xent_loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale=10.0)
        ```

    Args:
        z1: (N, D) embeddings of one view, usually of unit length.
        z2: (N, D) embeddings of the other view. Row i and row i of `z1` belong to the same sample.
        scale: the inverse temperature: a float, or a tensor of one element.
        reduction: "mean", "sum" or "none". "none" returns one value for each sample, (N,), the mean of its two views. "sum" is
            N times the mean. See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    # Negatives are views of other samples. One pass over z1·z2ᵀ sums over negatives from the other view. The symmetric passes
    # sum over negatives from the same view.
    loss = describe_loss(group, "nt_xent_loss", reduction=reduction)
    run = pairs(z1, z2, ("z1", "z2"), reduction=reduction, group=group, loss=loss, backend=backend)
    loss_at_once = primitives.nt_xent_loss(z1, z2, scale, run, reduction=reduction)
    if loss_at_once is not None:
        return loss_at_once
    factor = number(scale, "scale", z1, shared=True)
    z1, z2 = widen_float16(z1), widen_float16(z2)
    across1, across2, match, mean_weight = logsumexp(z1, z2, factor, run, diagonal=SEPARATE, columns=True)
    within1, within2 = (symmetric_logsumexp(z, factor, run) for z in (z1, z2))
    losses = [cross_entropy(log_add(sums, match), match, z1) for sums in ((across1, within1), (across2, within2))]
    return reduce_losses(losses, mean_weight, reduction, z1)


# ----------------------------------------------------------------------------------------------------------------------
# The supervised contrastive loss. Each row finds the other rows with its label among all rows.


def sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor = 10.0,
    *,
    form: Literal["out", "in"] = "out",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the supervised contrastive loss without storing a large N×N matrix of logits.

    Each dot product is computed once. The loss has the same value and gradients as the mean of `out` or `in_` (see `form`),
    taken over all rows that share their label with another row:

        logits = (scale * z @ z.T).fill_diagonal_(-torch.inf)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        out = logits.logsumexp(1) - logits.masked_fill(~positive, 0).sum(1) / positive.sum(1)
        in_ = logits.logsumexp(1) - logits.masked_fill(~positive, -torch.inf).logsumexp(1) + positive.sum(1).log()

    The loss is 0 if there are no such rows. It is never negative and can be differentiated once. Its dtype is float32, or
    float64 for float64 inputs. See `pairwise_logsumexp` for the precision.

    Examples:
        ```python
        loss = mb.sup_con_loss(F.normalize(z, dim=1), labels, scale=10.0)
        ```

    Args:
        z: (N, D) embeddings, usually of unit length.
        labels: (N,) integers. Rows with equal labels are each other's positives.
        scale: the inverse temperature: a float, or a tensor of one element.
        form: "out" takes the mean of the log-probabilities of the positives, and "in" takes the log of their mean probability.
            "out" is the usual form, and its positives cost O(N·D). "in" computes the logits of positives again, with PyTorch
            operations.
        reduction: "mean", "sum" or "none". "none" returns one value for each row, (N,), which is 0 for a row without a
            positive. See `clip_loss`.
        group: see `clip_loss`. A label may occur on several ranks.
        backend: see `clip_loss`.
    """
    checks.reduction(reduction)
    loss = describe_loss(group, "sup_con_loss", form=form, reduction=reduction)
    run = execution(z, z, ("z", "z"), group=group, loss=loss, backend=backend)
    checks.labels(labels, z)
    _check_form(form, backend)
    loss_at_once = primitives.sup_con_loss(z, labels, scale, run, reduction=reduction) if form == "out" else None
    if loss_at_once is not None:
        return loss_at_once
    factor = number(scale, "scale", z, shared=True)
    z = widen_float16(z)
    mean, count, sole, mean_weight = mean_positive_logits(z, labels, factor, run)
    if form == "in":
        others = symmetric_logsumexp(z, factor, run, ids=labels)
        positives = positives_logsumexp(z, labels, factor, run)
        losses = cross_entropy(others, torch.where(count > 0, positives, 0.0), z) + count.clamp_min(1).to(mean.dtype).log()
    else:
        # A sole positive is excluded from `others`, so that neither the loss nor its gradient loses digits if its probability
        # is near 1. With several positives, no probability is near 1, because the loss is at least the log of their number.
        others = symmetric_logsumexp(z, factor, run, ids=sole)
        losses = torch.where(count == 1, cross_entropy(others, mean, z), others - mean)
    return reduce_losses([torch.where(count > 0, losses, 0.0)], mean_weight, reduction, z)


def _check_form(value: Any, backend: Backend) -> None:
    if value not in ("out", "in"):
        raise ValueError(f"form must be 'out' or 'in', got {value!r}")
    if value == "in" and backend == "triton":
        raise ValueError(
            'backend="triton" cannot serve this call: there are no kernels for the positives of form="in". Use backend="auto"'
        )
