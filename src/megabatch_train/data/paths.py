"""Paths and addresses of data: the cache folder, files at an address, read in pieces that are kept, and local files."""

import errno
import functools
import glob
import hashlib
import io
import logging
import os
import random
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import torch

from megabatch import extras, file_io
from megabatch_train.names import redact

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Cached files, written atomically, and locks that processes hold on them.


def folder() -> Path:
    """The folder `MEGABATCH_CACHE`, or `megabatch` in the user's cache folder."""
    chosen = os.environ.get("MEGABATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def load_or_make(path: Path, make: Callable[[], Any]) -> Any:
    """The contents of the file, memory-mapped; if it is missing or unreadable, `make` computes and writes them."""
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # a truncated file, or another format: written again
            path.unlink(missing_ok=True)
    value = make()
    file_io.write(path, lambda file: torch.save(value, file))
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of remote files on the local disk: a cache of bounded size that any number of processes share.
#
# A piece is a file of its own, written under another name and renamed, so readers see all of it or nothing. The piece that
# was not used for longest is deleted first. A reader that has opened a deleted piece still reads it; others fetch it again.
# Of several processes that need the same piece, one fetches it, and the others wait. The limit may be exceeded by the
# pieces that are being written, one for each process.

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
    place = folder() / "remote" / name
    if (found := _read_stored(place, start, size)) is not None:
        return found
    with ExitStack() as held:
        try:
            held.enter_context(file_io.hold_lock(place.parent / f"lock-{zlib.crc32(name.encode()) % LOCKS}"))
        except OSError as error:
            _warn(place.parent, error)
        if (found := _read_stored(place, start, size)) is not None:
            return found
        data = fetch()
        try:
            _store(place, data)
        except OSError as error:
            _warn(place.parent, error)
    return data[start:] if size is None else data[start : start + size]


def _read_stored(place: Path, start: int, size: int | None) -> bytes | None:
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
    with file_io.hold_lock(place.parent / "size") as number:
        counted = os.pread(number, 32, 0)
        total = int(counted) if counted.isdigit() else sum(size for _, _, size in _pieces(place.parent))
        most = _limit(place.parent, total)
        if size > most:
            return
        if total + size > most:
            total = _shrink(place.parent, int(KEPT * most) - size)
        os.truncate(number, 0)
        os.pwrite(number, str(total + size).encode(), 0)
    file_io.write(place, lambda file: file.write(data + END), durable=False)


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


def _shrink(folder: Path, most: int) -> int:
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


# ----------------------------------------------------------------------------------------------------------------------
# Files behind an address (s3://, gs://, hf://, http://, https://), read by byte ranges through fsspec.
#
# A file is cut into blocks of `BLOCK` bytes, and a block is fetched when a byte of it is needed: samples are read in any
# order, as from a local file. Blocks stay in a cache on the local disk. Their names follow from address, size
# and version, so a file that has changed on the server is not mixed with the blocks of the old one. The version is the
# server's ETag or date; after each block that was fetched the server is asked for it again, because a file may change
# during a run.
#
# A request that fails for a reason that may pass (no connection, a busy server) is repeated after a growing pause. If it
# fails for good, a `RemoteError` ends the run, because a skipped sample would change its results. A file that does not
# exist raises FileNotFoundError, as on a disk.

BLOCK = 1 << 23  # bytes: a request takes about 0.1 s, so that the latency of an object store is a small part
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)  # seconds between attempts, about two minutes in all
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
ACCESS = {  # advice by package
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true reads public buckets",
    "gcsfs": "run `gcloud auth application-default login`; FSSPEC_GS_TOKEN=anon reads public buckets",
    "huggingface_hub": "run `hf auth login`, or set HF_TOKEN, and accept the terms of the dataset on its page",
    "aiohttp": "check the address and the token in it; images with relative names are requested without the table's token",
}
VERSIONS = (  # the first that the server sends counts; later ones may differ between a listing and the file itself
    "ETag",
    "etag",
    "Content-MD5",
    "Digest",
    "md5Hash",
    "generation",
    "blob_id",
    "VersionId",
    "LastModified",
    "Last-Modified",
)
UNCHECKED = ("hf",)  # protocols without the check for a change after each block: the hub limits the number of requests
AGAIN = (408, 425, 429)  # HTTP statuses below 500 that may pass
_JITTER = random.Random()  # apart from the program's random numbers, which stay as they are
_Result = TypeVar("_Result")


class RemoteError(ConnectionError):
    """A remote file cannot be read, and no further attempt is made."""


class About(NamedTuple):
    """A file as the server describes it."""

    size: int
    version: str  # changes with the contents


def is_url(spec: str) -> bool:
    """Whether the text begins with a protocol."""
    return re.match(r"\w[\w+.-]*://", spec) is not None


class Url:
    """The part of `pathlib.Path` that datasets use, for an address.

    Args:
        address: of the file or folder.
        about: size and version of the file (default: asked for when needed). Pickled copies keep them.
    """

    def __init__(self, address: str, about: About | None = None) -> None:
        self.address, self._about = address, about
        self.protocol = address.partition("://")[0].lower()

    def __str__(self) -> str:
        """The address as it may be printed: without a user, a password and a query, which may hold a token."""
        return str(redact(self._path))

    @property
    def _path(self) -> str:
        """The address without its query."""
        return self.address.partition("?")[0] if self.protocol.startswith("http") else self.address

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy keeps size and version, if they are known."""
        return Url, (self.address, self._about)

    def __truediv__(self, name: str) -> "Url":
        """An address in this folder, or the other one if it is whole. For HTTP, a name is quoted; a pattern stays one."""
        if is_url(name):
            return Url(name)
        if self.protocol.startswith("http"):
            name = quote(name, safe="/*", errors="surrogatepass")
        return Url(f"{self._path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self._path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "Url":
        """The folder."""
        return Url(self._path.rstrip("/").rpartition("/")[0])

    @property
    def about(self) -> About:
        """Size and version.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self._about is None:
            found = self._ask()
            if not found.version:
                found = found._replace(version=_version_of_this_run(urlsplit(self.address).netloc.rpartition("@")[2]))
            self._about = found
        return self._about

    def _ask(self) -> About:
        found = self._patiently(lambda: _filesystem(self.protocol).info(self.address))
        if found.get("size") is None or found.get("type") == "directory":
            raise RemoteError(f"{self} must be a file whose size the server knows, got none; is it a folder or a web page?")
        if found.get("partial") is False:
            raise self._without_ranges()
        return About(int(found["size"]), next((f"{key}={found[key]}" for key in VERSIONS if found.get(key)), ""))

    def exists(self) -> bool:
        """Whether there is such a file."""
        try:
            return self.about.size >= 0
        except FileNotFoundError:
            return False

    def matches(self) -> "list[Url]":
        """The files that match the pattern in the address, sorted."""
        filesystem = _filesystem(self.protocol)
        found = self._patiently(lambda: filesystem.glob(self.address))
        return [Url(filesystem.unstrip_protocol(name)) for name in sorted(found)]

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file; fewer than `size` at its end."""
        end, found = min(offset + size, self.about.size), []
        while offset < end:
            number, start = divmod(offset, BLOCK)
            here = min(end - offset, BLOCK - start)
            found.append(part(self._key(number), start, here, functools.partial(self._block, number)))
            offset += here
        return b"".join(found)

    def read_bytes(self) -> bytes:
        """The whole file, in one request. Its version is not asked for, so it must not change; images of a table do not.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return part(self._key("whole"), 0, None, lambda: self._fetch(None, None))

    def open(self, mode: str = "r", encoding: str | None = None, newline: str | None = None) -> Any:
        """A file object that reads and seeks."""
        file = io.BufferedReader(_Raw(self), 1 << 16)
        return file if "b" in mode else io.TextIOWrapper(file, encoding=encoding, newline=newline)

    def _key(self, piece: int | str) -> str:
        whose = self.address if piece == "whole" else f"{self.address} {self.about} {BLOCK}"
        return f"{hashlib.blake2b(whose.encode(), digest_size=12).hexdigest()}-{piece}"

    def _block(self, number: int) -> bytes:
        start, end = number * BLOCK, min((number + 1) * BLOCK, self.about.size)
        try:
            data = self._fetch(start, end)
            if self.protocol not in UNCHECKED:
                with suppress(KeyError):  # another thread does the same
                    _filesystem(self.protocol).invalidate_cache(self.address)  # of listings
                now = self._ask()
                if len(data) == end - start and now != (self.about if now.version else (self.about.size, "")):
                    raise RemoteError(f"{self} has changed since the run began; start the run again")
        except FileNotFoundError as error:  # no sample is skipped that was there at the start
            raise RemoteError(f"{self} has gone from the server since the run began") from error
        if len(data) > end - start:
            raise self._without_ranges()
        if len(data) < end - start:
            raise RemoteError(f"{self} must have {self.about.size} bytes, got fewer: it has changed; start the run again")
        return data

    def _fetch(self, start: int | None, end: int | None) -> bytes:
        data: bytes = self._patiently(lambda: _filesystem(self.protocol).cat_file(self.address, start=start, end=end))
        return data

    def _without_ranges(self) -> RemoteError:
        return RemoteError(
            f"{self} is on a server that sends whole files instead of byte ranges, so single samples cannot be read. Copy the "
            "file to a disk, an object store or a server with ranges, such as nginx"
        )

    def _patiently(self, request: Callable[[], _Result]) -> _Result:
        """Makes a request, and repeats it after failures that may pass."""
        for attempt, pause in enumerate((*PAUSES, None), 1):
            try:
                return request()
            except Exception as error:
                reason = self._reason_to_retry(error)
                if pause is None:
                    raise RemoteError(
                        f"{self} could not be read in {attempt} attempts: {reason}. Check the connection and the server; "
                        "--resume continues a run from its last checkpoint"
                    ) from error
                seconds = pause * _JITTER.uniform(1.0, 1.5)
                LOG.warning("%s cannot be read: %s; attempt %d follows in %.1f s", self, reason, attempt + 1, seconds)
                time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _reason_to_retry(self, error: Exception) -> str:
        """The reason of a failure that may pass. Raises an error for any other failure."""
        if self.protocol.startswith("http") and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec says of every failure of a HEAD request that there is no file
        response = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
        status = status if isinstance(status, int) else 0
        kind = type(error).__name__
        reason = str(redact(f"{kind}: {error}".replace(self.address, str(self)))).rstrip(".: ")
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, "No such file on the server", str(self)) from error
        if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in kind:
            advice = ACCESS[PACKAGES[self.protocol]]
            raise RemoteError(f"{self} cannot be read, because access was denied ({reason}); {advice}") from error
        if isinstance(error, ImportError | ValueError | TypeError | RemoteError):
            raise error
        if 400 <= status < 500 and status not in AGAIN:
            raise RemoteError(f"{self} cannot be read, because the server refuses the request: {reason}") from error
        return reason


class _Raw(io.RawIOBase):
    """A remote file as a raw stream of `io`."""

    def __init__(self, url: Url) -> None:
        self._url, self._position = url, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._url.about.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, room: Any) -> int:
        data = self._url.read(self._position, len(room))
        room[: len(data)] = data
        self._position += len(data)
        return len(data)


@functools.cache
def _version_of_this_run(server: str) -> str:
    """A version for files whose server sends none: new in every run, so that blocks of earlier runs are not used."""
    LOG.warning(
        "%s sends neither ETag nor Last-Modified, so a changed file of the same size is not noticed. Its files are fetched "
        "anew in every run, and must not change during one",
        server,
    )
    return f"{os.getpid()} {time.time_ns()}"


@functools.cache
def _filesystem(protocol: str) -> Any:
    """One file system for the whole process: fsspec would make one for each thread, with connections of its own."""
    package = PACKAGES.get(protocol)
    if package is None:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ValueError(f"an address must begin with {known} or file://, got {protocol}://")
    for module in ("fsspec", package):
        extras.load(module, purpose=f"Reading {protocol}:// addresses")
    options = {"headers": {"Accept-Encoding": "identity"}} if protocol.startswith("http") else {}
    return extras.load("fsspec", purpose="Reading addresses").filesystem(protocol, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Files by path or address: patterns, names of cached files, and reading parts of local files.


Place = Path | Url
MOST_BYTES = 1 << 30  # of an image or a caption


def place(spec: str | Place) -> Place:
    """A path, or an address. A `file://` address is a path."""
    if not isinstance(spec, str):
        return spec
    if spec.startswith("file://"):
        return Path(unquote(urlsplit(spec).path))
    return Url(spec) if is_url(spec) else Path(spec)


def expand_pattern(files: str | Path | Sequence[str | Place]) -> list[Place]:
    """The files of a pattern; no match is an error. An existing file is no pattern; a plain name need not exist."""
    if not isinstance(files, str | Path):
        return [place(path) for path in files]
    named = place(files)
    pattern = named.address if isinstance(named, Url) else str(named)
    if os.path.exists(pattern):
        return [Path(pattern)]
    if "{" in pattern:
        library = extras.load("webdataset.shardlists", purpose="A pattern with braces")
        found: Iterable[str | Url] = library.expand_urls(pattern)
    elif not has_magic(pattern):
        found = [pattern]
    else:
        found = Url(pattern).matches() if is_url(pattern) else sorted(glob.glob(pattern))
    paths = [place(path) for path in found]
    if not paths:
        raise FileNotFoundError(f"a pattern must match files, got {pattern!r}, which matches none")
    return paths


def has_magic(spec: str) -> bool:
    """Whether a path or address is a pattern. In an address, `?` begins the query."""
    return glob.has_magic(spec.partition("?")[0] if is_url(spec) else spec) or "{" in spec


def identity(path: Place) -> tuple[str, str, int]:
    """A hash of the file's path or address, its version, and its size in bytes; for names of cached files."""
    if isinstance(path, Url):
        where, size = path.address, path.about.size
        version = hashlib.blake2b(path.about.version.encode(), digest_size=8).hexdigest()
    else:
        status = path.stat()
        where, version, size = str(path.resolve()), str(status.st_mtime_ns), status.st_size
    return hashlib.blake2b(where.encode(), digest_size=12).hexdigest(), version, size


def read_file(path: Place) -> bytes:
    """The contents of a file that a table or a folder names.

    Raises:
        OSError: it cannot be read, has more than `MOST_BYTES`, or is no regular file. A pipe would block, and a device may have
            no end.
    """
    if isinstance(path, Url):
        return path.read_bytes()
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    # A few files in /proc are regular and block all the same.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        data = file.read(MOST_BYTES + 1) or b""
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(path))
    return data


class OpenFiles:
    """Reads parts of files, and keeps the last `most` open. Threads may share it; a pickled copy opens its own files."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._open: dict[Path, _OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Bytes of a file; fewer than `size` at its end."""
        with self._lock:
            file = self._open.pop(path, None) or _OpenFile(path)
            self._open[path] = file  # the last one used comes last
            if len(self._open) > self._most:
                del self._open[next(iter(self._open))]
        return os.pread(file.number, size, offset)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no open files."""
        return OpenFiles, (self._most,)


class _OpenFile:
    """An open file, which is closed when no thread uses it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)
