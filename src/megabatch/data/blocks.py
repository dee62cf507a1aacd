"""Pieces of remote files on the local disk: a cache of bounded size that any number of processes share.

A piece is a file of its own, written under another name and renamed, so readers see all of it or nothing. The piece that was
not used for longest is deleted first. A reader that has opened a deleted piece still reads it; others fetch it again. Of
several processes that need the same piece, one fetches it, and the others wait. The limit may be exceeded by the pieces that
are being written, one for each process.
"""

import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from megabatch.data import cache

LOG = logging.getLogger("megabatch")
DEFAULT_GIB = 64.0  # at most, and at most half of what the disk has left
KEPT = 0.9  # fraction of the limit that is left after pieces were deleted
RECENT = 60  # seconds after which a piece is marked as used again
ABANDONED = 3600  # seconds after which an unfinished file belongs to nobody
END = b"\nthis is the end\n"  # of each piece; missing if the machine stopped before the file was on the disk
LOCKS = 64  # files that processes lock while they fetch; each serves many pieces
_warned = False


def part(name: str, start: int, size: int | None, fetch: Callable[[], bytes]) -> bytes:
    """Bytes of a piece from `start` on, `size` of them or all. `fetch` gets a piece that is not in the cache.

    If the cache cannot be written, the piece is fetched each time.
    """
    place = cache.folder() / "remote" / name
    if (found := _stored(place, start, size)) is not None:
        return found
    with ExitStack() as held:
        try:
            held.enter_context(cache.locked(place.parent / f"lock-{zlib.crc32(name.encode()) % LOCKS}"))
        except OSError as error:
            _warn(place.parent, error)
        if (found := _stored(place, start, size)) is not None:
            return found
        data = fetch()
        try:
            _store(place, data)
        except OSError as error:
            _warn(place.parent, error)
    return data[start:] if size is None else data[start : start + size]


def _stored(place: Path, start: int, size: int | None) -> bytes | None:
    try:
        number = os.open(place, os.O_RDONLY)
    except OSError:
        return None
    try:
        status = os.fstat(number)
        if time.time() - status.st_mtime > RECENT:
            with suppress(OSError):
                os.utime(number)  # used now
        end = status.st_size - len(END)
        if end < 0 or os.pread(number, len(END), end) != END:
            return None
        return os.pread(number, (end if size is None else min(start + size, end)) - start, start)
    finally:
        os.close(number)


def _store(place: Path, data: bytes) -> None:
    """Counts the piece, deletes others until it fits, and writes it. A piece above the limit is not written."""
    size = len(data) + len(END)
    with cache.locked(place.parent / "size") as number:
        counted = os.pread(number, 32, 0)
        total = int(counted) if counted.isdigit() else sum(size for _, _, size in _pieces(place.parent))
        most = _limit(place.parent, total)
        if size > most:
            return
        if total + size > most:
            total = _shrunk(place.parent, int(KEPT * most) - size)
        os.truncate(number, 0)
        os.pwrite(number, str(total + size).encode(), 0)
    cache.write(place, lambda file: file.write(data + END), durable=False)


def _limit(folder: Path, total: int) -> int:
    asked = os.environ.get("MEGABATCH_CACHE_GIB")
    if asked is None:
        return min(int(DEFAULT_GIB * 2**30), total + shutil.disk_usage(folder).free // 2)
    try:
        return int(float(asked) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(f"MEGABATCH_CACHE_GIB must be a number of GiB, such as 64, got {asked!r}") from None


def _pieces(folder: Path) -> list[tuple[float, str, int]]:
    """The time of last use, path and bytes of each piece. Deletes abandoned files."""
    pieces, now = [], time.time()
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            status = entry.stat()
            if entry.name.startswith(".") and now - status.st_mtime > ABANDONED:
                os.unlink(entry)
            elif entry.name != "size" and not entry.name.startswith("lock-"):
                pieces.append((status.st_mtime, entry.path, status.st_size))
    return pieces


def _shrunk(folder: Path, most: int) -> int:
    """Deletes the pieces unused for longest until at most `most` bytes are left. Returns the bytes left."""
    pieces = sorted(_pieces(folder))
    total = sum(size for _, _, size in pieces)
    for _, path, size in pieces:
        if total <= most:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
    return total


def _warn(folder: Path, error: OSError) -> None:
    global _warned
    if not _warned:
        LOG.warning(
            "remote data is not cached, because %s cannot be written to: %s; MEGABATCH_CACHE names a folder",
            folder,
            error.strerror,
        )
        _warned = True
