"""Process groups as strings, the nodes they span, and the route that was asked for.

PyTorch operators take tensors, numbers and strings. A group therefore goes into them as a string, its *address*: the route, the
purpose of the operation where a loss has named one, and the group's name, `"auto@@0"`. An empty string is one process. What
belongs to PyTorch's internals is wrapped here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megabatch import tracing
from megabatch.ring.routes import Nodes

AUTO, RING, TWO_LEVEL, GATHER = "auto", "ring", "two_level", "gather"
ROUTES = (AUTO, RING, TWO_LEVEL, GATHER)
VARIABLE = "MEGABATCH_RING"


def check_route(value: Any, name: str = "route") -> str:
    """One of the names, or "two_level:4" for nodes of four ranks each."""
    kind, colon, size = value.partition(":") if isinstance(value, str) else (None, "", "")
    if kind not in ROUTES or (colon and not (kind == TWO_LEVEL and size.isdecimal() and int(size) > 0)):
        names = ", ".join(map(repr, ROUTES))
        raise ValueError(f"{name} must be one of {names}, or 'two_level:4' for nodes of 4 ranks, got {value!r}")
    return str(value)


# Read once, because the compiler cannot trace the reading; `using` changes it.
_route = check_route(os.environ.get(VARIABLE, AUTO), f"the environment variable {VARIABLE}")


@contextmanager
def using(route: str) -> Iterator[None]:
    """Within it, losses over a group use this route: "auto", "ring", "two_level", "two_level:4" or "gather".

    All ranks have to choose the same. The backward pass goes the way its forward pass went. The environment variable
    MEGABATCH_RING sets it for the whole program.
    """
    global _route
    before, _route = _route, check_route(route)
    try:
        yield
    finally:
        _route = before


def address(group: "dist.ProcessGroup | None", purpose: str = "") -> str:
    """A process group as operators take it; empty for one process.

    Args:
        group: the processes.
        purpose: of the operation; all ranks have to agree on it, and messages name it.
    """
    return "" if group is None or group.size() == 1 else f"{_route}@{purpose}@{group.group_name}"


def resolved(address: str) -> tuple[str, str, "dist.ProcessGroup"]:
    """(route, purpose, process group) of an address that is not empty."""
    route, purpose, name = address.split("@", 2)
    return route, purpose, dist.distributed_c10d._resolve_process_group(name)  # type: ignore


@tracing.constant
def rank_at(address: str) -> int:
    """This process's rank in the group of an address."""
    return dist.get_rank(resolved(address)[2]) if address else 0


def own_node() -> int:
    """The node of this process, from the variables that torchrun sets; 0 without them."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def nodes_from(node_of: list[int]) -> Nodes:
    """Ranks by node, from the node of each rank."""
    return tuple(tuple(r for r, node in enumerate(node_of) if node == n) for n in sorted(set(node_of)))
