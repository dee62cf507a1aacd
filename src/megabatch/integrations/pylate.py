"""PyLate's `CachedContrastive` and `Distillation` without score matrices and without an all-gather of documents.

The classes inherit from PyLate's classes, which encode mini-batches (twice if they cache) and hook into the trainer's backward
pass. Only the loss of all embeddings is replaced, by `megabatch.late_interaction_loss`. In a script, only the import changes:

    from megabatch.integrations.pylate import CachedContrastive
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.dispatch import Backend
from megabatch.integrations.trainers import candidate_scores, ranking_loss

extras.load("pylate", purpose="megabatch.integrations.pylate")

from pylate import losses as originals  # noqa: E402
from pylate import scores  # noqa: E402

__all__ = ["CachedContrastive", "Distillation"]


class CachedContrastive(originals.CachedContrastive):  # type: ignore[misc]
    """PyLate's loss of this name, with memory that is linear in the tokens. It has the same arguments and values.

    Three things differ. First, the gradient belongs to the returned value. PyLate 1.6 returns the mean over the batch but
    backpropagates the sum, so its gradient is larger by the batch size. Second, masked document tokens are excluded from the
    maxima, as in PyLate's GPU backends. Its PyTorch path counts them as dot products of 0. Third, `gather_across_devices`
    passes documents round a ring (docs/ring.md) instead of gathering them, and ranks may have different numbers of pairs.
    `score_mini_batch_size` has no effect.

    Args:
        model: a ColBERT model of PyLate.
        *args: all other arguments of the original. `score_metric` must be `ColBERTScores`.
        **kwargs: keyword arguments of the original.
        backend: "auto", "eager" or "triton". It changes the speed but not the result.
    """

    def __init__(self, model: Any, *args: Any, backend: Backend = "auto", **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        if not isinstance(self.score_metric, scores.ColBERTScores):
            raise ValueError(f"score_metric must be pylate.scores.ColBERTScores, got {type(self.score_metric).__name__}")
        self.backend = backend

    def calculate_loss(
        self, reps: Sequence[Sequence[Tensor]], masks: Sequence[Tensor], with_backward: bool = False
    ) -> Tensor:  # ()
        """Computes the loss of token embeddings, which come as a list of mini-batches for each column of the dataset."""
        model = self.model if hasattr(self.model, "do_query_expansion") else self.model.module
        query_mask = None if model.do_query_expansion else masks[0]
        return ranking_loss(
            [torch.cat(tuple(parts)) for parts in reps],
            [query_mask, *masks[1:]],
            1 / self.temperature,
            gather=self.gather_across_devices,
            reduction="mean" if self.size_average else "sum",
            backend=self.backend,
            with_backward=with_backward,
        )


class Distillation(originals.Distillation):  # type: ignore[misc]
    """PyLate's loss of this name. Dot products are stored for some queries at a time and computed again in backward.

    It has the same arguments, values and gradients, except for masked document tokens: see `CachedContrastive`.

    Args:
        model: a ColBERT model of PyLate.
        score_metric: `colbert_kd_scores`. Other functions are not supported.
        *args: all other arguments of the original.
        **kwargs: keyword arguments of the original.
    """

    def __init__(
        self, model: Any, score_metric: Callable[..., Tensor] = scores.colbert_kd_scores, *args: Any, **kwargs: Any
    ) -> None:
        if score_metric is not scores.colbert_kd_scores:
            raise ValueError("score_metric must be pylate.scores.colbert_kd_scores, got another function")
        super().__init__(model, candidate_scores, *args, **kwargs)
