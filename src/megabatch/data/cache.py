"""Where what was made once is kept, and how it gets there: whole or not at all."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def folder() -> Path:
    """`MEGABATCH_CACHE` if it is set, or a folder of ours in the user's cache."""
    chosen = os.environ.get("MEGABATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What is in the file; made and written first where there is none, or one that cannot be read."""
    if path.exists():
        try:
            return torch.load(path, weights_only=True)
        except Exception:  # half a file from elsewhere, or another format: it is made again
            path.unlink(missing_ok=True)
    value = make()
    write(path, lambda file: torch.save(value, file))
    return value


def write(path: Path, save: Callable[[Any], None]) -> None:
    """Writes beside the place and moves there: who reads finds the old file, or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
