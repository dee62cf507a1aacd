"""Cached files, written atomically."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def folder() -> Path:
    """The folder `MEGABATCH_CACHE`, or `megabatch` in the user's cache folder."""
    chosen = os.environ.get("MEGABATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabatch"


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """The contents of the file, memory-mapped; if it is missing or unreadable, `make` computes and writes them."""
    if path.exists():
        try:
            return torch.load(path, weights_only=True, mmap=True)
        except Exception:  # a truncated file, or another format: written again
            path.unlink(missing_ok=True)
    value = make()
    write(path, lambda file: torch.save(value, file))
    return value


def write(path: Path, save: Callable[[Any], None]) -> None:
    """Writes a temporary file and renames it, so that readers see the old file or the new one, never a part."""
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
