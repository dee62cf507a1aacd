"""Towers whose parameters or gradients ranks share: when gradients are reduced, and how often a rank has to encode.

DDP and FSDP2 reduce gradients with a backward pass; a step has one for every chunk and wants one reduction. And FSDP2 gathers
parameters in every pass, so ranks that encode a different number of chunks would wait for one another for ever. Both are
settled here; towers that are not shared between ranks need neither.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cached.graphs import parameters_in
from megabatch.world import World


def shared_between_ranks(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The DDP wrappers in these modules, and the outermost modules that are fully sharded."""
    found: list[nn.Module] = []
    for module in modules:
        _collect(module, found)
    return found


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module):
        if not any(module is other for other in found):
            found.append(module)
        return
    for child in module.children():
        _collect(child, found)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has it in charge by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Reductions:
    """One reduction of every gradient in a step, with the last backward pass that reaches its module.

    Args:
        modules: of each role.
        sync: whether to reduce at all; not while gradients are accumulated over several steps.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], sync: bool) -> None:
        self._modules = modules
        self._pending: list[nn.Module] = []
        self._final: dict[int, list[nn.Module]] = {}  # role → what its last pass reduces
        if sync:
            for module in (module for group in modules for module in group):
                off = isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync  # its no_sync()
                if not off and not any(module is other for other in self._pending):
                    self._pending.append(module)

    def schedule(self, encoding_again: Sequence[int]) -> None:
        """Given the roles that will encode again, in order: which of them ends with which reduction."""
        for module in self._pending:
            users = [role for role in encoding_again if any(module is other for other in self._modules[role])]
            if users:
                self._final.setdefault(users[-1], []).append(module)

    @contextmanager
    def held_back(self, role: int) -> Iterator[None]:
        """Forward and backward of this role inside add to gradients and reduce nothing."""
        with self._only(self._modules[role], ()):
            yield

    @contextmanager
    def last_pass(self, role: int) -> Iterator[list[nn.Module]]:
        """Forward and backward inside reduce what this role is the last to reach; gives the modules they reduce."""
        final = self._final.get(role, [])
        with self._only(self._modules[role], final):
            yield final

    def done(self, modules: Sequence[nn.Module]) -> None:
        """Says that a backward pass has reduced these."""
        self._pending = [module for module in self._pending if not any(module is other for other in modules)]

    def left_over(self, roles: Iterable[int]) -> Iterator[int]:
        """Roles that have to make one more pass, to reduce what none of the passes has: chunks may all have kept graphs."""
        for role in roles:
            own = [m for m in self._pending if any(m is other for other in self._modules[role])]
            if own:
                self._final[role] = own
                yield role

    @contextmanager
    def _only(self, modules: Sequence[nn.Module], final: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as held:
            for module in modules:
                reduce = any(module is other for other in final)
                if isinstance(module, DistributedDataParallel):
                    if not reduce:
                        held.enter_context(module.no_sync())
                else:
                    _reduce_fully_sharded(module, reduce)
                    held.callback(_reduce_fully_sharded, module, True)  # as FSDP2 itself has it
            yield


def _reduce_fully_sharded(module: Any, reduce: bool) -> None:
    module.set_requires_gradient_sync(reduce)
    module.set_is_last_backward(reduce)


def not_reached(modules: Iterable[nn.Module], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that have a gradient from elsewhere (the loss, another role) and that DDP would wait for in vain.

    DDP reduces when all its parameters have had their turn in *this* backward pass. A learned scale had its turn in that of the
    loss. Wrappers that look for unused parameters find these themselves.
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
    if reached is None:  # not to be seen, with reentrant checkpoints; DDP says so itself if it misses any
        return []
    return [parameter for parameter in waiting if id(parameter) not in reached]


class Ranks:
    """All ranks that share the towers, found from their wrappers: one process group, or one for each dimension of a mesh."""

    def __init__(self, modules: Sequence[nn.Module], synchronised: Sequence[nn.Module], device: torch.device | None) -> None:
        self._worlds = [World.of(group, device) for group in _groups(modules, synchronised)]
        self.size = math.prod(world.size for world in self._worlds)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in the same order on all ranks. One all-gather for each process group."""
        table = [list(values)]
        for world in self._worlds:
            flat = [value for line in table for value in line]
            gathered = [value for line in world.gather_integers(flat) for value in line]
            table = [gathered[i : i + len(values)] for i in range(0, len(gathered), len(values))]
        return table


def _groups(modules: Sequence[nn.Module], synchronised: Sequence[nn.Module]) -> list["dist.ProcessGroup"]:
    """Of the first module that has any; one for each dimension of a mesh. All towers are taken to have the same ranks."""
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
