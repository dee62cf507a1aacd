"""Towers under DDP or FSDP2: one reduction of gradients for each step, and equally many passes on every rank.

DDP and FSDP2 reduce gradients in every backward pass. Gradient caching has one backward pass for each chunk but needs only one
reduction. FSDP2 also gathers parameters in every pass, so ranks with different numbers of chunks would wait forever.
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
    """Returns the DDP wrappers in these modules and the outermost modules that FSDP2 shards."""
    distributed: list[nn.Module] = []
    for module in modules:
        _collect(module, distributed)
    return distributed


def _collect(module: nn.Module, distributed: list[nn.Module]) -> None:
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module):
        if module not in distributed:
            distributed.append(module)
        return
    for child in module.children():
        _collect(child, distributed)


def is_fully_sharded(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was applied to this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Reductions:
    """Reduces every gradient once in a step, in the last backward pass that reaches its module.

    Args:
        modules: the DDP and FSDP2 modules of each role.
        sync: whether to reduce in this step. It is False while gradients are accumulated over steps.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], sync: bool) -> None:
        self._modules = modules
        self._pending: list[nn.Module] = []
        self._final: dict[int, list[nn.Module]] = {}  # role → the modules that are reduced in its last pass
        if sync:
            for module in (module for group in modules for module in group):
                off = isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync  # in no_sync()
                if not off and module not in self._pending:
                    self._pending.append(module)

    def schedule(self, encoding_again: Sequence[int]) -> None:
        """Assigns the reduction of each module to the last role that uses it. Takes the roles that encode again, in order."""
        for module in self._pending:
            users = [role for role in encoding_again if module in self._modules[role]]
            if users:
                self._final.setdefault(users[-1], []).append(module)

    @contextmanager
    def hold_back(self, role: int) -> Iterator[None]:
        """Makes forward and backward passes in the context accumulate gradients without a reduction."""
        with self._only(self._modules[role], ()):
            yield

    @contextmanager
    def last_pass(self, role: int) -> Iterator[list[nn.Module]]:
        """Makes passes in the context reduce the modules that no later role uses. Yields these modules."""
        final = self._final.get(role, [])
        with self._only(self._modules[role], final):
            yield final

    def done(self, modules: Sequence[nn.Module]) -> None:
        """Records that a backward pass has reduced these modules."""
        self._pending = [module for module in self._pending if module not in modules]

    def find_unreduced(self, roles: Iterable[int]) -> Iterator[int]:
        """Yields roles that need another pass for the reduction, because the graphs of all their chunks were kept."""
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
    """Returns parameters that already have a gradient and that this backward pass does not reach.

    DDP reduces after all its parameters have got a gradient in *this* backward pass, so it would wait for the returned
    parameters forever. An example is a learned scale, which got its gradient in the backward pass of the loss. With
    `find_unused_parameters`, DDP finds these parameters itself.
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
    if reached is None:  # hidden by reentrant activation checkpointing; DDP raises an error if a parameter has no gradient
        return []
    return [parameter for parameter in waiting if id(parameter) not in reached]


class ShardRanks:
    """All ranks that share the towers.

    The wrappers of the towers have one process group, or one for each dimension of a mesh.
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = worlds

    @classmethod
    def of(
        cls, modules: Sequence[nn.Module], synchronized: Sequence[nn.Module], device: torch.device | None
    ) -> "ShardRanks | None":
        """Returns the ranks of DDP and FSDP2 modules and of SyncBatchNorm layers, or None for a single process."""
        worlds = [World.of(group, device) for group in _groups(modules, synchronized)]
        return cls(worlds) if worlds else None

    def smallest(self, number: int) -> int:
        """Returns the smallest number over all ranks."""
        return min(line[0] for line in self.gather_integers([number]))

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the integers of every rank, in equal order on all ranks. This takes one all-gather for each process group."""
        table = [list(values)]
        for world in self._worlds:
            flat = [value for line in table for value in line]
            gathered = [value for line in world.gather_integers(flat) for value in line]
            table = [gathered[i : i + len(values)] for i in range(0, len(gathered), len(values))]
        return table


def _groups(modules: Sequence[nn.Module], synchronized: Sequence[nn.Module]) -> list["dist.ProcessGroup"]:
    """Returns the process groups of the first module that has any, one for each mesh dimension.

    All towers must be on the same ranks.
    """
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            return [module.process_group] if module.process_group.size() > 1 else []
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    for layer in synchronized:
        group = getattr(layer, "process_group", None) or dist.group.WORLD
        if dist.is_initialized() and group is not None:
            return [group] if group.size() > 1 else []
    return []
