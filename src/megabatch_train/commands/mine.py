"""`megabatch mine`: finds hard negatives with a model, and writes them to a table of pairs with further columns."""

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
from megabatch_train import commands
from megabatch_train.commands import add_model_arguments, describe, parse_positive_int
from megabatch_train.names import redact, tell

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megabatch_train.evaluation.embedding import Choice


LOG = logging.getLogger("megabatch")
FORMATS = (".jsonl", ".parquet")
ROWS_AT_ONCE = 256  # rows of a Parquet file, with their images, that are written at once
SIDES = {True: ("query", "document"), False: ("image", "caption")}  # the key is whether the first side is a text
DESCRIPTION = """
Finds hard negatives. For each pair, these are the texts that are most similar to its first side and
do not match it.

  megabatch mine runs/wordnet --negatives 8                 mine in the training data of the run
  megabatch mine runs/qa --data pairs.csv --negatives 4 --absolute-margin 0.05 --output mined.jsonl
  megabatch mine runs/qa --data pairs.csv --range-min 10 --range-max 100 --sampling random

Writes a table in JSON lines or Parquet. Each row contains the two sides of a pair ("query" and
"document", or "image" and "caption") and the texts of its negatives, negative_1 to negative_K, most
similar first. If fewer negatives are found, the other columns are null. If the data pairs several
texts with a query or an image, none of them is a negative of it. A JSON line names an image by its
path or URL. A Parquet file contains the images.

The command stores embeddings in the folder OUTPUT.work and removes this folder at the end. If the
command was stopped, call it again to continue. With --keep-embeddings the folder is not removed, so
a later call with other filters only has to search. Memory grows linearly with the number of texts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch mine`."""
    describe(parser, DESCRIPTION)
    add_model_arguments(parser, default="training data of the run, without the held-out part")
    parser.add_argument(
        "--negatives",
        type=parse_positive_int,
        default=8,
        metavar="K",
        help="number of negatives per pair (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        default="mined.jsonl",
        metavar="FILE",
        help="table to write, with the suffix .jsonl or .parquet (default: %(default)s)",
    )
    parser.add_argument("--range-min", type=int, default=0, metavar="N", help="skip the N most similar texts (default: 0)")
    parser.add_argument(
        "--range-max", type=int, metavar="N", help="consider only the N most similar texts (default: as many as needed)"
    )
    parser.add_argument(
        "--max-score", type=float, metavar="S", help="exclude texts with a similarity above S (default: no limit)"
    )
    parser.add_argument(
        "--min-score", type=float, metavar="S", help="exclude texts with a similarity below S (default: no limit)"
    )
    parser.add_argument(
        "--absolute-margin",
        type=float,
        metavar="S",
        help="exclude texts that are more similar than s - S, where s is the similarity of the pair (default: no limit)",
    )
    parser.add_argument(
        "--relative-margin",
        type=float,
        metavar="R",
        help="exclude texts that are more similar than s - R·|s|, where s is the similarity of the pair (default: no limit)",
    )
    parser.add_argument(
        "--sampling",
        choices=("top", "random"),
        default="top",
        help="take the most similar texts, or random texts of the range (default: top)",
    )
    parser.add_argument(
        "--keep-embeddings",
        action="store_true",
        help="do not remove the folder OUTPUT.work, so that a later call can use its embeddings",
    )


def run(args: argparse.Namespace) -> int:
    """Finds the negatives and writes the table."""
    from megabatch.world import join_world
    from megabatch_train.evaluation import embedding
    from megabatch_train.evaluation.embedding import Choice

    names = ("negatives", "range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin", "sampling")
    choice = Choice(**{name: getattr(args, name) for name in names})
    output = Path(args.output)
    if output.suffix not in FORMATS:
        raise ValueError(f"--output must end in {' or '.join(FORMATS)}, got {args.output!r}")
    if output.suffix == ".parquet":
        extras.load("pyarrow.parquet", purpose="Writing Parquet")  # raises an error before the search
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch mine must run in one process, got {world.size}; start it without torchrun")
        inputs = commands.choose(args, world.device, training=True)
        inputs.check_kinds([0, 1])
        inputs.keep_data([output])
        file_io.remove_leftovers(output.parent, output.name.__eq__)  # of a killed command
        written, missing = Mine(inputs, output, args).write(choice, world.device)
    tell(
        f"wrote {written:,} pairs with their negatives to {output}"
        + (f"; {missing:,} negatives are missing" if missing else "")
    )
    if not args.keep_embeddings:
        shutil.rmtree(embedding.work_folder(output))
    return 0


class Mine:
    """Computes the embeddings of both sides, and writes the table as JSON lines. At the end it can convert them to Parquet."""

    def __init__(self, inputs: commands.ModelAndData, output: Path, args: argparse.Namespace) -> None:
        from megabatch_train.data.dataset import IMAGE, TEXT
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import read_or_none

        self.inputs, self.dataset, self.output, self.args = inputs, inputs.dataset, output, args
        if self.dataset.sides not in ((IMAGE, TEXT), (TEXT, TEXT)):
            raise ValueError(
                f"--data must have images and texts, or queries and documents, got {' and '.join(self.dataset.sides)}"
            )
        self.work, self._warned = embedding.work_folder(output), False
        self.holds_images = output.suffix == ".parquet" and self.dataset.sides[0] == IMAGE
        if self.dataset.sides[0] == IMAGE and not self.holds_images:
            self._check_paths()
        self.texts = [read_or_none(self.dataset, index, 1) for index in range(len(self.dataset))]
        embedding.continue_or_begin(self.work, self._describe_inputs())

    def _describe_inputs(self) -> dict[str, Any]:
        """Returns the inputs. A stopped command can continue only if they are the same."""
        from megabatch.cached.replay import checksum
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import read_stored_or_none

        everything, number = range(len(self.dataset)), len(self.dataset)
        return {
            "the model": self.args.model,
            "the model's weights": embedding.fingerprint(self.inputs.pair),
            "the data": [redact(self.inputs.data), self.inputs.split],
            "the first side of the pairs": embedding.digest(
                (read_stored_or_none(self.dataset, index, 0) for index in everything), number
            ),
            "the texts": embedding.digest(self.texts, number),
            "the ids of the pairs": checksum(self.dataset.ids(everything)),
        }

    def write(self, choice: Choice, device: torch.device) -> tuple[int, int]:
        """Writes the table. Returns the number of pairs and the number of missing negatives."""
        import torch

        from megabatch_train.data.dataset import TEXT
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.embedding import hard_negatives

        candidates_of, first_pairs = self._number_texts()
        names = [*SIDES[self.dataset.sides[0] == TEXT], *(f"negative_{number + 1}" for number in range(choice.negatives))]
        query, document = (embedding.Stored(self.work / f"side{side}", len(self.dataset)) for side in (0, 1))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        for side, embeddings in enumerate((query, document)):
            embeddings.fill(self.inputs.pair.towers[side], self.dataset, side, **options)
        ids = self.dataset.ids(range(len(self.dataset)))
        part_file = self.output.with_name(self.output.name + ".part")
        lines_done, missing = self._count_written(part_file, choice)
        candidates = document.rows()[first_pairs]
        matches: dict[str, Any] = {} if ids is None else {"ids": (ids, ids[first_pairs])}
        if ids is not None and ids.dim() == 2:  # rows share texts in chains, so a query excludes only its own documents
            matches = {"queries": torch.unique(ids[:, 0], return_inverse=True)[1]}
        mined = hard_negatives(query.rows(), candidates, candidates_of, choice, **matches, first=lines_done, device=device)
        # A path may contain half of a surrogate pair, which UTF-8 cannot encode. Its backslash form is valid in JSON, too.
        with part_file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for rows in mined:
                for index, row in enumerate(rows.tolist(), start=lines_done):
                    negatives = [None if number < 0 else self.texts[first_pairs[number]] for number in row]
                    negatives += [None] * (choice.negatives - len(negatives))
                    missing += negatives.count(None)
                    line = dict(zip(names, (self._read_first_side(index), self.texts[index], *negatives), strict=True))
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                lines_done += len(rows)
                file.flush()
                tell(f"searched {lines_done:,} of {len(self.dataset):,} pairs")
        if self.output.suffix == ".parquet":
            self._write_parquet(part_file, names)
            part_file.unlink()
        else:
            os.replace(part_file, self.output)
        return lines_done, missing

    def _read_first_side(self, index: int) -> Any:
        """Returns the first side of a pair. For an image that the table will contain, it returns the name."""
        from megabatch_train.data.dataset import TEXT
        from megabatch_train.evaluation.embedding import read_or_none

        if self.dataset.sides[0] == TEXT:
            return read_or_none(self.dataset, index, 0)
        return redact(self.dataset.name(index)) if self.holds_images else self._name_image(index)

    def _check_paths(self) -> None:
        for index in range(len(self.dataset)):
            if self.dataset.place(index) is None:
                raise ValueError(
                    "--data must have images with a path or a URL, because the mined table names them, got "
                    f"{self.dataset.name(index)!r}, which is inside a table, a shard or a dataset; an --output that ends in "
                    ".parquet contains the images"
                )

    def _write_parquet(self, part: Path, names: list[str]) -> None:
        """Converts the lines to Parquet. Images are stored as `{"bytes": …, "path": …}`, as in the library datasets."""
        from megabatch.tiles.block import windows

        arrow = extras.load("pyarrow", purpose="Writing Parquet")
        parquet = extras.load("pyarrow.parquet", purpose="Writing Parquet")
        image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        kinds = [image if self.holds_images else arrow.string()] + [arrow.string()] * (len(names) - 1)
        schema = arrow.schema(list(zip(names, kinds, strict=True)))

        def write_table(file: Any) -> None:
            with part.open("rb") as lines, parquet.ParquetWriter(file, schema) as writer:
                for rows in windows(len(self.dataset), ROWS_AT_ONCE):
                    records = [json.loads(next(lines)) for _ in range(rows.start, rows.stop)]
                    if self.holds_images:
                        records = [line | {names[0]: self._read_image(index)} for index, line in enumerate(records, rows.start)]
                    writer.write_table(arrow.Table.from_pylist(records, schema))

        file_io.write(self.output, write_table)

    def _read_image(self, index: int) -> dict[str, Any] | None:
        """Returns an image and its name, or None if it cannot be read. A drawing of the demo data is converted to PNG."""
        from megabatch_train.data import images
        from megabatch_train.evaluation.embedding import read_stored_or_none

        image = read_stored_or_none(self.dataset, index, 0)
        if image is None:
            return None
        if not isinstance(image, images.EncodedImage):
            file = io.BytesIO()
            images.to_pillow(image).save(file, "PNG")
            image = images.EncodedImage(file.getvalue(), "")
        return {"bytes": image.data, "path": redact(self.dataset.name(index)).encode("utf-8", "backslashreplace").decode()}

    def _name_image(self, index: int) -> str:
        """Returns the path or URL of an image. The path is relative if the image's name is its path from the output folder."""
        from megabatch_train.data.paths import is_url

        name, path_or_url = self.dataset.name(index), self.dataset.place(index)
        assert path_or_url is not None, "`_check_paths` has checked that all images have a path"
        if is_url(path_or_url):
            return self._redact_url(path_or_url)
        path = os.path.abspath(path_or_url)
        return name if os.path.abspath(self.output.parent / name) == path else path

    def _redact_url(self, url: str) -> str:
        """Removes the user, the password and the query from a URL, because tables are often shared."""
        redacted = str(redact(url))
        if redacted != url and not self._warned:
            LOG.warning(
                "the table contains URLs of images without user, password and query, such as %s; an --output that ends in "
                ".parquet contains the images",
                redacted,
            )
            self._warned = True
        return redacted

    def _number_texts(self) -> tuple[Tensor, list[int]]:
        """Makes each distinct text one candidate. Returns the candidate of each pair, and the first pair of each candidate."""
        import torch

        number_of: dict[str | None, int] = {}
        numbers = [number_of.setdefault(text, len(number_of)) for text in self.texts]
        first_pairs: dict[int, int] = {}
        for index, number in enumerate(numbers):
            first_pairs.setdefault(number, index)
        return torch.tensor(numbers), list(first_pairs.values())

    def _count_written(self, part: Path, choice: Choice) -> tuple[int, int]:
        """Returns how many lines an earlier run wrote with this choice, and how many negatives these lines miss.

        Removes an incomplete last line, and all lines that were written with another choice.
        """
        path = self.work / "choice.txt"
        if part.exists() and path.exists() and path.read_text() == repr(choice):
            complete = part.read_bytes().rpartition(b"\n")[0]
            lines = complete.splitlines()
            part.write_bytes(complete + b"\n" if lines else b"")
            negatives = (list(json.loads(line).values())[2:] for line in lines)
            return len(lines), sum(row.count(None) for row in negatives)
        part.write_bytes(b"")
        path.write_text(repr(choice))
        return 0, 0
