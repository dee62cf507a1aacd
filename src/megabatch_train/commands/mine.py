"""`megabatch mine`: hard negatives of a model, as a table of pairs with further columns."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import extras, file_io
from megabatch_train.commands import describe, model, whole
from megabatch_train.commands.model import add_model_arguments
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megabatch_train.evaluation.embedding import Choice


LOG = logging.getLogger("megabatch")
FORMATS = (".jsonl", ".parquet")
ROWS_AT_ONCE = 256  # of a Parquet file, with their images
SIDES = {True: ("query", "document"), False: ("image", "caption")}  # whether the first side is a text: the columns
DESCRIPTION = """
Finds hard negatives: for each pair, the most similar texts other than its match.

  megabatch mine runs/wordnet --negatives 8                 the run's training data
  megabatch mine runs/qa --data pairs.csv --negatives 4 --absolute-margin 0.05 --output mined.jsonl
  megabatch mine runs/qa --data pairs.csv --range-min 10 --range-max 100 --sampling random

Writes a table in JSON lines or Parquet. Each row has the two sides of a pair ("query" and
"document", or "image" and "caption") and its negatives as texts, negative_1 … negative_K, best
first; null where fewer were found. Texts that belong to the same query or image in the data are no
negatives of it. JSON lines name the images by path or address; Parquet holds the images themselves.

Embeddings are kept in a folder beside the output, OUTPUT.work. A command that was stopped continues
where it was when it is called again. At the end the folder is removed; with --keep-embeddings it
stays, and the same command with other filters begins with the search. Memory grows with the number
of texts, not with their pairs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch mine`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser, default="the run's training data, without the part that it held out")
    parser.add_argument("--negatives", type=whole, default=8, metavar="K", help="negatives per pair (default: %(default)s)")
    parser.add_argument(
        "--output", default="mined.jsonl", metavar="FILE", help="the table, .jsonl or .parquet (default: %(default)s)"
    )
    parser.add_argument("--range-min", type=int, default=0, metavar="N", help="skip the N most similar texts (default: 0)")
    parser.add_argument(
        "--range-max", type=int, metavar="N", help="consider only the N most similar texts (default: as many as needed)"
    )
    parser.add_argument("--max-score", type=float, metavar="S", help="leave out texts with a similarity above S")
    parser.add_argument("--min-score", type=float, metavar="S", help="leave out texts with a similarity below S")
    parser.add_argument(
        "--absolute-margin", type=float, metavar="S", help="leave out texts above s - S, where s is the pair's similarity"
    )
    parser.add_argument(
        "--relative-margin", type=float, metavar="R", help="leave out texts above s - R·|s|, where s is the pair's similarity"
    )
    parser.add_argument(
        "--sampling",
        choices=("top", "random"),
        default="top",
        help="the most similar, or random ones of the range (default: top)",
    )
    parser.add_argument("--keep-embeddings", action="store_true", help="keep the folder OUTPUT.work for another call")


def run(args: argparse.Namespace) -> int:
    """Mines, and writes the table."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.embedding import Choice

    names = ("negatives", "range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin", "sampling")
    choice = Choice(**{name: getattr(args, name) for name in names})
    output = Path(args.output)
    if output.suffix not in FORMATS:
        raise ValueError(f"--output must end in {' or '.join(FORMATS)}, got {args.output!r}")
    if output.suffix == ".parquet":
        extras.load("pyarrow.parquet", purpose="Writing Parquet")  # an error now, and not after the search
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch mine must be one process, got {world.size}; start it without torchrun")
        chosen = model.choose(args, world.device, training=True)
        chosen.check_kinds([0, 1])
        chosen.keep_data([output])
        written, missing = Mine(chosen, output, args).write(choice, world.device)
    tell(f"{written:,} pairs with their negatives in {output}" + (f"; {missing:,} negatives were not found" if missing else ""))
    if not args.keep_embeddings:
        shutil.rmtree(embedding.work_folder(output))
    return 0


class Mine:
    """The work on one table: embeddings of both sides, then the lines, which become Parquet at the end if that is asked for."""

    def __init__(self, chosen: model.Chosen, output: Path, args: argparse.Namespace) -> None:
        from megabatch_train.data.dataset import IMAGE
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import read_or_none

        self.chosen, self.dataset, self.output, self.args = chosen, chosen.dataset, output, args
        self.work, self._warned = embedding.work_folder(output), False
        self.holds_images = output.suffix == ".parquet" and self.dataset.sides[0] == IMAGE
        if self.dataset.sides[0] == IMAGE and not self.holds_images:
            self._check_places()
        self.texts = [read_or_none(self.dataset, index, 1) for index in range(len(self.dataset))]
        embedding.continue_or_begin(self.work, self._about())

    def _about(self) -> dict[str, Any]:
        """What must be the same for a stopped command to continue."""
        from megabatch.cached.replay import checksum
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import read_stored_or_none

        everything, number = range(len(self.dataset)), len(self.dataset)
        return {
            "the model": self.args.model,
            "the model's weights": embedding.fingerprint(self.chosen.pair),
            "the data": [redact(self.chosen.data), self.chosen.split],
            "the first side of the pairs": embedding.digest(
                (read_stored_or_none(self.dataset, index, 0) for index in everything), number
            ),
            "the texts": embedding.digest(self.texts, number),
            "the ids of the pairs": checksum(self.dataset.ids(everything)),
        }

    def write(self, choice: Choice, device: torch.device) -> tuple[int, int]:
        """Writes the table; returns the pairs written, and the negatives not found."""
        import torch

        from megabatch_train.data.dataset import TEXT
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import hard_negatives

        numbers, kept = self._distinct()
        names = [*SIDES[self.dataset.sides[0] == TEXT], *(f"negative_{place + 1}" for place in range(choice.negatives))]
        query, document = (embedding.Stored(self.work / f"side{side}", len(self.dataset)) for side in (0, 1))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        for side, embeddings in enumerate((query, document)):
            embeddings.fill(self.chosen.pair.towers[side], self.dataset, side, **options)
        ids = self.dataset.ids(range(len(self.dataset)))
        part = self.output.with_name(self.output.name + ".part")
        done, missing = self._lines(part, choice)
        candidates = document.rows()[kept]
        known: dict[str, Any] = {} if ids is None else {"ids": (ids, ids[kept])}
        if ids is not None and ids.dim() == 2:  # chains of shared texts: the documents of a query are none of its negatives
            known = {"queries": torch.unique(ids[:, 0], return_inverse=True)[1]}
        found = hard_negatives(query.rows(), candidates, numbers, choice, **known, first=done, device=device)
        # A path may have half of a surrogate pair, which UTF-8 has no code for; its backslash form is JSON's as well.
        with part.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for rows in found:
                for index, row in enumerate(rows.tolist(), start=done):
                    negatives = [None if place < 0 else self.texts[kept[place]] for place in row]
                    negatives += [None] * (choice.negatives - len(negatives))
                    missing += negatives.count(None)
                    line = dict(zip(names, (self._first(index), self.texts[index], *negatives), strict=True))
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                done += len(rows)
                file.flush()
                tell(f"{done:,} of {len(self.dataset):,} pairs searched")
        if self.output.suffix == ".parquet":
            self._write_parquet(part, names)
            part.unlink()
        else:
            os.replace(part, self.output)
        return done, missing

    def _first(self, index: int) -> Any:
        """The first side of a line; for an image that the table will hold, its name."""
        from megabatch_train.data.dataset import TEXT
        from megabatch_train.evaluation.embedding import read_or_none

        if self.dataset.sides[0] == TEXT:
            return read_or_none(self.dataset, index, 0)
        return redact(self.dataset.name(index)) if self.holds_images else self._image(index)

    def _check_places(self) -> None:
        for index in range(len(self.dataset)):
            if self.dataset.place(index) is None:
                raise ValueError(
                    "--data must have images that are files or addresses, because the mined table names them, got "
                    f"{self.dataset.name(index)!r}, which is inside a table, a shard or a dataset; a mined table that ends in "
                    ".parquet holds its images"
                )

    def _write_parquet(self, part: Path, names: list[str]) -> None:
        """The lines as Parquet, with images inside as `{"bytes": …, "path": …}`, like those of the library datasets."""
        from megabatch.tiles.block import windows

        arrow = extras.load("pyarrow", purpose="Writing Parquet")
        parquet = extras.load("pyarrow.parquet", purpose="Writing Parquet")
        image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        kinds = [image if self.holds_images else arrow.string()] + [arrow.string()] * (len(names) - 1)
        schema = arrow.schema(list(zip(names, kinds, strict=True)))

        def table(file: Any) -> None:
            with part.open("rb") as lines, parquet.ParquetWriter(file, schema) as writer:
                for rows in windows(len(self.dataset), ROWS_AT_ONCE):
                    some = [json.loads(next(lines)) for _ in range(rows.start, rows.stop)]
                    if self.holds_images:
                        some = [line | {names[0]: self._read_image(index)} for index, line in enumerate(some, rows.start)]
                    writer.write_table(arrow.Table.from_pylist(some, schema))

        file_io.write(self.output, table)

    def _read_image(self, index: int) -> dict[str, Any] | None:
        """An image and its name; None if it cannot be read. A drawing of a demo, which is no file, becomes a PNG."""
        from megabatch_train.data import images
        from megabatch_train.evaluation.embedding import read_stored_or_none

        found = read_stored_or_none(self.dataset, index, 0)
        if found is None:
            return None
        if not isinstance(found, images.EncodedImage):
            file = io.BytesIO()
            images.to_pillow(found).save(file, "PNG")
            found = images.EncodedImage(file.getvalue(), "")
        return {"bytes": found.data, "path": redact(self.dataset.name(index)).encode("utf-8", "backslashreplace").decode()}

    def _image(self, index: int) -> str:
        """The image's name if `train` finds it from the folder of the output, else its path or address."""
        from megabatch_train.data.paths import is_url

        name, place = self.dataset.name(index), self.dataset.place(index)
        assert place is not None, "places are checked at the start"
        if is_url(place):
            return self._redact_url(place)
        path = os.path.abspath(place)
        return name if os.path.abspath(self.output.parent / name) == path else path

    def _redact_url(self, url: str) -> str:
        """The URL without a user, a password and a query, because a table is often passed on."""
        found = str(redact(url))
        if found != url and not self._warned:
            LOG.warning(
                "the table has the URLs of images without user, password and query, such as %s; a table that ends in .parquet "
                "holds the images",
                found,
            )
            self._warned = True
        return found

    def _distinct(self) -> tuple[Tensor, list[int]]:
        """(the candidate of each pair, the pair that each candidate was first seen in): a text is a candidate once."""
        import torch

        places: dict[str | None, int] = {}
        numbers = [places.setdefault(text, len(places)) for text in self.texts]
        kept: dict[int, int] = {}
        for index, number in enumerate(numbers):
            kept.setdefault(number, index)
        return torch.tensor(numbers), list(kept.values())

    def _lines(self, part: Path, choice: Choice) -> tuple[int, int]:
        """The lines already written with the same choice, and the negatives missing in them; a broken last line is removed."""
        path = self.work / "choice.txt"
        if part.exists() and path.exists() and path.read_text() == repr(choice):
            whole = part.read_bytes().rpartition(b"\n")[0]
            lines = whole.splitlines()
            part.write_bytes(whole + b"\n" if lines else b"")
            negatives = (list(json.loads(line).values())[2:] for line in lines)
            return len(lines), sum(row.count(None) for row in negatives)
        part.write_bytes(b"")
        path.write_text(repr(choice))
        return 0, 0
