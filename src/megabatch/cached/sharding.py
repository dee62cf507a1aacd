"""Towers under DDP or FSDP2: one reduction of gradients per step, and equally many passes on every rank.

DDP and FSDP2 reduce gradients in every backward pass. A cached step has one backward pass per chunk and needs one reduction.
FSDP2 also gathers parameters in every pass, so ranks with a different number of chunks would wait for each other forever.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cached.memory import parameters_in
from megabatch.world import World


def find_distributed_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The DDP wrappers in these modules, and the outermost modules sharded by FSDP2."""
    found: list[nn.Module] = []
    for module in modules:
        _collect(module, found)
    return found


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module):
        if module not in found:
            found.append(module)
        return
    for child in module.children():
        _collect(child, found)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Reductions:
    """Reduces every gradient once per step, in the last backward pass that reaches its module.

    Args:
        modules: DDP and FSDP2 modules of each role.
        sync: whether to reduce in this step; False while accumulating gradients over steps.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], sync: bool) -> None:
        self._modules = modules
        self._pending: list[nn.Module] = []
        self._final: dict[int, list[nn.Module]] = {}  # role → modules that its last pass reduces
        if sync:
            for module in (module for group in modules for module in group):
                off = isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync  # its no_sync()
                if not off and module not in self._pending:
                    self._pending.append(module)

    def schedule(self, encoding_again: Sequence[int]) -> None:
        """Assigns each module's reduction to the last of the roles that use it, given the roles that encode again, in order."""
        for module in self._pending:
            users = [role for role in encoding_again if module in self._modules[role]]
            if users:
                self._final.setdefault(users[-1], []).append(module)

    @contextmanager
    def hold_back(self, role: int) -> Iterator[None]:
        """Forward and backward passes inside accumulate gradients without a reduction."""
        with self._only(self._modules[role], ()):
            yield

    @contextmanager
    def last_pass(self, role: int) -> Iterator[list[nn.Module]]:
        """Forward and backward passes inside reduce the modules that this role is the last to use; yields these modules."""
        final = self._final.get(role, [])
        with self._only(self._modules[role], final):
            yield final

    def done(self, modules: Sequence[nn.Module]) -> None:
        """Records that a backward pass has reduced these modules."""
        self._pending = [module for module in self._pending if module not in modules]

    def find_unreduced(self, roles: Iterable[int]) -> Iterator[int]:
        """Roles that need one more pass for the reduction, because all their chunks had kept graphs."""
        for role in roles:
            own = [module for module in self._pending if module in self._modules[role]]
            if own:
                self._final[role] = own
                yield role

    @contextmanager
    def _only(self, modules: Sequence[nn.Module], final: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as held:
            for module in modules:
                reduce = module in final
                if isinstance(module, DistributedDataParallel):
                    if not reduce:
                        held.enter_context(module.no_sync())
                else:
                    _reduce_fully_sharded(module, reduce)
                    held.callback(_reduce_fully_sharded, module, True)  # the default of FSDP2
            yield


def _reduce_fully_sharded(module: Any, reduce: bool) -> None:
    module.set_requires_gradient_sync(reduce)
    module.set_is_last_backward(reduce)


def find_unreached(modules: Iterable[nn.Module], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that already have a gradient, from the loss or another role, and that this backward pass does not reach.

    DDP reduces once all its parameters have got a gradient in *this* backward pass, so it would wait for these forever: a
    learned scale got its gradient in the backward pass of the loss. With `find_unused_parameters` DDP finds them itself.
    """
    waiting = [
        parameter
        for module in modules
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters
        for parameter in module.module.parameters()
        if parameter.requires_grad and parameter.grad is not None
    ]
    if not waiting:
        return []
    reached = parameters_in(outputs)
    if reached is None:  # hidden by reentrant checkpoints; DDP raises an error if it misses any
        return []
    return [parameter for parameter in waiting if id(parameter) not in reached]


class ShardRanks:
    """All ranks that share the towers, found from their wrappers: one process group, or one for each dimension of a mesh."""

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = worlds

    @classmethod
    def of(
        cls, modules: Sequence[nn.Module], synchronised: Sequence[nn.Module], device: torch.device | None
    ) -> "ShardRanks | None":
        """The ranks of DDP and FSDP2 modules and of SyncBatchNorm layers; None for one process alone."""
        worlds = [World.of(group, device) for group in _groups(modules, synchronised)]
        return cls(worlds) if worlds else None

    def smallest(self, number: int) -> int:
        """The smallest number over all ranks."""
        return min(line[0] for line in self.gather_integers([number]))

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in the same order on all ranks. One all-gather for each process group."""
        table = [list(values)]
        for world in self._worlds:
            flat = [value for line in table for value in line]
            gathered = [value for line in world.gather_integers(flat) for value in line]
            table = [gathered[i : i + len(values)] for i in range(0, len(gathered), len(values))]
        return table


def _groups(modules: Sequence[nn.Module], synchronised: Sequence[nn.Module]) -> list["dist.ProcessGroup"]:
    """The process groups of the first module that has any, one for each mesh dimension. All towers must have the same ranks."""
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            return [module.process_group] if module.process_group.size() > 1 else []
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    for layer in synchronised:
        group = getattr(layer, "process_group", None) or dist.group.WORLD
        if dist.is_initialized() and group is not None:
            return [group] if group.size() > 1 else []
    return []
