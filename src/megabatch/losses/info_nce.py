"""InfoNCE: each query finds its key among many. Dense retrieval, two-tower recommenders, MoCo and GTE are forms of it."""

from collections.abc import Sequence

from torch import Tensor

from megabatch.arguments import Backend, Group
from megabatch.losses.arguments import batch_of
from megabatch.losses.contrast import QUERY_KEY, Batch, Contrast, Negatives, Sums
from megabatch.losses.sums import Reduction, check_smoothing, cross_entropy, mean_similarity, reduced


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

    and with every option more columns, or −inf in some places. Never negative without label smoothing, differentiable once,
    float32 (float64 for float64 inputs). See `pairwise_logsumexp` for the precision.

    Args:
        query: (N, D) embeddings, usually of unit length.
        key: (N, D) embeddings; row i belongs to row i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        negatives: further keys, which match no query: (M, D), or (N, K, D) for K hard negatives of each query. They are
            negatives of all queries, unless `Negatives` says more of them. Keys of earlier steps (a memory bank, detached)
            are given here too, on their own or as one of several.
        contrast: what of the batch is in the denominator of query i, beside its own key: "query-key", other keys;
            "query-query", other queries; "key-query" and "key-key", its key against other queries, other keys and the hard
            negatives of other queries. All four are GTE's form; none, `()`, leaves the further negatives alone.
        symmetric: the mean of both directions: the roles of queries and keys are exchanged as well. Further negatives belong to
            queries alone.
        ids: one integer for each pair; what has the same id (a document that occurs twice) is not a negative.
        log_q: (N,) how often each key is sampled, as a logarithm; subtracted from its similarities, its own query's too.
        margin: what is more similar than a query's own key by more than this is left out, as it may be a match that nobody
            knows of. In units of the products, before the scale; a number, or (N,). The decision has no gradient.
        guide: embeddings of queries and keys by another model, whose products decide instead; the margin is then 0 if it is
            not given.
        label_smoothing: the part of the target that is spread evenly over all that a query is compared with, as in
            `F.cross_entropy`. With the contrast "query-key" alone, and nothing that leaves pairs out.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: process group to share the batch over, as in `clip_loss`; each rank passes its own pairs and negatives.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
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
    label_smoothing = _check_smoothing(label_smoothing, batch, contrast)
    sums = batch.sums(number, contrast, symmetric=symmetric)
    losses = [cross_entropy(negatives, match) for negatives, match in sums.directions]
    if label_smoothing > 0:
        above = _above_the_mean(batch, number, sums)
        losses = [loss + label_smoothing * more for loss, more in zip(losses, above, strict=True)]
    return reduced(losses, sums.share, reduction)


def _above_the_mean(batch: Batch, scale: Tensor, sums: Sums) -> list[Tensor]:  # (N,) each
    """How far s_ii is above the mean of all that query i is compared with, for each direction."""
    keys = [(batch.key, batch.log_q), *((further.keys, further.log_q) for further in batch.negatives)]
    queries: list[tuple[Tensor, Tensor | None]] = [(batch.query, None)]
    sides = ((batch.query, keys), (batch.key, queries))
    return [
        match - mean_similarity(rows, columns, scale, batch.run)
        for (_, match), (rows, columns) in zip(sums.directions, sides, strict=False)
    ]


def _check_smoothing(value: float, batch: Batch, contrast: Sequence[Contrast]) -> float:
    limited = None if batch.limit is None else "a limit"
    private = True if any(further.private for further in batch.negatives) else None
    value = check_smoothing(value, ids=batch.ids, margin=limited, **{"negatives.private": private})
    if value > 0 and tuple(contrast) != (QUERY_KEY,):
        raise ValueError(f"contrast must be ({QUERY_KEY!r},) with label smoothing, got {contrast!r}")
    return value
