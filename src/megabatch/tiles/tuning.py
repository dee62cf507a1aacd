"""Tile sizes measured on the machine at hand, where `plan` has none for it: opt-in, and remembered.

`MEGABATCH_AUTOTUNE=1` tries a few sizes the first time a kernel meets a new width, precision or chip, with the inputs of that
call, and keeps the fastest in `tiles.json` under `MEGABATCH_CACHE` (`~/.cache/megabatch`). It takes seconds, mostly of
compiling. Sizes change the order in which sums are added, so the last digits may differ between machines tuned differently.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from megabatch.tiles import plan
from megabatch.tiles.block import Block
from megabatch.tiles.plan import KernelTile
from megabatch.tiles.precision import FLOAT32, TF32

ENABLED = os.environ.get("MEGABATCH_AUTOTUNE") == "1"

_SMALLEST = 4096 * 4096  # similarities; less work than that says little about a size
_REPEATS = 5


def tile(
    kernel: str, block: Block, default: KernelTile, trial: Callable[[KernelTile], object], widest: int = 256
) -> KernelTile:
    """The fastest tile of `kernel` for blocks like this one, or `default`; `trial` runs the kernel once with a tile.

    No tile has more than `widest` columns.
    """
    if not ENABLED or block.N * block.M < _SMALLEST or _is_capturing(block):
        return default
    key = f"{kernel} {_chip(block.x.device)} {block.precision} {block.D} {_triton_version()}"
    known = _remembered()
    if key not in known:
        times = {size: _milliseconds(trial, size) for size in candidates(block, default) if size.columns <= widest}
        known[key] = min(times, key=times.__getitem__)
        _remember(known)
    return known[key]


def candidates(block: Block, default: KernelTile) -> Iterator[KernelTile]:
    """`default`, and others that fit the chip's shared memory."""
    yield default
    element_size = 4 if block.precision in (FLOAT32, TF32) else 2
    for rows, columns, warps in ((64, 64, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8)):
        for stages in (2, 3, 4):
            for programs in (1, 2):
                other = KernelTile(rows, columns, default.width, warps, stages, default.group, programs)
                used = programs * stages * (rows + columns) * default.width * element_size
                if other != default and used <= plan.shared_memory(block.x.device):
                    yield other


def _milliseconds(trial: Callable[[KernelTile], object], candidate: KernelTile) -> float:
    """Of a few runs after the first, which compiles; infinity for a size that the chip refuses."""
    from triton.runtime.errors import OutOfResources

    try:
        trial(candidate)
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPEATS):
            trial(candidate)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    except OutOfResources:
        return float("inf")


def _is_capturing(block: Block) -> bool:
    return block.x.is_cuda and torch.cuda.is_current_stream_capturing()


def _chip(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _file() -> Path:
    return Path(os.environ.get("MEGABATCH_CACHE", Path.home() / ".cache" / "megabatch")) / "tiles.json"


@cache
def _remembered() -> dict[str, KernelTile]:
    """What was found before; a file that cannot be read counts as none."""
    try:
        return {key: KernelTile(**size) for key, size in json.loads(_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(known: dict[str, KernelTile]) -> None:
    """Replaces the file in one step, so that nobody reads half of it; where it cannot be written, this process remembers."""
    file = _file()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({key: asdict(size) for key, size in known.items()}, indent=1) + "\n")
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
