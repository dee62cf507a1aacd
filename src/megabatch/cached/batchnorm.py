"""Batch normalisation in towers that see one chunk at a time: one warning, and running statistics that are updated once.

The statistics of a chunk differ from the statistics of the batch. The cached step cannot change that, so it warns. It does make
sure that neither the second pass nor a dummy pass updates the running statistics.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import _global_forward_pre_hooks

_warned: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def layers(modules: Iterable[nn.Module]) -> list[tuple[str, _BatchNorm]]:
    """(name, layer) of the layers that normalise by the statistics of their input, each once."""
    found = {
        id(layer): (name, layer)
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }
    return list(found.values())


_HOOK = "megabatch"
_watching: list[Callable[[nn.Module], None]] = []


def _tell(module: nn.Module, _: object) -> None:
    if not torch.compiler.is_compiling():  # compiled code must not depend on this hook
        for tell in list(_watching):
            tell(module)


@contextmanager
def watch_calls(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls `see` with each outermost module that this thread calls inside, and so finds the modules behind a function.

    Of compiled modules it sees the outermost one; of a compiled function it sees none.
    """
    thread, inside = threading.get_ident(), set[int]()

    def tell(module: nn.Module) -> None:
        if threading.get_ident() == thread and id(module) not in inside:
            inside.update(map(id, module.modules()))
            see(module)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        _watching.append(tell)
        # Always under one name: compiled code depends on the names of hooks and would be compiled again for a new one, and
        # `register_module_forward_pre_hook` makes a new one each time.
        _global_forward_pre_hooks[_HOOK] = _tell  # type: ignore[index]
        try:
            yield
        finally:
            _watching.remove(tell)
            if not _watching:
                del _global_forward_pre_hooks[_HOOK]  # type: ignore[arg-type]


def waits_for_ranks(layer: _BatchNorm) -> bool:
    """Whether it is a SyncBatchNorm over several ranks."""
    if not isinstance(layer, nn.SyncBatchNorm) or not dist.is_initialized():
        return False
    return dist.get_world_size(layer.process_group) > 1


def warn(found: list[tuple[str, _BatchNorm]], tower: str, chunk_size: int, rows: int) -> None:
    """Warns once for each tower."""
    if not found or chunk_size >= rows or found[0][1] in _warned:
        return
    name, layer = found[0]
    _warned.add(layer)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    everywhere = ", over all ranks," if isinstance(layer, nn.SyncBatchNorm) else ""
    warnings.warn(
        f"{tower} has {type(layer).__name__} {name!r}{more} in training mode. It normalises by the mean and variance of one "
        f"chunk of {chunk_size} samples{everywhere} instead of the batch of {rows}, so the gradients are those of that model. "
        "Use a larger chunk_size, put the layer into eval(), or use LayerNorm or GroupNorm, which normalise each sample",
        UserWarning,
        stacklevel=3,
    )


@contextmanager
def keep_running_statistics(found: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """For a second pass: the layers normalise as in the first pass and do not update their running statistics."""
    tracking = [layer for _, layer in found if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


@contextmanager
def restore_running_statistics(found: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """For the backward pass of a kept graph: a checkpointed layer runs in it as in the first pass, updates included."""
    before = [(buffer, buffer.clone()) for _, layer in found for buffer in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def at_rest(found: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """For a dummy pass: the layers normalise by their running statistics, since one sample has no variance.

    SyncBatchNorm takes part as usual, because the other ranks wait for it.
    """
    resting = [layer for _, layer in found if layer.training and not isinstance(layer, nn.SyncBatchNorm)]
    for layer in resting:
        layer.training = False
    try:
        yield
    finally:
        for layer in resting:
            layer.training = True


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of all its layers by name, not copied."""
    return {
        f"{name}.{kind}" if name else kind: statistic
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for kind in ("running_mean", "running_var")
        if (statistic := getattr(layer, kind)) is not None
    }
