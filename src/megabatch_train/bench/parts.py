"""The three parts of `megabatch bench`; each returns its entries of the record."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megabatch import extras
from megabatch.cached.memory import available_memory
from megabatch_train.bench import levels as tiling
from megabatch_train.bench import losses as alone
from megabatch_train.bench import steps as training
from megabatch_train.bench.losses import NAMES, pairs, truth_of


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: smaller on a CPU, much smaller with `--quick`."""

    batches: list[int]
    width: int
    seconds: float  # of timing for one loss at one batch
    limit: float  # seconds for all losses, and for all steps; measurements beyond it are skipped
    level_batch: int  # large enough that a rank's block is larger than a tile
    ranks: int
    model: str
    step_batches: list[int]
    chunk: int


SIZES = {  # (device, quick)
    ("cpu", True): Sizes([64, 256, 1024, 4096], 256, 0.3, 18.0, 4096, 2, "tiny", [32, 64, 128], 16),
    ("cpu", False): Sizes([64, 256, 1024, 4096, 16384], 512, 3.0, math.inf, 8192, 4, "tiny", [128, 512, 2048], 16),
    ("cuda", True): Sizes([64, 256, 1024, 4096, 16384, 65536], 512, 0.3, 60.0, 4096, 2, "ViT-B/32", [1024, 2048, 4096], 256),
    ("cuda", False): Sizes(
        [64, 256, 1024, 4096, 16384, 65536, 262144], 512, 1.5, 600.0, 8192, 4, "ViT-B/32", [4096, 16384, 65536], 1024
    ),
}
MEMORY_SHARE = 0.8  # of the available memory; a dense loss that needs more is not tried
REPEATS = 2  # timed steps over ranks

Say = Callable[[str, float], None]  # (present task, fraction of the part that is done)


def losses(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Memory and time of each loss against the batch, and of the bare products."""
    memory = available_memory() if device == "cpu" else None
    limit = None if memory is None else int(MEMORY_SHARE * memory)
    found: dict[str, Any] = {"losses": [], "products": []}
    everything = sum(batch**2 for batch in sizes.batches) * (1 + len(NAMES))
    done = 0
    until = time.perf_counter() + sizes.limit
    for result in alone.measure(sizes.batches, sizes.width, device, sizes.seconds, limit, until):
        found["losses" if isinstance(result, alone.LossResult) else "products"].append(asdict(result))
        done += result.batch**2
        say(f"{result.batch:,} pairs", done / everything)
    return found


def levels(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """The loss over ranks at each level of tiling; always on the CPU."""
    batch, width, world = sizes.level_batch, sizes.width, sizes.ranks
    say(f"{batch:,} pairs on {world} ranks", 0.1)
    right = truth_of(*pairs(batch, width))
    systems = {
        name: system
        for name, system in tiling.SYSTEMS.items()
        if name in (tiling.TILES, tiling.BLOCKS) or extras.is_installed("open_clip")
    }
    found = tiling.measure(systems, world, batch, width, REPEATS, right)
    about = {"batch": batch, "world": world, "width": width}
    return {"levels": [asdict(result) for result in reversed(found)], "levels_of": about}


def steps(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Memory and speed of a training step against the batch."""
    names = list(training.SYSTEMS)
    rows = []
    say("comparing gradients", 0.0)
    until = time.perf_counter() + sizes.limit
    for result in training.measure(sizes.model, sizes.step_batches, sizes.chunk, device, names, until):
        rows.append(asdict(result))
        say(f"{result.batch:,} pairs, {result.system}", len(rows) / (len(names) * len(sizes.step_batches)))
    precision = "bf16 autocast" if device == "cuda" else "float32"
    return {"steps": rows, "steps_of": {"model": sizes.model, "chunk": sizes.chunk, "precision": precision}}
