"""Hard negatives: for each query, the documents that a model takes for a match and that are none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch import pairwise
from megabatch.tiles.block import accumulator_dtype, windows
from megabatch.tiles.topk import MOST_OF_THE_BEST

ROWS = 8192  # queries searched for at once


@dataclass(frozen=True)
class Choice:
    """Which documents may be negatives of a query, with the names of sentence-transformers' `mine_hard_negatives`.

    Args:
        negatives: of each query.
        range_min: so many of the best are skipped: they are probably matches that nobody has labelled.
        range_max: so many of the best are looked at (default: as many as needed).
        max_score: no product above it.
        min_score: no product below it.
        absolute_margin: no product above that of the positive less this.
        relative_margin: no product above s − this·|s|, s being that of the positive.
        sampling: "top" for the best of the range, "random" for a random choice.
    """

    negatives: int
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling: str = "top"

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.negatives < 1 or self.range_min < 0:
            raise ValueError(
                f"negatives must be at least 1 and range_min at least 0, got {self.negatives} and {self.range_min}"
            )
        if self.range_max is not None and self.range_max < self.range_min + self.negatives:
            raise ValueError(
                f"range_max must be at least range_min + negatives, {self.range_min + self.negatives}, got {self.range_max}"
            )
        for name in ("max_score", "min_score", "absolute_margin", "relative_margin"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ValueError(f"{name} must be a number, got nan")
        if self.sampling not in ("top", "random"):
            raise ValueError(f'sampling must be "top" or "random", got {self.sampling!r}')
        if self.candidates > MOST_OF_THE_BEST:
            by_default = (
                "range_min + negatives" if self.sampling == "top" else "range_min + 4·negatives, if sampling is random,"
            )
            what = by_default if self.range_max is None else "range_max"
            raise ValueError(f"{what} must be at most {MOST_OF_THE_BEST}, got {self.candidates}")

    @property
    def candidates(self) -> int:
        """Documents found for each query, of which the negatives are chosen."""
        if self.range_max is not None:
            return self.range_max
        return self.range_min + self.negatives * (4 if self.sampling == "random" else 1)

    def limit(self, positive: Tensor) -> Tensor | None:  # (n,) → (n,)
        """The product that a negative has to be below."""
        limits = (
            [] if self.max_score is None else [torch.full_like(positive, self.max_score).nextafter(positive.new_tensor(9e9))]
        )
        if self.absolute_margin is not None:
            limits.append(positive - self.absolute_margin)
        if self.relative_margin is not None:
            limits.append(positive - self.relative_margin * positive.abs())
        return torch.stack(limits).amin(0) if limits else None


class _Known:
    """The documents of each query, where a query has several rows."""

    def __init__(self, queries: Tensor, positive: Tensor, documents: int) -> None:  # (N,), (N,) int64
        self._queries, self._documents = queries, documents
        self._pairs = torch.unique(queries * documents + positive)
        self._counts = torch.bincount(self._pairs // documents)  # of each query

    def most_others(self, rows: slice) -> int:
        """The largest number of documents that a query of these rows has beside the row's own."""
        return int(self._counts[self._queries[rows]].max()) - 1

    def remove(self, found: Tensor, rows: slice) -> Tensor:  # (n, k) int64
        """The documents found for these rows without those of the query; −1 at the end in their place."""
        keys = self._queries[rows, None].to(found.device) * self._documents + found
        gone = torch.isin(keys, self._pairs.to(found.device)) | (found < 0)
        order = gone.int().argsort(dim=1, stable=True)
        return found.masked_fill(gone, -1).gather(1, order)


@torch.no_grad()
def hard_negatives(
    query: Tensor,  # (N, D)
    document: Tensor,  # (M, D)
    positive: Tensor,  # (N,) int64
    choice: Choice,
    *,
    ids: tuple[Tensor, Tensor] | None = None,  # (N,), (M,)
    queries: Tensor | None = None,  # (N,) int64
    first: int = 0,
    device: torch.device | None = None,
) -> Iterator[Tensor]:  # (n, negatives) int64 each
    """Row numbers of the hard negatives of each query, best first, some queries at a time; −1 where there are fewer.

    On a GPU, embeddings are rounded to float16.

    Args:
        query: (N, D) embeddings.
        document: (M, D) embeddings.
        positive: (N,) the document of each query.
        choice: which documents may be negatives.
        ids: of queries and documents; a document with the id of a query is none of its negatives (default: only its own).
        queries: a number for each row of `query`, from 0 on. Rows with equal numbers are one query, and the documents of all of
            them are none of its negatives. Not with ids.
        first: query to begin with.
        device: to compute on (default: where the queries are).
    """
    place = query.device if device is None else device
    dtype = torch.float16 if place.type == "cuda" else query.dtype
    document = document.to(place, dtype)
    own, others = (positive, torch.arange(len(document))) if ids is None else ids
    others = others.to(place)
    wide = accumulator_dtype(dtype)
    known = None if queries is None else _Known(queries, positive, len(document))
    lowest = None if choice.min_score is None else torch.tensor(choice.min_score, dtype=wide, device=place)
    for rows in windows(slice(first, len(query)), ROWS):
        x = query[rows].to(place, dtype)
        match = (x.to(wide) * document[positive[rows].to(place)].to(wide)).sum(1)
        more = 0 if known is None else known.most_others(rows)
        found = pairwise.pairwise_topk(
            x,
            document,
            min(choice.candidates + more, MOST_OF_THE_BEST),
            exclude=(own[rows].to(place), others),
            above=None if lowest is None else lowest.nextafter(lowest - 1),
            below=choice.limit(match),
        ).indices
        if known is not None:
            found = known.remove(found, rows)[:, : choice.candidates]
        found = found[:, choice.range_min :]
        yield (found[:, : choice.negatives] if choice.sampling == "top" else _draw(found, choice.negatives, rows)).cpu()


def _draw(found: Tensor, count: int, rows: slice) -> Tensor:  # (n, k) → (n, count)
    """A random choice of the documents found, in their order. A row always draws the same, wherever a search begins."""
    generator = torch.Generator()
    drawn = [torch.rand(found.shape[1], generator=generator.manual_seed(row)) for row in range(rows.start, rows.stop)]
    keys = torch.stack(drawn).to(found.device).masked_fill(found < 0, 2.0)
    places = keys.topk(min(count, found.shape[1]), dim=1, largest=False).indices.sort(dim=1).values
    return found.gather(1, places)
