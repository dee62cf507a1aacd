"""Files by path or address: patterns, names of cached files, and reading parts of local files."""

import glob
import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from megabatch import extras
from megabatch.data.remote import Url, is_url

Place = Path | Url


def place(spec: str | Place) -> Place:
    """A path, or an address. A `file://` address is a path."""
    if not isinstance(spec, str):
        return spec
    if spec.startswith("file://"):
        return Path(unquote(urlsplit(spec).path))
    return Url(spec) if is_url(spec) else Path(spec)


def expanded(files: str | Path | Sequence[str | Place]) -> list[Place]:
    """The files of a pattern; no match is an error. An existing file is no pattern; a plain name need not exist."""
    if not isinstance(files, str | Path):
        return [place(path) for path in files]
    named = place(files)
    pattern = named.address if isinstance(named, Url) else str(named)
    if os.path.exists(pattern):
        return [Path(pattern)]
    if "{" in pattern:
        library = extras.load("webdataset.shardlists", extra="webdataset", purpose="A pattern with braces")
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
