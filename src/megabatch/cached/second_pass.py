"""What keeps the second pass over a tower equal to the first: the states of random generators and of batch normalization."""

import importlib
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import _global_forward_pre_hooks

# ----------------------------------------------------------------------------------------------------------------------
# Saves generator states before a chunk is encoded and restores them later, so that both passes draw equal random numbers.
#
# Towers use PyTorch's generators of the CPU and of each device. Some also use Python's and NumPy's generators, for masking of
# speech or layer drop. All states are saved. A state that did not change between two chunks is stored once.


class States(NamedTuple):
    """The states of all random generators that a tower may use."""

    cpu: Tensor
    cuda: tuple[tuple[int | torch.device, Tensor], ...]  # (device, state)
    python: Any
    numpy: Any  # None if NumPy was never imported


def capture_generators(devices: Iterable[torch.device], before: States | None = None) -> States:
    """Returns the current states. A state that did not change since `before` is shared with it."""
    numpy = _numpy()
    now = States(
        torch.get_rng_state(),
        tuple((index, torch.cuda.get_rng_state(index)) for index in _cuda_indices(devices)),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
    )
    if before is None:
        return now
    return States(
        before.cpu if torch.equal(before.cpu, now.cpu) else now.cpu,
        now.cuda,
        before.python if before.python == now.python else now.python,
        before.numpy if _same_numpy(before.numpy, now.numpy) else now.numpy,
    )


def restore_generators(states: States) -> None:
    """Sets all generators to `states`."""
    torch.set_rng_state(states.cpu)
    for index, state in states.cuda:
        torch.cuda.set_rng_state(state, index)
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


def _cuda_indices(devices: Iterable[torch.device]) -> list[int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    indices = {device.index for device in devices if device.type == "cuda" and device.index is not None}
    return sorted(indices | {torch.cuda.current_device()})


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
