"""`megabatch search`: the best matches of texts or images, printed and as a contact sheet."""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megabatch.commands import model
from megabatch.data import images
from megabatch.data.dataset import IMAGE, TEXT, Dataset, UnreadableSampleError
from megabatch.display.tables import Table
from megabatch.evaluation import embedded, encode, search, sheet
from megabatch.evaluation.embedding import read_or_none
from megabatch.evaluation.sheet import Found, Shown
from megabatch.towers import Pair, Tower
from megabatch.world import joined

KINDS = {"images": IMAGE, "texts": TEXT}


def run(args: argparse.Namespace) -> int:
    """Searches, prints the matches and draws the sheet."""
    with joined(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch search must be one process, got {world.size}; start it without torchrun")
        chosen = model.choose(args, world.device)
        queries = [_query(text) for text in args.queries]
        found = searched(chosen, queries, args)
    for text, row in zip(args.queries, found, strict=True):
        rows = [[str(place), _told(match, chosen.dataset), f"{match.score:.3f}"] for place, match in enumerate(row, 1)]
        Table(["", "found", "similarity"], rows, text, names=(1,)).print()
    sheet.draw(args.sheet, queries, found, title=f"{chosen.data}, searched with {args.model}", credits=chosen.dataset.credits)
    cut = args.k > sheet.MOST_MATCHES or len(queries) > sheet.MOST_QUERIES
    first = f" (the first {sheet.MOST_MATCHES} of the first {min(len(queries), sheet.MOST_QUERIES)} queries)" if cut else ""
    print(f"drawn in {args.sheet}{first}")
    if chosen.dataset.failures:
        print(
            f"{len(chosen.dataset.failures):,} samples could not be read, first: {next(iter(chosen.dataset.failures.values()))}"
        )
    return 0


def _told(match: Found, dataset: Dataset) -> str:
    return match.name if IMAGE in dataset.sides else str(match.shown)


def searched(chosen: model.Chosen, queries: list[Shown], args: argparse.Namespace) -> list[list[Found]]:
    """The matches of each query."""
    kinds = [TEXT if isinstance(query, str) else IMAGE for query in queries]
    drawn = chosen.drawn(sheet.PICTURE)
    found: dict[int, list[Found]] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        side = _side(chosen.dataset, kind, args.among)
        encoder = _encoder(chosen.pair, kind, other=side)
        best = search(encode(encoder, [queries[number] for number in numbers]), _readable(chosen, side, args), k=args.k)
        for number, scores, indices in zip(numbers, best.scores.tolist(), best.indices.tolist(), strict=True):
            matches = zip(scores, indices, strict=True)
            found[number] = [_found(drawn, index, side, score) for score, index in matches if score > -math.inf]
    return [found[number] for number in range(len(queries))]


def _readable(chosen: model.Chosen, side: int, args: argparse.Namespace) -> Iterator[Tensor]:
    """Embeddings chunk by chunk. Unreadable samples are NaN, which `search` ranks last, with −∞."""
    position = 0
    options = {"chunk_size": args.chunk_size, "workers": args.workers}
    for chunk in embedded(chosen.pair.towers[side], chosen.dataset, side, **options):
        usable = chosen.dataset.usable(range(position, position + len(chunk))).to(chunk.device)
        position += len(chunk)
        yield chunk.masked_fill(~usable[:, None], math.nan)


def _query(text: str) -> Shown:
    """An image if the file exists, else a text; a missing file with an image's extension is an error."""
    path = Path(text)
    if path.is_file():
        try:
            return images.decode(images.Encoded(path.read_bytes(), text))
        except UnreadableSampleError as error:
            raise ValueError(f"QUERY must be a text or an image that can be read: {error}") from error
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"):
        raise FileNotFoundError(f"QUERY must be a text or an image that exists, got {text!r}")
    return text


def _side(dataset: Dataset, kind: str, among: str | None) -> int:
    """The side of the data to search. In text–text data it is the second, because a query is like the first."""
    wanted = KINDS[among] if among else IMAGE if kind == TEXT and IMAGE in dataset.sides else TEXT
    if wanted not in dataset.sides:
        raise ValueError(f"--among must be a side of the data, {' or '.join(dataset.sides)}, got {wanted}")
    return 1 if dataset.sides[1] == wanted else 0


def _encoder(pair: Pair, kind: str, *, other: int) -> Tower:
    """The tower for queries; of two text towers, the one of the side that is not searched."""
    if pair.towers[1 - other].kind == kind:
        return pair.towers[1 - other]
    if pair.towers[other].kind == kind:
        return pair.towers[other]
    raise ValueError(f"QUERY must be of a kind that the model encodes, {pair.first.kind} or {pair.second.kind}, got {kind}")


def _found(drawn: Dataset, index: int, side: int, score: float) -> Found:
    """An image with its caption, whichever was searched; of two texts, the searched one with the other below."""
    shown = drawn.sides.index(IMAGE) if IMAGE in drawn.sides else side
    sides = (read_or_none(drawn, index, which) for which in (shown, 1 - shown))
    first, second = ("cannot be read" if value is None else value for value in sides)
    return Found(first, str(second), score)
