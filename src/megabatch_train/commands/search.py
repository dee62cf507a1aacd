"""`megabatch search`: the best matches of texts or images, printed and as a contact sheet, or as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train.commands import describe, model
from megabatch_train.commands.embed import sample
from megabatch_train.commands.model import add_dim, add_model_arguments
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megabatch_train.data.dataset import Dataset
    from megabatch_train.display.tables import TextTable
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.sheet import Found, Shown
    from megabatch_train.towers import Pair, Tower


LOG = logging.getLogger("megabatch")
KINDS = {"images": "image", "texts": "text"}  # kinds of sides (`data.dataset`) by the names of --among
SHEET = "found.png"
DESCRIPTION = """
Searches data with a model. A query is a text or the path of an image.

  megabatch search runs/emoji "smiling cat" "red heart"     texts find images
  megabatch search runs/emoji cat.png                       an image finds texts
  megabatch search runs/photos "dog on a beach" photo.jpg   both
  megabatch search runs/emoji cat.png --among images        an image finds images like it
  megabatch search runs/wordnet "animal with a trunk"       a query finds documents
  megabatch search runs/photos "red car" --data new.csv --columns image=file text=description
  megabatch search runs/photos "red car" --data holidays/    a folder of images
  megabatch search runs/photos "red car" --embeddings photos.npy --json
  megabatch search open_clip:ViT-B-32@laion2b_s34b_b79k "dog on a beach" --data photos.csv

Prints the matches of each query, best first, with their cosine similarity, and draws a contact
sheet (PNG) with one row per query. Only the best matches are in memory, so any amount of data can
be searched. With --embeddings, a file of `megabatch embed`, only the queries are embedded; they are
cut to the dimension of the file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch search`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser)
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="a text, or the path of an image")
    parser.add_argument("-k", type=int, default=8, help="matches per query (default: %(default)s)")
    parser.add_argument(
        "--among",
        choices=("images", "texts"),
        help="side of the data to search (default: images or documents for texts, texts for images)",
    )
    add_dim(parser)
    parser.add_argument("--embeddings", metavar="FILE", help="file of `megabatch embed` to search, instead of --data")
    parser.add_argument(
        "--json", action="store_true", help="print the matches as JSON: rank, similarity, index, name, path, text"
    )
    parser.add_argument("--sheet", metavar="PNG", help="file of the contact sheet (default: found.png; none with --json)")


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
        self.name, self.credits, self.failures = redact(chosen.data), chosen.dataset.credits, chosen.dataset.failures
        self._drawn: Dataset | None = None

    def side(self, kind: str) -> int:
        """The side to search for queries of this kind; of two texts the second, because a query is like the first."""
        from megabatch_train.data.dataset import IMAGE, TEXT
        from megabatch_train.data.rows import ImageFolder

        sides = self.dataset.sides[:1] if isinstance(self.dataset, ImageFolder) else self.dataset.sides
        among = self.args.among
        wanted = KINDS[among] if among else IMAGE if IMAGE in sides and (kind == TEXT or TEXT not in sides) else TEXT
        if wanted not in sides:
            raise ValueError(f"--among must be a side of the data, {' or '.join(sides)}, got {wanted}")
        return 1 if self.dataset.sides[1] == wanted else 0

    def chunks(self, side: int) -> Iterator[Tensor]:  # (n, D) each
        """The embeddings; NaN for unreadable samples, which `search` ranks last, with −∞."""
        from megabatch_train.evaluation.embedding import readable

        tower, everything = self.chosen.pair.towers[side], range(len(self.dataset))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        return readable(tower, self.dataset, side, everything, **options)

    def about(self, index: int, side: int) -> dict[str, Any]:
        """Name, path and text of a sample."""
        return sample(self.dataset, index, side)

    def show(self, match: Match, side: int) -> Found:
        """An image with its caption, whichever was searched; of two texts, the searched one with the other below."""
        from megabatch_train.data.dataset import IMAGE
        from megabatch_train.evaluation import sheet
        from megabatch_train.evaluation.embedding import read_or_none
        from megabatch_train.evaluation.sheet import Found

        drawn = self._drawn = self._drawn or self.chosen.redraw(sheet.PICTURE)
        shown = drawn.sides.index(IMAGE) if IMAGE in drawn.sides else side
        sides = (read_or_none(drawn, match.index, which) for which in (shown, 1 - shown))
        first, second = ("cannot be read" if value is None else value for value in sides)
        return Found(first, str(second), match.similarity)


class Embeddings:
    """A file that `megabatch embed` wrote."""

    def __init__(self, saved: embedding.Saved) -> None:
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

    def show(self, match: Match, side: int) -> Found:
        """The image if its file can be read, else its text."""
        from megabatch_train.data import images
        from megabatch_train.data.dataset import UnreadableSampleError
        from megabatch_train.evaluation.sheet import Found

        told = match.text or match.name or ""
        try:
            path = Path(match.path or "")
            return Found(images.decode(images.EncodedImage(path.read_bytes(), str(path))), told, match.similarity)
        except (OSError, UnreadableSampleError):
            return Found(told, match.name or "", match.similarity)


def run(args: argparse.Namespace) -> int:
    """Searches, prints the matches and draws the sheet."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import sheet

    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch search must be one process, got {world.size}; start it without torchrun")
        queries = [_query(text) for text in args.queries]
        pair, where = _place(args, world.device)
        found = find_matches(pair, where, queries, args.k)
    if args.json:
        matches = ([asdict(match) for match, _ in row] for row in found)
        print(json.dumps([{"query": text, "matches": row} for text, row in zip(args.queries, matches, strict=True)], indent=1))
    else:
        for text, row in zip(args.queries, found, strict=True):
            _table(text, [match for match, _ in row]).print()
    place = args.sheet or (None if args.json else SHEET)
    if place is not None:
        first = [[where.show(match, side) for match, side in row[: sheet.MOST_MATCHES]] for row in found[: sheet.MOST_QUERIES]]
        title = f"{where.name}, searched with {args.model}"
        sheet.draw(place, queries[: len(first)], first, title=title, credits=where.credits)
    if place is not None and not args.json:
        cut = args.k > sheet.MOST_MATCHES or len(queries) > sheet.MOST_QUERIES
        tell(f"drawn in {place}" + (f" (the first {sheet.MOST_MATCHES} of the first {len(first)} queries)" if cut else ""))
    if where.failures:
        told = f"{len(where.failures):,} samples could not be read, first: {next(iter(where.failures.values()))}"
        tell(told, file=sys.stderr if args.json else sys.stdout)
    return 0


def _table(query: str, row: list[Match]) -> TextTable:
    """The matches of a query; with their files, if they have files."""
    from megabatch_train.display.tables import TextTable

    files = any(match.path for match in row)
    cells = [
        [match.rank, match.text or match.name or "", *([match.path or ""] if files else []), f"{match.similarity:.3f}"]
        for match in row
    ]
    return TextTable(["", "found", *(["file"] if files else []), "similarity"], cells, query, names=(1, 2) if files else (1,))


def find_matches(pair: Pair, where: Data | Embeddings, queries: list[Shown], k: int) -> list[list[tuple[Match, int]]]:
    """The matches of each query, best first, with the side that was searched."""
    from megabatch_train.data.dataset import IMAGE, TEXT
    from megabatch_train.evaluation import encode, search

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
    from megabatch_train.evaluation import embedding

    if not args.embeddings:
        chosen = model.choose(args, device, images_alone=True)
        return chosen.pair, Data(chosen, args)
    given = [name for name in ("data", "columns", "split", "among") if getattr(args, name) is not None]
    if given:
        raise ValueError(f"--{given[0]} must be left out with --embeddings, which has its own, got both")
    saved = embedding.Saved(Path(args.embeddings))
    pair = model.load_pair(args.model, device, tuple(saved.about["sides"]), trust=args.trust_remote_code)
    if embedding.fingerprint(pair) != saved.about["weights"]:
        raise ValueError(
            f"--embeddings must be of the same model and weights, got {args.embeddings} of {saved.about['model']!r}; embed the "
            "data again"
        )
    dim = saved.about.get("dim")
    if args.dim not in (None, dim):
        told = "all dimensions of the model" if dim is None else f"{dim} dimensions"
        raise ValueError(f"--dim must be left out, or be the dimension of --embeddings, got {args.dim} for a file of {told}")
    if dim is not None:
        model.truncate_pair(pair, dim, model.run_of(args.model))
    LOG.info("data: %s, %s embeddings of %s", args.embeddings, f"{len(saved.samples):,}", saved.about.get("data"))
    return pair, Embeddings(saved)


def _query(text: str) -> Shown:
    """An image if the file exists, else a text; an empty text or a missing file with an image's extension raises an error."""
    from megabatch_train.data import images
    from megabatch_train.data.dataset import UnreadableSampleError
    from megabatch_train.data.rows import ENDINGS

    if not text.strip():
        raise ValueError(f"QUERY must be a text or the path of an image, got {text!r}, which is empty")
    path = Path(text)
    if os.path.isfile(text):  # a Path refuses long names
        try:
            return images.decode(images.EncodedImage(path.read_bytes(), text))
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
