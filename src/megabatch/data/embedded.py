"""Images that are stored in a table, copied once into a file in which each of them can be read by itself.

Parquet holds many images in one compressed column, which is read as a whole. The copy has the bytes of all images one after
another, each distinct image once; a table beside it has the place of each row's image. Both are in the cache folder, and are
made again if the table changes.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megabatch.data import cache

LOG = logging.getLogger("megabatch")
_FORMAT = 1  # version of the copies


class Embedded(NamedTuple):
    """An image that was stored in a row."""

    digest: str  # of its bytes
    name: str  # the path that is stored with it, or the digest
    file: Path  # the copy
    offset: int
    size: int


def copied(key: str, column: str, table: str, values: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """The images of a column, in order. A row without bytes gives its path, or None if it has no path either.

    Args:
        key: name of the table and its version.
        column: name of the column.
        table: name of the table, for messages.
        values: gives the values of the column: encoded images as bytes, or `{"bytes": …, "path": …}`.
    """
    folder = cache.folder() / "images"
    key = hashlib.blake2b(f"{key} {column} {_FORMAT}".encode(), digest_size=16).hexdigest()
    index, file = folder / f"{key}.pt", folder / f"{key}.bin"
    with cache.locked(folder / f"{key}.lock"):  # ranks wait for the one that copies
        if not file.exists():
            index.unlink(missing_ok=True)
        found = cache.kept(index, lambda: _copy(values(), file, f"{table}, column {column}"))
    places, digests = found["places"].tolist(), found["digests"]
    names, ends = bytes(found["names"].tolist()), found["ends"].tolist()
    for row, (offset, size) in enumerate(places):
        name = names[ends[row] : ends[row + 1]].decode("utf-8", "surrogatepass")
        if offset < 0:
            yield name or None
            continue
        digest = bytes(digests[row].tolist()).hex()
        yield Embedded(digest, name or digest, file, offset, size)


def _copy(values: Iterable[Any], file: Path, what: str) -> dict[str, Any]:
    """Writes the copy. Returns for each row the place of its image (offset −1 if there is none), its digest and its path."""
    LOG.info("the images of %s are copied once to %s, so that each can be read by itself", what, file)
    places: list[tuple[int, int]] = []
    digests: list[bytes] = []
    names: list[bytes] = []
    known: dict[bytes, tuple[int, int]] = {}

    def save(opened: Any) -> None:
        for value in values:
            data, name = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
            place, digest = (-1, 0), bytes(16)
            if isinstance(data, bytes) and data:
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if digest not in known:
                    known[digest] = opened.tell(), len(data)
                    opened.write(data)
                place = known[digest]
            places.append(place)
            digests.append(digest)
            names.append(name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b"")

    cache.write(file, save)
    return {
        "places": torch.tensor(places, dtype=torch.int64).view(-1, 2),
        "digests": torch.frombuffer(bytearray(b"".join(digests) or bytes(16)), dtype=torch.uint8).view(-1, 16),
        "names": torch.tensor(list(b"".join(names)), dtype=torch.uint8),
        "ends": torch.tensor([0, *itertools.accumulate(map(len, names))], dtype=torch.int64),  # of name i: i and i + 1
    }
