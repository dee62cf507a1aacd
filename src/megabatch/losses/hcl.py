"""Hard-negative reweighting (Robinson et al. 2021), and with β = 0 the debiased loss (Chuang et al. 2020).

A negative is weighted by exp(β·s), normalised. A part τ⁺ of the negatives is expected to match by chance; its share of the
sum is subtracted. Both need two sums of exponentials, of (1 + β)·s and of β·s, from one pass each.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.losses.contrast import KEY_KEY, QUERY_KEY, Batch, Contrast
from megabatch.losses.formulas import cross_entropy, number_in_range, reduced
from megabatch.losses.negatives import Negatives
from megabatch.primitives import Backend, Group, Reduction, accumulator_dtype, sum_over_ranks


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
    """InfoNCE with its n negatives weighted by exp(β·s), and the expected share of chance matches subtracted.

    Same value and gradients as, with s the similarities of a query to its n negatives and p the similarity to its own key:

        weighted = n * ((1 + beta) * s).exp().sum(1) / (beta * s).exp().sum(1)
        negatives = ((weighted - tau_plus * n * p.exp()) / (1 - tau_plus)).clamp_min(n * math.exp(-scale))
        return -(p.exp() / (p.exp() + negatives)).log().mean()

    Embeddings must have unit length: the clamp is the least sum of n such similarities. The paper's form for two views is
    `contrast=("query-key", "query-query"), symmetric=True`. There is no `log_q`: the loss depends on the number of negatives,
    and a correction for their sampling would change it.

    Example:
        loss = mb.hcl_loss(query, key, scale=2.0, beta=1.0, tau_plus=0.1, negatives=[hard, bank])

    Args:
        query: (N, D) embeddings of unit length.
        key: (N, D) embeddings of unit length; row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        beta: concentration of the weights on similar negatives; 0 weights all alike.
        tau_plus: the probability that a random key is a match; below 1.
        negatives: see `info_nce_loss`; they count in n.
        contrast: see `info_nce_loss`.
        symmetric: see `info_nce_loss`.
        ids: see `info_nce_loss`; n counts only what is not left out.
        margin: see `info_nce_loss`; n counts only what is not left out.
        guide: see `info_nce_loss`.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    beta = number_in_range("beta", beta, "of at least 0")
    tau_plus = number_in_range("tau_plus", tau_plus, "from 0 to below 1", below=1)
    batch = Batch.of(
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
        reduction=reduction,
        group=group,
        backend=backend,
    )
    if any(further.log_q is not None for further in batch.negatives):
        raise ValueError(
            "negatives.log_q must be None: hcl_loss counts its negatives, and has no correction for their sampling"
        )
    counts = _log_counts(batch)
    upper, share = batch.sums(batch.scale * (1 + beta))
    weights = [lower.negatives for lower in batch.sums(batch.scale * beta).directions] if beta > 0 else counts
    losses = []
    for (total, match), weight, count in zip(upper, weights, counts, strict=True):
        match = match / (1 + beta)
        weighted = total - _finite(weight) + _finite(count)
        debiased = _debiased(weighted, count, match, batch.scale, tau_plus)
        losses.append(cross_entropy(debiased, match))
    return reduced(losses, share, reduction)


def _debiased(
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
        debiased = weighted
    else:
        chance = math.log(tau_plus) + count + match - weighted  # log of the part that is subtracted
        too_much = chance >= 0
        kept = (-torch.expm1(torch.where(too_much, -1.0, chance))).log()
        debiased = torch.where(too_much, floor, weighted + kept - math.log1p(-tau_plus))
    return torch.where(nothing, -torch.inf, torch.maximum(debiased, floor))


def _log_counts(batch: Batch) -> list[Tensor]:  # (N,) each
    """The logarithm of the number of negatives of each query, and of each key."""
    owned = any(further.owner is not None for further in batch.negatives)
    if batch.ids is not None or batch.limit is not None or (owned and KEY_KEY in batch.contrast):
        with torch.no_grad():  # the numbers differ from query to query: sums of exp(0)
            return [counted.negatives for counted in batch.sums(torch.zeros_like(batch.scale)).directions]
    N = len(batch.query)
    shared = sum(len(further.keys) for further in batch.negatives if not further.private)
    whole = sum_over_ranks(torch.stack([torch.full_like(batch.scale, size) for size in (N, shared)]), batch.run)
    of_keys = ((whole[0] - 1) * len(batch.contrast)).expand(N)
    of_queries = of_keys + whole[1]
    for further in batch.negatives:
        if further.private and further.owner is not None:
            of_queries = of_queries.index_add(0, further.owner, torch.ones_like(further.owner, dtype=of_queries.dtype))
    counts = [of_queries, of_keys] if batch.symmetric else [of_queries]
    return [count.log().to(accumulator_dtype(batch.query.dtype)) for count in counts]


def _finite(logarithm: Tensor) -> Tensor:
    """0 in place of −inf, where there are no negatives."""
    return torch.where(logarithm == -torch.inf, 0.0, logarithm)
