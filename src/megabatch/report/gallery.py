"""Search results of a model: a few queries with their best matches in the test data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.data.dataset import IMAGE, Dataset
from megabatch.evaluation import embed, encode, search
from megabatch.evaluation.embedding import read_or_none
from megabatch.evaluation.sheet import Found, Shown
from megabatch.towers import Pair

QUERIES = 8  # captions of the test data, drawn at random
MATCHES = 8
MOST = 2000  # samples that are searched, to keep a large dataset fast
PICTURE = 72  # side length of a drawing, in pixels
_SEED = 20240917


@dataclass(frozen=True)
class Gallery:
    """Queries with their matches, best first. A match is right if the query is its caption."""

    queries: list[Shown]
    found: list[list[Found]]
    ranks: list[int | None]  # of each query's own sample, from 1; None for a query without one
    searched: int
    of: int


def gallery(pair: Pair, dataset: Dataset, drawn: Dataset, queries: Sequence[str] = ()) -> Gallery:
    """Searches for the given queries, then for captions of the data.

    Args:
        pair: the model.
        dataset: samples to search, as the model sees them.
        drawn: the same samples as they are shown, which may be larger.
        queries: texts to search for first.
    """
    items = _one_of_each(dataset)
    chosen = items[:MOST]
    embeddings = embed(pair.first, dataset, 0, chosen)
    usable = [i for i, good in enumerate(dataset.usable(chosen).tolist()) if good]
    asked = [chosen[i] for i in usable[:QUERIES]]
    captions = [caption for index in asked if (caption := read_or_none(dataset, index, 1)) is not None]
    texts = [*queries, *captions]
    if not texts or not usable:
        raise ValueError("dataset must have a sample that can be read, got none")
    encoded, embeddings = encode(pair.second, texts), embeddings[torch.tensor(usable)]
    matches, similarities = search(encoded, embeddings, k=MATCHES), encoded @ embeddings.T
    right: dict[str, list[int]] = {}  # caption → positions of the samples that it belongs to
    for position, i in enumerate(usable):
        right.setdefault(str(read_or_none(dataset, chosen[i], 1)), []).append(position)
    found, ranks = [], []
    for number, (scores, indices) in enumerate(zip(matches.scores.tolist(), matches.indices.tolist(), strict=True)):
        own = None if number < len(queries) else captions[number - len(queries)]
        row = [_match(drawn, chosen[usable[i]], score, own) for score, i in zip(scores, indices, strict=True)]
        found.append([match for match in row if match is not None])
        ranks.append(None if own is None else _rank(similarities[number], right[own]))
    return Gallery(list(texts), found, ranks, len(usable), len(items))


def _rank(similarities: Tensor, right: list[int]) -> int:  # (M,)
    """The rank of the best of the right samples, from 1."""
    return int((similarities > similarities[right].max()).sum()) + 1


def _one_of_each(dataset: Dataset) -> list[int]:
    """Samples in random order, one for each item: an image with five captions occurs once."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(_SEED))
    items = dataset.items()
    if items is None:
        return order.tolist()
    return list(dict(zip(items[order].tolist(), order.tolist(), strict=True)).values())


def _match(drawn: Dataset, index: int, score: float, caption: str | None) -> Found | None:
    shown, own = read_or_none(drawn, index, 0), read_or_none(drawn, index, 1)
    if shown is None or own is None:
        return None
    name = own if drawn.sides[0] == IMAGE else drawn.name(index)
    return Found(shown, name, score, None if caption is None else own == caption)
