"""Pairs in tables: CSV, TSV, JSON lines and Parquet."""

import bisect
import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch_train.data.dataset import (
    AUDIO,
    FILE,
    IMAGE,
    MIXED,
    STORED_IN_FILES,
    TEXT,
    VALUE,
    Content,
    Dataset,
    UnreadableSampleError,
    number_values,
    relate,
)
from megabatch_train.data.media import audio, images
from megabatch_train.data.paths import (
    OpenFiles,
    Place,
    RemoteError,
    Url,
    check_regular,
    expand_pattern,
    is_url,
    place,
    read_file,
)
from megabatch_train.data.rows import (
    FORMS,
    CaptionedImages,
    Embedded,
    ParquetRows,
    Row,
    RowSource,
    TextRows,
    Values,
    find_problem,
    has_captions,
    shorten,
)
from megabatch_train.names import TABLES, sanitize

# ----------------------------------------------------------------------------------------------------------------------
# The roles of a table's columns: image, audio or query, text or document, hard negatives, label, score. For towers of the user,
# each side can also be a value (the value of the column) or a file (its contents).
#
# A column is found by its usual name, or it is named by its role, as in `columns={"image": "file", "text": "description"}`.
# Several columns of negatives are a list. An empty name means that the role has no column, as in `{…, "label": ""}`.

IMAGE_COLUMNS = ("image", "image_path", "filepath", "file_name", "filename", "path")
AUDIO_COLUMNS = ("audio", "audio_path")
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

FIRST_ROLES = {"image": IMAGE, "query": TEXT, "audio": AUDIO, "value": VALUE, "file": FILE}  # kind of each role
SECOND_ROLES = {"text": TEXT, "document": TEXT, "second_value": VALUE, "second_file": FILE}
NEGATIVE, LABEL, SCORE = "negative", "label", "score"
IMAGE_ROLES, NEGATIVE_IMAGE = ("query_image", "document_image"), "negative_image"
SCORE_COLUMNS = ("score", "similarity_score", "similarity")
Named = Mapping[str, str | Sequence[str]]  # names of columns by role
_NEGATIVES = re.compile(r"(hard_)?negatives?(_?\d+)?")  # usual names
_NEGATIVE_IMAGES = re.compile(r"(hard_)?negative_images?(_?\d+)?")


class Columns(NamedTuple):
    """The names of columns by role."""

    pair: tuple[str, str]  # empty if a side has only images
    kinds: tuple[str, str]  # of both sides
    negatives: tuple[str, ...]
    label: str | None
    score: str | None
    images: tuple[str, str] = ("", "")  # columns of images in addition to texts; empty for sides without such a column
    negative_images: tuple[str, ...] = ()

    @property
    def all(self) -> list[str]:
        """All names, each once."""
        names = (*self.pair, *self.images, *self.negatives, *self.negative_images, self.label, self.score)
        return list(dict.fromkeys(name for name in names if name))


def choose(columns: Named | Sequence[str] | None, names: list[str], table: str) -> Columns:
    """Returns the columns of the table. If negatives, label and score are not named, they are found by their usual names."""
    by_role = {} if columns is None else _by_role(columns)
    if any(role in by_role for role in IMAGE_ROLES) or (columns is None and any(role in names for role in IMAGE_ROLES)):
        return _choose_mixed(by_role, names, table, usual=columns is None)
    if columns is None:
        pair, first = _usual_columns(names, table)
        return _complete(pair, (first, TEXT), {}, names)
    unknown = [role for role in by_role if role not in (*FIRST_ROLES, *SECOND_ROLES, NEGATIVE, LABEL, SCORE)]
    sides = [[role for role in roles if role in by_role] for roles in (FIRST_ROLES, SECOND_ROLES)]
    several = [role for role, given in by_role.items() if role != NEGATIVE and len(given) > 1]
    if unknown or several or any(len(roles) != 1 or not by_role[roles[0]] for roles in sides):
        raise ValueError(
            "columns must be image=NAME text=NAME or query=NAME document=NAME, or another one of "
            f"{', '.join(FIRST_ROLES)} and one of {', '.join(SECOND_ROLES)}, got {_describe_columns(by_role)}"
        )
    missing = [name for given in by_role.values() for name in given if name not in names]
    if missing:
        raise ValueError(f"{table} has no column {' and no column '.join(missing)}; it has {', '.join(names) or 'none'}")
    pair = by_role[sides[0][0]][0], by_role[sides[1][0]][0]
    if pair[0] == pair[1]:
        raise ValueError(f"columns must name two columns of pairs, got {pair[0]} twice: {_describe_columns(by_role)}")
    kinds = FIRST_ROLES[sides[0][0]], SECOND_ROLES[sides[1][0]]
    return _complete(pair, kinds, by_role, [name for name in names if name not in pair])


def _choose_mixed(by_role: Mapping[str, tuple[str, ...]], names: list[str], table: str, *, usual: bool) -> Columns:
    """Returns the columns of a table whose sides can have texts and images."""
    roles = ("query", "document", *IMAGE_ROLES)
    if usual:
        by_role = {role: (role,) for role in roles if role in names}
    wrong = [role for role in by_role if role not in (*roles, NEGATIVE, NEGATIVE_IMAGE, LABEL, SCORE)]
    wrong += [role for role, given in by_role.items() if role not in (NEGATIVE, NEGATIVE_IMAGE) and len(given) > 1]
    query, document, query_image, document_image = (next(iter(by_role.get(role, ())), "") for role in roles)
    if wrong or not (query or query_image) or not (document or document_image):
        got = _describe_columns(by_role) if by_role else ", ".join(names)
        raise ValueError(
            "columns must be query=NAME or query_image=NAME or both, and document=NAME or document_image=NAME or both, got "
            f"{got}"
        )
    missing = [name for given in by_role.values() for name in given if name not in names]
    if missing:
        raise ValueError(f"{table} has no column {' and no column '.join(missing)}; it has {', '.join(names) or 'none'}")
    chosen = [name for name in (query, document, query_image, document_image) if name]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"columns must name each column of pairs once, got {_describe_columns(by_role)}")
    others = [name for name in names if name not in chosen]
    images = tuple(name for name in others if _NEGATIVE_IMAGES.fullmatch(name.lower()))
    complete = _complete((query, document), (TEXT, TEXT), by_role, others)
    negative_images = by_role.get(NEGATIVE_IMAGE, images)
    kinds = MIXED if query_image else TEXT, MIXED if document_image or negative_images else TEXT
    return complete._replace(kinds=kinds, images=(query_image, document_image), negative_images=negative_images)


def _complete(
    pair: tuple[str, str], kinds: tuple[str, str], by_role: Mapping[str, tuple[str, ...]], names: list[str]
) -> Columns:
    """Adds negatives, label and score to the columns of the pair, as they are named or else by their usual names."""
    negatives = tuple(name for name in names if _NEGATIVES.fullmatch(name.lower())) if kinds[1] == TEXT else ()
    label, score = (
        next(iter(by_role.get(role, [name for name in usual if name in names])), None)
        for role, usual in ((LABEL, LABEL_COLUMNS), (SCORE, SCORE_COLUMNS))
    )
    negatives = by_role.get(NEGATIVE, negatives)
    if negatives and kinds[1] != TEXT:
        raise ValueError(f"columns must not name negatives, which are texts, for a second side of the kind {kinds[1]}")
    return Columns(pair, kinds, negatives, label, score)


def _by_role(columns: Named | Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the names by role, without empty names. Two names without roles are the columns of image and text."""
    given = columns if isinstance(columns, Mapping) else {}
    if isinstance(columns, list | tuple) and len(columns) == 2:
        given = {"image": columns[0], "text": columns[1]}
    by_role = {role: tuple(value) if isinstance(value, list | tuple) else (value,) for role, value in given.items()}
    if not by_role or not all(isinstance(name, str) for value in by_role.values() for name in value):
        raise ValueError(
            f'columns must be two names, or names by role as in {{"image": "file", "text": "title"}}, got {columns!r}'
        )
    return {role: tuple(name for name in value if name) for role, value in by_role.items()}


def _describe_columns(by_role: Mapping[str, tuple[str, ...]]) -> str:
    return " ".join(f"{role}={name}" for role, given in by_role.items() for name in given or ("",))


def _usual_columns(names: list[str], table: str) -> tuple[tuple[str, str], str]:
    """Returns the two columns, and the kind of the first one."""
    for pair in PAIR_COLUMNS:
        if set(pair) <= set(names):
            return pair, TEXT
    image = next((name for name in IMAGE_COLUMNS if name in names), None)
    text = next((name for name in TEXT_COLUMNS if name in names), None)
    recording = next((name for name in AUDIO_COLUMNS if name in names and "image" not in names), None)
    if recording is not None and text is not None:
        return (recording, text), AUDIO
    if image is None or text is None:
        first, second = [*names, "NAME", "NAME"][:2]
        raise ValueError(
            f"{table} has the columns {', '.join(names) or '(none)'}. Name the columns to use: --columns image={first} "
            f"text={second} for images and texts, --columns query={first} document={second} for texts"
        )
    return (image, text), IMAGE


# ----------------------------------------------------------------------------------------------------------------------
# A table of pairs in CSV, TSV, JSON lines or Parquet. Pairs are image paths and captions, or two texts.
#
# The table is kept in memory, and images are read when they are needed. Image paths are relative to the table's folder, or they
# are URLs. Damaged and empty rows are skipped and listed in `problems`. Unreadable images are detected when they are read, and
# listed in `failures`.
#
# Rows that share an image or a caption are not each other's negatives. `Columns` has the roles of columns, and rows.py reads
# the rows.


class Table(Dataset):
    """Pairs from one or more files.

    Args:
        path: path or URL of the table, or a pattern of tables; or a folder with one table, or with captioned images; or
            sources of rows.
        columns: names of the two columns; or names by role, as in {"image": "file", "text": "description"} or {"query":
            "question", "document": "answer", "negative": ["worse", "worst"]}. A role that is not named is found by common
            names, and an empty name means that the role has no column (default: all roles are found by common names).
        texts: whether the first column also contains texts (default: found by its name or role).
        root: folder that image paths are relative to (default: folder of the table).
        encoding: encoding of CSV, TSV and JSON lines.
    """

    def __init__(
        self,
        path: str | Path | Sequence[RowSource],
        *,
        columns: Named | tuple[str, str] | None = None,
        texts: bool | None = None,
        root: str | Path | None = None,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__()
        sources = _sources(path, encoding) if isinstance(path, str | Path) else path
        self.path = sanitize(str(path)) if isinstance(path, str | Path) else sources[0].name
        self.root = _root(sources) if root is None else place(root)
        self.problems: list[str] = []
        names = list(dict.fromkeys(name for source in sources for name in source.columns()))
        if not names:
            raise self._without_pairs(
                [_describe_problem(source, row, row.problem) for source in sources for row in source.rows()]
            )
        chosen = choose(columns, names, sources[0].name)
        self.columns = chosen
        self.negative_columns = chosen.negatives + chosen.negative_images
        self.label_column, self.score_column = chosen.label, chosen.score
        self.sides = chosen.kinds if texts is None or MIXED in chosen.kinds else (TEXT if texts else IMAGE, TEXT)
        # Texts, paths, or digests of images that are stored in the table. A value of a mixed side is made by `_join`.
        self._first: list[str] = []
        self._second: list[str] = []
        self._embedded: dict[str, Embedded] = {}  # images and other files by digest
        self._values = Values()
        self._files = OpenFiles()
        self._negatives: list[str] = []  # negatives of all rows, in order
        self._negative_ends: list[int] = []  # end of the negatives of each row
        self._labels: list[str] = []
        self._unlabeled: list[int] = []  # rows without a label
        self._score_list: list[float] = []
        for source in sources:
            for row in source.rows(chosen.all, self._file_columns()):
                self._add(source, row, chosen.pair)
        if not self._first:
            raise self._without_pairs(self.problems)
        self._items, self._documents = number_values(self._first), number_values(self._second)
        self._label_numbers = number_values(self._labels)
        self._rows_of: dict[str, list[int]] | None = None  # rows by the text of the second side; made when needed
        self._scores = torch.tensor(self._score_list, dtype=torch.float64)
        self._ids = relate(self._items, self._documents)

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self._first)

    def _file_columns(self) -> list[str]:
        """Returns the columns that can contain images or other files."""
        chosen = self.columns
        first = [chosen.pair[0]] if self.sides[0] in STORED_IN_FILES else []
        return [name for name in (*first, *chosen.images, *chosen.negative_images) if name]

    def read(self, index: int, side: int) -> Any:
        """Returns the image, the text, both, or another sample (`Dataset.read`)."""
        stored = self.read_stored(index, side)
        return audio.decode(stored) if isinstance(stored, audio.EncodedAudio) else images.decode_content(stored)

    def read_stored(self, index: int, side: int) -> Any:
        """Returns the encoded image, the text, both, or another sample as it is stored."""
        if index >= len(self) and side == 1:
            value = self._negatives[index - len(self)]
        else:
            value = (self._first, self._second)[side][self.check(index)]
        kind = self.sides[side]
        if kind == MIXED:
            image, text = split_mixed(value)
            return Content(text, self._read_file(image, IMAGE) if image else None)
        if kind not in STORED_IN_FILES:
            return value if kind == TEXT else self._values.get(value)
        return self._read_file(value, kind)

    def _read_file(self, value: str, kind: str) -> Any:
        file, form = self._file(value), FORMS[kind]
        try:
            if (inside := self._embedded.get(value)) is not None:
                return form(self._files.read(inside.file, inside.offset, inside.size), inside.name)
            return form(read_file(file), str(file))
        except RemoteError:
            raise
        except OSError as error:
            raise UnreadableSampleError(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not a valid path, for example because of a zero byte
            raise UnreadableSampleError(f"{str(file)!r} cannot be read: {error}") from error

    def name(self, index: int) -> str:
        """Returns the path of the image, or the first text."""
        value = self._first[self.check(index)]
        if self.sides[0] == MIXED:
            image, text = split_mixed(value)
            value = text or image
        return value if value not in self._embedded else self._embedded[value].name

    def place(self, index: int) -> str | None:
        """Returns the URL or path of the image or file, including the folder; None for texts and for files inside the table."""
        value = self._first[self.check(index)]
        if self.sides[0] == MIXED:
            value = split_mixed(value)[0]
        elif self.sides[0] not in STORED_IN_FILES:
            return None
        return None if not value or value in self._embedded else self._locate(value)

    def is_inside(self, image: str) -> bool:
        """Returns whether an image of `key` is inside the table."""
        return image in self._embedded

    def _locate(self, value: str) -> str:
        file = self._file(value)
        return file.address if isinstance(file, Url) else str(file)

    def key(self, index: int, side: int) -> str:
        """Returns the text, the path or URL of the image, or the digest of an image inside the table.

        The key of a mixed side can be divided by `split_mixed`.
        """
        value = (self._first, self._second)[side][self.check(index)]
        if self.sides[side] == MIXED:
            image, text = split_mixed(value)
            return _join(self._locate(image) if image and image not in self._embedded else image, text)
        return value if side == 1 else self.place(index) or value

    def _file(self, name: str) -> Place:
        return place(name) if is_url(name) else self.root / name

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) or (n, 2) int64
        """Returns equal ids for rows that share an image or a text. If one id is not enough, a row has an id for each side."""
        return self._ids[torch.as_tensor(indices, dtype=torch.int64)]

    def part(self, indices: Sequence[int]) -> "Table":
        """Returns a table with some of the rows, in this order. The rows keep their ids."""
        table, chosen = copy.copy(self), torch.as_tensor(indices, dtype=torch.int64)
        table.failures, table.problems = {}, list(self.problems)
        rows = chosen.tolist()
        table._first, table._second = [self._first[row] for row in rows], [self._second[row] for row in rows]
        table._items, table._documents, table._ids = self._items[chosen], self._documents[chosen], self._ids[chosen]
        for name in ("_label_numbers", "_scores"):
            values = getattr(self, name)
            setattr(table, name, values[chosen] if len(values) else values)
        texts = [self._negatives[end - self.negative_count(row) : end] for row in rows for end in [self._negative_ends[row]]]
        table._negatives, table._rows_of = [text for row_texts in texts for text in row_texts], None
        table._negative_ends = list(itertools.accumulate(map(len, texts)))
        return table

    def scores(self) -> Tensor | None:  # (samples,) float64
        """Returns the scores of the rows, NaN where the column has no number; None without a column of scores."""
        return None if self.score_column is None or self.sides != (TEXT, TEXT) else self._scores

    def negative_count(self, index: int) -> int:
        """Returns the number of hard negatives of a sample."""
        return self._negative_ends[index] - (self._negative_ends[index - 1] if index else 0)

    def negatives_of(self, indices: Sequence[int]) -> Tensor:  # (m,) int64
        """Returns the indices of hard negatives of samples, for `read` of side 1. They begin after the indices of samples."""
        ends = [(self._negative_ends[index], self.negative_count(index)) for index in indices]
        return torch.tensor([len(self) + end - count + i for end, count in ends for i in range(count)], dtype=torch.int64)

    def negative_ids(self, negatives: Tensor) -> Tensor:  # (m,) int64 -> (m,) or (m, 2) int64
        """Returns the ids of a sample whose second text equals the hard negative, or else an unused number below zero.

        If each row has two ids, both are taken from one sample. If several samples have this text, a sample that shares the
        first side of the negative's owner is preferred.
        """
        if self._rows_of is None:
            self._rows_of = {}
            for row, text in enumerate(self._second):
                self._rows_of.setdefault(text, []).append(row)
        ids = []
        for position, number in enumerate((negatives - len(self)).tolist()):
            rows = self._rows_of.get(self._negatives[number], [])
            if rows:
                owner = bisect.bisect_right(self._negative_ends, number)
                row = next((row for row in rows if self._first[row] == self._first[owner]), rows[-1])
                ids.append(self._ids[row].view(-1).tolist())
            else:
                ids.append([-1 - position] * self._ids.dim())
        return torch.tensor(ids, dtype=torch.int64).view(len(ids), *self._ids.shape[1:])

    def labels(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """Returns the class of each sample from the column of labels.

        Raises:
            ValueError: some rows have no label. As one class, they would be each other's positives.
        """
        if self._unlabeled:
            raise ValueError(
                f"{self.path} must have a label ({self.label_column}) in every row, got none in {len(self._unlabeled):,} "
                f"rows, the first of them row {self._unlabeled[0]}; label or remove these rows"
            )
        return self._label_numbers[torch.as_tensor(indices, dtype=torch.int64)]

    def items(self) -> Tensor:  # (samples,) int64
        """Rows with the same image or first text are one item with several captions."""
        return self._items

    def documents(self) -> Tensor:  # (samples,) int64
        """Rows with the same second text are one document with several images or queries."""
        return self._documents

    def _without_pairs(self, problems: list[str]) -> ValueError:
        reasons = "; ".join(problems[:5]) or "it has no rows"
        return ValueError(f"{self.path} must have at least one pair, got none: {reasons}")

    def _add(self, source: RowSource, row: Row, columns: tuple[str, str]) -> None:
        """Adds the pair of a row, or the problem of the row."""
        values, problem = row.values or {}, row.problem
        pair = []
        for side, (column, kind) in enumerate(zip(columns, self.sides, strict=True)):
            if kind == MIXED:
                image_column = self.columns.images[side]
                mixed, why = self._combine(values.get(column), column, values.get(image_column), image_column)
                problem = problem or why
                pair.append(mixed)
                continue
            value: Any = values.get(column)
            if kind in STORED_IN_FILES and isinstance(value, Embedded):
                self._embedded.setdefault(value.digest, value)
                value = value.digest
            elif kind == VALUE:
                value = self._values.put(value)
            problem = problem or find_problem(value, column, kind)
            pair.append(value)
        if problem:
            self.problems.append(_describe_problem(source, row, problem))
            return
        first, second = (text if kind == VALUE else text.strip() for text, kind in zip(pair, self.sides, strict=True))
        self._first.append(first)
        self._second.append(second)
        self._negatives += self._read_negatives(source, row)
        self._negative_ends.append(len(self._negatives))
        if self.label_column is not None:
            label = values.get(self.label_column)
            if label is None or label != label or not str(label).strip():  # missing, NaN, or an empty cell
                self._unlabeled.append(row.number)
            self._labels.append(str(label))
        if self.score_column is not None:
            try:
                self._score_list.append(float(values.get(self.score_column, "")))
            except (TypeError, ValueError):
                self._score_list.append(math.nan)

    def _combine(self, text: Any, column: str, image: Any, image_column: str) -> tuple[str, str]:
        """Returns a value of a mixed side, and why it cannot be a sample; empty if it can."""
        if isinstance(image, Embedded):
            self._embedded.setdefault(image.digest, image)
            image = image.digest
        parts = []
        for value, name, kind in ((image, image_column, IMAGE), (text, column, TEXT)):
            if value is None or value != value or (isinstance(value, str) and not value.strip()):
                parts.append("")
            elif why := find_problem(value, name, kind):
                return "", why
            else:
                parts.append(value.strip())
        named = " or ".join(name for name in (column, image_column) if name)
        return _join(*parts), "" if any(parts) else f"{named} must be a text or an image, got neither"

    def _read_negatives(self, source: RowSource, row: Row) -> list[str]:
        """Returns the negatives of a row."""
        if self.sides[1] != MIXED:
            return [entry for column in self.columns.negatives for entry in _texts(source, row, column)]
        pairs: list[tuple[str, str]] = []
        for columns in itertools.zip_longest(self.columns.negative_images, self.columns.negatives):
            parts = []
            for column in columns:
                value = (row.values or {}).get(column) if column is not None else None
                if isinstance(value, Embedded):
                    self._embedded.setdefault(value.digest, value)
                    value = value.digest
                elif column is not None:
                    _texts(source, row, column)  # raises an error for other values than texts
                entries = value if isinstance(value, list | tuple) else [value]
                parts.append([(entry or "").strip() for entry in entries])
            pairs += itertools.zip_longest(*parts, fillvalue="")
        return [_join(image, text) for image, text in pairs if image or text]


_BETWEEN_PARTS = "\0"  # not in paths, and not removed by `str.strip`


def _join(image: str, text: str) -> str:
    """Returns the value of a mixed side."""
    return f"{image}{_BETWEEN_PARTS}{text}"


def split_mixed(value: str) -> tuple[str, str]:
    """Returns the image and the text of a value of a mixed side. One of them may be empty."""
    image, _, text = value.partition(_BETWEEN_PARTS)
    return image, text


def _texts(source: RowSource, row: Row, column: str) -> list[str]:
    """Returns the text or the list of texts in a cell, without empty texts."""
    value = (row.values or {}).get(column)
    entries = value if isinstance(value, list | tuple) else [value]
    wrong = next((entry for entry in entries if entry is not None and not isinstance(entry, str)), None)
    if wrong is not None:
        problem = _describe_problem(source, row, f"{column} must be a text or a list of texts, got {shorten(wrong)}")
        raise ValueError(f"{problem}; --columns … {NEGATIVE}= (without a name) reads only the pairs")
    return [entry.strip() for entry in entries if entry is not None and entry.strip()]


def _describe_problem(source: RowSource, row: Row, problem: str) -> str:
    return f"{source.name}, row {row.number}: {problem}"


def _sources(spec: str | Path, encoding: str) -> list[RowSource]:
    """Returns the tables of a path, folder, URL or pattern."""
    path = place(spec)
    if isinstance(path, Path) and path.is_dir():
        tables = sorted(entry for entry in path.iterdir() if entry.suffix in TABLES)
        if not tables and has_captions(path):
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
    return [_source(file, encoding) for file in expand_pattern(str(spec))]


def _source(path: Place, encoding: str) -> RowSource:
    if not path.exists():
        raise FileNotFoundError(f"No such file: {path}")
    if path.suffix not in TABLES:
        raise ValueError(f"a table must end in {', '.join(TABLES)}, got {path}")
    check_regular(path)
    return ParquetRows(path) if path.suffix == ".parquet" else TextRows(path, encoding)


def _root(sources: Sequence[RowSource]) -> Place:
    folders = list(dict.fromkeys(str(source.folder) for source in sources))
    if len(folders) > 1:
        raise ValueError(
            f"tables of one pattern must be in one folder, got {folders[0]} and {folders[1]}; root names the folder of images"
        )
    return sources[0].folder
