"""Decoupled contrastive learning (Yeh et al. 2022): InfoNCE with a query's own key left out of the denominator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.losses.contrast import QUERY_KEY, Batch, Contrast
from megabatch.losses.formulas import reduced
from megabatch.losses.negatives import Negatives
from megabatch.primitives import Backend, Group, Reduction


def dcl_loss(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    *,
    scale: float | Tensor,
    negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None = None,
    contrast: Sequence[Contrast] = (QUERY_KEY,),
    symmetric: bool = False,
    ids: Tensor | None = None,  # (N,)
    log_q: Tensor | None = None,  # (N,)
    margin: float | Tensor | None = None,  # or (N,)
    guide: tuple[Tensor, Tensor] | None = None,  # (N, E), (N, E)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """The mean of log Σ_{j≠i} exp s_ij − s_ii. The gradient of a pair stays large even if the pair is almost certain.

    Same value and gradients as

        logits = scale * query @ key.T
        own = torch.eye(len(logits), dtype=torch.bool)
        return (logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.diagonal()).mean()

    It may be negative. The loss of a query without negatives is 0. The paper's form for two views is
    `contrast=("query-key", "query-query"), symmetric=True`.

    Example:
        loss = mb.dcl_loss(query, key, scale=10.0)

    Args:
        query: (N, D) embeddings, usually of unit length.
        key: (N, D) embeddings; row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        negatives: see `info_nce_loss`.
        contrast: see `info_nce_loss`.
        symmetric: see `info_nce_loss`.
        ids: see `info_nce_loss`.
        log_q: see `info_nce_loss`.
        margin: see `info_nce_loss`.
        guide: see `info_nce_loss`.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    batch = Batch.of(
        query,
        key,
        scale,
        negatives,
        contrast,
        symmetric=symmetric,
        ids=ids,
        log_q=log_q,
        margin=margin,
        guide=guide,
        reduction=reduction,
        group=group,
        backend=backend,
    )
    sums = batch.sums()
    losses = [torch.where(negatives == -torch.inf, 0.0, negatives - match) for negatives, match in sums.directions]
    return reduced(losses, sums.share, reduction)
