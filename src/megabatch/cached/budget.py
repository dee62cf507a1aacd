"""The memory budget: how many chunks keep their graph from the first pass, so that the second pass skips them.

The first chunk of a tower is encoded with a graph, and the graph's bytes are measured; the same holds for every further chunk
that is kept. One process alone tries the next chunk while the largest graph so far would still fit. Ranks that must encode
equally often agree on a number after the first chunk: the smallest number that fits on any rank.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch

from megabatch.machine import available_memory

AUTO: Literal["auto"] = "auto"
ALL: Literal["all"] = "all"
Budget = int | Literal["auto", "all"] | None

# The rest of the free memory is for activations inside a tower, the workspace of the loss (at most 512 MiB, docs/kernels.md)
# and fragmentation. Embeddings and gradients that do not exist yet are counted separately.
AUTO_FRACTION = 0.8

# An embedding, its gradient, and the float32 sums of a gradient that a loss may hold beside them.
COPIES_OF_EMBEDDINGS = 4

Agree = Callable[[int], int]  # the smallest number over all ranks


class Keeper:
    """Decides for each chunk, before it is encoded, whether to build a graph, and afterwards whether to keep it.

    Args:
        budget: bytes; "all" for no limit, "auto" for `fraction=AUTO_FRACTION`, None for no graphs at all.
        fraction: of the free memory, in place of `budget`.
        agree: for ranks that must encode equally often; None for a process that decides alone.
    """

    def __init__(self, budget: Budget, fraction: float | None, agree: Agree | None) -> None:
        self._fraction = AUTO_FRACTION if budget == AUTO else fraction
        self._limit: float | None = None  # bytes; a fraction of the free memory is known after the first chunk
        if self._fraction is None:
            self._limit = math.inf if budget == ALL else float(budget or 0)
        self._agree = agree
        self._free = 0
        self._used = 0
        self._largest = 0  # graph of this tower
        self._agreed: int | None = None  # chunks that this tower keeps
        self._tried = 0

    def begin(self, device: torch.device | None) -> None:
        """Starts a new tower."""
        self._largest, self._agreed, self._tried = 0, None, 0
        if self._limit is None:
            self._free = free_memory(device)

    def wants(self) -> bool:
        """Whether to build a graph of the next chunk."""
        if self._limit == 0 and self._fraction is None:
            return False
        if self._tried == 0:
            return self._limit is None or self._used < self._limit or self._agree is not None
        if self._agreed is not None:
            return self._tried < self._agreed
        return self._limit is not None and self._used + self._largest <= self._limit

    def keeps(self, graph_bytes: int, chunks: int, other_bytes: int) -> bool:
        """Whether to keep the graph just built.

        Args:
            graph_bytes: size of the graph.
            chunks: of this tower.
            other_bytes: memory that the step still needs, for embeddings and for gradients that do not exist yet.
        """
        self._largest = max(self._largest, graph_bytes)
        if self._limit is None:
            assert self._fraction is not None
            # Beside the kept graphs, one more chunk is in memory: in the first pass the chunk being encoded, in the second the
            # gradients of a kept graph. Chunks are encoded again only after all kept graphs are freed.
            self._limit = max(0.0, self._fraction * (self._free - other_bytes - graph_bytes))
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


def free_memory(device: torch.device | None) -> int:
    """Bytes that could be allocated: free memory of the device, and memory that PyTorch has reserved there and does not use."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return available_memory() or 0
