"""A run's lock: one process at a time writes to a run's folder.

The lock is a POSIX record lock on a file, so the system releases it when the process ends, also after SIGKILL, and NFS passes
it on between hosts. The file names the process and the host that hold it.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG = logging.getLogger("megabatch")
NAME = "run.lock"
_REFUSED = (errno.EACCES, errno.EAGAIN)
_HOLDERS: dict[Path, int] = {}  # threads of this process, by the folder they hold


class LockedError(ValueError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Creates the folder, and removes it afterwards if nothing is in it.

    The thread that holds it may ask again: a command does, and the trainer that it calls. The second time nothing is opened,
    because a process loses its record locks on a file with the first handle of the file that it closes.

    Raises:
        LockedError: another process or thread holds it.
    """
    key, me = folder.resolve(), threading.get_ident()
    if _HOLDERS.get(key) == me:
        yield
        return
    if key in _HOLDERS:
        raise LockedError(f"{folder} is in use by another thread of this process")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    handle = _opened(path)
    _HOLDERS[key] = me
    try:
        yield
    finally:
        del _HOLDERS[key]
        path.unlink(missing_ok=True)  # before the lock is released: nobody removes the file of another
        os.close(handle)
        with suppress(OSError):
            for place in made:
                place.rmdir()


def _opened(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(path)
            os.close(handle)
            if error.errno in _REFUSED:
                raise LockedError(f"{path.parent} is in use by {holder}") from error
            LOG.warning("%s cannot be locked (%s); no other run may write there", path.parent, error.strerror)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _is_at(handle, path):
            break
        os.close(handle)  # the holder before has removed it
    about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.truncate(handle, 0)
    os.write(handle, json.dumps(about).encode())
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        return f"process {about['process']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
