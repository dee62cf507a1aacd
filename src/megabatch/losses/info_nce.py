"""InfoNCE and two variants that treat negatives differently: DCL (decoupled) and HCL (hard negatives)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.losses.negatives import (
    KEY_KEY,
    QUERY_KEY,
    Contrast,
    ContrastBatch,
    ContrastSums,
    Direction,
    Negatives,
    describe_purpose,
)
from megabatch.primitives import (
    cross_entropy,
    cross_entropy_loss,
    describe_loss,
    mean_logit,
    pairs,
    reduce_losses,
    sum_over_ranks,
)

# ----------------------------------------------------------------------------------------------------------------------
# InfoNCE: each query finds its key among many. Dense retrieval, two-tower recommenders, MoCo and GTE use forms of it.


def info_nce_loss(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    scale: float | Tensor,
    *,
    negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None = None,
    contrast: Sequence[Contrast] = (QUERY_KEY,),
    symmetric: bool = False,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    log_q: Tensor | None = None,  # (N,)
    margin: float | Tensor | None = None,  # or (N,)
    guide: tuple[Tensor, Tensor] | None = None,  # (N, E), (N, E)
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the cross-entropy of each query's own key against its negatives, without storing the matrix of logits.

    It has the same value and gradients as

        logits = scale * query @ key.T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    Negatives and contrasts add columns to the logits. Ids, margin and guide set some logits to −inf. The loss can be
    differentiated once, and without label smoothing it is never negative. Its dtype is float32, or float64 for float64 inputs.
    See `pairwise_logsumexp` for the precision.

    Examples:
        ```python
        loss = mb.info_nce_loss(query, key, scale=50.0, negatives=hard)  # hard: (N, K, D), K hard negatives of each query
        ```

    Args:
        query: (N, D) embeddings, usually of unit length.
        key: (N, D) embeddings. Row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        negatives: keys that match no query: (M, D), or (N, K, D) for K hard negatives of each query. They can also be the
            detached keys of a memory bank. Every query is compared with all of them, unless `Negatives` restricts that. Several
            kinds are passed as a list.
        contrast: the logits within the batch that are negatives of query i. "query-key" compares the query with other keys.
            "query-query" compares the query with other queries. "key-query" compares its key with other queries. "key-key"
            compares its key with other keys and with the hard negatives of other queries. GTE uses all four. With `()`, only
            `negatives` are used.
        symmetric: whether the loss is the mean of both directions. In the second direction, queries and keys swap roles, and
            `negatives` are not used.
        ids: (N,) integers. Queries and keys with equal ids, such as a document that occurs twice, are not each other's
            negatives. Ids of shape (N, 2) can have the number of the query and the number of the key; see `clip_loss`.
        log_q: (N,) the log of the sampling probability of each key. It is subtracted from all logits of the key.
        margin: a number, or one number for each query, (N,). Let p be the dot product of the query and its own key. A negative
            is excluded if its dot product with the query exceeds p by more than the margin, because the negative is probably an
            unlabeled match. The margin has no gradient.
        guide: (N, E), (N, E) embeddings of queries and keys by another model. If given, their dot products decide which
            negatives are excluded. The default margin is then 0.
        label_smoothing: the part of the target that is spread evenly over the columns of the logits, as in `F.cross_entropy`.
            It is supported only for the contrast "query-key", without ids, margin, guide and private negatives.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`; each rank passes its own pairs and negatives.
        backend: see `clip_loss`.
    """
    label_smoothing = checks.check_smoothing(label_smoothing, ids=ids, margin=margin, guide=guide)
    others_are_keys = negatives is None and contrast in ((QUERY_KEY,), [QUERY_KEY])
    if others_are_keys and log_q is None and margin is None and guide is None and label_smoothing == 0:
        loss = describe_loss(group, "info_nce_loss", reduction=reduction)
        purpose = "" if group is None else describe_purpose(contrast, symmetric=symmetric)
        run = pairs(
            query, key, ("query", "key"), ids=ids, reduction=reduction, group=group, purpose=purpose, loss=loss, backend=backend
        )
        loss_at_once = cross_entropy_loss(query, key, scale, run, columns=symmetric, name="scale", ids=ids, reduction=reduction)
        if loss_at_once is not None:
            return loss_at_once
    batch = ContrastBatch.of(
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
        loss="info_nce_loss",
        label_smoothing=label_smoothing,
    )
    if label_smoothing > 0:
        _check_smoothed(batch)
    sums = batch.sums()
    losses = [cross_entropy(negatives, match, query) for negatives, match in sums.directions]
    if label_smoothing > 0:
        above = _above_the_mean(batch, sums)
        losses = [loss + label_smoothing * more for loss, more in zip(losses, above, strict=True)]
    return reduce_losses(losses, sums.mean_weight, reduction, query)


def _above_the_mean(batch: ContrastBatch, sums: ContrastSums) -> list[Tensor]:  # (N,) each
    """Returns s_ii minus the mean of all logits of query i, for each direction."""
    keys = [(batch.key, batch.log_q), *((further.keys, further.log_q) for further in batch.negatives)]
    queries: list[tuple[Tensor, Tensor | None]] = [(batch.query, None)]
    sides = ((batch.query, keys), (batch.key, queries))
    return [
        match - mean_logit(rows, columns, batch.scale, batch.run)
        for (_, match), (rows, columns) in zip(sums.directions, sides, strict=False)
    ]


def _check_smoothed(batch: ContrastBatch) -> None:
    if any(further.private for further in batch.negatives):
        raise ValueError(
            "negatives must not be private with label smoothing, because label smoothing averages over all keys of the batch"
        )
    if tuple(batch.contrast) != (QUERY_KEY,):
        raise ValueError(f"contrast must be ({QUERY_KEY!r},) with label smoothing, got {batch.contrast!r}")


# ----------------------------------------------------------------------------------------------------------------------
# Decoupled contrastive learning (Yeh et al. 2022): InfoNCE without a query's own key in the denominator.


def dcl_loss(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    scale: float | Tensor,
    *,
    negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None = None,
    contrast: Sequence[Contrast] = (QUERY_KEY,),
    symmetric: bool = False,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    log_q: Tensor | None = None,  # (N,)
    margin: float | Tensor | None = None,  # or (N,)
    guide: tuple[Tensor, Tensor] | None = None,  # (N, E), (N, E)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the mean of log Σ_{j≠i} exp s_ij − s_ii. The gradient of a pair stays large if its probability is near 1.

    It has the same value and gradients as

        logits = scale * query @ key.T
        own = torch.eye(len(logits), dtype=torch.bool)
        return (logits.masked_fill(own, -torch.inf).logsumexp(1) - logits.diagonal()).mean()

    The loss may be negative. The loss of a query without negatives is 0. The paper's form for two views is
    `contrast=("query-key", "query-query"), symmetric=True`.

    Examples:
        ```python
        loss = mb.dcl_loss(query, key, scale=10.0)
        ```

    Args:
        query: (N, D) embeddings, usually of unit length.
        key: (N, D) embeddings. Row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        negatives: see `info_nce_loss`.
        contrast: see `info_nce_loss`.
        symmetric: see `info_nce_loss`.
        ids: see `info_nce_loss`.
        log_q: see `info_nce_loss`.
        margin: see `info_nce_loss`.
        guide: see `info_nce_loss`.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    batch = ContrastBatch.of(
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
        loss="dcl_loss",
    )
    sums = batch.sums()
    losses = [torch.where(negatives == -torch.inf, 0.0, negatives - match) for negatives, match in sums.directions]
    return reduce_losses(losses, sums.mean_weight, reduction, query)


# ----------------------------------------------------------------------------------------------------------------------
# Hard-negative reweighting (Robinson et al. 2021), and with β = 0 the debiased loss (Chuang et al. 2020).
#
# Negatives are weighted by normalized exp(β·s). A part τ⁺ of the negatives is expected to match by chance, and its part of the
# sum is subtracted. This needs the sums of exp((1 + β)·s) and of exp(β·s), which take one pass each.


def hcl_loss(
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D)
    scale: float | Tensor,
    *,
    beta: float = 1.0,
    tau_plus: float = 0.1,
    negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None = None,
    contrast: Sequence[Contrast] = (QUERY_KEY,),
    symmetric: bool = False,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    margin: float | Tensor | None = None,  # or (N,)
    guide: tuple[Tensor, Tensor] | None = None,  # (N, E), (N, E)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes InfoNCE with its n negatives weighted by exp(β·s), minus the part that is expected from chance matches.

    Let s be the logits of a query and its n negatives, and p the logit of its own key. The loss has the same value and
    gradients as

        weighted = n * ((1 + beta) * s).exp().sum(1) / (beta * s).exp().sum(1)
        negatives = ((weighted - tau_plus * n * p.exp()) / (1 - tau_plus)).clamp_min(n * math.exp(-scale))
        return -(p.exp() / (p.exp() + negatives)).log().mean()

    Embeddings must have unit length, because the clamp is the smallest possible sum of exp(s) over n negatives of unit length.
    The paper's form for two views is `contrast=("query-key", "query-query"), symmetric=True`. There is no `log_q`, because the
    loss depends on the number of negatives, and a correction for their sampling would change this number.

    Examples:
        ```python
        loss = mb.hcl_loss(query, key, scale=2.0, beta=1.0, tau_plus=0.1, negatives=[hard, bank])
        ```

    Args:
        query: (N, D) embeddings of unit length.
        key: (N, D) embeddings of unit length. Row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        beta: the concentration of the weights on similar negatives. With 0, all weights are equal.
        tau_plus: the probability that a random key is a match, from 0 to below 1.
        negatives: see `info_nce_loss`. n includes them.
        contrast: see `info_nce_loss`.
        symmetric: see `info_nce_loss`.
        ids: see `info_nce_loss`. n does not include excluded negatives.
        margin: see `info_nce_loss`. n does not include excluded negatives.
        guide: see `info_nce_loss`.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    beta = checks.number_in_range("beta", beta, "of at least 0")
    tau_plus = checks.number_in_range("tau_plus", tau_plus, "from 0 to below 1", below=1)
    batch = ContrastBatch.of(
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
        loss="hcl_loss",
        beta=beta,
        tau_plus=tau_plus,
    )
    if any(further.log_q is not None for further in batch.negatives):
        raise ValueError(
            "negatives.log_q must be None, because hcl_loss counts its negatives and has no correction for their sampling"
        )
    counts = _log_counts(batch)
    upper, mean_weight = batch.sums(batch.scale * (1 + beta))
    nothing = torch.zeros_like(upper[0].match)
    lower = batch.sums(batch.scale * beta).directions if beta > 0 else [Direction(count, nothing) for count in counts]
    losses = []
    for (total, match_above), (weight, match_below), count in zip(upper, lower, counts, strict=True):
        match = match_above / (1 + beta)
        # (1 + β)·s and β·s are rounded separately. The rounding error of their difference is estimated from the match, for
        # which the difference must be s.
        rounding = (match - (match_above - match_below)).detach()
        weighted = total - _finite(weight) + _finite(count) + torch.where(rounding.isfinite(), rounding, 0.0)
        debiased = _debias(weighted, count, match, batch.scale, tau_plus)
        losses.append(cross_entropy(debiased, match, query))
    return reduce_losses(losses, mean_weight, reduction, query)


def _debias(
    weighted: Tensor,  # (N,) log of the reweighted sum over the negatives; −inf without negatives
    count: Tensor,  # (N,) log n
    match: Tensor,  # (N,)
    scale: Tensor,  # ()
    tau_plus: float,
) -> Tensor:  # (N,)
    """Computes log((exp weighted − τ⁺·n·exp match) / (1 − τ⁺)), clamped to at least log(n·exp(−scale))."""
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


def _log_counts(batch: ContrastBatch) -> list[Tensor]:  # (N,) each
    """Returns the logarithm of the number of negatives of each query, and of each key."""
    owned = any(further.owner is not None for further in batch.negatives)
    if batch.ids is not None or batch.limit is not None or (owned and KEY_KEY in batch.contrast):
        with torch.no_grad():  # the numbers differ between queries, so they are computed as sums of exp(0)
            return [counted.negatives for counted in batch.sums(torch.zeros_like(batch.scale)).directions]
    N = len(batch.query)
    shared = sum(len(further.keys) for further in batch.negatives if not further.private)
    total = sum_over_ranks(torch.stack([torch.full_like(batch.scale, size) for size in (N, shared)]), batch.run)
    of_keys = ((total[0] - 1) * len(batch.contrast)).expand(N)
    of_queries = of_keys + total[1]
    for further in batch.negatives:
        if further.private and further.owner is not None:
            of_queries = of_queries.index_add(0, further.owner, torch.ones_like(further.owner, dtype=of_queries.dtype))
    counts = [of_queries, of_keys] if batch.symmetric else [of_queries]
    return [count.log() for count in counts]


def _finite(logarithm: Tensor) -> Tensor:
    """Replaces −inf by 0, for queries without negatives."""
    return torch.where(logarithm == -torch.inf, 0.0, logarithm)
