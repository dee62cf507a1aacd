"""The commands `megabatch embed`, which writes embeddings, and `megabatch search`, which finds the best matches in data."""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train import commands
from megabatch_train.commands import Command, add_dim, add_json, add_model_arguments, describe, print_json
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megabatch_train.data.dataset import Audio, Dataset
    from megabatch_train.display.plots import Found, Shown
    from megabatch_train.display.tables import TextTable
    from megabatch_train.evaluation import embedding
    from megabatch_train.towers import Pair, Tower

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# `megabatch embed`: writes the embeddings of one side of the data to a NumPy or Parquet file.

SIDES = ("images", "texts", "queries", "documents", "audio", "first", "second")
EMBED_DESCRIPTION = """
Writes the embeddings of one side of the data. They are float32, have unit length, and keep the
order of the data.

  megabatch embed runs/photos --data photos/ --output photos.npy       a folder of images
  megabatch embed runs/photos --data pairs.csv --output photos.parquet
  megabatch embed runs/photos --data pairs.csv --side texts --output texts.npy
  megabatch embed runs/photos --data photos/ --dim 128 --output small.npy
  megabatch search runs/photos "dog on a beach" --embeddings photos.npy

A .parquet file has one row per sample with the columns name, path, text and embedding. A .npy file
has one row per sample, too. Two files in the same folder describe it: a .jsonl file lists the
samples, and a .json file names the model and the data. If a sample cannot be read, its row is NaN.

The command collects embeddings in the folder OUTPUT.work and removes this folder at the end. If the
command was stopped, call it again to continue.
"""


def add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch embed`."""
    describe(parser, EMBED_DESCRIPTION)
    add_model_arguments(parser)
    add_dim(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write, with the suffix .npy or .parquet")
    parser.add_argument(
        "--side", choices=SIDES, help="side of the data to embed (default: images, audio, documents of text pairs, or first)"
    )


def run_embed(args: argparse.Namespace) -> int:
    """Computes the embeddings and writes the file."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.late_interaction import StoredTokens, check_lengths, locate_lengths
    from megabatch_train.towers.late_interaction import token_dim

    output = Path(args.output)
    embedding.check_output(output)
    has_lengths = output.suffix == ".npy" and check_lengths(output)
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch embed must run in one process, got {world.size}; start it without torchrun")
        inputs = commands.choose(args, world.device, allow_images_only=True)
        inputs.keep_data(embedding.targets(output))
        dataset, side = inputs.dataset, find_side(inputs.dataset, args.side)
        inputs.check_kinds([side])
        if token_dim(inputs.pair) and output.suffix != ".npy":
            raise ValueError(f"--output must end in .npy for a late-interaction model, got {args.output!r}")
        about = {
            "model": args.model,
            "weights": embedding.fingerprint(inputs.pair),
            "data": redact(inputs.data),
            "split": inputs.split,
            "sides": list(dataset.sides),
            "side": side,
            "dim": args.dim,
            **({"token_dim": token_dim(inputs.pair)} if token_dim(inputs.pair) else {}),
            "samples": embedding.digest((_identify(dataset, index, side) for index in range(len(dataset))), len(dataset)),
        }
        work = embedding.work_folder(output)
        embedding.continue_or_begin(work, about)
        dim = token_dim(inputs.pair)
        rows = StoredTokens(work / "rows", len(dataset), dim) if dim else embedding.Stored(work / "rows", len(dataset))
        rows.fill(inputs.pair.towers[side], dataset, side, chunk_size=args.chunk_size, workers=args.workers)
    if isinstance(rows, StoredTokens):
        rows.write_lengths(output)
    elif has_lengths:  # of an earlier late-interaction model
        locate_lengths(output).unlink(missing_ok=True)
    embedding.write(output, rows, (sample(dataset, index, side) for index in range(len(dataset))), about)
    unreadable = rows.count_unreadable()
    shutil.rmtree(work)
    tell(
        f"wrote {rows.done:,} embeddings of {rows.dim} dimensions to {output}"
        + (f"; {unreadable:,} samples could not be read, so their rows are NaN" if unreadable else "")
    )
    return 0


def find_side(dataset: Dataset, name: str | None) -> int:
    """Returns the index of the side with this name: images or audio and texts, queries and documents, or first and second."""
    from megabatch_train.data.dataset import AUDIO, IMAGE, MIXED, TEXT

    names = {(IMAGE, TEXT): ("images", "texts"), (TEXT, TEXT): ("queries", "documents"), (AUDIO, TEXT): ("audio", "texts")}
    sides = names.get(dataset.sides, names[TEXT, TEXT] if MIXED in dataset.sides else ("first", "second"))
    side = name or (sides[1] if dataset.sides[0] in (TEXT, MIXED) else sides[0])
    if side not in sides:
        raise ValueError(f"--side must be {' or '.join(sides)} for this data, got {side}")
    return sides.index(side)


def sample(dataset: Dataset, index: int, side: int) -> dict[str, Any]:
    """Returns the name, the path and the text of a sample. The text of an image is its caption."""
    from megabatch_train.data.dataset import MIXED, TEXT
    from megabatch_train.data.tables import split_mixed
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.embedding import read_or_none

    if dataset.sides[side] == MIXED:
        path, text = (value or None for value in split_mixed(dataset.key(index, side)))
        named = (redact(path or dataset.name(index)), redact(path), text)
    else:
        text = read_or_none(dataset, index, side if dataset.sides[side] == TEXT else 1)
        text = text if isinstance(text, str) else None  # both sides can be values
        named = (redact(dataset.name(index)), redact(dataset.place(index)), text)
    values = dict(zip(embedding.SAMPLE, named, strict=True))
    # A path may contain half of a surrogate pair, which UTF-8 cannot encode.
    return {key: value and value.encode("utf-8", "backslashreplace").decode() for key, value in values.items()}


def _identify(dataset: Dataset, index: int, side: int) -> Any:
    """Returns a value that changes with the sample. For a file it is path, size and date, so no file is read."""
    from megabatch_train.data.dataset import STORED_IN_FILES
    from megabatch_train.data.paths import is_url
    from megabatch_train.evaluation.embedding import read_stored_or_none

    path = dataset.place(index) if side == 0 and dataset.sides[0] in STORED_IN_FILES else None
    if path is None:
        return read_stored_or_none(dataset, index, side)
    if is_url(path):
        return redact(path)  # as in the cache, the file at a URL is assumed not to change; a token in the URL may change
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # the file is missing, or the text is not a path
        return path
    return path, status.st_size, status.st_mtime_ns


# ----------------------------------------------------------------------------------------------------------------------
# `megabatch search`: prints the best matches of texts or images, and draws a contact sheet, or prints JSON.

KINDS = {
    "images": "image",
    "texts": "text",
    "audio": "audio",
    "values": "value",
    "files": "file",
}  # value of --among → kind of the side (`data.dataset`)
SHEET = "found.png"
SEARCH_DESCRIPTION = """
Searches data for the best matches of queries. A query is a text, or the path of an image or a
recording.

  megabatch search runs/emoji "smiling cat" "red heart"     find images for texts
  megabatch search runs/emoji cat.png                       find texts for an image
  megabatch search runs/photos "dog on a beach" photo.jpg   find images, and find texts
  megabatch search runs/emoji cat.png --among images        find images that are similar to an image
  megabatch search runs/wordnet "animal with a trunk"       find documents for a query
  megabatch search runs/photos "red car" --data new.csv --columns image=file text=description
  megabatch search runs/photos "red car" --data holidays/   search a folder of images
  megabatch search runs/photos "red car" --embeddings photos.npy --json
  megabatch search open_clip:ViT-B-32@laion2b_s34b_b79k "dog on a beach" --data photos.csv

Prints the matches of each query with their cosine similarity, best first. Draws a contact sheet
(PNG) with one row per query. Only the best matches are in memory, so the data can have any size.
With --embeddings, megabatch reads the embeddings of the data from a file of `megabatch embed` and
encodes only the queries. It cuts them to the dimension of the file.
"""


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch search`."""
    describe(parser, SEARCH_DESCRIPTION)
    add_model_arguments(parser)
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="text, or path of an image or a recording")
    parser.add_argument("-k", type=int, default=8, help="number of matches per query (default: %(default)s)")
    parser.add_argument(
        "--among",
        choices=tuple(KINDS),
        help="side of the data to search (default for texts: images, audio or documents; for images and audio: texts)",
    )
    add_dim(parser)
    parser.add_argument(
        "--embeddings", metavar="FILE", help="file of `megabatch embed`; searches its embeddings instead of --data"
    )
    add_json(parser, "the matches with rank, similarity, index, name, path and text")
    parser.add_argument("--sheet", metavar="PNG", help="file of the contact sheet (default: found.png, or none with --json)")


@dataclass(frozen=True)
class Match:
    """A match of a query."""

    rank: int  # 1 is the best
    similarity: float
    index: int  # in the data
    name: str | None
    path: str | None  # None for a sample that is not a file
    text: str | None


class Data:
    """A dataset to search. Its samples are encoded chunk by chunk."""

    def __init__(self, inputs: commands.ModelAndData, args: argparse.Namespace) -> None:
        self.inputs, self.dataset, self.args = inputs, inputs.dataset, args
        self.name, self.credits, self.failures = redact(inputs.data), inputs.dataset.credits, inputs.dataset.failures
        self._pictures: Dataset | None = None

    def side(self, kind: str) -> int:
        """Returns the side to search for queries of this kind. For pairs of texts it is the second side."""
        from megabatch_train.data.dataset import MIXED, TEXT
        from megabatch_train.data.rows import ImageFolder

        if MIXED in self.dataset.sides:
            if self.args.among:
                raise ValueError(f"--among must not be set for data with query_image or document_image, got {self.args.among}")
            return 1
        sides = self.dataset.sides[:1] if isinstance(self.dataset, ImageFolder) else self.dataset.sides
        among = self.args.among
        searched = KINDS[among] if among else sides[0] if kind == TEXT or TEXT not in sides else TEXT
        if searched not in sides:
            raise ValueError(f"--among must be a side of the data, {' or '.join(sides)}, got {searched}")
        return 1 if self.dataset.sides[1] == searched else 0

    def chunks(self, side: int) -> Iterator[Tensor]:  # (n, D) each
        """Yields the embeddings of `samples`. A sample that cannot be read has NaN, which `search` ranks last with −∞."""
        from megabatch_train.evaluation.embedding import readable

        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        return readable(self.inputs.pair.towers[side], self.dataset, side, self.samples(side), **options)

    def samples(self, side: int) -> Sequence[int]:
        """Returns the samples to search. An image with several captions, or a document of several queries, occurs once."""
        from megabatch_train.data.dataset import distinct_samples

        return distinct_samples(self.dataset, side)

    def about(self, index: int, side: int) -> dict[str, Any]:
        """Returns the name, the path and the text of a sample."""
        return sample(self.dataset, index, side)

    def show(self, match: Match, side: int) -> Found:
        """Returns a match for the contact sheet: the image with its caption, or the searched text with the other text."""
        from megabatch_train.data.dataset import IMAGE
        from megabatch_train.display.plots import PICTURE, Found
        from megabatch_train.evaluation.embedding import read_or_none

        pictures = self._pictures = self._pictures or self.inputs.redraw(PICTURE)
        shown = pictures.sides.index(IMAGE) if IMAGE in pictures.sides else side
        sides = (read_or_none(pictures, match.index, which) for which in (shown, 1 - shown))
        first, second = (_show(value, pictures.name(match.index)) for value in sides)
        return Found(first, str(second), match.similarity)


class Embeddings:
    """A file of `megabatch embed` to search."""

    def __init__(self, saved: embedding.Saved) -> None:
        self.saved, self.name = saved, str(saved.path)
        self.credits: tuple[str, ...] = ()
        self.failures: dict[int, str] = {}

    def side(self, kind: str) -> int:
        """Returns the side that the file contains."""
        return int(self.saved.about["side"])

    def chunks(self, side: int) -> Iterator[Tensor]:  # (n, D) each
        """Yields the embeddings. If several rows belong to one sample, all of them except the first become NaN."""
        from megabatch_train.data.dataset import TEXT

        key = "text" if self.saved.about["sides"][side] == TEXT else "path"
        earlier: set[str] = set()
        position = 0
        for chunk in self.saved.chunks():
            repeated = []
            for row, about in enumerate(self.saved.samples[position : position + len(chunk)]):
                if (value := about.get(key)) in earlier:
                    repeated.append(row)
                elif value is not None:
                    earlier.add(value)
            position += len(chunk)
            yield chunk.index_fill(0, chunk.new_tensor(repeated).long(), math.nan)

    def samples(self, side: int) -> Sequence[int]:
        """Returns the samples that the rows of the embeddings belong to."""
        return range(len(self.saved.samples))

    def about(self, index: int, side: int) -> dict[str, Any]:
        """Returns the name, the path and the text of a sample."""
        return self.saved.samples[index]

    def show(self, match: Match, side: int) -> Found:
        """Returns the image if its file can be read, or else its text."""
        from megabatch_train.data.dataset import UnreadableSampleError
        from megabatch_train.data.media import images
        from megabatch_train.display.plots import Found

        text = match.text or match.name or ""
        try:
            path = Path(match.path or "")
            return Found(images.decode(images.EncodedImage(path.read_bytes(), str(path))), text, match.similarity)
        except (OSError, UnreadableSampleError):
            return Found(text, match.name or "", match.similarity)


def run_search(args: argparse.Namespace) -> int:
    """Searches, prints the matches and draws the contact sheet."""
    from megabatch.world import join_world
    from megabatch_train.display import plots

    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch search must run in one process, got {world.size}; start it without torchrun")
        queries = [_parse_query(text) for text in args.queries]
        pair, source = _load_source(args, world.device)
        results = find_matches(pair, source, queries, args.k)
    if args.json:
        matches = ([asdict(match) for match, _ in row] for row in results)
        print_json([{"query": text, "matches": row} for text, row in zip(args.queries, matches, strict=True)])
    else:
        for text, row in zip(args.queries, results, strict=True):
            _tabulate(text, [match for match, _ in row]).print()
    sheet_path = args.sheet or (None if args.json else SHEET)
    if sheet_path is not None:
        sheet_rows = [
            [source.show(match, side) for match, side in row[: plots.MOST_MATCHES]] for row in results[: plots.MOST_QUERIES]
        ]
        title = f"{source.name}, searched with {args.model}"
        shown = [_show(query, text) for query, text in zip(queries, args.queries, strict=True)]
        plots.draw_sheet(sheet_path, shown[: len(sheet_rows)], sheet_rows, title=title, credits=source.credits)
    if sheet_path is not None and not args.json:
        is_cut = args.k > plots.MOST_MATCHES or len(queries) > plots.MOST_QUERIES
        tell(
            f"wrote {sheet_path}"
            + (f" (the first {plots.MOST_MATCHES} matches of the first {len(sheet_rows)} queries)" if is_cut else "")
        )
    if source.failures:
        message = f"{len(source.failures):,} samples could not be read; the first: {next(iter(source.failures.values()))}"
        tell(message, file=sys.stderr if args.json else sys.stdout)
    return 0


def _show(value: Any, name: str) -> Shown:
    """Returns an image or a text for the contact sheet. Other samples are shown by their names."""
    import torch

    from megabatch_train.data.dataset import Content

    if isinstance(value, Content):
        return value.text if value.image is None else value.image
    return "cannot be read" if value is None else value if isinstance(value, str | torch.Tensor) else name


def _tabulate(query: str, row: list[Match]) -> TextTable:
    """Returns the table of the matches of a query. It has a column for files if a match is a file."""
    from megabatch_train.display.tables import TextTable

    files = any(match.path for match in row)
    cells = [
        [match.rank, match.text or match.name or "", *([match.path or ""] if files else []), f"{match.similarity:.3f}"]
        for match in row
    ]
    return TextTable(["", "match", *(["file"] if files else []), "similarity"], cells, query, names=(1, 2) if files else (1,))


def find_matches(pair: Pair, source: Data | Embeddings, queries: list[Any], k: int) -> list[list[tuple[Match, int]]]:
    """Returns the matches of each query, best first, with the side that was searched."""
    from megabatch_train.data.dataset import AUDIO, IMAGE, TEXT, Audio
    from megabatch_train.evaluation import encode
    from megabatch_train.evaluation.late_interaction import search_any

    kinds = [TEXT if isinstance(query, str) else AUDIO if isinstance(query, Audio) else IMAGE for query in queries]
    results: dict[int, list[tuple[Match, int]]] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        side = source.side(kind)
        encoder = _choose_encoder(pair, kind, other=side)
        encoded = encode(encoder, [queries[number] for number in numbers])
        best = search_any(pair, encoded, source.chunks(side), k)
        samples = source.samples(side)
        for number, scores, indices in zip(numbers, best.scores.tolist(), best.indices.tolist(), strict=True):
            pairs = [(score, samples[index]) for score, index in zip(scores, indices, strict=True) if score > -math.inf]
            matches = [Match(rank, score, index, **source.about(index, side)) for rank, (score, index) in enumerate(pairs, 1)]
            results[number] = [(match, side) for match in matches]
    return [results[number] for number in range(len(queries))]


def _load_source(args: argparse.Namespace, device: torch.device) -> tuple[Pair, Data | Embeddings]:
    """Returns the model and the data or embeddings to search."""
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.late_interaction import open_saved

    if not args.embeddings:
        inputs = commands.choose(args, device, allow_images_only=True)
        return inputs.pair, Data(inputs, args)
    options = [name for name in ("data", "columns", "split", "among") if getattr(args, name) is not None]
    if options:
        raise ValueError(f"--{options[0]} cannot be used with --embeddings, because the file determines it")
    saved = open_saved(Path(args.embeddings))
    pair = commands.load_pair(args.model, device, tuple(saved.about["sides"]), trust=args.trust_remote_code)
    if embedding.fingerprint(pair) != saved.about["weights"]:
        raise ValueError(
            f"--embeddings must have the same model and weights, got {args.embeddings} of {saved.about['model']!r}; run "
            "`megabatch embed` again"
        )
    dim = saved.about.get("dim")
    if args.dim not in (None, dim):
        dims_in_words = "all dimensions of the model" if dim is None else f"{dim} dimensions"
        raise ValueError(
            f"--dim must equal the dimension of --embeddings, its default, got {args.dim} for a file of {dims_in_words}"
        )
    if dim is not None:
        commands.truncate_pair(pair, dim, commands.run_of(args.model))
    LOG.info("data: %s, %s embeddings of %s", args.embeddings, f"{len(saved.samples):,}", saved.about.get("data"))
    return pair, Embeddings(saved)


def _parse_query(text: str) -> Shown | Audio:
    """Returns the image or recording if the file exists, or else the text. An empty text and a missing file are errors."""
    from megabatch_train.data.dataset import UnreadableSampleError
    from megabatch_train.data.media import audio, images
    from megabatch_train.data.rows import ENDINGS

    if not text.strip():
        raise ValueError(f"QUERY must be a text or the path of an image or a recording, got {text!r}, which is empty")
    path = Path(text)
    is_audio = path.suffix.lower() in audio.ENDINGS
    if os.path.isfile(text):  # `Path.is_file` raises an error for a long name
        try:
            if is_audio:
                return audio.decode(audio.EncodedAudio(path.read_bytes(), text))
            return images.decode(images.EncodedImage(path.read_bytes(), text))
        except UnreadableSampleError as error:
            raise ValueError(f"QUERY must be a text, or an image or a recording that can be read: {error}") from error
    if is_audio or path.suffix.lower() in ENDINGS:
        raise FileNotFoundError(f"QUERY must be a text, or an image or a recording that exists, got {text!r}")
    return text


def _choose_encoder(pair: Pair, kind: str, *, other: int) -> Tower:
    """Returns the tower for queries. If both towers encode them, it is the tower of the side that is not searched."""
    from megabatch_train.data.dataset import MIXED

    for side in (1 - other, other):
        if pair.towers[side].kind in (kind, MIXED):
            return pair.towers[side]
    raise ValueError(f"QUERY must be of a kind that the model encodes, {pair.first.kind} or {pair.second.kind}, got {kind}")


COMMANDS = {
    "embed": Command(add_embed_arguments, run_embed),
    "search": Command(add_search_arguments, run_search),
}
