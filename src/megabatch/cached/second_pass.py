"""The second pass over a tower: the chunks that skip it because their graphs are kept, and the states of random generators and
of batch normalization, which keep it equal to the first pass.
"""

import importlib
import math
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import _global_forward_pre_hooks

from megabatch.world import free_memory, local

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


# ----------------------------------------------------------------------------------------------------------------------
# Saves generator states before a chunk is encoded and restores them later, so that both passes draw equal random numbers.
#
# Towers use PyTorch's generators of the CPU and of each device. Some also use Python's and NumPy's generators, for masking of
# speech or layer drop. All states are saved. A state that did not change between two chunks is stored once.


class States(NamedTuple):
    """The states of all random generators that a tower may use."""

    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]  # (device, state)
    python: Any
    numpy: Any  # None if NumPy was never imported


def capture_generators(devices: Iterable[torch.device], before: States | None = None) -> States:
    """Returns the current states. A state that did not change since `before` is shared with it."""
    numpy = _numpy()
    now = States(
        torch.get_rng_state(),
        tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in _with_generator(devices)),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
    )
    if before is None:
        return now
    return States(
        before.cpu if torch.equal(before.cpu, now.cpu) else now.cpu,
        now.devices,
        before.python if before.python == now.python else now.python,
        before.numpy if _same_numpy(before.numpy, now.numpy) else now.numpy,
    )


def restore_generators(states: States) -> None:
    """Sets all generators to `states`."""
    torch.set_rng_state(states.cpu)
    for device, state in states.devices:
        torch.get_device_module(device).set_rng_state(state, device)
    random.setstate(states.python)
    if states.numpy is not None:
        importlib.import_module("numpy.random").set_state(states.numpy)


@contextmanager
def preserve_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores all generators at the end of the context."""
    states = capture_generators(devices)
    try:
        yield
    finally:
        restore_generators(states)


def seed_host(seed: int) -> None:
    """Seeds the CPU generators of PyTorch, Python and NumPy. Generators of other devices are not seeded."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _with_generator(devices: Iterable[torch.device]) -> list[torch.device]:
    """Returns the accelerators whose generators a tower may use: the current accelerator, and the accelerators in `devices`."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else getattr(torch, accelerator.type)
    # Before the first use of an accelerator, its generators have no state. MPS is always ready if it is available.
    if accelerator is None or not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return []
    indices = {device.index for device in devices if device.type == accelerator.type and device.index is not None}
    return [torch.device(accelerator.type, i) for i in sorted(indices | {torch.accelerator.current_device_index()})]


def list_autocasts() -> list[str]:
    """Returns the device types whose autocast is enabled."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]


def _numpy() -> Any:
    """Returns `numpy.random`, or None if NumPy was never imported.

    NumPy imports `numpy.random` at its first use, which may be in a tower, so this function imports it.
    """
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def _same_numpy(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    if {first["bit_generator"], second["bit_generator"]} != {
        "MT19937"
    }:  # the state of another bit generator has another structure
        return False
    a, b = first["state"], second["state"]
    return a["pos"] == b["pos"] and bool((a["key"] == b["key"]).all()) and first["gauss"] == second["gauss"]


# ----------------------------------------------------------------------------------------------------------------------
# Batch normalization in towers that encode one chunk at a time.
#
# The statistics of a chunk differ from the statistics of the batch. Gradient caching cannot change that, so it warns once for
# each tower. Running statistics are updated once, because neither the second pass nor a dummy pass updates them.

_warned: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def list_batch_norms(modules: Iterable[nn.Module]) -> list[tuple[str, _BatchNorm]]:
    """Returns the name and layer of each layer that normalizes by the statistics of its input."""
    unique = {
        id(layer): (name, layer)
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }
    return list(unique.values())


_HOOK = "megabatch"
_watching: list[Callable[[nn.Module], None]] = []


def _notify(module: nn.Module, _: object) -> None:
    if not torch.compiler.is_compiling():  # compiled code must not depend on this hook
        for watcher in list(_watching):
            watcher(module)


@contextmanager
def watch_calls(on_call: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls `on_call` with each outermost module that this thread calls in the context. This finds the modules in a function.

    In a compiled module, only the outermost module is reported. In a compiled function, no module is reported.
    """
    thread, inside = threading.get_ident(), set[int]()

    def watcher(module: nn.Module) -> None:
        if threading.get_ident() == thread and id(module) not in inside:
            inside.update(map(id, module.modules()))
            on_call(module)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        _watching.append(watcher)
        # The hook always has the same name, because compiled code depends on the names of hooks and is compiled again for a
        # new name. `register_module_forward_pre_hook` creates a new name each time.
        _global_forward_pre_hooks[_HOOK] = _notify  # type: ignore[index]
        try:
            yield
        finally:
            _watching.remove(watcher)
            if not _watching:
                del _global_forward_pre_hooks[_HOOK]  # type: ignore[arg-type]


def waits_for_ranks(layer: _BatchNorm) -> bool:
    """Returns whether the layer is a SyncBatchNorm over several ranks."""
    if not isinstance(layer, nn.SyncBatchNorm) or not dist.is_initialized():
        return False
    return dist.get_world_size(layer.process_group) > 1


def warn_about_batch_norms(layers: list[tuple[str, _BatchNorm]], tower: str, chunk_size: int, rows: int) -> None:
    """Warns once for each tower that has such layers and more than one chunk."""
    if not layers or chunk_size >= rows or layers[0][1] in _warned:
        return
    name, layer = layers[0]
    _warned.add(layer)
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    everywhere = ", over all ranks," if isinstance(layer, nn.SyncBatchNorm) else ""
    warnings.warn(
        f"{tower} has {type(layer).__name__} {name!r}{more} in training mode. It normalizes by the mean and variance of one "
        f"chunk of {chunk_size} samples{everywhere} instead of the batch of {rows}, so the gradients differ from a step with "
        "the whole batch. Use a larger chunk_size, put the layer into eval(), or use LayerNorm or GroupNorm, which normalize "
        "each sample",
        UserWarning,
        stacklevel=3,
    )


@contextmanager
def keep_running_statistics(layers: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """Stops updates of the running statistics in a second pass. The layers normalize as in the first pass."""
    tracking = [layer for _, layer in layers if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


@contextmanager
def restore_running_statistics(layers: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """Restores the running statistics after the backward pass of a kept graph.

    With activation checkpointing, the backward pass runs a layer again and updates its statistics a second time.
    """
    before = [(buffer, buffer.clone()) for _, layer in layers for buffer in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def use_running_statistics(layers: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """Makes the layers normalize by their running statistics in a dummy pass, because one sample has no variance.

    SyncBatchNorm runs as usual, because the other ranks wait for it.
    """
    training = [layer for _, layer in layers if layer.training and not isinstance(layer, nn.SyncBatchNorm)]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Returns the running means and variances of all layers of a module by name, without a copy."""
    return {
        f"{name}.{kind}" if name else kind: statistic
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for kind in ("running_mean", "running_var")
        if (statistic := getattr(layer, kind)) is not None
    }
