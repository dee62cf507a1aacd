"""Who takes part: process groups by name, the nodes they span, and the way round that was asked for.

PyTorch operators take tensors, numbers and strings. A group therefore goes into them as a string, its *route*: the schedule,
the purpose of the operation where a loss has named one, and the group's name, `"auto@@0"`. An empty string is this process
alone. What belongs to PyTorch's internals is wrapped here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megabatch.ring.schedule import Nodes

AUTO, RING, TWO_LEVEL, GATHER = "auto", "ring", "two_level", "gather"
SCHEDULES = (AUTO, RING, TWO_LEVEL, GATHER)
VARIABLE = "MEGABATCH_RING"


def check_schedule(value: Any, name: str = "schedule") -> str:
    """One of the names, or "two_level:4" for nodes of four ranks each."""
    kind, colon, size = value.partition(":") if isinstance(value, str) else (None, "", "")
    if kind not in SCHEDULES or (colon and not (kind == TWO_LEVEL and size.isdecimal() and int(size) > 0)):
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"{name} must be one of {names}, or 'two_level:4' for nodes of 4 ranks, got {value!r}")
    return str(value)


# Read once, because the compiler cannot trace the reading; `using` changes it.
_schedule = check_schedule(os.environ.get(VARIABLE, AUTO), f"the environment variable {VARIABLE}")


@contextmanager
def using(schedule: str) -> Iterator[None]:
    """Within it, losses over a group go round by this schedule: "auto", "ring", "two_level", "two_level:4" or "gather".

    All ranks have to choose the same. The backward pass goes the way its forward pass went. The environment variable
    MEGABATCH_RING sets it for the whole program.
    """
    global _schedule
    before, _schedule = _schedule, check_schedule(schedule)
    try:
        yield
    finally:
        _schedule = before


def route(group: "dist.ProcessGroup | None", purpose: str = "") -> str:
    """What an operator is given: empty for one process alone.

    Args:
        group: the processes.
        purpose: what the operation is for, which all ranks have to agree on, and which messages name.
    """
    return "" if group is None or group.size() == 1 else f"{_schedule}@{purpose}@{group.group_name}"


@dataclass(frozen=True)
class Members:
    """The processes of a group, as this one sees them."""

    group: "dist.ProcessGroup"
    rank: int  # in the group, as everywhere here
    size: int
    schedule: str  # as asked for
    purpose: str = ""  # of the operation, if it has one

    @classmethod
    def of(cls, route: str) -> "Members":
        """Of a route that is not empty."""
        schedule, purpose, name = route.split("@", 2)
        group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore
        return cls(group, group.rank(), group.size(), schedule, purpose)

    def is_staged(self, device: torch.device) -> bool:
        """Whether tensors of this device have to go through host memory: gloo sends nothing else."""
        return device.type == "cuda" and self.group._get_backend(device).name() == "gloo"


def own_node() -> int:
    """The node this process is on, by what torchrun (or whoever sets the same variables) says; 0 if nobody does."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def nodes_from(node_of: list[int]) -> Nodes:
    """Ranks by node, from the node of each rank."""
    return tuple(tuple(r for r, node in enumerate(node_of) if node == n) for n in sorted(set(node_of)))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rank_on(route: str) -> int:
    """This process's place in the group of a route."""
    return Members.of(route).rank if route else 0
