"""Cached files, written atomically, and locks that processes hold on them."""

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def folder() -> Path:
    """The folder `MEGABATCH_CACHE`, or `megabatch` in the user's cache folder."""
    chosen = os.environ.get("MEGABATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """The contents of the file, memory-mapped; if it is missing or unreadable, `make` computes and writes them."""
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # a truncated file, or another format: written again
            path.unlink(missing_ok=True)
    value = make()
    write(path, lambda file: torch.save(value, file))
    return value


def write(path: Path, save: Callable[[Any], Any], *, durable: bool = True) -> None:
    """Writes a temporary file and renames it, so that readers see the old file or the new one, never a part.

    If the machine stops, a file that is not `durable` may be left empty or cut off; a durable one is flushed to the disk first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            save(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds a lock and yields its file descriptor. Threads exclude one another too: `flock` belongs to the opened file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # a file system without locks: work may be done twice
            fcntl.flock(number, fcntl.LOCK_EX)
        yield number
    finally:
        os.close(number)
