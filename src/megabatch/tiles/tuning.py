"""Autotuning of tile sizes, for chips that the sizes in `kernel_plan` were not measured on. Opt-in.

With `MEGABATCH_AUTOTUNE=1` the first call of a kernel with a new width, precision or chip times a few tiles on its own inputs.
The fastest is kept in `tiles.json` under `MEGABATCH_CACHE` (`~/.cache/megabatch`). Tuning takes seconds, mostly for compiling.
Tile sizes change the order of summation, so the last digits of results may differ between tiles.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from megabatch.tiles import kernel_plan
from megabatch.tiles.block import Block
from megabatch.tiles.kernel_plan import KernelTile
from megabatch.tiles.precision import FLOAT32, TF32

ENABLED = os.environ.get("MEGABATCH_AUTOTUNE") == "1"

_SMALLEST = 4096 * 4096  # similarities; a smaller block says little about the speed of a tile
_REPEATS = 5


def tile(
    kernel: str, block: Block, default: KernelTile, trial: Callable[[KernelTile], object], widest: int = 256
) -> KernelTile:
    """The fastest tile of `kernel` for blocks like this one, or `default` if autotuning is off.

    `trial` runs the kernel once with a tile. No tile has more than `widest` columns.
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
    """`default`, and other tiles that fit in the chip's shared memory."""
    yield default
    element_size = 4 if block.precision in (FLOAT32, TF32) else 2
    for rows, columns, warps in ((64, 64, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8)):
        for stages in (2, 3, 4):
            for programs in (1, 2):
                other = KernelTile(rows, columns, default.width, warps, stages, default.group, programs)
                used = programs * stages * (rows + columns) * default.width * element_size
                if other != default and used <= kernel_plan.shared_memory(block.x.device):
                    yield other


def _milliseconds(trial: Callable[[KernelTile], object], candidate: KernelTile) -> float:
    """Time of a few runs after the first, which compiles; infinity if the tile exceeds the chip's resources."""
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
    """The tiles found by earlier calls and processes. An unreadable file counts as empty."""
    try:
        return {key: KernelTile(**size) for key, size in json.loads(_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(known: dict[str, KernelTile]) -> None:
    """Replaces the file atomically. If it cannot be written, the tiles are kept in this process only."""
    file = _file()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({key: asdict(size) for key, size in known.items()}, indent=1) + "\n")
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
