"""The ranks of a job: their devices and free memory, their process group, the messages between ranks outside of a loss, and
tensors that are sharded over ranks.

Training, evaluation and gradient caching use a `World`. A loss takes a process group and uses `ring.ranks.Ranks`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# gloo raises a plain RuntimeError if another rank has ended. Its text contains one of these parts.
_CONNECTION_LOST = ("closed by peer", "Connection reset", "Connection refused", "Broken pipe", "remote process exited")


class LostRankError(ConnectionError):
    """Another rank has ended or cannot be reached."""


@dataclass(frozen=True)
class World:
    """This process and the other ranks of its process group.

    Args:
        device: the device of this process.
        group: the process group of all ranks, or None for one process.
    """

    device: torch.device
    group: Any = None

    def __post_init__(self) -> None:  # noqa: D105
        if self.group is not None:
            _release_default_group()

    @classmethod
    def of(cls, group: Any, device: torch.device | None = None) -> "World":
        """Creates the world of a process group, a 1-D `DeviceMesh` or None."""
        return cls(device or torch.device("cpu"), group.get_group() if hasattr(group, "get_group") else group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def local_size(self) -> int:
        """The number of ranks on this machine, which share its memory. torchrun sets it."""
        return min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @contextmanager
    def explain_errors(self, describe_progress: Callable[[], str]) -> Iterator[None]:
        """Turns communication errors with a rank that has ended into a `LostRankError`, which contains this rank's progress."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or any(m in str(error) for m in _CONNECTION_LOST)):
                raise
            reason = str(error).partition("] ")[2] or str(error)
            raise LostRankError(
                f"rank {self.rank} of {self.size} lost another rank {describe_progress()}. The messages of that rank contain "
                f"the reason. The error on this rank: {reason.splitlines()[0].partition('. ')[0]}"
            ) from error

    # Reductions of numbers. The result is equal on every rank. Integers are exact up to 2⁵³.

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums each number over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Returns the maximum of each number over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: Sequence[float]) -> list[float]:
        """Returns the minimum of each number over the ranks."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the integers of each rank, in rank order. All ranks must pass equally many. This takes one all-gather."""
        if self.group is None:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.int64, device=self._message_device())
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=self.group)
        return [line.tolist() for line in gathered]

    # Small objects

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the object of each rank, in rank order. The objects must be small and picklable."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_first(self, value: Any) -> Any:
        """Returns the value of the first rank on every rank."""
        return self.gather_objects(value if self.rank == 0 else None)[0]

    # Tensors with a different number of rows on each rank

    def row_offset(self, rows: int) -> int:
        """Returns the number of rows on the ranks before this one. This rank has `rows` rows."""
        return sum(line[0] for line in self.gather_integers([rows])[: self.rank])

    def blocks(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields the row offset and the broadcast rows of each rank in turn. The rows of two ranks are in memory at once."""
        if self.group is None:
            yield 0, rows
            return
        sizes = [line[0] for line in self.gather_integers([len(rows)])]
        for rank, size in enumerate(sizes):
            block = rows.contiguous() if rank == self.rank else rows.new_empty(size, *rows.shape[1:])
            if size:
                dist.broadcast(block, src=dist.get_global_rank(self.group, rank), group=self.group)
            yield sum(sizes[:rank]), block

    def gather_rows(self, values: Tensor) -> Tensor:  # (n, …) -> (sum of n over ranks, …)
        """Returns the rows of all ranks, in rank order. Use it for a number per sample, because embeddings may not fit."""
        return torch.cat([block for _, block in self.blocks(values)])

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.group is None:
            return [float(value) for value in values]
        numbers = torch.tensor(values, dtype=torch.float64, device=self._message_device())
        dist.all_reduce(numbers, operation, group=self.group)
        return [float(value) for value in numbers.tolist()]

    def _message_device(self) -> torch.device:
        return torch.device("cpu") if "gloo" in dist.get_backend(self.group) else self.device


def default_group() -> Any:
    """Returns the process group of all processes, or None if there is only one or `torch.distributed` is not initialized."""
    has_several_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if has_several_ranks else None


@cache
def _release_default_group() -> None:
    """Removes the default group from the default arguments of `torch.distributed.nn.functional`; None has the same meaning.

    The first optimizer step imports this module. If the default group already exists, these arguments keep the group and the
    threads of gloo alive after `destroy_process_group`, and such a thread can abort or hang the exit of Python.
    """
    from torch.distributed.nn import functional

    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            defaults = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(defaults)


def devices() -> list[str]:
    """Returns the device types that PyTorch finds on this machine: an accelerator such as "cuda" if there is one, and "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else [accelerator.type, "cpu"]


def _own_device(name: str) -> torch.device:
    """Returns the device of this process, which is the current one afterwards."""
    available = devices()
    kind = available[0] if name == "auto" else name
    if kind not in available:
        listed = ", ".join(f'"{each}"' for each in ("auto", *available))
        raise ValueError(f'device must be one of {listed} on this machine, got "{name}", but PyTorch finds no such device')
    if kind in ("cpu", "mps"):  # PyTorch has one device of these types
        return torch.device(kind)
    own_device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(own_device)
    return own_device


@contextmanager
def join_world(device: str = "auto") -> Iterator[World]:
    """Yields the world of this process, which has all ranks that torchrun started, or only this process.

    Args:
        device: a type of `devices`, or "auto" for the first of them.
    """
    own_device, ranks = _own_device(device), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield World(own_device)
        return
    if own_device.type == "mps":
        raise ValueError(f'device must be "cpu" for {ranks} ranks on this machine, got "mps": its GPU serves one process')
    if own_device.type == "cpu":
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(dist.get_default_backend_for_device(own_device), device_id=own_device)
    world = World(own_device, dist.group.WORLD)
    try:
        with world.explain_errors(lambda: "outside of a training step"):
            yield world
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that FSDP2 shards over ranks (DTensor). DTensor is not imported here, because the import is slow.


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor. Other tensors are returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether the tensor is a DTensor. If DTensor was never imported, no tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def compute_device(parameter: Tensor) -> torch.device:
    """Returns the device that a module with this parameter computes on. FSDP2 may offload the parameter to the CPU."""
    if is_sharded(parameter) and parameter.device.type == "cpu":
        kind = parameter.device_mesh.device_type  # type: ignore[attr-defined]
        if kind != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device


# ----------------------------------------------------------------------------------------------------------------------
# The free memory of a device and of the machine.

# Files with the memory limit of a container, in control groups version 2 and version 1.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> int | None:
    """Returns the bytes that a new program can allocate without swapping, or None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for path in CONTAINER_LIMITS:
        try:
            available = min(available, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return available


def free_memory(device: torch.device | None) -> int:
    """Returns the bytes that can be allocated: free memory of the device plus unused memory that PyTorch has reserved."""
    module: Any = None if device is None else getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    if hasattr(module, "recommended_max_memory"):  # MPS
        return max(0, int(module.recommended_max_memory() - module.current_allocated_memory()))
    return available_memory() or 0
