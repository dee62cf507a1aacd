"""A table of pairs: image paths and captions, or texts and texts, in CSV, TSV, JSON lines or Parquet.

The table is in memory, images are read when they are needed. Their paths are relative to the table's folder, or
addresses. Damaged and empty rows are skipped and listed in `problems`. Unreadable images are found when they are read, and
listed in `failures`.

Rows that share an image or a caption, directly or through other rows, have the same id and are not each other's negatives.
Columns have roles, see columns.py; rows.py reads the rows.
"""

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.data import columns as roles
from megabatch.data import images
from megabatch.data.dataset import IMAGE, TEXT, Dataset, UnreadableSampleError
from megabatch.data.embedded import Embedded
from megabatch.data.ids import connected, numbered
from megabatch.data.places import OpenFiles, Place, expanded, place
from megabatch.data.remote import RemoteError, Url, is_url
from megabatch.data.rows import CaptionedImages, ParquetRows, Row, Source, TextRows, captioned
from megabatch.names import TABLES, shown

LONGEST_TOLD = 60  # characters of a value in a message


class Table(Dataset):
    """Pairs from one or more files.

    Args:
        path: of the table; of a folder with one table, or with images that have captions beside them; a pattern of tables; or
            sources of rows.
        columns: names of the two columns; or by role, as in {"image": "file", "text": "description"} or {"query": "question",
            "document": "answer"} (default: found by common names).
        texts: whether the first column holds texts too (default: found by its name or role).
        root: folder that image paths are relative to (default: the table's).
        encoding: of CSV, TSV and JSON lines.
    """

    def __init__(
        self,
        path: str | Path | Sequence[Source],
        *,
        columns: Mapping[str, str] | tuple[str, str] | None = None,
        texts: bool | None = None,
        root: str | Path | None = None,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__()
        sources = _sources(path, encoding) if isinstance(path, str | Path) else path
        self.path = shown(str(path)) if isinstance(path, str | Path) else sources[0].name
        self.root = _root(sources) if root is None else place(root)
        self.problems: list[str] = []
        names = list(dict.fromkeys(name for source in sources for name in source.columns()))
        if not names:
            raise self._without_pairs([_told(source, row, row.problem) for source in sources for row in source.rows()])
        chosen = roles.choose(columns, names, sources[0].name)
        self.negative_columns, self.label_column, self.score_column = chosen.negatives, chosen.label, chosen.score
        self.sides = (TEXT if (chosen.texts if texts is None else texts) else IMAGE, TEXT)
        self._first: list[str] = []  # texts, paths, or digests of images that are stored in the table
        self._second: list[str] = []
        self._embedded: dict[str, Embedded] = {}  # by digest
        self._files = OpenFiles()
        self._negatives: list[str] = []  # of all rows, in order
        self._negative_ends: list[int] = []  # of each row
        self._labels: list[str] = []
        self._unlabelled: list[int] = []  # rows without a label
        self._score_list: list[float] = []
        for source in sources:
            for row in source.rows(chosen.all, chosen.pair[0] if self.sides[0] == IMAGE else None):
                self._add(source, row, chosen.pair)
        if not self._first:
            raise self._without_pairs(self.problems)
        self._items, self._label_numbers = numbered(self._first), numbered(self._labels)
        self._row_of: dict[str, int] | None = None  # made when it is needed
        self._scores = torch.tensor(self._score_list, dtype=torch.float64)
        self._ids = connected(self._items, numbered(self._second))

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self._first)

    def read(self, index: int, side: int) -> Any:
        """The image, or the text."""
        found = self.stored(index, side)
        return images.decode(found) if isinstance(found, images.Encoded) else found

    def stored(self, index: int, side: int) -> Any:
        """The file of the image, or the text."""
        if index >= len(self) and side == 1:
            return self._negatives[index - len(self)]
        value = (self._first, self._second)[side][self.check(index)]
        if self.sides[side] == TEXT:
            return value
        file = self._file(value)
        try:
            if (inside := self._embedded.get(value)) is not None:
                return images.Encoded(self._files.read(inside.file, inside.offset, inside.size), inside.name)
            return images.Encoded(file.read_bytes(), str(file))
        except RemoteError:
            raise
        except OSError as error:
            raise UnreadableSampleError(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:  # no path at all, such as one with a zero byte
            raise UnreadableSampleError(f"{str(file)!r} cannot be read: {error}") from error

    def name(self, index: int) -> str:
        """The image's path, or the first text."""
        value = self._first[self.check(index)]
        return value if value not in self._embedded else self._embedded[value].name

    def place(self, index: int) -> str | None:
        """The image's address, or its path with the folder it is relative to; None for texts and images inside the table."""
        value = self._first[self.check(index)]
        if self.sides[0] == TEXT or value in self._embedded:
            return None
        found = self._file(value)
        return found.address if isinstance(found, Url) else str(found)

    def _file(self, name: str) -> Place:
        return place(name) if is_url(name) else self.root / name

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """Ids of the connected components of rows that share an image or a text."""
        return self._ids[torch.as_tensor(indices, dtype=torch.int64)]

    def part(self, indices: Sequence[int]) -> "Table":
        """A table with some of the rows, in this order. Ids stay the same."""
        made, chosen = copy.copy(self), torch.as_tensor(indices, dtype=torch.int64)
        made.failures, made.problems = {}, list(self.problems)
        rows = chosen.tolist()
        made._first, made._second = [self._first[row] for row in rows], [self._second[row] for row in rows]
        made._items, made._ids = self._items[chosen], self._ids[chosen]
        for name in ("_label_numbers", "_scores"):
            values = getattr(self, name)
            setattr(made, name, values[chosen] if len(values) else values)
        texts = [self._negatives[end - self.negative_count(row) : end] for row in rows for end in [self._negative_ends[row]]]
        made._negatives, made._row_of = [text for found in texts for text in found], None
        made._negative_ends = list(itertools.accumulate(map(len, texts)))
        return made

    def scores(self) -> Tensor | None:  # (samples,) float64
        """The similarity of the two texts by the column of scores, NaN where it has no number; None without this column."""
        return None if self.score_column is None or self.sides[0] == IMAGE else self._scores

    def negative_count(self, index: int) -> int:
        """The number of hard negatives of a sample."""
        return self._negative_ends[index] - (self._negative_ends[index - 1] if index else 0)

    def negatives_of(self, indices: Sequence[int]) -> Tensor:  # (m,) int64
        """The hard negatives of samples, as indices beyond the samples, which `read` takes for the second side."""
        ends = [(self._negative_ends[index], self.negative_count(index)) for index in indices]
        return torch.tensor([len(self) + end - count + i for end, count in ends for i in range(count)], dtype=torch.int64)

    def negative_ids(self, negatives: Tensor) -> Tensor:  # (m,) int64 -> (m,) int64
        """The id of the samples with the same second text as a negative; else a negative number of its own."""
        if self._row_of is None:
            self._row_of = {text: row for row, text in enumerate(self._second)}
        rows = [self._row_of.get(self._negatives[number - len(self)]) for number in negatives.tolist()]
        return torch.tensor([-1 - i if row is None else int(self._ids[row]) for i, row in enumerate(rows)], dtype=torch.int64)

    def labels(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """The class of each sample, by the column of labels.

        Raises:
            ValueError: rows have no label; as one class they would be each other's positives.
        """
        if self._unlabelled:
            raise ValueError(
                f"{self.path} must have a label ({self.label_column}) in every row, got none in {len(self._unlabelled):,} "
                f"rows, the first of them row {self._unlabelled[0]}; label these rows or leave them out"
            )
        return self._label_numbers[torch.as_tensor(indices, dtype=torch.int64)]

    def items(self) -> Tensor:  # (samples,) int64
        """Rows with the same image, or the same first text, are one item with several captions."""
        return self._items

    def _without_pairs(self, problems: list[str]) -> ValueError:
        told = "; ".join(problems[:5]) or "it has no rows"
        return ValueError(f"{self.path} must have at least one pair, got none: {told}")

    def _add(self, source: Source, row: Row, columns: tuple[str, str]) -> None:
        """Adds the pair of a row, or its problem."""
        values, problem = row.values or {}, row.problem
        pair = []
        for column, kind in zip(columns, self.sides, strict=True):
            value: Any = values.get(column)
            if kind == IMAGE and isinstance(value, Embedded):
                self._embedded.setdefault(value.digest, value)
                value = value.digest
            problem = problem or _problem_with(value, column, kind)
            pair.append(value)
        if problem:
            self.problems.append(_told(source, row, problem))
            return
        self._first.append(pair[0].strip())
        self._second.append(pair[1].strip())
        self._negatives += [entry for column in self.negative_columns for entry in _texts(source, row, column)]
        self._negative_ends.append(len(self._negatives))
        if self.label_column is not None:
            label = values.get(self.label_column)
            if label is None or label != label or not str(label).strip():  # nothing, NaN, an empty cell
                self._unlabelled.append(row.number)
            self._labels.append(str(label))
        if self.score_column is not None:
            try:
                self._score_list.append(float(values.get(self.score_column, "")))
            except (TypeError, ValueError):
                self._score_list.append(math.nan)


def _problem_with(value: Any, column: str, kind: str) -> str:
    """The reason why a value cannot be one side of a pair; empty if it can."""
    if not isinstance(value, str) or not value.strip():
        came = "nothing" if value is None or value == "" else _short(value)
        hint = f" (--columns image={column} reads images)" if kind == TEXT and isinstance(value, bytes | dict) else ""
        return f"{column} must be a {'text' if kind == TEXT else 'path'}, got {came}{hint}"
    if kind == TEXT and _SURROGATE.search(value):
        return f"{column} must be Unicode text, and half of a surrogate pair is no character"
    return ""


def _texts(source: Source, row: Row, column: str) -> list[str]:
    """The text of a cell, or its list of texts, without empty ones."""
    value = (row.values or {}).get(column)
    found = value if isinstance(value, list | tuple) else [value]
    wrong = next((entry for entry in found if entry is not None and not isinstance(entry, str)), None)
    if wrong is not None:
        told = _told(source, row, f"{column} must be a text or a list of texts, got {_short(wrong)}")
        raise ValueError(f"{told}; --columns without {roles.NEGATIVE}= reads the pairs without this column")
    return [entry.strip() for entry in found if entry is not None and entry.strip()]


def _told(source: Source, row: Row, problem: str) -> str:
    return f"{source.name}, row {row.number}: {problem}"


def _short(value: Any) -> str:
    """A value as messages show it; bytes, which may be an image, by their number."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_short(entry)}' for key, entry in value.items())}}}"
    told = repr(value)
    return told if len(told) <= LONGEST_TOLD else f"{told[:LONGEST_TOLD]}…"


_SURROGATE = re.compile("[\\ud800-\\udfff]")  # JSON may escape one alone; no encoding and no tokenizer takes it


def _sources(spec: str | Path, encoding: str) -> list[Source]:
    """The tables of a path, folder, address or pattern."""
    path = place(spec)
    if isinstance(path, Path) and path.is_dir():
        tables = sorted(entry for entry in path.iterdir() if entry.suffix in TABLES)
        if not tables and captioned(path):
            return [CaptionedImages(path)]
        if len(tables) != 1:
            names = ", ".join(entry.name for entry in tables) or "none"
            raise ValueError(
                f"the folder {path} must have one table ({', '.join(TABLES)}), got {names}; name the file instead, or several "
                f'as a pattern ("{path}/*.parquet")'
            )
        return [_source(tables[0], encoding)]
    if isinstance(path, Path) and path.exists():
        return [_source(path, encoding)]
    return [_source(found, encoding) for found in expanded(str(spec))]


def _source(path: Place, encoding: str) -> Source:
    if not path.exists():
        raise FileNotFoundError(f"No such file: {path}")
    if path.suffix not in TABLES:
        raise ValueError(f"a table must end in {', '.join(TABLES)}, got {path}")
    return ParquetRows(path) if path.suffix == ".parquet" else TextRows(path, encoding)


def _root(sources: Sequence[Source]) -> Place:
    folders = list(dict.fromkeys(str(source.folder) for source in sources))
    if len(folders) > 1:
        raise ValueError(
            f"tables of one pattern must be in one folder, got {folders[0]} and {folders[1]}; root names the folder of images"
        )
    return sources[0].folder
