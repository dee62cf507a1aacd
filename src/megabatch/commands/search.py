"""`megabatch search`: the best matches of texts or images, printed and as a contact sheet, or as JSON."""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.commands import model
from megabatch.commands.embed import sample
from megabatch.data import images
from megabatch.data.dataset import IMAGE, TEXT, Dataset, UnreadableSampleError
from megabatch.data.folders import ENDINGS, Images
from megabatch.display.tables import Table
from megabatch.evaluation import encode, search, sheet, stored
from megabatch.evaluation.embedding import read_or_none, readable
from megabatch.evaluation.sheet import Found, Shown
from megabatch.names import shown
from megabatch.towers import Pair, Tower
from megabatch.world import joined

KINDS = {"images": IMAGE, "texts": TEXT}
SHEET = "found.png"


@dataclass(frozen=True)
class Match:
    """A sample that was found."""

    rank: int  # 1 is the best
    similarity: float
    index: int  # in the data
    name: str | None
    path: str | None  # of an image that is a file
    text: str | None


class Data:
    """A dataset that is embedded chunk by chunk."""

    def __init__(self, chosen: model.Chosen, args: argparse.Namespace) -> None:
        self.chosen, self.dataset, self.args = chosen, chosen.dataset, args
        self.name, self.credits, self.failures = shown(chosen.data), chosen.dataset.credits, chosen.dataset.failures
        self._drawn: Dataset | None = None

    def side(self, kind: str) -> int:
        """The side to search for queries of this kind; of two texts the second, because a query is like the first."""
        sides = self.dataset.sides[:1] if isinstance(self.dataset, Images) else self.dataset.sides
        among = self.args.among
        wanted = KINDS[among] if among else IMAGE if IMAGE in sides and (kind == TEXT or TEXT not in sides) else TEXT
        if wanted not in sides:
            raise ValueError(f"--among must be a side of the data, {' or '.join(sides)}, got {wanted}")
        return 1 if self.dataset.sides[1] == wanted else 0

    def chunks(self, side: int) -> Iterator[Tensor]:  # (n, D) each
        """The embeddings; NaN for unreadable samples, which `search` ranks last, with −∞."""
        tower, everything = self.chosen.pair.towers[side], range(len(self.dataset))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        return readable(tower, self.dataset, side, everything, **options)

    def about(self, index: int, side: int) -> dict[str, Any]:
        """Name, path and text of a sample."""
        return sample(self.dataset, index, side)

    def shown(self, match: Match, side: int) -> Found:
        """An image with its caption, whichever was searched; of two texts, the searched one with the other below."""
        drawn = self._drawn = self._drawn or self.chosen.drawn(sheet.PICTURE)
        shown = drawn.sides.index(IMAGE) if IMAGE in drawn.sides else side
        sides = (read_or_none(drawn, match.index, which) for which in (shown, 1 - shown))
        first, second = ("cannot be read" if value is None else value for value in sides)
        return Found(first, str(second), match.similarity)


class Embeddings:
    """A file that `megabatch embed` wrote."""

    def __init__(self, saved: stored.Saved) -> None:
        self.saved, self.name = saved, str(saved.path)
        self.credits: tuple[str, ...] = ()
        self.failures: dict[int, str] = {}

    def side(self, kind: str) -> int:
        """The side of the file."""
        return int(self.saved.about["side"])

    def chunks(self, side: int) -> Iterator[Tensor]:  # (n, D) each
        """The embeddings."""
        return self.saved.chunks()

    def about(self, index: int, side: int) -> dict[str, Any]:
        """Name, path and text of a sample."""
        return self.saved.samples[index]

    def shown(self, match: Match, side: int) -> Found:
        """The image if its file can be read, else its text."""
        told = match.text or match.name or ""
        try:
            path = Path(match.path or "")
            return Found(images.decode(images.Encoded(path.read_bytes(), str(path))), told, match.similarity)
        except (OSError, UnreadableSampleError):
            return Found(told, match.name or "", match.similarity)


def run(args: argparse.Namespace) -> int:
    """Searches, prints the matches and draws the sheet."""
    with joined(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch search must be one process, got {world.size}; start it without torchrun")
        queries = [_query(text) for text in args.queries]
        pair, where = _place(args, world.device)
        found = searched(pair, where, queries, args.k)
    if args.json:
        matches = ([asdict(match) for match, _ in row] for row in found)
        print(json.dumps([{"query": text, "matches": row} for text, row in zip(args.queries, matches, strict=True)], indent=1))
    else:
        for text, row in zip(args.queries, found, strict=True):
            _table(text, [match for match, _ in row]).print()
    place = args.sheet or (None if args.json else SHEET)
    if place is not None:
        first = [[where.shown(match, side) for match, side in row[: sheet.MOST_MATCHES]] for row in found[: sheet.MOST_QUERIES]]
        title = f"{where.name}, searched with {args.model}"
        sheet.draw(place, queries[: len(first)], first, title=title, credits=where.credits)
    if place is not None and not args.json:
        cut = args.k > sheet.MOST_MATCHES or len(queries) > sheet.MOST_QUERIES
        print(f"drawn in {place}" + (f" (the first {sheet.MOST_MATCHES} of the first {len(first)} queries)" if cut else ""))
    if where.failures:
        told = f"{len(where.failures):,} samples could not be read, first: {next(iter(where.failures.values()))}"
        print(told, file=sys.stderr if args.json else sys.stdout)
    return 0


def _table(query: str, row: list[Match]) -> Table:
    """The matches of a query; with their files, if they have files."""
    files = any(match.path for match in row)
    cells = [
        [match.rank, match.text or match.name or "", *([match.path or ""] if files else []), f"{match.similarity:.3f}"]
        for match in row
    ]
    return Table(["", "found", *(["file"] if files else []), "similarity"], cells, query, names=(1, 2) if files else (1,))


def searched(pair: Pair, where: Data | Embeddings, queries: list[Shown], k: int) -> list[list[tuple[Match, int]]]:
    """The matches of each query, best first, with the side that was searched."""
    kinds = [TEXT if isinstance(query, str) else IMAGE for query in queries]
    found: dict[int, list[tuple[Match, int]]] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        side = where.side(kind)
        encoder = _encoder(pair, kind, other=side)
        best = search(encode(encoder, [queries[number] for number in numbers]), where.chunks(side), k=k)
        for number, scores, indices in zip(numbers, best.scores.tolist(), best.indices.tolist(), strict=True):
            pairs = [(score, index) for score, index in zip(scores, indices, strict=True) if score > -math.inf]
            matches = [Match(rank, score, index, **where.about(index, side)) for rank, (score, index) in enumerate(pairs, 1)]
            found[number] = [(match, side) for match in matches]
    return [found[number] for number in range(len(queries))]


def _place(args: argparse.Namespace, device: torch.device) -> tuple[Pair, Data | Embeddings]:
    """The model, and what it searches."""
    if not args.embeddings:
        chosen = model.choose(args, device, images_alone=True)
        return chosen.pair, Data(chosen, args)
    given = [name for name in ("data", "columns", "split", "among") if getattr(args, name) is not None]
    if given:
        raise ValueError(f"--{given[0]} must be left out with --embeddings, which has its own, got both")
    saved = stored.Saved(Path(args.embeddings))
    pair = model.load_pair(args.model, device, tuple(saved.about["sides"]))
    if stored.fingerprint(pair) != saved.about["weights"]:
        raise ValueError(
            f"--embeddings must be of the same model and weights, got {args.embeddings} of {saved.about['model']!r}; embed the "
            "data again"
        )
    return pair, Embeddings(saved)


def _query(text: str) -> Shown:
    """An image if the file exists, else a text; a missing file with an image's extension is an error."""
    path = Path(text)
    if os.path.isfile(text):  # a Path refuses long names
        try:
            return images.decode(images.Encoded(path.read_bytes(), text))
        except UnreadableSampleError as error:
            raise ValueError(f"QUERY must be a text or an image that can be read: {error}") from error
    if path.suffix.lower() in ENDINGS:
        raise FileNotFoundError(f"QUERY must be a text or an image that exists, got {text!r}")
    return text


def _encoder(pair: Pair, kind: str, *, other: int) -> Tower:
    """The tower for queries; of two text towers, the one of the side that is not searched."""
    if pair.towers[1 - other].kind == kind:
        return pair.towers[1 - other]
    if pair.towers[other].kind == kind:
        return pair.towers[other]
    raise ValueError(f"QUERY must be of a kind that the model encodes, {pair.first.kind} or {pair.second.kind}, got {kind}")
