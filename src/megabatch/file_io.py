"""Writes files atomically, and holds locks on files."""

import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r"\.(.+)-[0-9a-f]{32}")  # the names that `write` uses


def write(path: Path, save: Callable[[Any], Any], *, durable: bool = True, private: bool = False) -> None:
    """Writes a temporary file and renames it, so that other processes read the old file or the new one, never a part of it.

    A `durable` file is flushed to the disk before it is renamed. Without that, a crash of the machine may leave the file empty
    or truncated. Only the user can read a `private` file (mode 600).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells `remove_leftovers` that the writer is alive
            if private:
                os.fchmod(file.fileno(), 0o600)
            save(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, is_ours: Callable[[str], bool], *, age: float = 0.0) -> None:
    """Removes the temporary files of writers that were killed.

    Args:
        folder: only files directly in it are removed.
        is_ours: whether `write` may have been called for a file of this name.
        age: seconds since the last change of a file. If several processes write to the folder, a positive age protects files
            that another process has just opened and not locked yet.
    """
    for path in folder.glob(".*-*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and is_ours(match[1]) and _is_old_file(path, age) and not _is_being_written(path):
            path.unlink(missing_ok=True)


def _is_old_file(path: Path, age: float) -> bool:
    with suppress(FileNotFoundError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= age
    return False


def _is_being_written(path: Path) -> bool:
    """Returns whether a process holds the lock of `write`, or True if the file cannot be opened or locked."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@contextmanager
def hold_lock(path: Path) -> Iterator[int]:
    """Holds a lock and yields its file descriptor.

    The lock excludes other threads as well, because `flock` belongs to the opened file and not to the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # on a file system without locks, two processes may do the same work
            fcntl.flock(number, fcntl.LOCK_EX)
        yield number
    finally:
        os.close(number)
