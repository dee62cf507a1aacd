"""`megabatch mine`: hard negatives of a model, as a table of pairs with further columns."""

import argparse
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.replay import checksum
from megabatch.commands import model
from megabatch.data.dataset import TEXT, Dataset, UnreadableSampleError
from megabatch.evaluation import embedded
from megabatch.evaluation.embedding import read_or_none
from megabatch.evaluation.mining import Choice, hard_negatives
from megabatch.towers import Tower
from megabatch.world import joined

SIDES = {True: ("query", "document"), False: ("image", "caption")}  # whether the first side is a text: the columns


def run(args: argparse.Namespace) -> int:
    """Mines, and writes the table."""
    names = ("negatives", "range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin", "sampling")
    choice = Choice(**{name: getattr(args, name) for name in names})
    output = Path(args.output)
    if output.suffix != ".jsonl":
        raise ValueError(f"--output must end in .jsonl, got {args.output!r}")
    with joined(args.device) as world:
        if world.size > 1:
            raise ValueError(f"megabatch mine must be one process, got {world.size}; start it without torchrun")
        chosen = model.choose(args, world.device)
        written, missing = Mine(chosen, output, args).write(choice, world.device)
    print(
        f"{written:,} pairs with their negatives in {output}" + (f"; {missing:,} negatives were not found" if missing else "")
    )
    if not args.keep_embeddings:
        shutil.rmtree(Mine.folder(output))
    return 0


class Mine:
    """The work on one table: embeddings of both sides, then the lines."""

    def __init__(self, chosen: model.Chosen, output: Path, args: argparse.Namespace) -> None:
        self.chosen, self.dataset, self.output, self.args = chosen, chosen.dataset, output, args
        self.work = self.folder(output)
        self.texts = [read_or_none(self.dataset, index, 1) for index in range(len(self.dataset))]
        self._continue_or_begin()

    @staticmethod
    def folder(output: Path) -> Path:
        """Where embeddings wait."""
        return output.with_name(output.name + ".work")

    def write(self, choice: Choice, device: torch.device) -> tuple[int, int]:
        """Writes the table; returns the pairs written, and the negatives not found."""
        numbers, kept = self._distinct()
        columns = SIDES[self.dataset.sides[0] == TEXT]
        query, document = (Stored(self.work / f"side{side}", len(self.dataset)) for side in (0, 1))
        for side, stored in enumerate((query, document)):
            self._embed(self.chosen.pair.towers[side], side, stored)
        ids = self.dataset.ids(range(len(self.dataset)))
        part = self.output.with_name(self.output.name + ".part")
        done, missing = self._lines(part, choice)
        candidates = document.rows()[kept]
        known = None if ids is None else (ids, ids[kept])
        found = hard_negatives(query.rows(), candidates, numbers, choice, ids=known, first=done, device=device)
        # A path may have half of a surrogate pair, which UTF-8 has no code for; its backslash form is JSON's as well.
        with part.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for rows in found:
                for index, row in enumerate(rows.tolist(), start=done):
                    negatives = [None if place < 0 else self.texts[kept[place]] for place in row]
                    negatives += [None] * (choice.negatives - len(negatives))
                    missing += negatives.count(None)
                    file.write(json.dumps(self._line(index, columns, negatives), ensure_ascii=False) + "\n")
                done += len(rows)
                file.flush()
                print(f"{done:,} of {len(self.dataset):,} pairs searched", flush=True)
        os.replace(part, self.output)
        return done, missing

    def _line(self, index: int, columns: tuple[str, str], negatives: list[str | None]) -> dict[str, Any]:
        first = read_or_none(self.dataset, index, 0) if self.dataset.sides[0] == TEXT else self.dataset.name(index)
        pair = dict(zip(columns, (first, self.texts[index]), strict=True))
        return pair | {f"negative_{place}": text for place, text in enumerate(negatives, 1)}

    def _distinct(self) -> tuple[Tensor, list[int]]:
        """(the candidate of each pair, the pair that each candidate was first seen in): a text is a candidate once."""
        places: dict[str | None, int] = {}
        numbers = [places.setdefault(text, len(places)) for text in self.texts]
        kept: dict[int, int] = {}
        for index, number in enumerate(numbers):
            kept.setdefault(number, index)
        return torch.tensor(numbers), list(kept.values())

    def _embed(self, tower: Tower, side: int, stored: "Stored") -> None:
        begin = stored.done
        rest = range(begin, len(self.dataset))
        options = {"chunk_size": self.args.chunk_size, "workers": self.args.workers}
        for number, chunk in enumerate(embedded(tower, self.dataset, side, rest, **options) if len(rest) else ()):
            usable = self.dataset.usable(rest[stored.done - begin : stored.done - begin + len(chunk)]).to(chunk.device)
            stored.append(chunk.masked_fill(~usable[:, None], math.nan))  # finds nothing, and is never found
            if number % 100 == 0 or stored.done == len(self.dataset):
                print(f"side {side + 1}: {stored.done:,} of {len(self.dataset):,} embedded", flush=True)

    def _continue_or_begin(self) -> None:
        """A folder of the same model and data is continued; another is an error."""
        pair, everything = self.chosen.pair, range(len(self.dataset))
        about = {
            "the model": self.args.model,
            "the model's weights": checksum(
                [pair.name, dict(pair.options), [tower.module.state_dict() for tower in pair.towers]]
            ),
            "the data": [self.chosen.data, self.chosen.split],
            "the first side of the pairs": _digest(_stored_or_none(self.dataset, index) for index in everything),
            "the texts": _digest(self.texts),
            "the ids of the pairs": checksum(self.dataset.ids(everything)),
        }
        path = self.work / "about.json"
        if path.exists():
            before = json.loads(path.read_text())
            changed = [name for name, value in about.items() if before.get(name) != value]
            if changed:
                raise ValueError(
                    f"{self.work} must be of the same model and data; changed since: {', '.join(changed)}. Remove the folder "
                    "to embed everything again, or choose another --output"
                )
            return
        self.work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about))

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


def _stored_or_none(dataset: Dataset, index: int) -> Any:
    """The first side of a pair, an image still encoded; None if it cannot be read."""
    try:
        return dataset.stored(index, 0)
    except UnreadableSampleError:
        return None


def _digest(samples: Iterable[Any]) -> str:
    """Of any number of samples, one in memory at a time."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(f"{checksum(sample)},".encode())
    return total.hexdigest()


class Stored:
    """Embeddings of one side in a file, written chunk by chunk, in float32."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path.with_suffix(".bin"), total
        self._width = path.with_suffix(".width")
        self.width = int(self._width.read_text()) if self._width.exists() else 0
        size = self.path.stat().st_size if self.path.exists() else 0
        self.done = size // (4 * self.width) if self.width else 0
        if self.path.exists():
            os.truncate(self.path, self.done * 4 * self.width)  # a row that was cut off

    def append(self, chunk: Tensor) -> None:  # (n, D)
        """Adds rows."""
        if not self.width:
            self.width = chunk.shape[1]
            self._width.write_text(str(self.width))
        with self.path.open("ab") as file:
            file.write(chunk.float().cpu().contiguous().numpy().tobytes())
        self.done += len(chunk)

    def rows(self) -> Tensor:  # (N, D)
        """All rows, mapped from the file and not read into memory."""
        return torch.from_file(str(self.path), shared=False, size=self.done * self.width).view(self.done, self.width)
