"""Hard-negative reweighting (Robinson et al. 2021), and with β = 0 the debiased loss (Chuang et al. 2020).

Negatives count by how similar they are, exp(β·s) normalised, and what chance matches add to them, a part τ⁺ of all keys, is
subtracted. Both are ratios of sums of exponentials: of (1 + β)·s and of β·s, one walk each.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megabatch.arguments import Backend, Group
from megabatch.losses.arguments import batch_of
from megabatch.losses.contrast import KEY_KEY, QUERY_KEY, Batch, Contrast, Negatives
from megabatch.losses.sums import Reduction, cross_entropy, reduced, sum_over_ranks
from megabatch.tiles.precision import accumulator_dtype


def hcl_loss(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    *,
    scale: float | Tensor,
    beta: float = 1.0,
    tau_plus: float = 0.1,
    negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None = None,
    contrast: Sequence[Contrast] = (QUERY_KEY,),
    symmetric: bool = False,
    ids: Tensor | None = None,  # (N,)
    margin: float | Tensor | None = None,  # or (N,)
    guide: tuple[Tensor, Tensor] | None = None,  # (N, E), (N, E)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """InfoNCE whose n negatives are reweighted by exp(β·s) and freed of chance matches.

    Same value and gradients as, with s the similarities to the n negatives of a query and p that to its own key:

        weighted = n * ((1 + beta) * s).exp().sum(1) / (beta * s).exp().sum(1)
        negatives = ((weighted - tau_plus * n * p.exp()) / (1 - tau_plus)).clamp_min(n * math.exp(-scale))
        return -(p.exp() / (p.exp() + negatives)).log().mean()

    Embeddings have to be of unit length: the clamp is the least that n similarities can add up to. The paper's form for two
    views is `contrast=("query-key", "query-query"), symmetric=True`. The other arguments are those of `info_nce_loss`; `log_q`
    is not among them, because the loss counts negatives, and a correction would count some of them more than once.

    Args:
        query: (N, D) embeddings of unit length.
        key: (N, D) embeddings of unit length; row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        beta: how much harder negatives count more; 0 for all alike.
        tau_plus: how likely a key drawn at random is a match; below 1.
        negatives: see `info_nce_loss`; n counts them.
        contrast: see `info_nce_loss`.
        symmetric: see `info_nce_loss`.
        ids: see `info_nce_loss`; n does not count what is left out.
        margin: see `info_nce_loss`; n does not count what is left out.
        guide: see `info_nce_loss`.
        reduction: see `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    beta = _number("beta", beta, "of at least 0", math.inf)
    tau_plus = _number("tau_plus", tau_plus, "from 0 to below 1", 1)
    batch, number = batch_of(
        query,
        key,
        scale,
        negatives,
        contrast,
        symmetric=symmetric,
        ids=ids,
        log_q=None,
        margin=margin,
        guide=guide,
        group=group,
        reduction=reduction,
        backend=backend,
    )
    if any(further.log_q is not None for further in batch.negatives):
        raise ValueError(
            "negatives.log_q must be None: hcl_loss counts its negatives, and has no correction for their sampling"
        )
    counts = _log_counts(batch, number, contrast, symmetric=symmetric)
    upper, share = batch.sums(number * (1 + beta), contrast, symmetric=symmetric)
    weights = (
        [lower.negatives for lower in batch.sums(number * beta, contrast, symmetric=symmetric).directions]
        if beta > 0
        else counts
    )
    losses = []
    for (total, match), weight, count in zip(upper, weights, counts, strict=True):
        match = match / (1 + beta)
        weighted = total - _finite(weight) + _finite(count)
        freed = _freed_of_matches(weighted, count, match, number, tau_plus)
        losses.append(cross_entropy(freed, match))
    return reduced(losses, share, reduction)


def _freed_of_matches(
    weighted: Tensor,  # (N,) log Σ over the negatives, reweighted; −inf without any
    count: Tensor,  # (N,) log n
    match: Tensor,  # (N,)
    scale: Tensor,  # ()
    tau_plus: float,
) -> Tensor:  # (N,)
    """log((exp weighted − τ⁺·n·exp match) / (1 − τ⁺)), and at least log(n·exp(−scale))."""
    nothing = weighted == -torch.inf
    weighted, count = _finite(weighted), _finite(count)
    floor = count - scale
    if tau_plus == 0:
        freed = weighted
    else:
        chance = math.log(tau_plus) + count + match - weighted  # log of the part that is subtracted
        too_much = chance >= 0
        kept = (-torch.expm1(torch.where(too_much, -1.0, chance))).log()
        freed = torch.where(too_much, floor, weighted + kept - math.log1p(-tau_plus))
    return torch.where(nothing, -torch.inf, torch.maximum(freed, floor))


def _log_counts(batch: Batch, scale: Tensor, contrast: Sequence[Contrast], *, symmetric: bool) -> list[Tensor]:  # (N,) each
    """The logarithm of the number of negatives of each query, and of each key."""
    owned = any(further.owner is not None for further in batch.negatives)
    if batch.ids is not None or batch.limit is not None or (owned and KEY_KEY in contrast):  # then queries have different ones
        with torch.no_grad():
            return [
                counted.negatives for counted in batch.sums(torch.zeros_like(scale), contrast, symmetric=symmetric).directions
            ]
    N = len(batch.query)
    shared = sum(len(further.keys) for further in batch.negatives if not further.private)
    whole = sum_over_ranks(torch.stack([torch.full_like(scale, size) for size in (N, shared)]), batch.run)
    of_keys = ((whole[0] - 1) * len(contrast)).expand(N)
    of_queries = of_keys + whole[1]
    for further in batch.negatives:
        if further.private and further.owner is not None:
            of_queries = of_queries.index_add(0, further.owner, torch.ones_like(further.owner, dtype=of_queries.dtype))
    counts = [of_queries, of_keys] if symmetric else [of_queries]
    return [count.log().to(accumulator_dtype(batch.query.dtype)) for count in counts]


def _finite(logarithm: Tensor) -> Tensor:
    """0 in place of −inf, where there is nothing to weigh."""
    return torch.where(logarithm == -torch.inf, 0.0, logarithm)


def _number(name: str, value: Any, expected: str, below: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        raise ValueError(f"{name} must be a number {expected}, got {value!r}")
    return float(value)
