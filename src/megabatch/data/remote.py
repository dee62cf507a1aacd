"""Files behind an address (s3://, gs://, hf://, http://, https://), read by byte ranges through fsspec.

A file is cut into blocks of `BLOCK` bytes, and a block is fetched when a byte of it is needed: samples are read in any order,
as from a local file. Blocks stay in a cache on the local disk (blocks.py). Their names follow from address, size and version,
so a file that has changed on the server is not mixed with the blocks of the old one. The version is the server's ETag or date;
after each block that was fetched the server is asked for it again, because a file may change during a run.

A request that fails for a reason that may pass (no connection, a busy server) is repeated after a growing pause. If it fails
for good, a `RemoteError` ends the run, because a skipped sample would change its results. A file that does not exist raises
FileNotFoundError, as on a disk.
"""

import errno
import functools
import hashlib
import io
import logging
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from megabatch import extras
from megabatch.data import blocks

LOG = logging.getLogger("megabatch")
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
        """The address, without a query: it may hold a token."""
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
        return Url(f"{str(self).rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "Url":
        """The folder."""
        return Url(str(self).rstrip("/").rpartition("/")[0])

    @property
    def about(self) -> About:
        """Size and version.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self._about is None:
            found = self._asked()
            if not found.version:
                found = found._replace(version=_version_of_this_run(urlsplit(self.address).netloc.rpartition("@")[2]))
            self._about = found
        return self._about

    def _asked(self) -> About:
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
            found.append(blocks.part(self._key(number), start, here, functools.partial(self._block, number)))
            offset += here
        return b"".join(found)

    def read_bytes(self) -> bytes:
        """The whole file, in one request. Its version is not asked for, so it must not change; images of a table do not.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return blocks.part(self._key("whole"), 0, None, lambda: self._fetched(None, None))

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
            data = self._fetched(start, end)
            if self.protocol not in UNCHECKED:
                with suppress(KeyError):  # another thread does the same
                    _filesystem(self.protocol).invalidate_cache(self.address)  # of listings
                now = self._asked()
                if len(data) == end - start and now != (self.about if now.version else (self.about.size, "")):
                    raise RemoteError(f"{self} has changed since the run began; start the run again")
        except FileNotFoundError as error:  # no sample is skipped that was there at the start
            raise RemoteError(f"{self} has gone from the server since the run began") from error
        if len(data) > end - start:
            raise self._without_ranges()
        if len(data) < end - start:
            raise RemoteError(f"{self} must have {self.about.size} bytes, got fewer: it has changed; start the run again")
        return data

    def _fetched(self, start: int | None, end: int | None) -> bytes:
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
                reason = self._passing(error)
                if pause is None:
                    raise RemoteError(
                        f"{self} could not be read in {attempt} attempts: {reason}. Check the connection and the server; "
                        "--resume continues a run from its last checkpoint"
                    ) from error
                seconds = pause * _JITTER.uniform(1.0, 1.5)
                LOG.warning("%s cannot be read: %s; attempt %d follows in %.1f s", self, reason, attempt + 1, seconds)
                time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _passing(self, error: Exception) -> str:
        """The reason of a failure that may pass. Raises an error for any other failure."""
        if self.protocol.startswith("http") and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec says of every failure of a HEAD request that there is no file
        response = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
        status = status if isinstance(status, int) else 0
        kind = type(error).__name__
        reason = f"{kind}: {error}".replace(self.address, str(self)).rstrip(".: ")
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
        extras.load(module, extra="remote", purpose=f"Reading {protocol}:// addresses")
    options = {"headers": {"Accept-Encoding": "identity"}} if protocol.startswith("http") else {}
    return extras.load("fsspec", extra="remote", purpose="Reading addresses").filesystem(protocol, **options)
