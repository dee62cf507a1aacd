"""webdataset shards as img2dataset writes them: tar files of images and captions, with random access.

Each shard's table of contents (name, offset and size of each member) is made once and cached. Samples can then be read in any
order, by any rank or worker, and again for a second pass. The tables are memory-mapped, so all readers of a machine share them,
and a shard stays open between samples. `groups` is the number of samples of each shard; `Order` uses it
to shuffle so that few shards are read at a time.

Damaged data does not end a run. Of a truncated shard the intact samples are used; samples without image or caption are skipped;
`problems` lists both. An image that cannot be decoded is found when it is read, and listed in `failures`.
"""

import bisect
import glob
import hashlib
import itertools
import json
import os
import tarfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.data import cache, images
from megabatch.data.dataset import Dataset, UnreadableSampleError

IMAGES = ("jpg", "jpeg", "png", "webp")
TEXTS = ("txt", "json")  # the caption, or img2dataset's JSON with the key "caption"
_FORMAT = 2  # version of the cached tables of contents


class Shards(Dataset):
    """Images and captions in tar files.

    Args:
        shards: paths of tar files; or one pattern with `*` or braces, as in "data/{00000..00099}.tar".
        caption_ids: whether samples with equal captions are not each other's negatives. The captions of each batch are then
            read once more.
        cache_folder: for tables of contents (default: `cache.folder()`).
    """

    def __init__(
        self, shards: str | Path | Sequence[str | Path], *, caption_ids: bool = False, cache_folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self.problems: list[str] = []  # missing shards and samples, by name
        self._caption_ids = caption_ids
        self.paths: list[Path] = []
        self._tables: list[dict[str, Any]] = []
        folder = Path(cache_folder or cache.folder())
        for path in expanded(shards):
            table, problems = _contents(path, folder / "shards")
            self.problems += problems
            if table is not None and len(table["places"]):
                self.paths.append(path)
                self._tables.append(table)
        if not self.paths:
            raise ValueError(f"shards must have at least one sample, got none in {shards!r}: {'; '.join(self.problems[:5])}")
        self.groups = tuple(len(table["places"]) for table in self._tables)
        self._ends = list(itertools.accumulate(self.groups))
        self._folder, self._files = folder, OpenFiles()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in a reader process maps the same tables of contents."""
        return _reopened, (self.paths, self._caption_ids, self._folder, self.groups)

    def __len__(self) -> int:
        """The number of samples that have an image and a caption."""
        return self._ends[-1]

    def read(self, index: int, side: int) -> Any:
        """The image, or the caption."""
        found = self.stored(index, side)
        return images.decode(found) if side == 0 else found

    def stored(self, index: int, side: int) -> Any:
        """The encoded image, or the caption."""
        shard, row = self._find(index)
        offset, size, kind = self._tables[shard]["places"][row, side].tolist()
        name = f"{self._name(shard, row)}.{(IMAGES, TEXTS)[side][kind]}"
        try:
            data = self._files.read(self.paths[shard], offset, size)
        except OSError as error:
            raise UnreadableSampleError(f"{name} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise UnreadableSampleError(f"{name} must have {size} bytes, got {len(data)}: the shard has become shorter")
        return images.Encoded(data, name) if side == 0 else _caption(data, TEXTS[kind], name)

    def name(self, index: int) -> str:
        """The shard and the key."""
        return self._name(*self._find(index))

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """Ids of the captions, with `caption_ids`."""
        if not self._caption_ids:
            return None
        found = []
        for index in map(int, indices):
            try:
                found.append(text_id(self.read(index, 1)))
            except UnreadableSampleError:
                found.append(text_id(self.name(index)))  # unreadable caption: a unique id
        return torch.tensor(found, dtype=torch.int64)

    def _name(self, shard: int, row: int) -> str:
        table = self._tables[shard]
        start, end = table["ends"][row : row + 2].tolist()
        key = bytes(table["keys"][start:end].tolist())
        return f"{self.paths[shard].name}:{key.decode('utf-8', 'surrogateescape')}"

    def _find(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, self.check(index))
        return shard, index - (self._ends[shard - 1] if shard else 0)


def _reopened(paths: list[Path], caption_ids: bool, folder: Path, groups: tuple[int, ...]) -> Shards:
    shards = Shards(paths, caption_ids=caption_ids, cache_folder=folder)
    if shards.groups != groups:
        raise RuntimeError(f"shards must not change while they are read, got {len(shards)} samples instead of {sum(groups)}")
    return shards


def text_id(text: str) -> int:
    """63-bit hash of a text; two texts collide with probability 10⁻¹⁹."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1


def expanded(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """The paths that match a pattern; no match is an error. A plain path need not exist."""
    if not isinstance(shards, str | Path):
        paths = [Path(path) for path in shards]
    else:
        pattern = str(shards)
        if "{" in pattern:
            found: Iterable[str] = extras.load(
                "webdataset.shardlists", extra="webdataset", purpose="A pattern of shards with braces"
            ).expand_urls(pattern)
        else:
            found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        paths = [Path(path) for path in found]
    if not paths:
        raise FileNotFoundError(f"shards must name tar files, got {shards!r}, which matches none")
    return paths


class OpenFiles:
    """Reads parts of files, the last few of which stay open. Threads may share it; a copy in another process opens its own."""

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


def _contents(path: Path, folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The table of contents of one shard, cached until the file changes, and its problems."""
    try:
        status = path.stat()
    except OSError as error:
        return None, [f"shard {path} cannot be read: {error.strerror}"]
    name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=12).hexdigest()
    place = folder / f"{name}-{_FORMAT}-{status.st_size}-{status.st_mtime_ns}.pt"
    table: dict[str, Any] = cache.kept(place, lambda: _listed(path, status.st_size))
    return table, table["problems"]


def _listed(path: Path, length: int) -> dict[str, Any]:
    """Of each sample with both sides: its key, UTF-8 in one tensor, and offset, size and kind of each side's member."""
    members, problems = _members(path, length)
    keys, places = [], []
    for key, by_ending in members.items():
        chosen = []
        for what, endings in (("image", IMAGES), ("caption", TEXTS)):
            kind = next((number for number, ending in enumerate(endings) if ending in by_ending), None)
            if kind is None:
                problems.append(f"sample {path.name}:{key} has no {what} ({' or '.join(endings)})")
            else:
                chosen.append((*by_ending[endings[kind]], kind))
        if len(chosen) == 2:
            keys.append(key.encode("utf-8", "surrogateescape"))
            places.append(chosen)
    return {
        "keys": torch.tensor(list(b"".join(keys)), dtype=torch.uint8),
        "ends": torch.tensor([0, *itertools.accumulate(map(len, keys))], dtype=torch.int64),  # of key i: i and i + 1
        "places": torch.tensor(places, dtype=torch.int64).view(-1, 2, 3),
        "problems": problems,
    }


def _members(path: Path, length: int) -> tuple[dict[str, dict[str, tuple[int, int]]], list[str]]:
    """(key, extension) → offset and size of every complete member; the key is the name up to its first dot."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    problems: list[str] = []
    end = 0
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                key, ending = (f"{folder}/{key}" if folder else key), ending.lower()
                if member.offset_data + member.size > length:
                    problems.append(f"shard {path} is cut off in {member.name}; what comes before it is used")
                elif ending in members.setdefault(key, {}):
                    problems.append(f"sample {path.name}:{key} has {ending} twice; the first is used")
                else:
                    members[key][ending] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as error:
        if not any("is cut off" in problem for problem in problems):
            problems.append(f"shard {path} is not a whole tar file: {error}; what comes before is used")
    if not problems and not _ends_at(path, end):
        problems.append(f"shard {path} has no end mark, so it may be cut off; what comes before is used")
    return members, problems


def _ends_at(path: Path, end: int) -> bool:
    """Whether the final block of zeros is there. `tarfile` does not report a truncated file without it."""
    with path.open("rb") as file:
        file.seek(end)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _caption(data: bytes, ending: str, name: str) -> str:
    try:
        text = data.decode("utf-8")
        if ending == "json":
            text = json.loads(text)["caption"] or ""
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableSampleError(f"{name} has no caption that can be read: {type(error).__name__}: {error}") from error
    if not isinstance(text, str) or not text.strip():
        raise UnreadableSampleError(f"{name} has an empty caption")
    return text.strip()
