"""Batch normalisation in towers that see a chunk at a time: said aloud once, and running statistics counted once.

Statistics over a chunk are not those over the batch, and no second pass can change that. What can be avoided is that the second
pass moves the running statistics again, or a pass that only keeps ranks in step, and that ranks have statistics of their own.
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
    """Those that normalise by the statistics of what they are given, each once."""
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
    if not torch.compiler.is_compiling():  # compiled code is to be the same with this hook and without
        for tell in list(_watching):
            tell(module)


@contextmanager
def watched(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """Calls `see` with each module that this thread is about to call, unless another one around it was seen before.

    It shows the modules behind any function. Compiled code shows its outermost module; a compiled function shows none.
    """
    thread, inside = threading.get_ident(), set[int]()

    def tell(module: nn.Module) -> None:
        if threading.get_ident() == thread and id(module) not in inside:
            inside.update(map(id, module.modules()))
            see(module)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        _watching.append(tell)
        # Under one name always, which `register_module_forward_pre_hook` would not give it: compiled code depends on the
        # names of hooks, and would be compiled again for every new one.
        _global_forward_pre_hooks[_HOOK] = _tell  # type: ignore[index]
        try:
            yield
        finally:
            _watching.remove(tell)
            if not _watching:
                del _global_forward_pre_hooks[_HOOK]  # type: ignore[arg-type]


def waits_for_ranks(layer: _BatchNorm) -> bool:
    """Whether its passes wait for other ranks."""
    if not isinstance(layer, nn.SyncBatchNorm) or not dist.is_initialized():
        return False
    return dist.get_world_size(layer.process_group) > 1


def warn(found: list[tuple[str, _BatchNorm]], tower: str, chunk_size: int, rows: int) -> None:
    """One warning for each tower, once."""
    if not found or chunk_size >= rows or found[0][1] in _warned:
        return
    name, layer = found[0]
    _warned.add(layer)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    everywhere = ", over all ranks," if isinstance(layer, nn.SyncBatchNorm) else ""
    warnings.warn(
        f"{tower} has {type(layer).__name__} {name!r}{more} in training mode. It normalises by the mean and variance of one "
        f"chunk of {chunk_size} samples{everywhere} and not of the batch of {rows}: gradients are those of a model that sees "
        "chunks. Use a chunk_size that is large enough for its statistics, put the layer into eval(), or use a normalisation "
        "that looks at one sample (LayerNorm, GroupNorm)",
        UserWarning,
        stacklevel=3,
    )


@contextmanager
def running_statistics_kept(found: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """For a second pass: the layers normalise as in the first, and their running statistics stay as it left them."""
    tracking = [layer for _, layer in found if layer.track_running_stats]
    for layer in tracking:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True


@contextmanager
def at_rest(found: list[tuple[str, _BatchNorm]]) -> Iterator[None]:
    """For a pass whose result is not used: the layers normalise by what they know, and one sample is enough for that.

    Those that all ranks normalise in together take part, because the others wait for them.
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
    """The running means and variances of all its layers, by name; not copied."""
    return {
        f"{name}.{kind}" if name else kind: statistic
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for kind in ("running_mean", "running_var")
        if (statistic := getattr(layer, kind)) is not None
    }
