"""Towers on several ranks: DDP replicates them, FSDP2 shards them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cached import batchnorm
from megabatch.cached.graphs import parameters_in
from megabatch.cached.sharding import shared_between_ranks
from megabatch.cached.tower_io import call, map_rows, opened
from megabatch.world import World

FSDP = "fsdp"


def distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Each module once: both sides of a model may share one."""
    return list({id(module): module for module in modules}.values())


def wrapped(
    modules: Sequence[nn.Module], samples: Sequence[Any], world: World, how: str, *, offload: bool = False
) -> list[nn.Module]:
    """The modules wrapped for training, in the same order.

    Args:
        modules: of the two sides, on their device. FSDP2 changes them in place, DDP makes a wrapper.
        samples: inputs of a few samples of each side, to find unused parameters.
        world: the ranks; one rank needs no wrapper.
        how: "ddp" or "fsdp".
        offload: whether FSDP2 keeps weights, gradients and so the optimizer's state in host memory.
    """
    if offload and (how != FSDP or world.size == 1):
        got = f"one rank with parallel = {how!r}" if world.size == 1 else f"parallel = {how!r}"
        raise ValueError(f'memory.offload needs parallel = "fsdp" on several ranks (torchrun), got {got}')
    made: dict[int, nn.Module] = {}
    for module in distinct(modules):
        learns = any(parameter.requires_grad for parameter in module.parameters())
        if world.size == 1 or not learns:  # frozen: no gradients to reduce
            made[id(module)] = module
        elif how == FSDP:
            made[id(module)] = _sharded(module, world, offload)
        else:
            inputs = [sample for side, sample in zip(modules, samples, strict=True) if side is module]
            made[id(module)] = DistributedDataParallel(
                module,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                process_group=world.group,
                find_unused_parameters=_has_unused(module, inputs, world.device),
            )
    return [made[id(module)] for module in modules]


def _sharded(module: nn.Module, world: World, offload: bool) -> nn.Module:
    """Shards in place: each layer of a `ModuleList` by itself, so that one is gathered at a time, then the rest."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    how: Any = {
        "mesh": DeviceMesh.from_group(world.group, world.device.type),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy(),
    }
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                if any(True for _ in layer.parameters()) and not isinstance(layer, nn.ModuleList):
                    fully_shard(layer, **how)
    fully_shard(module, **how)
    return module


def _has_unused(module: nn.Module, inputs: Sequence[Any], device: torch.device) -> bool:
    """Whether a parameter never gets a gradient, such as a pooler of transformers; DDP would wait for it."""
    with torch.enable_grad(), batchnorm.running_statistics_kept(batchnorm.layers([module])):
        outputs = [call(module, map_rows(lambda tensor: tensor.to(device), chunk)) for chunk in inputs]
    reached = parameters_in([opened(output, type(module).__name__).embeddings for output in outputs])
    return reached is None or any(p.requires_grad and id(p) not in reached for p in module.parameters())


@contextmanager
def whole(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gathers sharded parameters on every rank, so that ranks may encode a different number of chunks."""
    roots: list[Any] = [m for m in shared_between_ranks(modules) if not isinstance(m, DistributedDataParallel)]
    if not roots:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            # The default of FSDP2: a root stays gathered between its forward and its backward pass.
            part.set_reshard_after_forward(part not in roots, recurse=False)
