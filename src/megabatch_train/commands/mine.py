"""`megabatch mine`: finds hard negatives with a model, and writes them to a table, or groups of pairs for batches."""

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

    from megabatch_train.evaluation.embedding import Choice, Stored


LOG = logging.getLogger("megabatch")
FORMATS = (".jsonl", ".parquet")
TABLE, GROUPS = "mined.jsonl", "batches.safetensors"  # default names of the output
NEGATIVES, NEIGHBORS, GROUP_SIZE = 8, 32, 32  # default numbers
ROWS_AT_ONCE = 256  # rows of a Parquet file, with their images, that are written at once
SIDES = {True: ("query", "document"), False: ("image", "caption")}  # the key is whether the first side is a text
DESCRIPTION = """
Finds hard negatives. For each pair, these are the texts that are most similar to its first side and
do not match it.

  megabatch mine runs/wordnet --negatives 8                 mine in the training data of the run
  megabatch mine runs/qa --data pairs.csv --negatives 4 --absolute-margin 0.05 --output mined.jsonl
  megabatch mine runs/qa --data pairs.csv --range-min 10 --range-max 100 --sampling random
  megabatch mine runs/qa --data pairs.csv --corpus corpus.jsonl     also search texts without a pair
  megabatch mine runs/qa --data pairs.csv --batches                  group the pairs for batches

Writes a table in JSON lines or Parquet. Each row contains the two sides of a pair ("query" and
"document", or "image" and "caption") and the texts of its negatives, negative_1 to negative_K, most
similar first. If fewer negatives are found, the other columns are null. If the data pairs several
texts with a query or an image, none of them is a negative of it. A JSON line names an image by its
path or URL. A Parquet file contains the images.

--corpus names a file of JSON lines with "text" and optionally "title". The candidates are then its
texts and the texts of the pairs.

--batches writes groups of pairs that are hard negatives of each other. `megabatch train --batches
mined --batch-groups FILE` puts whole groups into batches. A group has --group-size pairs, and does
not depend on the batch size. Pairs that share an image or a text are put into different groups.

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
        metavar="K",
        help=f"number of negatives per pair (default: {NEGATIVES}, or {NEIGHBORS} with --batches)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"table to write, with the suffix .jsonl or .parquet (default: {TABLE}, or {GROUPS} with --batches)",
    )
    parser.add_argument("--corpus", metavar="FILE", help="also search these texts; JSON lines with text, and optionally title")
    parser.add_argument("--batches", action="store_true", help="write groups of pairs that are hard negatives of each other")
    parser.add_argument(
        "--group-size", type=parse_positive_int, metavar="N", help="pairs in a group of --batches (default: 32)"
    )
    parser.add_argument(
        "--holdout", type=float, metavar="X", help="exclude the part of --data that a run with --holdout X evaluates on"
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
    from megabatch_train.towers.late_interaction import token_dim

    names = ("range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin", "sampling")
    negatives = args.negatives or (NEIGHBORS if args.batches else NEGATIVES)
    choice = Choice(negatives, **{name: getattr(args, name) for name in names})
    output = Path(args.output or (GROUPS if args.batches else TABLE))
    formats = (Path(GROUPS).suffix,) if args.batches else FORMATS
    if output.suffix not in formats:
        raise ValueError(f"--output must end in {' or '.join(formats)}, got {args.output!r}")
    if args.batches and args.corpus:
        raise ValueError(f"--corpus must not be set with --batches, which groups pairs, got {args.corpus}")
    if args.group_size and not args.batches:
        raise ValueError(f"--group-size must not be set without --batches, got {args.group_size}")
    if args.group_size == 1:
        raise ValueError("--group-size must be at least 2, because a group of one pair has no negatives, got 1")
    if output.suffix == ".parquet":
        extras.load("pyarrow.parquet", purpose="Writing Parquet")  # raises an error before the search
    with join_world(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch mine must run in one process, got {world.size}; start it without torchrun")
        inputs = commands.choose(args, world.device, training=True)
        inputs.check_kinds([0, 1])
        inputs.keep_data([output])
        if args.corpus and output.exists() and output.samefile(args.corpus):
            raise ValueError(f"--output must not replace the corpus, got {output}; choose another --output")
        file_io.remove_leftovers(output.parent, output.name.__eq__)  # of a killed command
        if (args.batches or args.corpus) and token_dim(inputs.pair):
            option = "--batches" if args.batches else "--corpus"
            raise ValueError(f"{option} must not be set for a late-interaction model, got {args.model}")
        mine = Mine(inputs, output, args)
        if args.batches:
            tell(mine.write_groups(choice, args.group_size or GROUP_SIZE, world.device))
        else:
            written, missing = mine.write(choice, world.device)
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
        from megabatch_train.data.dataset import IMAGE, MIXED, TEXT
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.corpus import TextFile
        from megabatch_train.evaluation.embedding import read_or_none

        self.inputs, self.dataset, self.output, self.args = inputs, inputs.dataset, output, args
        if MIXED not in self.dataset.sides and self.dataset.sides not in ((IMAGE, TEXT), (TEXT, TEXT)):
            raise ValueError(
                f"--data must have images and texts, or queries and documents, got {' and '.join(self.dataset.sides)}"
            )
        self.work, self._warned = embedding.work_folder(output), False
        self.holds_images = output.suffix == ".parquet" and self.dataset.sides[0] == IMAGE
        if self.dataset.sides[0] == IMAGE and not self.holds_images and not args.batches:
            self._check_paths()
        self.corpus = None if args.corpus is None else TextFile(Path(args.corpus), "--corpus")
        self.is_mixed = MIXED in self.dataset.sides
        if self.is_mixed:
            self._check_mixed()
        mixed = self.dataset.sides[1] == MIXED
        self.texts = [
            self.dataset.key(index, 1) if mixed else read_or_none(self.dataset, index, 1) for index in range(len(self.dataset))
        ]
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
            "the corpus": None if self.corpus is None else self.corpus.digest(),
        }

    def _embed(self) -> list[Stored]:
        """Embeds both sides of the pairs. Returns the embeddings, which are memory-mapped."""
        sides = []
        for side in (0, 1):
            stored = self._open_stored(side)
            options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
            stored.fill(self.inputs.pair.towers[side], self.dataset, side, **options)
            sides.append(stored)
        return sides

    def write_groups(self, choice: Choice, group_size: int, device: torch.device) -> str:
        """Writes groups of pairs for `megabatch train --batches mined`. Returns a summary."""
        from megabatch_train.data import batches
        from megabatch_train.data.dataset import ReadingProgress
        from megabatch_train.evaluation.grouping import find_neighbors, group_pairs, share_inside

        first, second = (side.rows() for side in self._embed())
        ids = self.dataset.ids(range(len(self.dataset)))
        progress = ReadingProgress("pairs searched", len(self.dataset))
        neighbors = find_neighbors(first, second, choice, ids=ids, device=device, tell=progress.tell)
        groups = group_pairs(neighbors, group_size, ids=ids, device=device)
        about = {
            "data": redact(self.inputs.data),
            "samples": batches.fingerprint(self.dataset),
            "model": self.args.model,
            "group_size": group_size,
        }
        batches.write_groups(self.output, {batches.GROUPS: groups}, about)
        number, share = int(groups.max()) + 1, share_inside(neighbors, groups)
        return (
            f"wrote {number:,} groups of {group_size} of {len(groups):,} pairs to {self.output}; {share:.1%} of the "
            f"{choice.negatives} hard negatives of a pair are in its group"
        )

    def write(self, choice: Choice, device: torch.device) -> tuple[int, int]:
        """Writes the table. Returns the number of pairs and the number of missing negatives."""
        import torch

        from megabatch_train.data.dataset import IMAGE
        from megabatch_train.evaluation.embedding import hard_negatives
        from megabatch_train.evaluation.late_interaction import MaxSim, StoredTokens

        candidates_of, first_pairs = self._number_texts()
        added = self._choose_from_corpus()
        names = [*SIDES[self.dataset.sides[0] != IMAGE], *(f"negative_{number + 1}" for number in range(choice.negatives))]
        query, document = self._embed()
        ids = self.dataset.ids(range(len(self.dataset)))
        part_file = self.output.with_name(self.output.name + ".part")
        lines_done, missing = self._count_written(part_file, choice)
        matches: dict[str, Any] = {}
        if ids is not None and ids.dim() == 1:  # a text that only the corpus has shares no id
            own = torch.unique(ids, return_inverse=True)[1]
            matches = {"ids": (own, torch.cat([own[first_pairs], len(own) + torch.arange(len(added))]))}
        if ids is not None and ids.dim() == 2:  # rows share texts in chains, so a query excludes only its own documents
            matches = {"queries": torch.unique(ids[:, 0], return_inverse=True)[1]}
        if isinstance(query, StoredTokens) and isinstance(document, StoredTokens):
            scored: tuple[Any, Any] = MaxSim(query, document.part(first_pairs), device), None
        else:
            candidates = document.rows()[first_pairs]
            scored = query.rows(), torch.cat([candidates, self._embed_corpus()[added]]) if added else candidates
        mined = hard_negatives(*scored, candidates_of, choice, **matches, first=lines_done, device=device)

        def text_of(number: int) -> Any:
            if number < len(first_pairs):
                return self.texts[first_pairs[number]]
            assert self.corpus is not None, "only a corpus has further candidates"
            return self.corpus.read(added[number - len(first_pairs)], 1)

        # A path may contain half of a surrogate pair, which UTF-8 cannot encode. Its backslash form is valid in JSON, too.
        with part_file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for rows in mined:
                for index, row in enumerate(rows.tolist(), start=lines_done):
                    negatives = [None if number < 0 else text_of(number) for number in row]
                    negatives += [None] * (choice.negatives - len(negatives))
                    missing += negatives.count(None)
                    line = dict(zip(names, (self._read_first_side(index), self.texts[index], *negatives), strict=True))
                    if self.is_mixed:
                        line = self._divide(line)
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

    def _open_stored(self, side: int) -> Stored:
        """Returns the embeddings of one side that are computed so far."""
        from megabatch_train.evaluation import embedding
        from megabatch_train.evaluation.late_interaction import StoredTokens
        from megabatch_train.towers.late_interaction import token_dim

        path, total, dim = self.work / f"side{side}", len(self.dataset), token_dim(self.inputs.pair)
        return StoredTokens(path, total, dim) if dim else embedding.Stored(path, total)

    def _read_first_side(self, index: int) -> Any:
        """Returns the first side of a pair. For an image that the table will contain, it returns the name."""
        from megabatch_train.data.dataset import MIXED, TEXT
        from megabatch_train.evaluation.embedding import read_or_none

        if self.dataset.sides[0] == MIXED:
            return self.dataset.key(index, 0)
        if self.dataset.sides[0] == TEXT:
            return read_or_none(self.dataset, index, 0)
        return redact(self.dataset.name(index)) if self.holds_images else self._name_image(index)

    def _check_mixed(self) -> None:
        """Raises an error if the table cannot name the images of sides with texts and images."""
        from megabatch_train.data.dataset import MIXED
        from megabatch_train.data.tables import Table, split_mixed

        if self.output.suffix != ".jsonl":
            raise ValueError(f"--output must end in .jsonl for data with query_image or document_image, got {self.output}")
        if self.corpus is not None:
            raise ValueError(f"--corpus must not be set for data with query_image or document_image, got {self.corpus.path}")
        for index in range(len(self.dataset)):
            for side in (side for side in (0, 1) if self.dataset.sides[side] == MIXED):
                image, _ = split_mixed(self.dataset.key(index, side))
                if isinstance(self.dataset, Table) and self.dataset.is_inside(image):
                    raise ValueError(
                        "--data must have images with a path or a URL, because the mined table names them, got an image inside "
                        f"the table in row {index}"
                    )

    def _divide(self, line: dict[str, Any]) -> dict[str, Any]:
        """Returns a line with separate columns for texts and images. The paths of images are absolute."""
        from megabatch_train.data.dataset import MIXED
        from megabatch_train.data.paths import is_url
        from megabatch_train.data.tables import split_mixed

        divided: dict[str, Any] = {}
        for name, value in line.items():
            if self.dataset.sides[name != "query"] != MIXED:
                divided[name] = value
                continue
            image, text = ("", "") if value is None else split_mixed(value)
            image = self._redact_url(image) if is_url(image) else os.path.abspath(image) if image else ""
            divided |= {name: text or None, _name_image_column(name): image or None}
        return divided

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
        from megabatch_train.data.media import images
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

    def _choose_from_corpus(self) -> list[int]:
        """Returns the lines of the corpus that are candidates. Each text that no pair has is one candidate."""
        if self.corpus is None:
            return []
        from megabatch_train.data.dataset import ReadingProgress, text_id

        seen = {text_id(text) for text in self.texts if text is not None}
        chosen, progress = [], ReadingProgress("texts of the corpus read", len(self.corpus))
        for index in range(len(self.corpus)):
            if (number := text_id(self.corpus.read(index, 1))) not in seen:
                seen.add(number)
                chosen.append(index)
            progress.tell(index + 1)
        return chosen

    def _embed_corpus(self) -> Tensor:  # (M, D)
        """Embeds all texts of the corpus. Returns the embeddings, which are memory-mapped."""
        from megabatch_train.evaluation import embedding

        assert self.corpus is not None, "called only with a corpus"
        stored = embedding.Stored(self.work / "corpus", len(self.corpus))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        stored.fill(self.inputs.pair.second, self.corpus, 1, **options)
        return stored.rows()

    def _count_written(self, part: Path, choice: Choice) -> tuple[int, int]:
        """Returns how many lines an earlier run wrote with this choice, and how many negatives these lines miss.

        Removes an incomplete last line, and all lines that were written with another choice.
        """
        path = self.work / "choice.txt"
        if part.exists() and path.exists() and path.read_text() == repr(choice):
            complete = part.read_bytes().rpartition(b"\n")[0]
            lines = complete.splitlines()
            part.write_bytes(complete + b"\n" if lines else b"")
            return len(lines), sum(map(_count_missing, map(json.loads, lines)))
        part.write_bytes(b"")
        path.write_text(repr(choice))
        return 0, 0


def _name_image_column(name: str) -> str:
    """Returns the name of the column of images, such as "negative_image_1" for "negative_1"."""
    role, _, number = name.partition("_")
    return f"{role}_image{'_' if number else ''}{number}"


def _count_missing(line: dict[str, Any]) -> int:
    """Returns the number of negatives that a line of the table misses."""
    names = [name for name in line if name.startswith("negative_") and not name.startswith("negative_image_")]
    return sum(line[name] is None and line.get(_name_image_column(name)) is None for name in names)
