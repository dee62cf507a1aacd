"""Floating-point operations of matrix products, convolutions and attention.

PyTorch's `FlopCounterMode` also follows modules, by hooks. They keep the tensors that a checkpoint computes again, and without
gradients they fail where a module is called with a view of a parameter, as in the attention pool of SigLIP's vision tower. Its
formulas are used here, without its modules.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

# Attention on a CPU, which the registry does not know. The arguments are those of the operators.
_MISSING: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(
        q.shape, k.shape, v.shape
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dout, q, k, v, *rest, **more: (
        sdpa_backward_flop(dout.shape, q.shape, k.shape, v.shape)
    ),
}


def flops(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of one call of an operator that a dispatch mode sees."""
    name = operator._overloadpacket
    formula = flop_registry.get(name) or _MISSING.get(name)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of everything inside the context, in `total`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operator."""
        result = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, result)
        return result
