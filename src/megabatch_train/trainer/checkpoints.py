"""The checkpoints of a run on disk: complete folders with checksums, and which of them are kept."""

import errno
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megabatch.world import World

# ----------------------------------------------------------------------------------------------------------------------
# One checkpoint on disk: a folder `step_00000160` that is complete and has checksums.
#
# It is written under a temporary name, its files are flushed to disk, a table of contents with sizes and checksums is
# written last, and then the folder is renamed. So a folder with the final name is complete, whenever the process is killed.
# Before a checkpoint is used, its files are compared with the table.

CONTENTS = "checkpoint.json"
DISK_FULL = "the disk is full"
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
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return DISK_FULL
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


# ----------------------------------------------------------------------------------------------------------------------
# The checkpoints of a run: written while training goes on. The last few are kept, and a damaged one is skipped.
#
# The state is copied, and a thread of each rank writes the copy. Threads exchange no messages: between steps the ranks ask
# one another whether all have written, and then the first rank's thread completes the checkpoint (`finish`).


LOG = logging.getLogger("megabatch")
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save a checkpoint, and how many to keep."""

    every: int = 0  # steps between checkpoints; 0 for ten per run. The last step always has one
    minutes: float = 15.0  # and at most this many minutes between checkpoints; 0 for no limit
    keep: int = 2  # number of checkpoints
    best: str = "auto"  # metric by which the best weights are kept in best/; "auto" is recall@1 by text, "none" keeps none

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be at least 0, got {self.every}")
        if not 0 <= self.minutes < math.inf:
            raise ValueError(f"checkpoint.minutes must be a finite number of at least 0, got {self.minutes}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")

    def due(self, step: int, steps: int) -> bool:
        """Whether to save after `step` of `steps`."""
        return step == steps or step % (self.every or max(1, steps // 10)) == 0

    def late(self, seconds: float) -> bool:
        """Whether the last checkpoint is too many seconds ago."""
        return self.minutes > 0 and seconds >= 60 * self.minutes


class Copy(Protocol):
    """A rank's part of a checkpoint, which training no longer changes."""

    def agree(self) -> None:
        """Called by all ranks before they write."""

    def write(self, folder: Path) -> None:
        """Writes this rank's files. Called in a thread."""


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    partial: Path
    final: Path
    about: dict[str, Any]
    work: Future[None]  # in this rank's thread
    written: bool = False  # by all ranks; the first one finishes it


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks share.

    Args:
        folder: created with the first checkpoint.
        keep: number of checkpoints.
        world: the ranks. All must call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self._keep, self._world = folder, keep, world
        self._pending: _Pending | None = None

    def begin(self, step: int, about: dict[str, Any], copied: Callable[[], Copy]) -> None:
        """Begins to write the checkpoint of a step. The one before must have been settled.

        Args:
            step: its number.
            about: entries of the table of contents, serialisable as JSON.
            copied: copies the state of this rank, without messages to other ranks.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints are unchanged.
        """
        assert self._pending is None, "one checkpoint at a time"
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".partial_{final.name}"
        made: list[Copy] = []
        self._together(lambda: self._prepare(partial), "prepared", partial, only_first=True)
        self._together(lambda: made.append(copied()), "copied", partial)
        copy = made[0]
        self._together(copy.agree, "prepared", partial)
        work = _in_a_thread(lambda: write(partial, copy.write))
        self._pending = _Pending(partial, final, about, work)

    def _prepare(self, partial: Path) -> None:
        self._clear()
        partial.mkdir(parents=True)
        self._make_room()

    def _make_room(self) -> None:
        """Deletes the oldest checkpoints while the disk has no room for another one. The newest intact one stays."""
        kept = self._all()
        size = _size(kept[-1]) if kept else 0
        if len(kept) < 2 or self._free() >= size:
            return
        newest = self._newest()
        for path in kept:
            if newest is None or path == newest[0] or self._free() >= size:
                break
            LOG.warning("the disk has no room for another checkpoint; the oldest, %s, is deleted", path)
            self._delete(path)

    def make_space(self, size: int) -> bool:
        """Deletes old checkpoints for a file that did not fit on the disk. The newest intact checkpoint stays.

        Args:
            size: of the file, in bytes.

        Returns:
            Whether at least one was deleted; not if the file would still not fit without all of them. All ranks must call it.
        """
        return bool(self._world.from_first(self._delete_for(size) if self._world.rank == 0 else None))

    def _delete_for(self, size: int) -> bool:
        newest = self._newest()
        old = [] if newest is None else [path for path in self._all() if path != newest[0]]
        if not old or self._free() + sum(map(_size, old)) < size:
            return False
        for number, path in enumerate(old):
            if number and self._free() >= size:
                break
            LOG.warning("the disk has no space for the model; the old checkpoint %s is deleted", path)
            self._delete(path)
        return True

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def settle(self, *, wait: bool) -> Path | None:
        """Brings the checkpoint that is being written closer to its end.

        Args:
            wait: for the end; else only what is possible at once.

        Returns:
            The checkpoint, if this call completed it.

        Raises:
            CheckpointError: on all ranks, if one of them failed. Earlier checkpoints are unchanged.
        """
        while (pending := self._pending) is not None:
            if not wait and not self._world.min([pending.work.done()])[0]:
                return None
            self._pending = None  # if it fails
            if pending.written:
                self._together(pending.work.result, "finished", pending.partial)
                return pending.final
            self._together(pending.work.result, "written", pending.partial)
            pending.work, pending.written = _in_a_thread(lambda: self._finish(pending)), True
            self._pending = pending
        return None

    def _finish(self, pending: _Pending) -> None:
        if self._world.rank == 0:
            finish(pending.partial, pending.final, pending.about)
            self._forget_old()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint and its table of contents, or None. Damaged ones are logged."""
        return self._world.from_first(self._newest() if self._world.rank == 0 else None)  # type: ignore[no-any-return]

    def count(self) -> int:
        """The number of checkpoints."""
        return len(self._all())

    def last_step(self) -> int | None:
        """The step of the last checkpoint; None if there is none."""
        return max(map(_step, self._all()), default=None)

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of later steps: a run that resumes from `step` will write its own."""
        if self._world.rank == 0:
            for path in self._all():
                if _step(path) > step:
                    aside = path.rename(free_name(path, "abandoned"))
                    LOG.warning("the run continues from step %d; %s is now called %s", step, path, aside.name)

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        for path in reversed(self._all()):
            try:
                return path, contents(path)
            except CheckpointError as error:
                LOG.warning("%s; trying the checkpoint before it", error)
        return None

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_step)

    def _forget_old(self) -> None:
        for path in self._all()[: -self._keep]:
            self._delete(path)
        self._clear()

    def _delete(self, path: Path) -> None:
        path.rename(free_name(path, ".deleted"))  # so that a half-deleted one is not taken for damaged
        for left in self.folder.glob(".deleted_*"):
            shutil.rmtree(left, ignore_errors=True)

    def _clear(self) -> None:
        """Deletes unfinished and half-deleted checkpoints."""
        for left in [*self.folder.glob(".deleted_*"), *self.folder.glob(".partial_*")]:
            shutil.rmtree(left, ignore_errors=True)

    def _together(self, work: Callable[[], None], what: str, partial: Path, *, only_first: bool = False) -> None:
        """Runs `work` on all ranks, or on the first. If one rank fails, the files are removed and all ranks raise its error."""
        problem = None
        try:
            if not only_first or self._world.rank == 0:
                work()
        except Exception as error:
            problem = reason(error)
        problems = {rank: text for rank, text in enumerate(self._world.gather_objects(problem)) if text is not None}
        if problems:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            rank, text = next(iter(problems.items()))
            where = f" on rank {rank}" if self._world.size > 1 else ""
            raise CheckpointError(f"a checkpoint could not be {what} in {self.folder}{where}: {text}")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _in_a_thread(work: Callable[[], None]) -> Future[None]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="megabatch-checkpoint")
    try:
        return executor.submit(work)
    finally:
        executor.shutdown(wait=False)  # the thread ends with its work, and Python with the thread
