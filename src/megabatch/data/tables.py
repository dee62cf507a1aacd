"""A table of pairs: image paths and captions, or texts and texts, in CSV, TSV, JSON lines or Parquet.

The table is in memory, images are read when they are needed; their paths are relative to the table's folder. Damaged and empty
rows are skipped and listed in `problems`. Unreadable images are found when they are read, and listed in `failures`.

Rows that share an image or a caption, directly or through other rows, have the same id and are not each other's negatives.
A column is found by its usual name, or named for its role: `columns={"image": "file", "text": "description"}`.
"""

import codecs
import copy
import csv
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.data import images
from megabatch.data.dataset import IMAGE, TEXT, Dataset, UnreadableSampleError
from megabatch.names import TABLES

IMAGE_COLUMNS = ("image", "image_path", "filepath", "file_name", "filename", "path")
TEXT_COLUMNS = ("caption", "text", "title", "sentence", "raw_caption")
LABEL_COLUMNS = ("label", "class", "category")
PAIR_COLUMNS = (
    ("anchor", "positive"),
    ("query", "document"),
    ("query", "positive"),
    ("question", "answer"),
    ("text1", "text2"),
    ("sentence1", "sentence2"),
)

FIRST_ROLES, SECOND_ROLES = ("image", "query"), ("text", "document")
NEGATIVE, LABEL, SCORE = "negative", "label", "score"
SCORE_COLUMNS = ("score", "similarity_score", "similarity")
_NEGATIVES = re.compile(r"(hard_)?negatives?(_?\d+)?")  # usual names

Row = tuple[int, dict[str, Any] | None, str]  # row number, values or None, and the problem if there is one


class Table(Dataset):
    """Pairs from a file.

    Args:
        path: of the table, or of a folder with one table.
        columns: names of the two columns; or by role, as in {"image": "file", "text": "description"} or {"query": "question",
            "document": "answer"} (default: found by common names).
        texts: whether the first column holds texts too (default: found by its name or role).
        root: folder that image paths are relative to (default: the table's).
        encoding: of CSV, TSV and JSON lines.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Mapping[str, str] | tuple[str, str] | None = None,
        texts: bool | None = None,
        root: str | Path | None = None,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__()
        self.path = _table(Path(path))
        self.root = self.path.parent if root is None else Path(root)
        self.problems: list[str] = []
        rows = _rows(self.path, encoding)
        beginning, names = _up_to_the_first_whole(rows)
        if names is not None and self.path.suffix == ".jsonl":  # each row has its own keys
            names = list(dict.fromkeys(name for _, values, _ in _rows(self.path, encoding) for name in values or ()))
        if names is None and not beginning:
            raise ValueError(f"{self.path} must have at least one pair, got none: it has no rows")
        if names is None:
            raise self._without_pairs([_told(self.path, number, problem) for number, _, problem in beginning])
        columns, found, self.negative_columns, self.label_column, self.score_column = _chosen(columns, names, self.path)
        texts = found if texts is None else texts
        self.sides = (TEXT if texts else IMAGE, TEXT)
        self._first: list[str] = []
        self._second: list[str] = []
        self._negatives: list[str] = []  # of all rows, in order
        self._negative_ends: list[int] = []  # of each row
        self._labels: list[str] = []
        self._unlabelled: list[int] = []  # rows without a label
        self._score_list: list[float] = []
        for number, values, problem in itertools.chain(beginning, rows):
            self._add(number, values, problem, columns)
        if not self._first:
            raise self._without_pairs(self.problems)
        self._items, self._label_numbers = _numbered(self._first), _numbered(self._labels)
        self._row_of: dict[str, int] | None = None  # made when it is needed
        self._scores = torch.tensor(self._score_list, dtype=torch.float64)
        self._ids = connected(self._items, _numbered(self._second))

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
        place = self.root / value
        try:
            return images.Encoded(place.read_bytes(), str(place))
        except OSError as error:
            raise UnreadableSampleError(f"{place} cannot be read: {error.strerror}") from error
        except ValueError as error:  # no path at all, such as one with a zero byte
            raise UnreadableSampleError(f"{str(place)!r} cannot be read: {error}") from error

    def name(self, index: int) -> str:
        """The image's path, or the first text."""
        return self._first[self.check(index)]

    def place(self, index: int) -> str | None:
        """The image's path, with the folder it is relative to; None for texts."""
        return str(self.root / self.name(index)) if self.sides[0] == IMAGE else None

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
        """How similar the two texts of each row are, by the column of scores, NaN if it has no number; None without one."""
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
        return ValueError(f"{self.path} must have at least one pair, got none: {'; '.join(problems[:5])}")

    def _add(self, number: int, values: dict[str, Any] | None, problem: str, columns: tuple[str, str]) -> None:
        if values is None:
            self.problems.append(_told(self.path, number, problem))
            return
        pair = []
        for column, kind in zip(columns, self.sides, strict=True):
            value = values.get(column)
            if not isinstance(value, str) or not value.strip():
                came = "nothing" if value is None or value == "" else repr(value)
                self.problems.append(_told(self.path, number, f"{column} must be a text, got {came}"))
                return
            if kind == TEXT and _SURROGATE.search(value):
                problem = f"{column} must be Unicode text, and half of a surrogate pair is no character"
                self.problems.append(_told(self.path, number, problem))
                return
            pair.append(value.strip())
        negatives = [entry for column in self.negative_columns for entry in self._texts(number, column, values.get(column))]
        if self.label_column is not None:
            label = values.get(self.label_column)
            if label is None or label != label or not str(label).strip():  # nothing, NaN, an empty cell
                self._unlabelled.append(number)
            self._labels.append(str(label))
        if self.score_column is not None:
            try:
                self._score_list.append(float(values.get(self.score_column, "")))
            except (TypeError, ValueError):
                self._score_list.append(math.nan)
        self._negatives += negatives
        self._negative_ends.append(len(self._negatives))
        self._first.append(pair[0])
        self._second.append(pair[1])

    def _texts(self, number: int, column: str, value: Any) -> list[str]:
        """A text, or a list of texts, without empty ones."""
        found = value if isinstance(value, list | tuple) else [value]
        wrong = next((entry for entry in found if entry is not None and not isinstance(entry, str)), None)
        if wrong is not None:
            told = _told(self.path, number, f"{column} must be a text or a list of texts, got {wrong!r}")
            raise ValueError(f"{told}; --columns without {NEGATIVE}= reads the pairs without this column")
        return [entry.strip() for entry in found if entry is not None and entry.strip()]


_SURROGATE = re.compile("[\\ud800-\\udfff]")  # JSON may escape one alone; no encoding and no tokenizer takes it


def connected(first: Tensor, second: Tensor) -> Tensor:  # (n,), (n,) int64 -> (n,) int64
    """Connected components: an id per row, the same for rows that share a number on either side, also through others."""
    parent = list(range(len(first)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for side in (first, second):
        seen: dict[int, int] = {}
        for row, value in enumerate(side.tolist()):
            a, b = root(row), root(seen.setdefault(value, row))
            parent[max(a, b)] = min(a, b)
    return torch.tensor([root(row) for row in range(len(first))], dtype=torch.int64)


def _numbered(values: list[str]) -> Tensor:  # (n,) int64
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64)


def _table(path: Path) -> Path:
    if path.is_dir():
        found = sorted(entry for entry in path.iterdir() if entry.suffix in TABLES)
        if len(found) != 1:
            names = ", ".join(entry.name for entry in found) or "none"
            raise ValueError(f"the folder {path} must have one table ({', '.join(TABLES)}), got {names}; name the file instead")
        return found[0]
    if not path.exists():
        raise FileNotFoundError(f"No such file: {path}")
    if path.suffix not in TABLES:
        raise ValueError(f"A table ends in {', '.join(TABLES)}, got {path}")
    return path


def _chosen(
    columns: Mapping[str, str] | Sequence[str] | None, names: list[str], path: Path
) -> tuple[tuple[str, str], bool, tuple[str, ...], str | None, str | None]:
    """The two columns, whether both are texts, columns of negatives, labels, scores. Of named columns no others are used."""
    if columns is None:
        label, score = (next((name for name in usual if name in names), None) for usual in (LABEL_COLUMNS, SCORE_COLUMNS))
        return *_usual_columns(names, path), tuple(name for name in names if _NEGATIVES.fullmatch(name.lower())), label, score
    by_role = columns if isinstance(columns, Mapping) else dict(zip(("image", "text"), columns, strict=True))
    unknown = [role for role in by_role if role not in (*FIRST_ROLES, *SECOND_ROLES, NEGATIVE, LABEL, SCORE)]
    sides = [[role for role in roles if role in by_role] for roles in (FIRST_ROLES, SECOND_ROLES)]
    if unknown or any(len(found) != 1 for found in sides):
        raise ValueError(f"columns must be image=NAME text=NAME or query=NAME document=NAME, got {_told_columns(by_role)}")
    missing = [name for name in by_role.values() if name not in names]
    if missing:
        raise ValueError(f"{path.name} has no column {' and no column '.join(missing)}; it has {', '.join(names) or 'none'}")
    chosen = by_role[sides[0][0]], by_role[sides[1][0]]
    if chosen[0] == chosen[1]:
        raise ValueError(f"columns must name two columns of pairs, got {chosen[0]} twice: {_told_columns(by_role)}")
    negatives = (by_role[NEGATIVE],) if NEGATIVE in by_role else ()
    return chosen, sides[0][0] == "query", negatives, by_role.get(LABEL), by_role.get(SCORE)


def _told_columns(by_role: Mapping[str, str]) -> str:
    return " ".join(f"{role}={name}" for role, name in by_role.items())


def _usual_columns(names: list[str], path: Path) -> tuple[tuple[str, str], bool]:
    """The two columns, and whether both are texts."""
    for pair in PAIR_COLUMNS:
        if set(pair) <= set(names):
            return pair, True
    image = next((name for name in IMAGE_COLUMNS if name in names), None)
    text = next((name for name in TEXT_COLUMNS if name in names), None)
    if image is None or text is None:
        first, second = [*names, "NAME", "NAME"][:2]
        raise ValueError(
            f"{path.name} has the columns {', '.join(names) or '(none)'}. Say which ones to use: --columns image={first} "
            f"text={second} for images and texts, --columns query={first} document={second} for texts"
        )
    return (image, text), False


def _told(path: Path, number: int, problem: str) -> str:
    return f"{path.name}, row {number}: {problem}"


def _up_to_the_first_whole(rows: Iterator[Row]) -> tuple[list[Row], list[str] | None]:
    """The rows up to the first intact one, and its column names."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        if row[1] is not None:
            return found, list(row[1])
    return found, None


def _rows(path: Path, encoding: str) -> Iterator[Row]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        codecs.lookup(encoding)
    except LookupError as error:
        raise ValueError(f"encoding must be one that Python knows, such as utf-8 or latin-1, got {encoding!r}") from error
    encoding = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        yield from (_json_rows if path.suffix == ".jsonl" else _csv_rows)(path, encoding)
    except UnicodeDecodeError as error:
        raise ValueError(_not_decoded(path, encoding)) from error


def _not_decoded(path: Path, encoding: str) -> str:
    data = path.read_bytes()
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        where = f"the byte 0x{data[error.start]:02x} in line {data.count(bytes([10]), 0, error.start) + 1} is not"
        return (
            f"{path} must be {encoding.removesuffix('-sig')}, and {where}. If the file is Latin-1, convert it (iconv -f latin1 "
            "-t utf-8), or train with --set data_options.encoding=latin-1"
        )
    return f"{path} has changed while it was read"


def _csv_rows(path: Path, encoding: str) -> Iterator[Row]:
    with path.open(encoding=encoding, newline="") as file:
        separator, called = ("\t", "tab") if path.suffix == ".tsv" else (",", "comma")
        reader = csv.DictReader((line.replace("\0", "") for line in file), delimiter=separator)
        try:
            counts = Counter(reader.fieldnames or ())
        except csv.Error as error:
            raise ValueError(f"{path} must have a line of column names, which cannot be read: {error}") from error
        twice = next((name for name, count in counts.items() if name and count > 1), None)
        if twice is not None:
            raise ValueError(f"{path} must name each column once, got {twice} more than once")
        for number in itertools.count(1):
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, None, f"cannot be read: {error}"
                continue
            if None in values:  # more fields than the header: an unquoted comma would cut a caption
                expected = len(reader.fieldnames or ())
                came = len(values) - 1 + len(values[None])
                told = f"must have {expected} fields, got {came}; a {called} in a text needs quotes around the text"
                yield number, None, told
            else:
                yield number, dict(values), ""


def _json_rows(path: Path, encoding: str) -> Iterator[Row]:
    with path.open(encoding=encoding) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                yield number, None, f"must be a JSON object: {error}"
                continue
            yield (number, values, "") if isinstance(values, dict) else (number, None, "must be a JSON object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = extras.load("pyarrow.parquet", extra="parquet", purpose="Reading Parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield number, values, ""
    except (ValueError, OSError) as error:  # pyarrow's errors do not name the file
        raise ValueError(f"{path} must be Parquet and cannot be read: {error}") from error
