"""Memory and operations of PyTorch code, found by running it on tensors that have shapes and no data.

Nothing is allocated and no device is needed: operators return the shapes of their results, and the meter adds up the storages
that are alive. Tensors saved by autograd live as long as their graph, so the peaks of forward and backward passes are right.

The tensors claim to be on a CPU, where PyTorch can run backward passes without a device. Two differences of CUDA are imitated:
under autocast, normalisations and softmax compute in float32, and allocations are rounded up to 512 bytes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabatch.flops import flops

ALLOCATION_UNIT = 512  # bytes, of PyTorch's allocator for CUDA

# Functions that autocast runs in float32 on CUDA and in half precision on a CPU, as far as towers call them.
_IN_FLOAT32: set[Callable[..., Any]] = {
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.normalize,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    torch.softmax,
    torch.log_softmax,
    torch.norm,
    Tensor.softmax,
    Tensor.log_softmax,
    Tensor.norm,
}


class Meter(TorchDispatchMode):
    """Bytes alive now and at the peak, and operations so far, of tensors made inside `metered`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self.operations = 0  # floating-point, of matrix products, convolutions and attention
        self._seen: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Leaves these tensors out: they existed before."""
        self._seen.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the storages of all tensors that an operator returns, and its operations."""
        result = func(*args, **(kwargs or {}))
        self.operations += flops(func, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT
                self._seen.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


@contextmanager
def metered(meter: Meter, half: torch.dtype | None) -> Iterator[None]:
    """Counts tensors made inside the context; `half` is autocast's type, or None. Use it inside `nowhere`."""
    autocast = torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None)
    with autocast, _Float32(half is not None), meter:
        yield


@cache
def nowhere() -> AbstractContextManager[Any]:
    """Tensors made inside have a shape and no data. There is one such context, because tensors of two cannot be mixed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def without_data(module: nn.Module) -> nn.Module:
    """`module`, built on the meta device, with parameters and buffers of the same shapes; to be used inside `nowhere`."""
    made: dict[int, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            trained = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if trained else empty
        return made[id(tensor)]

    for part in module.modules():
        for group in (part._parameters, part._buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    group[name] = like(tensor)  # type: ignore[assignment]
    return module


class _Float32(TorchFunctionMode):
    """CUDA's autocast where the CPU's differs."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._enabled and func in _IN_FLOAT32 and args and isinstance(args[0], Tensor):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))
