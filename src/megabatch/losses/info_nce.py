"""InfoNCE: each query finds its key among many. Dense retrieval, two-tower recommenders, MoCo and GTE are forms of it."""

from collections.abc import Sequence

from torch import Tensor

from megabatch.losses.contrast import QUERY_KEY, Batch, Contrast, Sums
from megabatch.losses.formulas import check_smoothing, cross_entropy, reduced
from megabatch.losses.negatives import Negatives
from megabatch.primitives import Backend, Group, Reduction, is_small, mean_similarity, number, pairs, small_cross_entropy


def info_nce_loss(
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
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """The cross-entropy of each query's own key among its negatives, without the matrix of logits.

    Same value and gradients as

        logits = scale * query @ key.T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    Negatives and contrasts add columns to the logits; ids, margin and guide set some logits to −inf. Never negative without
    label smoothing, differentiable once, float32 (float64 for float64 inputs). See `pairwise_logsumexp` for the precision.

    Example:
        loss = mb.info_nce_loss(query, key, scale=50.0, negatives=hard)  # hard: (N, K, D), K hard negatives of each query

    Args:
        query: (N, D) embeddings, usually of unit length.
        key: (N, D) embeddings; row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        negatives: keys that match no query: (M, D), or (N, K, D) for K hard negatives of each query. Every query is compared
            with all of them; `Negatives` can restrict that. A memory bank of earlier keys, detached, is given here as well.
            Several kinds are given as a list.
        contrast: which similarities within the batch are negatives of query i: "query-key", the query with other keys;
            "query-query", the query with other queries; "key-query" and "key-key", its key with other queries, or with other
            keys and the hard negatives of other queries. All four are GTE's form; `()` leaves only `negatives`.
        symmetric: the mean of both directions; in the second, queries and keys swap roles, and `negatives` are not used.
        ids: (N,) integers; queries and keys with equal ids (a document that occurs twice) are not each other's negatives.
        log_q: (N,) logarithm of how often each key is sampled; subtracted from all similarities of the key.
        margin: a negative whose product ⟨query, key⟩ exceeds that of the query's own key by more than the margin is left out,
            because it is probably an unlabelled match. A number, or one per query, (N,). It has no gradient.
        guide: (N, E), (N, E) embeddings of queries and keys by another model, whose products decide instead. The margin is then
            0 by default.
        label_smoothing: the part of the target that is spread evenly over the columns of logits, as in `F.cross_entropy`. Only
            with the contrast "query-key" and without ids, margin, guide and private negatives.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: see `clip_loss`; each rank passes its own pairs and negatives.
        backend: see `clip_loss`.
    """
    label_smoothing = check_smoothing(label_smoothing, ids=ids, margin=margin, guide=guide)
    others_are_keys = negatives is None and contrast in ((QUERY_KEY,), [QUERY_KEY])
    if others_are_keys and log_q is None and margin is None and guide is None and label_smoothing == 0 and group is None:
        run = pairs(query, key, ("query", "key"), ids=ids, reduction=reduction, backend=backend)
        if is_small(query, run, reduction, tiled=True, rows_only=not symmetric):
            factor = number(scale, "scale", query)
            return small_cross_entropy(query, key, factor, run, ids=ids, columns=symmetric, reduction=reduction)
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
    if label_smoothing > 0:
        _check_smoothed(batch)
    sums = batch.sums()
    losses = [cross_entropy(negatives, match) for negatives, match in sums.directions]
    if label_smoothing > 0:
        above = _above_the_mean(batch, sums)
        losses = [loss + label_smoothing * more for loss, more in zip(losses, above, strict=True)]
    return reduced(losses, sums.share, reduction)


def _above_the_mean(batch: Batch, sums: Sums) -> list[Tensor]:  # (N,) each
    """s_ii less the mean of all similarities of query i, for each direction."""
    keys = [(batch.key, batch.log_q), *((further.keys, further.log_q) for further in batch.negatives)]
    queries: list[tuple[Tensor, Tensor | None]] = [(batch.query, None)]
    sides = ((batch.query, keys), (batch.key, queries))
    return [
        match - mean_similarity(rows, columns, batch.scale, batch.run)
        for (_, match), (rows, columns) in zip(sums.directions, sides, strict=False)
    ]


def _check_smoothed(batch: Batch) -> None:
    if any(further.private for further in batch.negatives):
        raise ValueError("negatives must not be private with label smoothing, whose mean is taken over all keys of the batch")
    if tuple(batch.contrast) != (QUERY_KEY,):
        raise ValueError(f"contrast must be ({QUERY_KEY!r},) with label smoothing, got {batch.contrast!r}")
