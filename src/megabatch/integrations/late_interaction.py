"""Late interaction for the trainers of sentence-transformers and PyLate: the loss of columns, and scores of candidates."""

from collections.abc import Sequence

from torch import Tensor

import megabatch as mb
from megabatch.dispatch import Backend, Reduction
from megabatch.integrations.wrapping import differentiate
from megabatch.late.interaction import Similarities
from megabatch.world import default_group


def ranking_loss(
    columns: Sequence[Tensor],  # (N, L, D) each: queries, their documents, hard negatives of each query
    masks: Sequence[Tensor | None],  # (N, L) each
    scale: float,
    *,
    normalize: bool = False,
    gather: bool = False,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    with_backward: bool = False,
) -> Tensor:  # ()
    """The loss of all columns; `with_backward` leaves the gradients in the `.grad` of what the columns are made of."""
    if len(columns) < 2:
        raise ValueError(f"the dataset must have at least two columns, queries and their documents, got {len(columns)}")

    def loss(scale: float | Tensor) -> Tensor:
        return mb.late_interaction_loss(
            columns[0],
            columns[1],
            scale=scale,
            query_mask=masks[0],
            document_mask=masks[1],
            negatives=[mb.Tokens(column, mask) for column, mask in zip(columns[2:], masks[2:], strict=True)],
            normalize=normalize,
            reduction=reduction,
            group=default_group() if gather else None,
            backend=backend,
        )

    return differentiate(loss, scale, None, with_backward=with_backward)


def candidate_scores(
    queries_embeddings: Tensor,  # (N, Lq, D)
    documents_embeddings: Tensor,  # (N, K, Ld, D)
    queries_mask: Tensor | None = None,  # (N, Lq)
    documents_mask: Tensor | None = None,  # (N, K, Ld)
    *,
    normalize: bool = False,
) -> Tensor:  # (N, K)
    """MaxSim scores of each query with its own K documents; with the arguments of both libraries' `colbert_kd_scores`.

    The products are held for some queries at a time, and formed again in backward.
    """
    documents = documents_embeddings.flatten(0, 1)
    masks = queries_mask, None if documents_mask is None else documents_mask.flatten(0, 1)
    return Similarities(queries_embeddings, documents, 1.0, masks=masks, normalize=normalize).of_own()[0]
