"""Autograd graphs: the parameters that they reach, and the bytes that they keep in memory."""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megabatch.cached.dtensors import local


def parameters_in(outputs: Sequence[Tensor]) -> set[int] | None:
    """The ids of all leaves that get a gradient from these outputs; None if a reentrant checkpoint hides them."""
    found: set[int] = set()
    seen: set[object] = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    found.update(id(output) for output in outputs if output.requires_grad and output.is_leaf)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":  # reentrant: its graph is built in the backward pass
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found


ALLOCATING = threading.Lock()  # held by a thread that allocates on a CUDA device, and while a graph is measured there


class GraphSize:
    """Bytes that a graph built inside `measured` keeps in memory."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def measured(device: torch.device | None, known: Iterable[Tensor]) -> Iterator[GraphSize]:
    """Measures the graph built inside: allocated bytes on CUDA, elsewhere the tensors that autograd saves.

    Args:
        device: of the tower.
        known: tensors that are in memory anyway, such as parameters and inputs. They do not count.
    """
    size = GraphSize()
    if device is not None and device.type == "cuda":
        with ALLOCATING:
            before = torch.cuda.memory_allocated(device)
            yield size
            size.bytes = max(0, torch.cuda.memory_allocated(device) - before)
        return
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            size.bytes += storage.nbytes()
        return tensor.detach()  # with its grad_fn it would form a reference cycle with its node

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    hooks = [pack, unpack]
    if "torch._dynamo" in sys.modules:  # around a compiled tower, Dynamo would try to compile the hooks
        hooks = [torch.compiler.disable(hook) for hook in hooks]  # type: ignore[no-untyped-call]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield size


def stored(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers; of a DTensor this rank's shard."""
    return [local(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())]
