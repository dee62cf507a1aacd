"""What evaluation sends between ranks: sizes, numbers, and one rank's rows at a time to all the others."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def plain(group: Any) -> Any:
    """The process group of a mesh; others as they are."""
    return group.get_group() if hasattr(group, "get_group") else group


def sizes_of(length: int, device: torch.device, group: Any) -> list[int]:
    """How many rows each rank has."""
    if group is None:
        return [length]
    own = torch.tensor([length], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(plain(group)))]
    dist.all_gather(sizes, own, group=plain(group))
    return [int(size) for size in sizes]


def broadcast_rows(rows: Tensor, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Every rank's rows in turn, with the number of rows before them; two ranks' rows are held at any time."""
    if group is None:
        yield 0, rows
        return
    group = plain(group)
    sizes, me = sizes_of(len(rows), rows.device, group), dist.get_rank(group)
    for rank, size in enumerate(sizes):
        block = rows.contiguous() if rank == me else rows.new_empty(size, *rows.shape[1:])
        if size:
            dist.broadcast(block, src=dist.get_global_rank(group, rank), group=group)
        yield sum(sizes[:rank]), block


def gathered(values: Tensor, group: Any) -> Tensor:  # (n, …) -> (all, …)
    """All ranks' values, in order of rank; for numbers, not for embeddings."""
    return torch.cat([block for _, block in broadcast_rows(values, group)])
