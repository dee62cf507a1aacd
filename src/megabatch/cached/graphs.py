"""What an autograd graph reaches, and what it weighs."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megabatch.cached.tower_io import local


def parameters_in(outputs: Sequence[Tensor]) -> set[int] | None:
    """The ids of all leaves that get a gradient from these; None where a node hides what is behind it."""
    found: set[int] = set()
    seen: set[object] = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    found.update(id(output) for output in outputs if output.requires_grad and output.is_leaf)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":  # reentrant: the graph is made when it is needed
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found


class Weight:
    """Bytes that a graph made inside `weighed` keeps in memory."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def weighed(device: torch.device | None, known: Iterable[Tensor]) -> Iterator[Weight]:
    """Measures what is kept when it ends: allocated bytes on CUDA; elsewhere the tensors that autograd saves.

    Args:
        device: where the work is done.
        known: tensors that are in memory anyway, which a graph only refers to.
    """
    weight = Weight()
    if device is not None and device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield weight
        weight.bytes = max(0, torch.cuda.memory_allocated(device) - before)
        return
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            weight.bytes += storage.nbytes()
        return tensor.detach()  # with its graph it would hold the node that holds it

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    hooks = [pack, unpack]
    if "torch._dynamo" in sys.modules:  # around a compiled tower it would try to compile these
        hooks = [torch.compiler.disable(hook) for hook in hooks]  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield weight


def stored(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, this rank's part of those that are sharded."""
    return [local(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())]
