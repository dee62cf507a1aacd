"""Decoupled contrastive learning (Yeh et al. 2022): InfoNCE with a query's own key left out of the denominator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.arguments import Backend, Group
from megabatch.losses.arguments import batch_of
from megabatch.losses.contrast import QUERY_KEY, Contrast, Negatives
from megabatch.losses.sums import Reduction, reduced


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
    """The mean of log Σ_{j≠i} exp s_ij − s_ii: a pair that is almost certain still pulls with full weight.

    Same value and gradients as

        logits = scale * query @ key.T
        own = torch.eye(len(logits), dtype=torch.bool)
        return (logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.diagonal()).mean()

    It may be negative. A query without any negative adds nothing. The paper's form for two views is
    `contrast=("query-key", "query-query"), symmetric=True`. Arguments are those of `info_nce_loss`.
    """
    batch, number = batch_of(
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
        group=group,
        reduction=reduction,
        backend=backend,
    )
    sums = batch.sums(number, contrast, symmetric=symmetric)
    losses = [torch.where(negatives == -torch.inf, 0.0, negatives - match) for negatives, match in sums.directions]
    return reduced(losses, sums.share, reduction)
