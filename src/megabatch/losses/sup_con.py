"""The supervised contrastive loss: every row finds the other rows of its label among all rows."""

from typing import Any, Literal

import torch
from torch import Tensor

from megabatch import checks
from megabatch.losses.formulas import cross_entropy, reduced
from megabatch.primitives import (
    Backend,
    Group,
    Reduction,
    execution,
    is_small,
    number,
    positive_similarities,
    positives_logsumexp,
    small_sup_con_loss,
    symmetric_logsumexp,
)


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
    """The supervised contrastive loss, without the N×N matrix of logits, each product formed once.

    Same value and gradients as the mean, over all rows that share their label with another, of

        logits = (scale * z @ z.T).fill_diagonal_(-torch.inf)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        out = logits.logsumexp(1) - logits.masked_fill(~positive, 0).sum(1) / positive.sum(1)
        in_ = logits.logsumexp(1) - logits.masked_fill(~positive, -torch.inf).logsumexp(1) + positive.sum(1).log()

    and 0 if there are no such rows. Never negative, differentiable once, float32 (float64 for float64 inputs). See
    `pairwise_logsumexp` for the precision.

    Example:
        loss = mb.sup_con_loss(F.normalize(z, dim=1), labels, scale=10.0)

    Args:
        z: (N, D) embeddings, usually of unit length.
        labels: (N,) integers; rows with equal labels are each other's positives.
        scale: the inverse temperature: a float, or a tensor of one element.
        form: where the mean over positives is taken: "out", of logarithms, or "in", of probabilities. "out" is the usual one,
            and its positives cost O(N·D). "in" computes the similarities of positives once more, in PyTorch operations.
        reduction: "mean", "sum", or "none" for one value per row, (N,), 0 for a row without a positive. See `clip_loss`.
        group: see `clip_loss`; a label may occur on several ranks.
        backend: see `clip_loss`.
    """
    run = execution(z, z, ("z", "z"), group=group, backend=backend)
    checks.labels(labels, z)
    checks.reduction(reduction)
    _check_form(form, backend)
    small = form == "out" and is_small(z, run, reduction)
    factor = number(scale, "scale", z, shared=not small)
    if small:
        return small_sup_con_loss(z, labels, factor, run, reduction=reduction)
    mean, count, sole, share = positive_similarities(z, labels, factor, run)
    if form == "in":
        others = symmetric_logsumexp(z, factor, run, ids=labels)
        positives = positives_logsumexp(z, labels, factor, run)
        losses = cross_entropy(others, torch.where(count > 0, positives, 0.0)) + count.clamp_min(1).to(mean.dtype).log()
    else:
        # A sole positive is kept apart, so that neither the loss nor its gradient loses digits when it is almost certain. Of
        # several, each is far from certain: the loss is at least the logarithm of their number.
        others = symmetric_logsumexp(z, factor, run, ids=sole)
        losses = torch.where(count == 1, cross_entropy(others, mean), others - mean)
    return reduced([torch.where(count > 0, losses, 0.0)], share, reduction)


def _check_form(value: Any, backend: Backend) -> None:
    if value not in ("out", "in"):
        raise ValueError(f"form must be 'out' or 'in', got {value!r}")
    if value == "in" and backend == "triton":
        raise ValueError(
            'backend="triton" cannot serve this call: there are no kernels for the positives of form="in". Use backend="auto"'
        )
