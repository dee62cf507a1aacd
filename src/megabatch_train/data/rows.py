"""Rows of tables that are read by index, images that are stored in tables, and folders of images."""

import codecs
import csv
import hashlib
import itertools
import json
import logging
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch_train.data import paths
from megabatch_train.data.dataset import (
    AUDIO,
    FILE,
    IMAGE,
    TEXT,
    VALUE,
    Dataset,
    StoredFile,
    UnreadableSampleError,
    number_values,
)
from megabatch_train.data.media import audio, images
from megabatch_train.data.paths import Place, RemoteError, identity, read_file
from megabatch_train.names import TABLES

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Images, recordings and other files inside tables. They are copied once to a file from which each can be read separately.
#
# Parquet stores many images in one compressed column chunk, which must be read as a whole. The copy contains the bytes of all
# images, each distinct image once. An index next to it has, for each row, offset and size of the image. Both files are in the
# cache folder. They are made again if the table changes. Recordings and other files are copied in the same way.

_FORMAT = 1  # version of the copies


class Embedded(NamedTuple):
    """An image that is stored in a row."""

    digest: str  # digest of the image's bytes
    name: str  # path that is stored with the image, or else the digest
    file: Path  # file with the copies
    offset: int
    size: int


def copy_images(key: str, column: str, table: str, values: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yields the images of a column, in order. A row without image bytes yields its path, or None if it has no path.

    Args:
        key: name and version of the table.
        column: name of the column.
        table: name of the table, for messages.
        values: function that returns the values of the column, which are encoded images or `{"bytes": …, "path": …}`.
    """
    folder = paths.folder() / "images"
    key = hashlib.blake2b(f"{key} {column} {_FORMAT}".encode(), digest_size=16).hexdigest()
    index, file = folder / f"{key}.pt", folder / f"{key}.bin"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the URL of the table can contain a password
    with file_io.hold_lock(folder / f"{key}.lock"):  # other ranks wait for the rank that copies
        if not file.exists():
            index.unlink(missing_ok=True)
        stored = paths.load_or_make(index, lambda: _copy(values(), file, f"{table}, column {column}"), private=True)
    places, digests = stored["places"].tolist(), stored["digests"]
    names, ends = bytes(stored["names"].tolist()), stored["ends"].tolist()
    for row, (offset, size) in enumerate(places):
        name = names[ends[row] : ends[row + 1]].decode("utf-8", "surrogatepass")
        if offset < 0:
            yield name or None
            continue
        digest = bytes(digests[row].tolist()).hex()
        yield Embedded(digest, name or digest, file, offset, size)


def _copy(values: Iterable[Any], file: Path, what: str) -> dict[str, Any]:
    """Writes the copy. Returns offset, size, digest and path of each row's image. A row without an image has the offset −1."""
    LOG.info("the files in %s are copied once to %s, so that each file can be read separately", what, file)
    places: list[tuple[int, int]] = []
    digests: list[bytes] = []
    names: list[bytes] = []
    stored: dict[bytes, tuple[int, int]] = {}

    def save(output: Any) -> None:
        for value in values:
            data, name = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
            place, digest = (-1, 0), bytes(16)
            if isinstance(data, bytes) and data:
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if digest not in stored:
                    stored[digest] = output.tell(), len(data)
                    output.write(data)
                place = stored[digest]
            places.append(place)
            digests.append(digest)
            names.append(name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b"")

    file_io.write(file, save, private=True)
    return {
        "places": torch.tensor(places, dtype=torch.int64).view(-1, 2),
        "digests": torch.frombuffer(bytearray(b"".join(digests) or bytes(16)), dtype=torch.uint8).view(-1, 16),
        "names": torch.tensor(list(b"".join(names)), dtype=torch.uint8),
        "ends": torch.tensor(
            [0, *itertools.accumulate(map(len, names))], dtype=torch.int64
        ),  # entries i and i + 1 are start and end of name i
    }


# ----------------------------------------------------------------------------------------------------------------------
# Values of columns: what one side of a pair can be, and values for towers of the user.

LONGEST_VALUE = 60  # maximum number of characters of a value in a message
_SURROGATE = re.compile("[\\ud800-\\udfff]")  # JSON can escape a single surrogate, but no encoding and no tokenizer accepts one
FORMS: dict[str, type[StoredFile | images.EncodedImage]] = {
    IMAGE: images.EncodedImage,
    AUDIO: audio.EncodedAudio,
    FILE: StoredFile,
}


def find_problem(value: Any, column: str, kind: str) -> str:
    """Returns why a value cannot be one side of a pair; empty if it can."""
    if not isinstance(value, str) or not value.strip():
        description = "nothing" if value is None or value == "" else shorten(value)
        if kind == VALUE:
            return f"{column} must be a value, got {description}"
        is_image = isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)
        hint = f" (--columns image={column} reads images)" if kind == TEXT and is_image else ""
        return f"{column} must be a {'text' if kind == TEXT else 'path'}, got {description}{hint}"
    if kind in (TEXT, VALUE) and _SURROGATE.search(value):
        return f"{column} must be Unicode text, got half of a surrogate pair"
    return ""


def shorten(value: Any) -> str:
    """Returns a value as it is shown in messages. Bytes can be an image, so only their number is shown."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    try:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {shorten(entry)}' for key, entry in value.items())}}}"
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


class Values:
    """Values of a column for towers of the user. A text is kept as it is, and any other value as pickled bytes."""

    def __init__(self) -> None:
        self._pickled: dict[str, bytes] = {}  # by digest

    def put(self, value: Any) -> str | None:
        """Stores a value. Returns the text, or a digest that equal values of one table share; None without a value."""
        if value is None or isinstance(value, str):
            return value
        try:
            data = pickle.dumps(value, protocol=5)
        except RecursionError:  # nested too deeply
            return None
        key = hashlib.blake2b(data, digest_size=16).hexdigest()
        self._pickled.setdefault(key, data)
        return key

    def get(self, key: str) -> Any:
        """Returns a copy of the value."""
        data = self._pickled.get(key)
        return key if data is None else pickle.loads(data)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of pairs from CSV, TSV, JSON lines, Parquet, and folders of images with caption files.
#
# A row source has the names of its columns and yields rows. A damaged row has a problem instead of values. An image is a path
# or URL, or an `Embedded` if it is stored in the row.

CAPTION_KEYS = ("caption", "text")  # keys of the caption in JSON
ROWS_AT_ONCE = 1024


Images = str | Sequence[str] | None  # names of the columns that can contain images


class Row(NamedTuple):
    """A row of a table."""

    number: int  # number of the row, from 1
    values: dict[str, Any] | None
    problem: str = ""  # empty if there are values


class RowSource(Protocol):
    """A table or another source of rows."""

    name: str  # name for messages
    folder: Place  # folder that image paths are relative to

    def columns(self) -> list[str]:
        """Returns the names of the columns; none if there is no intact row."""

    def rows(self, columns: Sequence[str] | None = None, image: Images = None) -> Iterator[Row]:
        """Yields rows with at least these columns. The columns `image` can contain images instead of paths."""


class TextRows:
    """A CSV, TSV or JSON lines file.

    Args:
        path: path or URL of the file.
        encoding: encoding of its text.
    """

    def __init__(self, path: Place, encoding: str) -> None:
        self.name, self.folder, self._path = path.name, path.parent, path
        try:
            codecs.lookup(encoding)
        except LookupError as error:
            raise ValueError(f"encoding must be an encoding of Python, such as utf-8 or latin-1, got {encoding!r}") from error
        self._quoted: bool | None = None  # whether quotes are CSV syntax, not text; None until a row is read
        self._encoding = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding

    def columns(self) -> list[str]:
        """Returns the names in the header. For JSON lines, returns the keys of all rows, because each row has its own keys."""
        values_of_rows = (row.values for row in self.rows() if row.values is not None)
        if self._path.suffix != ".jsonl":
            return list(next(values_of_rows, {}))
        return list(dict.fromkeys(name for values in values_of_rows for name in values))

    def rows(self, columns: Sequence[str] | None = None, image: Images = None) -> Iterator[Row]:
        """Yields rows with all columns. Values of CSV and TSV are texts."""
        try:
            if self._path.suffix == ".jsonl":
                yield from _json_rows(self._path, self._encoding)
                return
            if self._quoted is None:
                self._quoted = self._path.suffix != ".tsv" or _is_well_quoted(self._path, self._encoding)
            yield from _csv_rows(self._path, self._encoding, self._quoted)
        except UnicodeDecodeError as error:
            raise ValueError(_describe_encoding_error(self._path, self._encoding)) from error


class ParquetRows:
    """A Parquet file. Its images are copied once, because a single row cannot be read.

    Args:
        path: path or URL of the file.
    """

    def __init__(self, path: Place) -> None:
        self.name, self.folder, self._path = path.name, path.parent, path

    def columns(self) -> list[str]:
        """Returns the columns of the schema."""
        with self._open() as file:
            return list(file.schema_arrow.names) if file.metadata.num_rows else []

    def rows(self, columns: Sequence[str] | None = None, image: Images = None) -> Iterator[Row]:
        """Yields rows with only the named columns."""
        with self._open() as file:
            schema = file.schema_arrow
        selected = [name for name in schema.names if columns is None or name in columns]
        embedded = [  # the other columns contain paths
            name
            for name in names_of(image)
            if name in schema.names and not re.match(r"(dictionary<values=)?(large_)?string", str(schema.field(name).type))
        ]
        return number_rows(self._read, selected, embedded, "-".join(map(str, identity(self._path))), self.name)

    def _read(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()

    @contextmanager
    def _open(self) -> Iterator[Any]:
        parquet = extras.load("pyarrow.parquet", purpose="Reading Parquet")
        try:
            with self._path.open("rb") as stream, parquet.ParquetFile(stream) as file:
                yield file
        except RemoteError:
            raise
        except (ValueError, OSError) as error:  # pyarrow's errors do not name the file
            raise ValueError(f"{self._path} must be Parquet and cannot be read: {error}") from error


def names_of(image: Images) -> list[str]:
    """Returns the names of the columns that can contain images."""
    return [image] if isinstance(image, str) else list(image or ())


def number_rows(
    read: Callable[[list[str]], Iterator[dict[str, Any]]], columns: list[str], image: Images, key: str, table: str
) -> Iterator[Row]:
    """Numbers the rows that `read` yields. Images of the columns `image` are copied once and yielded as `Embedded`."""
    embedded = names_of(image)
    if not embedded:
        yield from (Row(number, values) for number, values in enumerate(read(columns), 1))
        return
    copies = [
        copy_images(key, name, table, lambda name=name: (values[name] for values in read([name])))  # type: ignore[misc]
        for name in embedded
    ]
    others = read([name for name in columns if name not in embedded])
    for number, (values, *found) in enumerate(zip(others, *copies, strict=True), 1):
        yield Row(number, {**values, **dict(zip(embedded, found, strict=True))})


class CaptionedImages:
    """Images of a folder and its subfolders. Each has its caption in a file of the same name, `.txt` or `.json`.

    Args:
        folder: folder of the images.
    """

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = folder.name, folder
        self.folder: Place = folder

    def columns(self) -> list[str]:
        """Returns the names of the image path and the caption."""
        return ["image", "caption"]

    def rows(self, columns: Sequence[str] | None = None, image: Images = None) -> Iterator[Row]:
        """Yields rows in the order of the image paths."""
        image_paths = (path for path in sorted(self._folder.rglob("*")) if is_image(path))
        for number, path in enumerate(image_paths, 1):
            name = str(path.relative_to(self._folder))
            endings = (form for ending in CAPTIONS for form in (ending, ending.upper()))
            caption = next((file for ending in endings if (file := path.with_suffix(ending)).exists()), None)
            if caption is None:
                yield Row(number, None, f"{name} has no caption file with its name ({' or '.join(CAPTIONS)})")
                continue
            try:
                text = read_file(caption).decode("utf-8-sig")
                values = parse_json(text) if caption.suffix.lower() == ".json" else {CAPTION_KEYS[0]: text}
            except (OSError, ValueError) as error:
                yield Row(number, None, f"{caption.name} has no caption that can be read: {error}")
                continue
            key = next((key for key in CAPTION_KEYS if isinstance(values, dict) and key in values), None)
            if key is None:
                yield Row(number, None, f"{caption.name} must be a JSON object with the key {' or '.join(CAPTION_KEYS)}")
            else:
                yield Row(number, {"image": name, "caption": values[key]})


def has_captions(folder: Path) -> bool:
    """Returns whether images have caption files. In a possible folder of classes, at least half of the images must have one."""
    files = list(folder.rglob("*"))
    stems = [path.with_suffix("") for path in files if is_image(path)]
    captions = {path.with_suffix("") for path in files if path.suffix.lower() in CAPTIONS}
    count = sum(stem in captions for stem in stems)
    if 0 < 2 * count < len(stems) and class_folders(folder):
        LOG.warning(
            "%s: the names of the folders are used as captions. %s files of %d of %d images are not read, because at least "
            "half of the images must have one",
            *(folder, " and ".join(CAPTIONS), count, len(stems)),
        )
        return False
    return count > 0


def _describe_encoding_error(path: Place, encoding: str) -> str:
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


def _csv_rows(path: Place, encoding: str, quoted: bool) -> Iterator[Row]:
    separator, separator_name = ("\t", "tab") if path.suffix == ".tsv" else (",", "comma")
    with path.open(encoding=encoding, newline="") as file:
        row_lines: list[str] = []  # lines of the current row
        lines = _keep_lines(file, row_lines)
        reader = csv.DictReader(lines, delimiter=separator, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
        try:
            counts = Counter(reader.fieldnames or ())
        except csv.Error as error:
            raise ValueError(f"{path} must have a line of column names, which cannot be read: {error}") from error
        expected = len(reader.fieldnames or ())
        if quoted and (problem := _find_misquote(row_lines, separator, expected)):
            raise ValueError(f"{path} must begin with a line of column names: {problem}")
        twice = next((name for name, count in counts.items() if name and count > 1), None)
        if twice is not None:
            raise ValueError(f"{path} must name each column once, got {twice} more than once")
        for number in itertools.count(1):
            row_lines.clear()
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(number, None, f"cannot be read: {error}, {_lines(reader, row_lines)}")
                continue
            if quoted and (problem := _find_misquote(row_lines, separator, expected)):
                yield Row(number, None, f"{_lines(reader, row_lines)}: {problem}")
            elif None in values:  # more fields than the header, for example because an unquoted comma divides a caption
                count = len(values) - 1 + len(values[None])
                problem = f"must have {expected} fields, got {count}; a {separator_name} in a text needs quotes around the text"
                yield Row(number, None, problem)
            else:
                yield Row(number, dict(values))


def _lines(reader: "csv.DictReader[str]", row_lines: list[str]) -> str:
    last = reader.reader.line_num  # DictReader's own number excludes lines that cannot be read
    return f"line {last}" if len(row_lines) == 1 else f"lines {last - len(row_lines) + 1} to {last}"


def _keep_lines(file: Iterable[str], kept: list[str]) -> Iterator[str]:
    """Yields the lines of a file, and appends each to `kept`."""
    for line in file:
        kept.append(line.replace("\0", ""))
        yield kept[-1]


def _find_misquote(lines: list[str], separator: str, fields: int) -> str:
    """Returns the problem with the quotes of a row, given its lines; empty if there is none."""
    if len(lines) < 2 and not sum(line.count('"') for line in lines) % 2:
        return ""
    how = 'a text that contains quotation marks needs quotes around it, and each of its marks must be doubled ("")'
    try:
        list(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error as error:
        return f"a quoted field does not end where it should ({error}); {how}"
    rows = list(itertools.dropwhile(lambda line: not line.strip(), lines))  # the lines of a row include empty lines before it
    if len(rows) > 1 and all(line.count(separator) == fields - 1 for line in rows):
        return f"a quoted field contains whole rows; {how}"
    return ""


def _is_well_quoted(path: Place, encoding: str) -> bool:
    """Returns whether the quotes of a TSV file are syntax, as in CSV. Otherwise they are characters of the texts."""
    with path.open(encoding=encoding, newline="") as file:
        row_lines: list[str] = []
        reader, fields = csv.reader(_keep_lines(file, row_lines), delimiter="\t", strict=True), 0
        try:
            for row in reader:
                fields = fields or len(row)
                if len(row_lines) > 1 and _find_misquote(row_lines, "\t", fields):
                    return False
                row_lines.clear()
        except csv.Error:
            return False
    return True


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises a ValueError if it is invalid, or too deeply nested for Python's stack."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _json_rows(path: Place, encoding: str) -> Iterator[Row]:
    with path.open(encoding=encoding) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = parse_json(line)
            except ValueError as error:
                yield Row(number, None, f"must be a JSON object: {error}")
                continue
            yield Row(number, values) if isinstance(values, dict) else Row(number, None, "must be a JSON object")


# ----------------------------------------------------------------------------------------------------------------------
# Folders of images. Either each class has a folder whose name is the caption, or the images have no captions.


ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
CAPTIONS = (".txt", ".json")  # extensions of caption files, in lower or upper case


class _ImageFiles(Dataset):
    """Image files. The text of each image follows from its path.

    Args:
        path: folder that contains all files.
        files: the images.
        texts: text of each file.
    """

    def __init__(self, path: Path, files: list[Path], texts: list[str]) -> None:
        super().__init__()
        self.path, self._files, self._texts = path, files, texts
        self._ids = number_values(texts)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, side: int) -> Any:
        stored = self.read_stored(index, side)
        return images.decode(stored) if side == 0 else stored

    def read_stored(self, index: int, side: int) -> Any:
        place = self._files[self.check(index)]
        if side == 1:
            return self._texts[index]
        try:
            return images.EncodedImage(read_file(place), str(place))
        except OSError as error:
            raise UnreadableSampleError(f"{place} cannot be read: {error.strerror}") from error

    def name(self, index: int) -> str:
        return str(self._files[self.check(index)].relative_to(self.path))

    def place(self, index: int) -> str:
        return str(self._files[self.check(index)])

    def key(self, index: int, side: int) -> str:
        return self._texts[self.check(index)] if side == 1 else self.place(index)

    def ids(self, indices: Any) -> Tensor:  # (n,) int64
        """Images with the same text are not each other's negatives."""
        return self._ids[torch.as_tensor(indices, dtype=torch.int64)]

    def documents(self) -> Tensor:  # (samples,) int64
        """Images with the same text belong to one class."""
        return self._ids


class Folders(_ImageFiles):
    """Images in one folder for each class. The text of an image is the name of its class, with spaces instead of underscores.

    Args:
        path: folder that contains the folders of the classes.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = [file for folder in class_folders(path) for file in sorted(folder.rglob("*")) if is_image(file)]
        if not files:
            raise ValueError(f"{path} must have folders with images ({', '.join(ENDINGS)}), got none")
        super().__init__(path, files, [file.relative_to(path).parts[0].replace("_", " ") for file in files])


class ImageFolder(_ImageFiles):
    """Images without captions, for search and embedding. The text of an image is its path in the folder.

    Args:
        path: folder of the images, including its subfolders.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(file for file in path.rglob("*") if is_image(file))
        super().__init__(path, files, [str(file.relative_to(path)) for file in files])


def is_plain(path: Path) -> bool:
    """Returns whether a folder has images, but no caption files, no tables and no shards."""
    if not os.path.isdir(path):  # a Path raises an error for long names
        return False
    files = [entry for entry in path.iterdir() if entry.is_file()]
    captions = {file.stem for file in files if file.suffix.lower() in CAPTIONS}
    stems = {file.stem for file in files if is_image(file)}
    return bool(stems) and not stems & captions and not any(file.suffix in (".tar", *TABLES) for file in files)


def class_folders(path: Path) -> list[Path]:
    """Returns the subfolders that contain images."""
    subfolders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [folder for folder in subfolders if any(is_image(file) for file in folder.rglob("*"))]


def is_image(path: Path) -> bool:
    """Returns whether the name has the extension of an image."""
    return path.suffix.lower() in ENDINGS
