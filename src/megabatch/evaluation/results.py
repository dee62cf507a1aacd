"""Results as JSON lines: one object per line, appended, so that they can be read during a run."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: str | Path, result: Mapping[str, Any]) -> None:
    """Appends one line, or nothing if the disk is full. NaN and infinity become null, since JSON has neither."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    line = f"{json.dumps(_writable(result), ensure_ascii=False, allow_nan=False)}\n".encode()
    with place.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        except OSError:
            file.truncate(end)  # half a line, followed by another, would make the file unreadable
            raise


def read(path: str | Path) -> list[dict[str, Any]]:
    """All lines. An incomplete last line is left out: it may be in the middle of being written."""
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")  # strings may contain other line separators
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line.decode()))
        except ValueError as error:  # not JSON, or half a character
            if number < len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1}, must be a JSON object: {error}") from error
    return found


def _writable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _writable(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
