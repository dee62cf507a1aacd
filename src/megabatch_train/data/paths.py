"""Paths and URLs of data: the cache folder, remote files that are read in cached pieces, and local files."""

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
# Cached files, which are written atomically.


def folder() -> Path:
    """Returns the folder `MEGABATCH_CACHE`, or `megabatch` in the user's cache folder."""
    chosen = os.environ.get("MEGABATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def load_or_make(path: Path, make: Callable[[], Any], *, private: bool = False) -> Any:
    """Returns the contents of a file, memory-mapped. If it is missing or unreadable, the result of `make` is written.

    Only the user can read a `private` file.
    """
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # the file is truncated or has another format, so it is written again
            path.unlink(missing_ok=True)
    _remove_leftovers(path.parent)
    value = make()
    file_io.write(path, lambda file: torch.save(value, file), private=private)
    return value


@functools.cache
def _remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of killed processes from a folder of the cache, once per process."""
    file_io.remove_leftovers(folder, lambda name: name.endswith((".pt", ".bin")), age=UNLOCKED)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces of remote files on the local disk. The cache has a limited size, and any number of processes share it.
#
# Each piece is one file. It is written under another name and then renamed, so a process never reads an incomplete piece.
# The least recently used piece is deleted first. A process that has opened a deleted piece can still read it, and other
# processes fetch the piece again. If several processes need the same piece, one process fetches it and the others wait. Only
# the user can read the pieces, because their URLs can contain a password. The total size can exceed the limit by the
# pieces that are being written, one for each process.

DEFAULT_GIB = 64.0  # upper limit; half of the free disk space is another limit
KEPT = 0.9  # fraction of the limit that remains after pieces are deleted
RECENT = 60  # seconds after which a use of a piece is recorded again
UNLOCKED = 60  # seconds after which an unlocked temporary file of the cache is treated as abandoned
ABANDONED = 3600  # seconds after which an unfinished file is treated as abandoned
END = b"\nthis is the end\n"  # end of each piece; it is missing if the machine stopped before the file was on the disk
LOCKS = 64  # number of lock files for fetching; several pieces share a lock file
_warned = False


def part(name: str, start: int, size: int | None, fetch: Callable[[], bytes]) -> bytes:
    """Returns `size` bytes of a piece from `start` on, or all bytes. `fetch` downloads a piece that is not in the cache.

    If the cache is not writable, each call fetches the piece.
    """
    file = folder() / "remote" / name
    if (stored := _read_stored(file, start, size)) is not None:
        return stored
    with ExitStack() as held:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(file_io.hold_lock(file.parent / f"lock-{zlib.crc32(name.encode()) % LOCKS}"))
        except OSError as error:
            _warn(file.parent, error)
        if (stored := _read_stored(file, start, size)) is not None:
            return stored
        data = fetch()
        try:
            _store(file, data)
        except OSError as error:
            _warn(file.parent, error)
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
                os.utime(number)  # records the use
        end = status.st_size - len(END)
        if end < 0 or os.pread(number, len(END), end) != END:
            return None
        return os.pread(number, (end if size is None else min(start + size, end)) - start, start)
    finally:
        os.close(number)


def _store(place: Path, data: bytes) -> None:
    """Writes a piece and adds its size to the total. Deletes other pieces until it fits. Skips a piece above the limit."""
    size = len(data) + len(END)
    with file_io.hold_lock(place.parent / "size") as number:
        recorded = os.pread(number, 32, 0)
        total = int(recorded) if recorded.isdigit() else sum(size for _, _, size in _pieces(place.parent))
        most = _limit(place.parent, total)
        if size > most:
            return
        if total + size > most:
            total = _shrink(place.parent, int(KEPT * most) - size)
        os.truncate(number, 0)
        os.pwrite(number, str(total + size).encode(), 0)
    file_io.write(place, lambda file: file.write(data + END), durable=False, private=True)


def _limit(folder: Path, total: int) -> int:
    setting = os.environ.get("MEGABATCH_CACHE_GIB")
    if setting is None:
        return min(int(DEFAULT_GIB * 2**30), total + shutil.disk_usage(folder).free // 2)
    try:
        return int(float(setting) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(f"MEGABATCH_CACHE_GIB must be a number of GiB, such as 64, got {setting!r}") from None


def _pieces(folder: Path) -> list[tuple[float, str, int]]:
    """Returns the time of last use, the path and the size of each piece. Deletes abandoned files."""
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
    """Deletes the least recently used pieces until at most `most` bytes remain. Returns the remaining bytes."""
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
            "remote data is not cached, because %s cannot be written to: %s; set MEGABATCH_CACHE to another folder",
            folder,
            error.strerror,
        )
        _warned = True


# ----------------------------------------------------------------------------------------------------------------------
# Remote files (s3://, gs://, hf://, http://, https://), which are read by byte ranges through fsspec.
#
# A file consists of blocks of `BLOCK` bytes. A block is fetched when one of its bytes is needed, because samples are read in
# any order, as from a local file. Blocks stay in a cache on the local disk. The name of a block depends on the URL, size and
# version of the file, so blocks of an old and a new file are never mixed. The version is the ETag or the date that the server
# sends. After each fetched block, the version is checked again, because a file can change during a run.
#
# A request that fails for a temporary reason (no connection, a busy server) is repeated after a pause, and each pause is
# longer than the one before. After the last attempt, a `RemoteError` ends the run, because a skipped sample would change the
# results. A file that does not exist raises a FileNotFoundError, as on a local disk.

BLOCK = 1 << 23  # bytes; a request takes about 0.1 s, so the latency of an object store is small in comparison
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)  # seconds between attempts, about two minutes in total
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
ACCESS = {  # advice for each package
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true reads public buckets",
    "gcsfs": "run `gcloud auth application-default login`; FSSPEC_GS_TOKEN=anon reads public buckets",
    "huggingface_hub": "run `hf auth login`, or set HF_TOKEN, and accept the terms of the dataset on its page",
    "aiohttp": "check the URL and the token in it; images with relative names are requested without the table's token",
}
VERSIONS = (  # the first key that the server sends is used; later ones may differ between a listing and the file
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
UNCHECKED = ("hf",)  # protocols without a check after each block, because the hub limits the number of requests
AGAIN = (408, 425, 429)  # HTTP statuses below 500 that can be temporary
_JITTER = random.Random()  # separate from the random generators of the program, which stay unchanged
_Result = TypeVar("_Result")


class RemoteError(ConnectionError):
    """A remote file cannot be read, and no further attempt follows."""


class About(NamedTuple):
    """The server's description of a file."""

    size: int
    version: str  # differs if the contents differ


def is_url(spec: str) -> bool:
    """Returns whether the text begins with a protocol."""
    return re.match(r"\w[\w+.-]*://", spec) is not None


class Url:
    """A URL with the methods of `pathlib.Path` that datasets use.

    Args:
        address: URL of the file or folder.
        about: size and version of the file (default: requested when needed). Pickled copies keep them.
    """

    def __init__(self, address: str, about: About | None = None) -> None:
        self.address, self._about = address, about
        self.protocol = address.partition("://")[0].lower()

    def __str__(self) -> str:
        """Returns the URL without user, password and query, because these can contain a token."""
        return str(redact(self._path))

    @property
    def _path(self) -> str:
        """The URL without its query."""
        return self.address.partition("?")[0] if self.protocol.startswith("http") else self.address

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the URL with size and version, if they are known."""
        return Url, (self.address, self._about)

    def __truediv__(self, name: str) -> "Url":
        """Returns a URL in this folder. If `name` is a URL, returns it unchanged. HTTP names are quoted, except `*` and `/`."""
        if is_url(name):
            return Url(name)
        if self.protocol.startswith("http"):
            name = quote(name, safe="/*", errors="surrogatepass")
        return Url(f"{self._path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "Url":
        """The URL of the folder."""
        return Url(self._path.rstrip("/").rpartition("/")[0])

    @property
    def about(self) -> About:
        """Size and version of the file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self._about is None:
            about = self._request_about()
            if not about.version:
                about = about._replace(version=_version_of_this_run(urlsplit(self.address).netloc.rpartition("@")[2]))
            self._about = about
        return self._about

    def _request_about(self) -> About:
        info = self._retry(lambda: _filesystem(self.protocol).info(self.address))
        if info.get("size") is None or info.get("type") == "directory":
            raise RemoteError(f"{self} must be a file with a size, got none from the server; is it a folder or a web page?")
        if info.get("partial") is False:
            raise self._without_ranges()
        return About(int(info["size"]), next((f"{key}={info[key]}" for key in VERSIONS if info.get(key)), ""))

    def exists(self) -> bool:
        """Returns whether the file exists."""
        try:
            return self.about.size >= 0
        except FileNotFoundError:
            return False

    def matches(self) -> "list[Url]":
        """Returns the files that match the pattern in the URL, sorted."""
        filesystem = _filesystem(self.protocol)
        names = self._retry(lambda: filesystem.glob(self.address))
        return [Url(filesystem.unstrip_protocol(name)) for name in sorted(names)]

    def read(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` on, or fewer at the end of the file."""
        end, pieces = min(offset + size, self.about.size), []
        while offset < end:
            number, start = divmod(offset, BLOCK)
            count = min(end - offset, BLOCK - start)
            pieces.append(part(self._key(number), start, count, functools.partial(self._block, number)))
            offset += count
        return b"".join(pieces)

    def read_bytes(self) -> bytes:
        """Returns the whole file by one request. The version is not checked, so the file must not change.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return part(self._key("whole"), 0, None, lambda: self._fetch(None, None))

    def open(self, mode: str = "r", encoding: str | None = None, newline: str | None = None) -> Any:
        """Returns a file object that reads and seeks."""
        file = io.BufferedReader(_Raw(self), 1 << 16)
        return file if "b" in mode else io.TextIOWrapper(file, encoding=encoding, newline=newline)

    def _key(self, piece: int | str) -> str:
        source = self.address if piece == "whole" else f"{self.address} {self.about} {BLOCK}"
        return f"{hashlib.blake2b(source.encode(), digest_size=12).hexdigest()}-{piece}"

    def _block(self, number: int) -> bytes:
        start, end = number * BLOCK, min((number + 1) * BLOCK, self.about.size)
        try:
            data = self._fetch(start, end)
            if self.protocol not in UNCHECKED:
                with suppress(KeyError):  # another thread has removed the entry
                    _filesystem(self.protocol).invalidate_cache(self.address)  # a cached listing would hide a change
                now = self._request_about()
                if len(data) == end - start and now != (self.about if now.version else (self.about.size, "")):
                    raise RemoteError(f"{self} has changed since the run began; start the run again")
        except FileNotFoundError as error:  # a sample that existed at the start must not be skipped
            raise RemoteError(f"{self} has been removed from the server since the run began") from error
        if len(data) > end - start:
            raise self._without_ranges()
        if len(data) < end - start:
            raise RemoteError(f"{self} must have {self.about.size} bytes, got fewer: it has changed; start the run again")
        return data

    def _fetch(self, start: int | None, end: int | None) -> bytes:
        data: bytes = self._retry(lambda: _filesystem(self.protocol).cat_file(self.address, start=start, end=end))
        return data

    def _without_ranges(self) -> RemoteError:
        return RemoteError(
            f"{self} is on a server that sends whole files instead of byte ranges, so single samples cannot be read. Copy the "
            "file to a disk, an object store or a server with ranges, such as nginx"
        )

    def _retry(self, request: Callable[[], _Result]) -> _Result:
        """Makes a request, and repeats it after temporary failures."""
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
        """Returns the reason of a temporary failure. Raises an error for any other failure."""
        if self.protocol.startswith("http") and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec reports every failed HEAD request as a missing file
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
    """A remote file as a raw stream for `io`."""

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

    def readinto(self, buffer: Any) -> int:
        data = self._url.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@functools.cache
def _version_of_this_run(server: str) -> str:
    """Returns a new version in every run, if the server sends no version. So blocks of earlier runs are not used."""
    LOG.warning(
        "%s sends neither ETag nor Last-Modified, so a changed file of the same size is not noticed. Its files are fetched "
        "again in every run, and must not change during a run",
        server,
    )
    return f"{os.getpid()} {time.time_ns()}"


@functools.cache
def _filesystem(protocol: str) -> Any:
    """Returns one file system for the whole process. fsspec would make one with separate connections for each thread."""
    package = PACKAGES.get(protocol)
    if package is None:
        prefixes = ", ".join(f"{name}://" for name in PACKAGES)
        raise ValueError(f"a URL must begin with {prefixes} or file://, got {protocol}://")
    for module in ("fsspec", package):
        extras.load(module, purpose=f"Reading {protocol}:// URLs")
    options = {"headers": {"Accept-Encoding": "identity"}} if protocol.startswith("http") else {}
    return extras.load("fsspec", purpose="Reading URLs").filesystem(protocol, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Files by path or URL: patterns, names of cached files, and reading parts of local files.


Place = Path | Url
MOST_BYTES = 1 << 30  # size limit of an image or a caption file


def place(spec: str | Place) -> Place:
    """Returns a path or a URL. A `file://` URL becomes a path."""
    if not isinstance(spec, str):
        return spec
    if spec.startswith("file://"):
        return Path(unquote(urlsplit(spec).path))
    return Url(spec) if is_url(spec) else Path(spec)


def expand_pattern(files: str | Path | Sequence[str | Place]) -> list[Place]:
    """Returns the files of a pattern. Raises an error if a pattern matches nothing. A name without wildcards need not exist."""
    if not isinstance(files, str | Path):
        return [place(path) for path in files]
    named = place(files)
    pattern = named.address if isinstance(named, Url) else str(named)
    if os.path.exists(pattern):
        return [Path(pattern)]
    if "{" in pattern:
        library = extras.load("webdataset.shardlists", purpose="A pattern with braces")
        files_or_urls: Iterable[str | Url] = library.expand_urls(pattern)
    elif not has_magic(pattern):
        files_or_urls = [pattern]
    else:
        files_or_urls = Url(pattern).matches() if is_url(pattern) else sorted(glob.glob(pattern))
    paths = [place(path) for path in files_or_urls]
    if not paths:
        raise FileNotFoundError(f"a pattern must match files, got {pattern!r}, which matches none")
    return paths


def has_magic(spec: str) -> bool:
    """Returns whether a path or URL is a pattern. In a URL, `?` begins the query, so it is not a wildcard."""
    return glob.has_magic(spec.partition("?")[0] if is_url(spec) else spec) or "{" in spec


def identity(path: Place) -> tuple[str, str, int]:
    """Returns a hash of the path or URL, the version and the size in bytes, for names of cached files."""
    if isinstance(path, Url):
        where, size = path.address, path.about.size
        version = hashlib.blake2b(path.about.version.encode(), digest_size=8).hexdigest()
    else:
        status = path.stat()
        where, version, size = str(path.resolve()), str(status.st_mtime_ns), status.st_size
    return hashlib.blake2b(where.encode(), digest_size=12).hexdigest(), version, size


def check_regular(path: Place) -> None:
    """Raises an `OSError` if a path is a pipe, which would block, or a device, which may have no end."""
    if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_file(path: Place) -> bytes:
    """Returns the contents of a file that a table or a folder names.

    Raises:
        OSError: the file cannot be read, is larger than `MOST_BYTES`, or is not a regular file. A pipe would block, and a
            device may have no end.
    """
    if isinstance(path, Url):
        return path.read_bytes()
    check_regular(path)
    # O_NONBLOCK is needed for a few files in /proc, which are regular but would block.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        data = file.read(MOST_BYTES + 1) or b""
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(path))
    return data


class OpenFiles:
    """Reads parts of files, and keeps the last `most` files open. Threads can share it. A pickled copy opens its own files."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._open: dict[Path, _OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` on, or fewer at the end of the file."""
        with self._lock:
            file = self._open.pop(path, None) or _OpenFile(path)
            self._open[path] = file  # the most recently used file is the last entry
            if len(self._open) > self._most:
                del self._open[next(iter(self._open))]
        return os.pread(file.number, size, offset)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the open files."""
        return OpenFiles, (self._most,)


class _OpenFile:
    """An open file, which is closed when no thread uses it any longer."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)
