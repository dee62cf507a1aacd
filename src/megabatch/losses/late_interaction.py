"""Losses of late interaction (ColBERT, ColPali), which compare every query vector with its best match in a document."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.late import KEPT, SEPARATE, Similarities, Tokens
from megabatch.primitives import (
    cross_entropy,
    describe_loss,
    log_add,
    reduce_losses,
)


def late_interaction_loss(
    query: Tensor | Tokens,  # (N, Lq, D)
    document: Tensor | Tokens,  # (N, Ld, D)
    scale: float | Tensor,
    *,
    query_mask: Tensor | None = None,  # (N, Lq) bool
    document_mask: Tensor | None = None,  # (N, Ld) bool
    negatives: Tensor | Tokens | Sequence[Tensor | Tokens] | None = None,
    ids: Tensor | None = None,  # (N,)
    symmetric: bool = False,
    normalize: bool = False,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """Computes the cross-entropy of each query's own document among all documents, with MaxSim scores as logits.

    It has the same value and gradients as

        scores = scale * torch.einsum("itd,jud->ijtu", query, document).amax(3).sum(2)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    Negatives add columns to the scores, and ids set some scores to −inf. Masks, ties and memory are as in `maxsim_logsumexp`. A
    document without vectors is never a negative. If it is the document of a pair, the loss of the pair is infinite.
    The loss is never negative and can be differentiated once. Its dtype is float32, or float64 for float64 inputs.

    Examples:
        ```python
        loss = mb.late_interaction_loss(query, document, scale=20.0, document_mask=mask, negatives=hard)  # hard: (N, K, L, D)
        ```

    Args:
        query: (N, Lq, D) vectors, usually of unit length, or `Tokens`.
        document: (N, Ld, D) vectors, or `Tokens`. Item i belongs to item i of `query`.
        scale: the inverse temperature: a float, or a tensor of one element.
        query_mask: (N, Lq) bool. Vectors where it is False are ignored.
        document_mask: (N, Ld) bool. Vectors where it is False are ignored.
        negatives: documents that match no query: (M, L, D), (N, K, L, D), `Tokens` of these, or a list of several kinds. Every
            query is compared with all of them.
        ids: (N,) integers. Queries and documents with equal ids are not each other's negatives.
        symmetric: whether the loss is the mean of both directions. The second direction, from documents to queries, does not
            use `negatives`.
        normalize: whether to divide the scores of a query by its number of vectors.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`. Each rank passes its own pairs and negatives.
        backend: see `clip_loss`.
    """
    checks.reduction(reduction)
    purpose = "late interaction, symmetric" if symmetric else "late interaction"
    batch = Similarities(
        *(query, document, scale),
        masks=(query_mask, document_mask),
        normalize=normalize,
        group=group,
        purpose=purpose,
        loss=describe_loss(group, "late_interaction_loss", reduction=reduction),
        backend=backend,
    )
    if batch.query.count != batch.document.count:
        raise ValueError(
            "query and document must have the same number of items, because item i of one belongs to item i of the other; got "
            f"{batch.query.count} and {batch.document.count}"
        )
    batch.check_pairs()
    batch.check_ids(ids)
    further = _several(negatives)
    dense = None if further else batch.dense_loss(ids, reduction, symmetric=symmetric)
    if dense is not None:
        return dense
    if further:
        batch.share_query()
    row, col, match, mean_weight = batch.logsumexp(ids=(ids, ids), diagonal=SEPARATE, columns=symmetric)
    sums = [row]
    for i, documents in enumerate(further):
        sums.append(batch.against(_flat(documents), f"negatives[{i}]").logsumexp(diagonal=KEPT)[0])
    losses = [_of_pairs(log_add(sums, match), match, batch.query.values)]
    if symmetric:
        losses.append(_of_pairs(col, match, batch.query.values))
    return reduce_losses(losses, mean_weight, reduction, batch.query.values)


def late_distillation_loss(
    query: Tensor | Tokens,  # (N, Lq, D)
    document: Tensor | Tokens,  # (N, K, Ld, D)
    teacher: Tensor,  # (N, K)
    scale: float | Tensor = 1.0,
    *,
    query_mask: Tensor | None = None,  # (N, Lq) bool
    document_mask: Tensor | None = None,  # (N, K, Ld) bool
    normalize: bool = False,
    reduction: Reduction = "mean",
    group: Group = None,
) -> Tensor:  # () or (N,)
    """Computes the Kullback-Leibler divergence from a teacher's scores to MaxSim scores, for K documents of each query.

    It has the same value and gradients as

        scores = scale * torch.einsum("itd,ikud->iktu", query, document).amax(3).sum(2)
        return F.kl_div(scores.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")

    PyTorch operations compute it on every device, because there are only N·K scores instead of N². The dot products of some
    queries are in memory at a time, and backward computes them again. A document without vectors is excluded from both
    softmaxes. If all documents of a query have no vectors, the loss of the query is 0.

    Examples:
        ```python
        loss = mb.late_distillation_loss(query, document, teacher, document_mask=mask)
        ```

    Args:
        query: (N, Lq, D) vectors, or `Tokens`.
        document: (N, K, Ld, D) vectors of K documents for each query, or `Tokens` of N·K items in this order.
        teacher: (N, K) scores. They have no gradient.
        scale: the inverse temperature: a float, or a tensor of one element.
        query_mask: (N, Lq) bool. Vectors where it is False are ignored.
        document_mask: (N, K, Ld) bool. Vectors where it is False are ignored.
        normalize: whether to divide the scores of a query by its number of vectors.
        reduction: "mean", "sum" or "none". See `clip_loss`.
        group: see `clip_loss`.
    """
    checks.reduction(reduction)
    if not isinstance(teacher, Tensor) or teacher.dim() != 2 or not teacher.dtype.is_floating_point:
        given = f"{teacher.dtype} {tuple(teacher.shape)}" if isinstance(teacher, Tensor) else type(teacher).__name__
        raise ValueError(
            f"teacher must be a floating-point tensor of shape (N, K), a score for each document of a query, got {given}"
        )
    checks.without_gradient([teacher], ["teacher"])
    flat_mask = document_mask.flatten(0, 1) if isinstance(document_mask, Tensor) and document_mask.dim() == 3 else document_mask
    pairs = Similarities(
        *(query, _flat(document), scale),
        masks=(query_mask, flat_mask),
        normalize=normalize,
        group=group,
        purpose="distillation",
        loss=describe_loss(group, "late_distillation_loss", reduction=reduction),
    )
    N, M = pairs.query.count, pairs.document.count
    if teacher.shape[0] != N or teacher.numel() != M:
        raise ValueError(
            f"teacher must have a score for each document of a query, ({N}, {M // max(N, 1)}), got {tuple(teacher.shape)}"
        )
    if teacher.device != pairs.document.values.device:
        raise ValueError(f"teacher must be on {pairs.document.values.device}, got {teacher.device}")
    pairs.check_pairs()
    scores, mean_weight = pairs.of_own()
    scores = scores.view(teacher.shape)  # not (N, -1), because K cannot be inferred on a rank without queries
    missing = scores.detach() == -torch.inf
    # If all documents of a query are missing, none is excluded, because a softmax over no documents is NaN. The terms of such a
    # query are 0.
    excluded = missing & ~missing.all(1, keepdim=True)
    target = teacher.to(scores.dtype).masked_fill(excluded, -torch.inf).log_softmax(1)
    student = scores.masked_fill(missing, 0.0).masked_fill(excluded, -torch.inf).log_softmax(1)
    terms = target.exp() * (target - student).masked_fill(missing, 0.0)
    return reduce_losses([terms.sum(1)], mean_weight, reduction, scores)


def _of_pairs(negatives: Tensor, match: Tensor, like: Tensor) -> Tensor:  # (N,), (N,)
    """Computes the cross-entropies. They are infinite if the match is −inf, even without negatives."""
    nothing = (negatives.detach() == -torch.inf) & (match.detach() == -torch.inf)
    return cross_entropy(negatives.masked_fill(nothing, 0.0), match, like)


def _several(negatives: Tensor | Tokens | Sequence[Tensor | Tokens] | None) -> Sequence[Tensor | Tokens]:
    if negatives is not None and not isinstance(negatives, (Tensor, Sequence)):
        raise TypeError(f"negatives must be a tensor, Tokens or a list of these, got {type(negatives).__name__}")
    if negatives is None:
        return ()
    return [negatives] if isinstance(negatives, (Tensor, Tokens)) else negatives


def _flat(value: Tensor | Tokens) -> Tensor | Tokens:
    """Reshapes (N, K, L, D) to (N·K, L, D)."""
    values, mask, lengths = value if isinstance(value, Tokens) else Tokens(value)
    if not isinstance(values, Tensor) or values.dim() != 4:
        return value
    return Tokens(values.flatten(0, 1), None if mask is None else mask.flatten(0, 1), lengths)
