"""The memory budget for kept graphs, the free memory, and helpers for autograd graphs and sharded tensors."""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------------------------------------
# The memory of the machine.

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
# The memory budget: how many chunks keep their graph from the first pass, so that the second pass skips them.
#
# The first chunk of a tower is encoded with a graph, and the bytes of the graph are measured. All later graphs that are kept
# are measured as well. A single process builds the next graph if the largest graph so far would still fit. Ranks that must
# encode equally often agree on a number of graphs after the first chunk. It is the smallest number that fits on any rank.


AUTO: Literal["auto"] = "auto"
ALL: Literal["all"] = "all"
Budget = int | Literal["auto", "all"] | None

# The rest of the free memory is for activations inside a tower, the workspace of the loss (at most 512 MiB, docs/kernels.md)
# and fragmentation. Embeddings and gradients that do not exist yet are counted separately.
AUTO_FRACTION = 0.8

# An embedding, its gradient, and the float32 sums of a gradient, which a loss may store in addition.
COPIES_OF_EMBEDDINGS = 4

Agree = Callable[[int], int]  # returns the smallest number over all ranks


class Keeper:
    """Decides for each chunk, before it is encoded, whether to build a graph, and afterwards whether to keep it.

    Args:
        budget: bytes, "all" for no limit, "auto" for `fraction=AUTO_FRACTION`, or None for no graphs.
        fraction: the budget as a fraction of the free memory, instead of `budget`.
        agree: needed for ranks that must encode equally often. It is None for a single process.
    """

    def __init__(self, budget: Budget, fraction: float | None, agree: Agree | None) -> None:
        self._fraction = AUTO_FRACTION if budget == AUTO else fraction
        self._limit: float | None = None  # bytes; for a fraction of the free memory, set after the first chunk
        if self._fraction is None:
            self._limit = math.inf if budget == ALL else float(budget or 0)
        self._agree = agree
        self._free = 0
        self._used = 0
        self._largest = 0  # bytes of the largest graph of this tower
        self._agreed: int | None = None  # the number of graphs that this tower keeps
        self._tried = 0

    def begin(self, device: torch.device | None) -> None:
        """Starts a new tower."""
        self._largest, self._agreed, self._tried = 0, None, 0
        if self._limit is None:
            self._free = free_memory(device)

    def should_build(self) -> bool:
        """Returns whether to build a graph of the next chunk."""
        if self._limit == 0 and self._fraction is None:
            return False
        if self._tried == 0:
            return self._limit is None or self._used < self._limit or self._agree is not None
        if self._agreed is not None:
            return self._tried < self._agreed
        return self._limit is not None and self._used + self._largest <= self._limit

    def should_keep(self, graph_bytes: int, chunks: int, other_bytes: int) -> bool:
        """Returns whether to keep the graph just built.

        Args:
            graph_bytes: size of the graph.
            chunks: number of chunks of this tower.
            other_bytes: memory that the step still needs, for embeddings and for gradients that do not exist yet.
        """
        self._largest = max(self._largest, graph_bytes)
        if self._limit is None:
            assert self._fraction is not None
            # In addition to the kept graphs, one more chunk is in memory. In the first pass it is the chunk being encoded. In
            # the second pass it is the gradients of a kept graph. Chunks are encoded again after all kept graphs are freed.
            self._limit = max(0.0, self._fraction * (self._free - other_bytes - graph_bytes))
        fits = self._used + graph_bytes <= self._limit
        if self._tried == 0 and self._agree is not None:
            available = max(0.0, self._limit - self._used)
            own = chunks if available >= chunks * graph_bytes else int(available // graph_bytes)
            self._agreed = self._agree(own)
        if self._agreed is not None:
            fits = self._tried < self._agreed
        self._tried += 1
        if fits:
            self._used += graph_bytes
        return fits


def free_memory(device: torch.device | None) -> int:
    """Returns the bytes that can be allocated: free memory of the device plus unused memory that PyTorch has reserved."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return available_memory() or 0


# ----------------------------------------------------------------------------------------------------------------------
# Autograd graphs: the parameters that they reach, and the bytes that they keep in memory.


def parameters_in(outputs: Sequence[Tensor]) -> set[int] | None:
    """Returns the ids of all leaves that get a gradient from these outputs.

    Returns None if reentrant activation checkpointing hides them.
    """
    leaves: set[int] = set()
    visited: set[object] = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves.update(id(output) for output in outputs if output.requires_grad and output.is_leaf)
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.name() == "CheckpointFunctionBackward":  # reentrant: its graph is built in the backward pass
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        waiting += [after for after, _ in node.next_functions if after is not None]
    return leaves


ALLOCATING = threading.Lock()  # held by a thread that allocates on a CUDA device, and while a graph is measured there


class GraphSize:
    """The bytes that a graph built in `measure_graph` keeps in memory."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def measure_graph(device: torch.device | None, known: Iterable[Tensor]) -> Iterator[GraphSize]:
    """Measures the graph built in the context.

    On CUDA, it measures allocated bytes. On other devices, it adds up the tensors that autograd saves.

    Args:
        device: of the tower.
        known: tensors that are in memory anyway, such as parameters and inputs. They are not counted.
    """
    size = GraphSize()
    if device is not None and device.type == "cuda":
        with ALLOCATING:
            before = torch.cuda.memory_allocated(device)
            yield size
            size.bytes = max(0, torch.cuda.memory_allocated(device) - before)
        return
    counted = {tensor.untyped_storage().data_ptr() for tensor in known}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            size.bytes += storage.nbytes()
        return tensor.detach()  # a tensor with a grad_fn would form a reference cycle with its node

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    hooks = [pack, unpack]
    if "torch._dynamo" in sys.modules:  # Dynamo would try to compile the hooks of a compiled tower
        hooks = [torch.compiler.disable(hook) for hook in hooks]  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield size


def list_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers. A DTensor is replaced by this rank's shard."""
    return [local(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())]
