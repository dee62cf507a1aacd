"""What the model finds: a few queries, and the best matches of each among data it was not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megabatch.data.dataset import IMAGE, Dataset, UnreadableSampleError
from megabatch.evaluation import embed, encode, search
from megabatch.evaluation.sheet import Found, Shown
from megabatch.towers import Pair

QUERIES = 8  # captions of the data, drawn at random
MATCHES = 8
MOST = 2000  # samples that are searched; a gallery need not wait for all of a large dataset
PICTURE = 72  # pixels of a drawing's side
_SEED = 20240917


@dataclass(frozen=True)
class Gallery:
    """Queries with what was found, best first; a match is right where the query is its caption."""

    queries: list[Shown]
    found: list[list[Found]]
    searched: int
    of: int


def gallery(pair: Pair, dataset: Dataset, drawn: Dataset, queries: Sequence[str] = ()) -> Gallery:
    """Queries of one's own, then captions of the data.

    Args:
        pair: the model.
        dataset: what is searched.
        drawn: the same samples as they are shown, larger where the model's own are small.
        queries: texts that stand first.
    """
    items = _one_of_each(dataset)
    chosen = items[:MOST]
    embeddings = embed(pair.first, dataset, 0, chosen)
    usable = [i for i, good in enumerate(dataset.usable(chosen).tolist()) if good]
    asked = [chosen[i] for i in usable[:QUERIES]]
    captions = [caption for index in asked if (caption := _read(dataset, index, 1)) is not None]
    texts = [*queries, *captions]
    if not texts or not usable:
        raise ValueError("dataset must have a sample that can be read, got none")
    matches = search(encode(pair.second, texts), embeddings[torch.tensor(usable)], k=MATCHES)
    found = []
    for number, (scores, indices) in enumerate(zip(matches.scores.tolist(), matches.indices.tolist(), strict=True)):
        own = None if number < len(queries) else captions[number - len(queries)]
        row = [_match(drawn, chosen[usable[i]], score, own) for score, i in zip(scores, indices, strict=True)]
        found.append([match for match in row if match is not None])
    return Gallery(list(texts), found, len(usable), len(items))


def _one_of_each(dataset: Dataset) -> list[int]:
    """Samples in random order, one for each item: an image with five captions is found once."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(_SEED))
    items = dataset.items()
    if items is None:
        return order.tolist()
    return list(dict(zip(items[order].tolist(), order.tolist(), strict=True)).values())


def _match(drawn: Dataset, index: int, score: float, caption: str | None) -> Found | None:
    shown, own = _read(drawn, index, 0), _read(drawn, index, 1)
    if shown is None or own is None:
        return None
    name = own if drawn.sides[0] == IMAGE else drawn.name(index)
    return Found(shown, name, score, None if caption is None else own == caption)


def _read(dataset: Dataset, index: int, side: int) -> Any:
    try:
        return dataset.read(index, side)
    except UnreadableSampleError:
        return None
