"""Evaluation and search in linear memory: retrieval, zero-shot classification and best matches."""

from megabatch_train.evaluation.embedding import Matches, embed, embed_chunks, encode, search
from megabatch_train.evaluation.evaluate import (
    Evaluated,
    classifier,
    evaluate,
    ranks_of_best,
    retrieval,
    spearman,
    sts,
    zero_shot,
)

__all__ = [
    "Evaluated",
    "Matches",
    "classifier",
    "embed",
    "embed_chunks",
    "encode",
    "evaluate",
    "ranks_of_best",
    "retrieval",
    "search",
    "spearman",
    "sts",
    "zero_shot",
]
