"""webdataset shards as img2dataset writes them: tar files of images or recordings with captions, local or remote.

The index of a shard has name, offset and size of each member. It is made once and cached. With it, samples can be read in any
order, by any rank or worker, and again for a second pass. Indexes are memory-mapped, so all workers of a machine share them. A
local shard stays open between samples. To index a remote shard, every block that contains the header of a member is fetched.
These blocks are the whole shard unless images are larger than a block. `groups` has the number of samples of each shard.
`Order` uses it to shuffle so that only a few shards are read at a time.

Damaged data does not end a run. The intact samples of a truncated shard are used, and samples without image or caption are
skipped. `problems` lists both. An image that cannot be decoded is detected when it is read, and listed in `failures`.
"""

import bisect
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch_train.data import paths as cache
from megabatch_train.data.dataset import AUDIO, IMAGE, TEXT, Dataset, ReadingProgress, UnreadableSampleError, text_id
from megabatch_train.data.media import audio, images
from megabatch_train.data.paths import OpenFiles, Place, RemoteError, Url, check_regular, expand_pattern, identity
from megabatch_train.data.rows import parse_json
from megabatch_train.names import sanitize

IMAGES = ("jpg", "jpeg", "png", "webp")
FIRST = (*IMAGES, *(ending.removeprefix(".") for ending in audio.ENDINGS))  # images and recordings
TEXTS = ("txt", "json")  # the caption, or a JSON object of img2dataset with the key "caption"
_FORMAT = 3  # version of the cached indexes
REMOTE_SHARDS = 16  # number of remote shards that are indexed at once


class Shards(Dataset):
    """Images and captions, or recordings and captions, in tar files.

    Args:
        shards: paths or URLs of tar files, or one pattern with `*` or braces, as in "s3://bucket/{00000..00099}.tar".
        caption_ids: whether samples with equal captions are not each other's negatives. If so, the captions of each batch are
            read one more time.
        cache_folder: folder for the indexes (default: `paths.folder()`).
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Place],
        *,
        caption_ids: bool = False,
        cache_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.problems: list[str] = []  # names of missing shards and samples
        self._caption_ids = caption_ids
        self.paths: list[Place] = []
        self._tables: list[dict[str, Any]] = []
        folder = Path(cache_folder or cache.folder())
        for path, (table, problems) in _all_contents(expand_pattern(shards), folder / "shards"):
            self.problems += problems
            if table is not None and len(table["places"]):
                self.paths.append(path)
                self._tables.append(table)
        if not self.paths:
            raise ValueError(
                f"shards must have at least one sample, got none in {sanitize(repr(shards))}: {'; '.join(self.problems[:5])}"
            )
        recordings = [bool((table["places"][:, 0, 2] >= len(IMAGES)).any()) for table in self._tables]
        if any(recordings):
            if not all(bool((table["places"][:, 0, 2] >= len(IMAGES)).all()) for table in self._tables):
                raise ValueError("shards must have only images or only recordings, got both")
            self.sides = (AUDIO, TEXT)
        self.groups = tuple(len(table["places"]) for table in self._tables)
        self._ends = list(itertools.accumulate(self.groups))
        self._folder, self._files = folder, OpenFiles()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the paths. A copy in a worker process maps the same indexes."""
        return _reopen, (self.paths, self._caption_ids, self._folder, self.groups)

    def __len__(self) -> int:
        """Returns the number of samples that have an image and a caption."""
        return self._ends[-1]

    def read(self, index: int, side: int) -> Any:
        """Returns the image or the recording, or the caption."""
        stored = self.read_stored(index, side)
        if isinstance(stored, audio.EncodedAudio):
            return audio.decode(stored)
        return images.decode(stored) if side == 0 else stored

    def read_stored(self, index: int, side: int) -> Any:
        """Returns the encoded image or recording, or the caption."""
        shard, row = self._find(index)
        offset, size, kind = self._tables[shard]["places"][row, side].tolist()
        name = f"{self._name(shard, row)}.{(FIRST, TEXTS)[side][kind]}"
        try:
            path = self.paths[shard]
            data = path.read(offset, size) if isinstance(path, Url) else self._files.read(path, offset, size)
        except RemoteError:
            raise
        except OSError as error:
            raise UnreadableSampleError(f"{name} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise UnreadableSampleError(f"{name} must have {size} bytes, got {len(data)}: the shard has become shorter")
        if side == 0:
            return images.EncodedImage(data, name) if self.sides[0] == IMAGE else audio.EncodedAudio(data, name)
        return _caption(data, TEXTS[kind], name)

    def name(self, index: int) -> str:
        """Returns the name of the shard and the key of the sample."""
        return self._name(*self._find(index))

    def key(self, index: int, side: int) -> str:
        """Returns the name of a sample with the offset and size of one side, because reading all texts takes long."""
        shard, row = self._find(index)
        return f"{self._name(shard, row)} {self._tables[shard]['places'][row, side].tolist()}"

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """Returns ids of the captions if `caption_ids` is true."""
        if not self._caption_ids:
            return None
        ids = []
        for index in map(int, indices):
            try:
                ids.append(text_id(self.read(index, 1)))
            except UnreadableSampleError:
                ids.append(text_id(self.name(index)))  # an unreadable caption gets a unique id
        return torch.tensor(ids, dtype=torch.int64)

    def _name(self, shard: int, row: int) -> str:
        table = self._tables[shard]
        start, end = table["ends"][row : row + 2].tolist()
        key = bytes(table["keys"][start:end].tolist())
        return f"{self.paths[shard].name}:{key.decode('utf-8', 'surrogateescape')}"

    def _find(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, self.check(index))
        return shard, index - (self._ends[shard - 1] if shard else 0)


def _reopen(paths: list[Place], caption_ids: bool, folder: Path, groups: tuple[int, ...]) -> Shards:
    shards = Shards(paths, caption_ids=caption_ids, cache_folder=folder)
    if shards.groups != groups:
        raise RuntimeError(f"shards must not change while they are read, got {len(shards)} samples instead of {sum(groups)}")
    return shards


_Contents = tuple[dict[str, Any] | None, list[str]]


def _all_contents(paths: list[Place], folder: Path) -> Iterator[tuple[Place, _Contents]]:
    """Yields the indexes of all shards. Several remote shards are indexed at once."""
    progress, at_once = (
        ReadingProgress("shards listed", len(paths)),
        REMOTE_SHARDS if any(isinstance(p, Url) for p in paths) else 1,
    )
    with ThreadPoolExecutor(at_once, thread_name_prefix="megabatch-shards") as threads:
        for done, contents in enumerate(threads.map(lambda path: _contents(path, folder), paths), 1):
            progress.tell(done)
            yield paths[done - 1], contents


def _contents(path: Place, folder: Path) -> _Contents:
    """Returns the index and the problems of one shard. They are cached until the file changes."""
    try:
        check_regular(path)
        name, version, size = identity(path)
    except RemoteError:
        raise
    except OSError as error:
        return None, [f"shard {path} cannot be read: {error.strerror}"]
    table: dict[str, Any] = cache.load_or_make(
        folder / f"{name}-{_FORMAT}-{size}-{version}.pt", lambda: _list_samples(path, size)
    )
    return table, table["problems"]


def _list_samples(path: Place, length: int) -> dict[str, Any]:
    """Returns the keys of samples with both sides, as UTF-8 in one tensor, and offset, size and kind of each side's member."""
    members, problems = _members(path, length)
    keys, places = [], []
    for key, by_ending in members.items():
        chosen = []
        for what, endings in (("image or recording", FIRST), ("caption", TEXTS)):
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
        "ends": torch.tensor(
            [0, *itertools.accumulate(map(len, keys))], dtype=torch.int64
        ),  # entries i and i + 1 are start and end of key i
        "places": torch.tensor(places, dtype=torch.int64).view(-1, 2, 3),
        "problems": problems,
    }


def _members(path: Place, length: int) -> tuple[dict[str, dict[str, tuple[int, int]]], list[str]]:
    """Returns offset and size of every complete member by key and extension. The key is the name up to its first dot."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    problems: list[str] = []
    end = 0
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                key, ending = (f"{folder}/{key}" if folder else key), ending.lower()
                if member.offset_data + member.size > length:
                    problems.append(f"shard {path} is cut off in {member.name}; the samples before it are used")
                elif ending in members.setdefault(key, {}):
                    problems.append(f"sample {path.name}:{key} has {ending} twice; the first is used")
                else:
                    members[key][ending] = (member.offset_data, member.size)
    except RemoteError:
        raise
    except (tarfile.TarError, OSError, EOFError) as error:
        if not any("is cut off" in problem for problem in problems):
            problems.append(f"shard {path} is not a complete tar file: {error}; the samples before the damage are used")
    if not problems and not _ends_at(path, end):
        problems.append(f"shard {path} has no end mark, so it may be cut off; its samples are used")
    return members, problems


def _ends_at(path: Place, end: int) -> bool:
    """Returns whether the final block of zeros exists. `tarfile` does not report if a truncated file lacks it."""
    with path.open("rb") as file:
        file.seek(end)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _caption(data: bytes, ending: str, name: str) -> str:
    try:
        text = data.decode("utf-8")
        if ending == "json":
            text = parse_json(text)["caption"] or ""
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableSampleError(f"{name} has no caption that can be read: {type(error).__name__}: {error}") from error
    if not isinstance(text, str) or not text.strip():
        raise UnreadableSampleError(f"{name} has an empty caption")
    return text.strip()
