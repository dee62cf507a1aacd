"""Decoupled contrastive learning (Yeh et al. 2022): InfoNCE with a query's own key left out of the denominator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.losses.arguments import batch_of
from megabatch.losses.contrast import QUERY_KEY, Negatives
from megabatch.pairwise import part_of_mean


def dcl(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    *,
    scale: float | Tensor,
    negatives: Tensor | Negatives | Sequence[Negatives] | None = None,
    contrast: Sequence[str] = (QUERY_KEY,),
    both: bool = False,
    ids: Tensor | None = None,  # (N,)
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # ()
    """The mean of log Σ_{j≠i} exp s_ij − s_ii: a pair that is almost certain still pulls with full weight.

    Same value and gradients as

        logits = scale * query @ key.T
        own = torch.eye(len(logits), dtype=torch.bool)
        return (logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.diagonal()).mean()

    It may be negative. A query without any negative adds nothing. The paper's form for two views is
    `contrast=("query-key", "query-query"), both=True`. Arguments are those of `info_nce`.
    """
    batch, number = batch_of(
        query,
        key,
        scale,
        negatives,
        contrast,
        both=both,
        ids=ids,
        log_q=None,
        margin=None,
        guide=None,
        group=group,
        backend=backend,
    )
    sums = batch.sums(number, contrast, both=both)
    losses = [torch.where(negatives == -torch.inf, 0.0, negatives - match) for negatives, match in sums.directions]
    return part_of_mean(torch.stack(losses), sums.share / len(losses))
