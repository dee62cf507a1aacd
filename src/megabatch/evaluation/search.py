"""The best matches of a few queries among many embeddings, streamed: one chunk and the best matches are in memory."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 4096  # embeddings scored and sorted at once


class Matches(NamedTuple):
    """The matches of each query, best first."""

    scores: Tensor  # (Q, k) similarities
    indices: Tensor  # (Q, k) int64


@torch.no_grad()
def search(queries: Tensor, embeddings: Tensor | Iterable[Tensor], k: int = 8) -> Matches:  # (Q, D), (M, D) or chunks of it
    """The k rows of `embeddings` most similar to each query; ties go to the smaller index, and NaN ranks last.

    Args:
        queries: (Q, D).
        embeddings: (M, D), or its rows in chunks, as `embedded` gives them.
        k: matches per query; fewer if there are fewer rows.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best = Matches(queries.new_zeros(len(queries), 0), torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device))
    position = 0
    for chunk in torch.split(embeddings, ROWS) if isinstance(embeddings, Tensor) else embeddings:
        if chunk.dim() != 2 or chunk.shape[1] != queries.shape[1]:
            raise ValueError(
                f"embeddings must have the width of the queries, {queries.shape[1]}, got shape {tuple(chunk.shape)}"
            )
        scores = (queries @ chunk.to(queries).T).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        indices = torch.arange(position, position + len(chunk), device=queries.device).expand(len(queries), -1)
        position += len(chunk)
        # Earlier matches come first and the sort is stable, so ties go to the smaller index.
        scores, order = torch.sort(torch.cat([best.scores, scores], 1), dim=1, descending=True, stable=True)
        best = Matches(scores[:, :k], torch.cat([best.indices, indices], 1).gather(1, order[:, :k]))
    return best
