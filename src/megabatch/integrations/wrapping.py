"""A model as a trainer has wrapped it, and its parts as towers: whatever is called goes through the wrapper.

DDP and FSDP2 act when the wrapped module itself is called: that is where parameters are gathered and where a reduction is
announced. A tower that is a part of the model, or a method of it, would go past them, and its gradients would not be averaged.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cached.roles import modules_of
from megabatch.cached.sharding import is_fully_sharded, shared_between_ranks
from megabatch.cached.sources import as_source
from megabatch.cached.tower_io import call, is_sharded, opened
from megabatch.world import default_group

Towers = Sequence[tuple[Callable[..., Any], Any]]


def everyone() -> Any:
    """The process group of all processes, for `group=` of a loss; None for one process."""
    return default_group()


def unwrapped(model: Any) -> Any:
    """The module that DDP or `torch.compile` was given."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def whole(parameter: Tensor) -> Tensor:
    """A parameter that the loss uses itself, in one piece, also where FSDP2 has cut it up; the gradient is averaged."""
    if not is_sharded(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    sharded: Any = parameter
    found: Tensor = sharded.full_tensor(grad_placements=[Partial("avg")] * sharded.device_mesh.ndim)
    return found


def routed(towers: Towers, model: Any) -> list[tuple[Callable[..., Any], Any]]:
    """The same pairs, with every tower that belongs to a wrapped model called through the wrapper.

    Args:
        towers: pairs (tower, inputs), as for `cached_backward`; towers may be parts of the module inside `model`, methods of
            it, or that module itself.
        model: as the trainer has it: a module, DDP's wrapper, or a module sharded by FSDP2; None where towers belong to none.
    """
    if model is None:
        return _checked(towers)
    module = unwrapped(model)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it nothing is sharded
    first_version = fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel)
    if first_version or isinstance(model, nn.DataParallel) or not isinstance(module, nn.Module):
        raise TypeError(f"model must be a module, wrapped in DDP, sharded by FSDP2 or neither, got {type(model).__name__}")
    found = []
    for tower, inputs in towers:
        if tower is module:
            tower = model
        elif tower is not model:
            for outer, inner in reversed(_around(modules_of(tower), model, module)):
                if inner is not tower:
                    tower = partial(_through, outer, _Part(inner, tower))
        found.append((tower, inputs))
    return _checked(found)


def _around(modules: Sequence[nn.Module], model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """What these parts have to be reached through: (what is called, the module whose place a tower takes), outermost first.

    That is the model, if it is wrapped or sharded, and whatever FSDP2 shards by itself between the model and the parts. A
    function of which nothing is known is taken for a part of the model.
    """
    inside = {id(part) for part in modules}

    def contains(outer: nn.Module) -> bool:
        return any(id(part) in inside for part in outer.modules())

    wrapped = model is not module or is_fully_sharded(model)
    first = [(model, module)] if wrapped and (not modules or contains(module)) else []
    return first + [
        (part, part) for part in module.modules() if part is not module and is_fully_sharded(part) and contains(part)
    ]


class _Part(NamedTuple):
    """What is called inside of the wrapper."""

    module: Any
    tower: Callable[..., Any]


def _through(model: Callable[..., Any], part: _Part, *args: Any, **kwargs: Any) -> Any:
    """The tower's answer, from inside a call of the wrapper; for that call the tower takes the place of `module.forward`."""
    own = vars(part.module)
    before = own.get("forward")  # an instance may have one, Accelerate's is such

    def restore() -> None:
        own.pop("forward", None)
        if before is not None:
            own["forward"] = before

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()  # a tower may call the module itself
        return part.tower(*args, **kwargs)

    own["forward"] = forward
    try:
        return model(*args, **kwargs)
    finally:
        restore()


def _checked(towers: Towers) -> list[tuple[Callable[..., Any], Any]]:
    """Refuses, among several processes, towers that learn without anybody averaging their gradients."""
    if everyone() is not None:
        for i, (tower, _) in enumerate(towers):
            modules = modules_of(tower)
            learns = any(parameter.requires_grad for module in modules for parameter in module.parameters())
            if learns and not shared_between_ranks(modules):
                raise ValueError(
                    f"towers[{i}] must belong to the model, or be wrapped in DDP or FSDP2 itself, because there are "
                    f"{dist.get_world_size()} processes and nobody would average its gradients; got {type(tower).__name__}"
                )
    return list(towers)


@torch.no_grad()
def encoded(towers: Towers, chunk_size: int | Sequence[int]) -> list[Tensor]:  # of (N, D)
    """The embeddings of each tower, chunk by chunk, for a loss that is only looked at."""
    sizes = chunk_size if isinstance(chunk_size, Sequence) else [chunk_size] * len(towers)
    found = []
    for i, ((tower, inputs), size) in enumerate(zip(towers, sizes, strict=True)):
        parameters = [parameter for module in modules_of(tower) for parameter in module.parameters()]
        device = parameters[0].device if parameters else None
        source = as_source(inputs, f"towers[{i}][1]", device)
        spans = [(start, min(start + size, len(source))) for start in range(0, len(source), size)]
        answers = (call(tower, chunk) for chunk in source.chunks(spans, device))
        found.append(torch.cat([opened(answer, f"towers[{i}]").embeddings for answer in answers]))
    return found
