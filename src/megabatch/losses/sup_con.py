"""The supervised contrastive loss: every row finds the other rows of its label among all rows."""

from typing import Literal

import torch
from torch import Tensor

from megabatch import validation
from megabatch.arguments import Backend, Group, number
from megabatch.losses.sums import Reduction, cross_entropy, positive_similarities, positives_logsumexp, reduced
from megabatch.pairwise import pairwise_symmetric_logsumexp


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

    Args:
        z: (N, D) embeddings, usually of unit length.
        labels: one integer for each row; rows with the same one are each other's positives.
        scale: the inverse temperature: a float, or a tensor of one element.
        form: where the mean over positives is taken: "out", of logarithms, or "in", of probabilities. "out" is the usual one,
            and its positives cost O(N·D); those of "in" are formed as tiles once more, in PyTorch operations.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: process group to share the batch over, as in `clip_loss`; a label may occur on several of them.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    validation.embeddings(z, z, ("z", "z"))
    validation.labels(labels, z)
    validation.form(form, backend)
    validation.reduction(reduction)
    scale = number(scale, "scale", z, shared=True)
    mean, count, sole, share = positive_similarities(z, labels, scale, group=group)
    if form == "in":
        others = pairwise_symmetric_logsumexp(z, scale, exclude=labels, group=group, backend=backend)
        positives = positives_logsumexp(z, labels, scale, group=group)
        losses = cross_entropy(others, torch.where(count > 0, positives, 0.0)) + count.clamp_min(1).to(mean.dtype).log()
    else:
        # A sole positive is kept apart, so that neither the loss nor its gradient loses digits when it is almost certain. Of
        # several, each is far from certain: the loss is at least the logarithm of their number.
        others = pairwise_symmetric_logsumexp(z, scale, exclude=sole, group=group, backend=backend)
        losses = torch.where(count == 1, cross_entropy(others, mean), others - mean)
    return reduced([torch.where(count > 0, losses, 0.0)], share, reduction)
