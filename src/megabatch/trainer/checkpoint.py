"""One checkpoint on disk: a folder `step_00000160` that is complete and has checksums.

It is written under a temporary name, its files are flushed to disk, a table of contents with sizes and checksums is written
last, and then the folder is renamed. So a folder with the final name is complete, whenever the process is killed. Before a
checkpoint is used, its files are compared with the table.
"""

import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTENTS = "checkpoint.json"
_PIECE = 1 << 24  # bytes read at once


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def write(partial: Path, files: Callable[[Path], None]) -> None:
    """Calls `files` to write files into the folder, and flushes them to disk."""
    before = set(partial.iterdir())
    files(partial)
    for path in set(partial.iterdir()) - before:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def finish(partial: Path, final: Path, about: dict[str, Any]) -> None:
    """Writes the table of contents, with the entries of `about`, and renames the folder from `partial` to `final`."""
    table = {**about, "files": {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(partial.iterdir())}}
    with (partial / CONTENTS).open("w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # the same step, repeated
        final.rename(free_name(final, ".deleted"))
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def contents(path: Path) -> dict[str, Any]:
    """The table of contents of an intact checkpoint.

    Raises:
        CheckpointError: a file is missing or differs from its checksum.
    """
    try:
        table: dict[str, Any] = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
        files = table["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {CONTENTS} cannot be read: {error}") from error
    for name, (size, check) in files.items():
        place = path / name
        if not place.is_file():
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} is missing")
        if place.stat().st_size != size:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {name} has {place.stat().st_size} bytes instead of {size}"
            )
        if _checksum(place) != check:
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} does not match its checksum")
    return table


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value


def free_name(path: Path, prefix: str) -> Path:
    """`prefix_NAME`, or `prefix_NAME_1` … if that exists."""
    number = 0
    while (other := path.with_name(f"{prefix}_{path.name}" + (f"_{number}" if number else ""))).exists():
        number += 1
    return other


def reason(error: BaseException) -> str:
    """Why something could not be written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return "the disk is full"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"
