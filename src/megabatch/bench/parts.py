"""The three parts of `megabatch bench`; each returns its entries of the record."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megabatch.bench import cached
from megabatch.bench import levels as tiling
from megabatch.bench import losses as alone
from megabatch.bench.inputs import is_right, pairs, sampled_rows
from megabatch.bench.levels import BLOCKS, LOCAL, TILES, VANILLA
from megabatch.bench.loss_systems import NAMES
from megabatch.bench.losses import FAILED, OK, WRONG, LossResult
from megabatch.bench.measure import ProcessError
from megabatch.bench.ranks import on_ranks
from megabatch.bench.steps import SYSTEMS
from megabatch.bench.truth import clip_truth
from megabatch.machine import available_memory


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
    ("cpu", True): Sizes([512, 1024, 2048, 4096], 256, 0.3, 18.0, 4096, 2, "tiny", [32, 64, 128], 16),
    ("cpu", False): Sizes([1024, 2048, 4096, 8192, 16384], 512, 3.0, math.inf, 8192, 4, "tiny", [128, 512, 2048], 16),
    ("cuda", True): Sizes([8192, 16384, 32768, 65536], 512, 0.3, 60.0, 4096, 2, "ViT-B/32", [1024, 2048, 4096], 256),
    ("cuda", False): Sizes(
        [16384, 32768, 65536, 131072, 262144], 512, 1.5, 600.0, 8192, 4, "ViT-B/32", [4096, 16384, 65536], 1024
    ),
}
MEMORY_SHARE = 0.8  # of the available memory; a dense loss that needs more is not tried
LEVELS = [TILES, BLOCKS, LOCAL, VANILLA]  # smallest memory first, because freed memory would hide the peak of the next
REPEATS = 2

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
        found["losses" if isinstance(result, LossResult) else "products"].append(asdict(result))
        done += result.batch**2
        say(f"{result.batch:,} pairs", done / everything)
    return found


def levels(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """The loss over ranks at each level of tiling; always on the CPU."""
    batch, width, world = sizes.level_batch, sizes.width, sizes.ranks
    say(f"{batch:,} pairs on {world} ranks", 0.1)
    image, text, log_scale = pairs(batch, width)
    right = clip_truth(image, text, log_scale.exp(), sampled_rows(batch))
    systems = [name for name in LEVELS if name in (TILES, BLOCKS) or _has_open_clip()]
    rows: list[dict[str, Any]] = []
    try:
        answers = on_ranks(tiling.measure, world, systems, batch, width, REPEATS)
    except ProcessError as error:
        rows = [_level(name, f"{FAILED}: {error}") for name in systems]
    else:
        for i, name in enumerate(systems):
            one = [of_rank[i] for of_rank in answers]
            value, dimage, dtext = tiling.mean_over_ranks(one)
            row = _level(name, OK)
            row["loss_error"], row["gradient_error"] = errors = right.errors(value, dimage, dtext)
            if is_right(value, *errors):
                row["peak"] = max(a.peak for a in one)
                row["seconds"] = min(max(a.seconds[k] for a in one) for k in range(REPEATS))
            else:
                row["status"] = WRONG
            rows.append(row)
    return {"levels": rows[::-1], "levels_of": {"batch": batch, "world": world, "width": width}}


def _level(name: str, status: str) -> dict[str, Any]:
    return {"system": name, "status": status, "peak": None, "seconds": None, "loss_error": None, "gradient_error": None}


def _has_open_clip() -> bool:
    import importlib.util

    return importlib.util.find_spec("open_clip") is not None


def steps(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Memory and speed of a training step against the batch."""
    names = list(SYSTEMS)
    rows = []
    say("comparing gradients", 0.0)
    until = time.perf_counter() + sizes.limit
    for result in cached.measure(sizes.model, sizes.step_batches, sizes.chunk, device, names, until):
        rows.append(asdict(result))
        say(f"{result.batch:,} pairs, {result.system}", len(rows) / (len(names) * len(sizes.step_batches)))
    precision = "bf16 autocast" if device == "cuda" else "float32"
    return {"steps": rows, "steps_of": {"model": sizes.model, "chunk": sizes.chunk, "precision": precision}}
