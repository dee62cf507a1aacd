"""Which chunks keep their graph from the first pass, so that they need no second one: as many as fit a budget.

The first chunk of a tower is encoded with a graph and weighed, and so is every further one that is kept. One process alone
tries a chunk while the heaviest so far would still fit. Ranks that have to keep in step settle the number after the first
chunk: the smallest of what fits each of them.
"""

import math
from collections.abc import Callable

import torch

from megabatch.machine import available_memory

AUTO = "auto"
# What is left of the free memory for the work inside a tower, the workspace of the loss (at most 512 MiB, docs/kernels.md)
# and fragmentation. Embeddings and missing gradients are counted apart.
AUTO_SHARE = 0.8

# An embedding, its gradient, and the float32 sums of a gradient that a loss may hold beside them.
COPIES_OF_EMBEDDINGS = 4

Agree = Callable[[int], int]  # this rank's number to the smallest of all ranks


class Keeper:
    """Decides for each chunk, before it is encoded, whether to make a graph, and afterwards whether to keep it.

    Args:
        budget: None or 0, bytes, a share of the free memory, or "auto"; infinity keeps everything.
        agree: for ranks that have to keep in step; None for a process that decides alone.
    """

    def __init__(self, budget: int | float | str | None, agree: Agree | None) -> None:
        self._budget = AUTO_SHARE if budget == AUTO else budget or 0
        self._agree = agree
        self._limit: float | None = None  # bytes, once the first chunk has been weighed
        self._free = 0
        self._used = 0
        self._heaviest = 0  # of this tower
        self._agreed: int | None = None  # chunks that this tower keeps
        self._tried = 0

    def begin(self, device: torch.device | None) -> None:
        """A new tower."""
        self._heaviest, self._agreed, self._tried = 0, None, 0
        if self._limit is None and self._is_share():
            self._free = free_memory(device)

    def wants(self) -> bool:
        """Whether to make a graph of the next chunk."""
        if not self._budget:
            return False
        if self._tried == 0:
            return self._limit is None or self._used < self._limit or self._agree is not None
        if self._agreed is not None:
            return self._tried < self._agreed
        return self._limit is not None and self._used + self._heaviest <= self._limit

    def weighed(self, graph_bytes: int, chunks: int, other_bytes: int) -> bool:
        """Whether to keep the graph just made.

        Args:
            graph_bytes: what it weighs.
            chunks: of this tower.
            other_bytes: that the step still needs: embeddings and missing gradients.
        """
        self._heaviest = max(self._heaviest, graph_bytes)
        if self._limit is None:
            # Beside all that is kept, a chunk is at work on its way there, or one that is kept has gradients on its way back.
            # Chunks that are encoded again come when nothing is kept any more.
            free = self._free - other_bytes - graph_bytes
            self._limit = max(0.0, float(self._budget) * free) if self._is_share() else float(self._budget)
        fits = self._used + graph_bytes <= self._limit
        if self._tried == 0 and self._agree is not None:
            room = max(0.0, self._limit - self._used)
            own = chunks if room >= chunks * graph_bytes else int(room // graph_bytes)
            self._agreed = self._agree(own)
        if self._agreed is not None:
            fits = self._tried < self._agreed
        self._tried += 1
        if fits:
            self._used += graph_bytes
        return fits

    def _is_share(self) -> bool:
        return isinstance(self._budget, float) and not math.isinf(self._budget)


def free_memory(device: torch.device | None) -> int:
    """Bytes that could be allocated: what the device has left, and what PyTorch holds there without using it."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return available_memory() or 0
