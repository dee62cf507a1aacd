"""Evaluation and search in linear memory: retrieval, zero-shot classification, best matches."""

from megabatch.evaluation.embedding import embed, embedded, encode
from megabatch.evaluation.evaluate import evaluate
from megabatch.evaluation.ranks import ranks_of_best
from megabatch.evaluation.retrieval import retrieval
from megabatch.evaluation.search import Matches, search
from megabatch.evaluation.similarity import spearman, sts
from megabatch.evaluation.zero_shot import classifier, zero_shot

__all__ = [
    "Matches",
    "classifier",
    "embed",
    "embedded",
    "encode",
    "evaluate",
    "ranks_of_best",
    "retrieval",
    "search",
    "spearman",
    "sts",
    "zero_shot",
]
