"""The losses of sentence-transformers' `MultiVectorEncoder`, without score matrices and without an all-gather of documents.

The original classes encode mini-batches, twice where they cache, and hook into the trainer's backward pass; these classes
inherit that. The loss of all embeddings is replaced, by `megabatch.late_interaction_loss`. In a script, the import changes:

    from megabatch.integrations.multi_vector import CachedMultiVectorMultipleNegativesRankingLoss
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megabatch import extras
from megabatch.integrations.late_interaction import candidate_scores, ranking_loss
from megabatch.primitives import Backend

extras.load("sentence_transformers", extra="sentence_transformers", purpose="megabatch.integrations.multi_vector")

from sentence_transformers.multi_vector_encoder import losses as originals  # noqa: E402
from sentence_transformers.multi_vector_encoder import scoring  # noqa: E402
from sentence_transformers.util import cat_padded_token_embeddings  # noqa: E402

__all__ = ["CachedMultiVectorMultipleNegativesRankingLoss", "MultiVectorDistillKLDivLoss"]

_NORMALIZES = {scoring.colbert_scores: False, scoring.mean_colbert_scores: True}
_NORMALIZES_CANDIDATES = {scoring.colbert_kd_scores: False, scoring.mean_colbert_kd_scores: True}


class CachedMultiVectorMultipleNegativesRankingLoss(originals.CachedMultiVectorMultipleNegativesRankingLoss):
    """sentence-transformers' loss of this name in memory that is linear in the tokens: same arguments, values and gradients.

    With `gather_across_devices` the tokens of documents go round in a ring (docs/ring.md) instead of being gathered, and ranks
    may have different numbers of pairs. Scores of float64 inputs are float64; the original rounds them to float32.
    `score_mini_batch_size` has no effect. `similarity_fct` is `colbert_scores` or `mean_colbert_scores`. A positive all of
    whose tokens are masked makes the loss infinite.

    Args:
        model: a MultiVectorEncoder.
        *args: all other arguments of the original.
        **kwargs: likewise, by name.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """

    def __init__(self, model: Any, *args: Any, backend: Backend = "auto", **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._normalize = _known(self.similarity_fct, _NORMALIZES, "colbert_scores or mean_colbert_scores")
        self.backend = backend

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:  # ()
        """The loss of token embeddings that come in mini-batches, a list for each column of the dataset."""
        columns = [cat_padded_token_embeddings(parts, masks) for parts, masks in zip(reps, masks_chunks, strict=True)]
        return ranking_loss(
            [values for values, _ in columns],
            [mask for _, mask in columns],
            self.scale,
            normalize=self._normalize,
            gather=self.gather_across_devices,
            backend=self.backend,
            with_backward=with_backward,
        )


class MultiVectorDistillKLDivLoss(originals.MultiVectorDistillKLDivLoss):
    """sentence-transformers' loss of this name; products exist for some queries at a time and are formed again in backward.

    Same arguments, values and gradients. `similarity_fct` is `colbert_kd_scores` or `mean_colbert_kd_scores`.

    Args:
        model: a MultiVectorEncoder.
        *args: all other arguments of the original.
        **kwargs: likewise, by name.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        normalize = _known(self.similarity_fct, _NORMALIZES_CANDIDATES, "colbert_kd_scores or mean_colbert_kd_scores")
        self._normalize = normalize
        self.similarity_fct = partial(candidate_scores, normalize=normalize)

    def get_config_dict(self) -> dict[str, Any]:
        """The configuration for a model card."""
        name = "mean_colbert_kd_scores" if self._normalize else "colbert_kd_scores"
        return {**super().get_config_dict(), "similarity_fct": name}


def _known(function: Any, known: dict[Any, bool], expected: str) -> bool:
    """Whether the scores are divided by the number of query tokens."""
    if function not in known:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"similarity_fct must be {expected} of sentence_transformers, got {name}")
    return known[function]
