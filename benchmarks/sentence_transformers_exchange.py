"""The number of collectives in one step, counted by PyTorch's profiler on CPU ranks with gloo.

The reduction of the encoder's gradients is the same for all systems and is not counted. Gloo has no reduce-scatter: backward
of an all-gather is a scatter from each rank with gloo, and one reduce-scatter with NCCL.
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from sentence_transformers_systems import INTEGRATION, OURS, SYSTEMS, THEIRS, Setting, encoder, texts
from torch.profiler import ProfilerActivity, profile

from megabatch.bench.processes import on_ranks

ROWS, WIDTH, VOCABULARY, TOKENS = 64, 48, 100, 8
SHARED = (THEIRS, OURS, INTEGRATION)


def count(world: int, chunk: int) -> list[dict[str, Any]]:
    """Calls on the first rank, by name, of a step of each system with `ROWS` pairs on every rank."""
    return on_ranks(_on_a_rank, world, chunk, seconds=120.0)[0]


def _on_a_rank(rank: int, world: int, chunk: int) -> list[dict[str, Any]]:
    model = encoder(WIDTH, 2, VOCABULARY, "cpu").eval()
    queries, documents = texts(ROWS * world, TOKENS, VOCABULARY, "cpu")
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    first, second = ({key: value[mine] for key, value in column.items()} for column in (queries, documents))
    found = []
    for name in SHARED:
        s = Setting(model, (first, second), chunk, "cpu", group=dist.group.WORLD)
        try:
            SYSTEMS[name](s)  # ranks that never met connect first
        except ImportError:
            continue
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            value = SYSTEMS[name](s)
        dist.all_reduce(value)
        calls = Counter(e.name.removeprefix("c10d::").strip("_") for e in profiler.events() if e.name.startswith("c10d::"))
        mean = (value / world).item()
        found.append({"system": name, "world": world, "mini_batches": ROWS // chunk, "loss": mean, "calls": dict(calls)})
    return found
