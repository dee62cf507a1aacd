"""The best matches of a few queries among many embeddings, streamed: one chunk and the best matches are in memory."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

import megabatch.pairwise
from megabatch.tiles.precision import accumulator_dtype
from megabatch.tiles.topk import Best

ROWS = 4096  # embeddings scored and sorted at once


class Matches(NamedTuple):
    """The matches of each query, best first."""

    scores: Tensor  # (Q, k) similarities
    indices: Tensor  # (Q, k) int64


@torch.no_grad()
def search(queries: Tensor, embeddings: Tensor | Iterable[Tensor], k: int = 8) -> Matches:  # (Q, D), (M, D) or chunks of it
    """The k rows of `embeddings` most similar to each query; ties go to the smaller index.

    In place of a row with NaN comes, last, the score −inf and the index −1.

    Args:
        queries: (Q, D).
        embeddings: (M, D), or its rows in chunks, as `embedded` gives them.
        k: matches per query, at most 1,024; fewer if there are fewer rows.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best = Best.none(len(queries), k, queries.new_zeros(0, dtype=accumulator_dtype(queries.dtype)))
    position = 0
    for chunk in torch.split(embeddings, ROWS) if isinstance(embeddings, Tensor) else embeddings:
        if chunk.dim() != 2 or chunk.shape[1] != queries.shape[1]:
            raise ValueError(
                f"embeddings must have the width of the queries, {queries.shape[1]}, got shape {tuple(chunk.shape)}"
            )
        scores, indices = megabatch.pairwise.pairwise_topk(queries, chunk.to(queries), k)
        best = best.merged(Best(scores, torch.where(indices < 0, indices, indices + position)))
        position += len(chunk)
    return Matches(*(part[:, :position] for part in best))
