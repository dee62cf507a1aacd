"""Operators under `torch.func`: grad, vjp, jacrev and vmap work as elsewhere, and forward mode is refused.

PyTorch's custom operators have no part in these transforms: reverse mode raises an error about autograd.Function, and forward
mode drops the tangents without a word. So every operator is an `autograd.Function` as well, and is called as one wherever a
transform is active.
"""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from megabatch import tracing

NO_FORWARD_MODE = (
    "megabatch's operations have no forward-mode derivative, which torch.func.jvp, jacfwd and hessian and "
    "torch.autograd.forward_ad ask for. Use reverse mode: loss.backward(), torch.autograd.grad(), torch.func.grad() or vjp()."
)

_FUNCTIONS: dict[CustomOpDef, Callable[..., Any]] = {}


def differentiable(
    operator: CustomOpDef, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """Gives an operator its derivative and its rule for vmap; called by `apply`, it has them under transforms as well."""
    operator.register_autograd(backward, setup_context=setup_context)
    loop_under_vmap(operator)

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            raise RuntimeError(NO_FORWARD_MODE)

    _FUNCTIONS[operator] = lambda *arguments: Function.apply(*arguments)


def apply(operator: CustomOpDef, *arguments: Any) -> Any:
    """Calls an operator that is `differentiable`."""
    if transforms_are_active():
        _tell_compiler()
        return _FUNCTIONS[operator](*arguments)
    return operator(*arguments)


@tracing.constant
def _tell_compiler() -> None:
    """Has the compiler, if it is at work, take the functions as they are: it cannot look into a function with a jvp."""
    if "torch._dynamo" in sys.modules:
        allow: Callable[..., Any] = torch.compiler.allow_in_graph
        for function in _FUNCTIONS.values():
            allow(function)


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func`, or a level of dual numbers, surrounds the call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def loop_under_vmap(operator: CustomOpDef) -> None:
    """The rule for vmap: one call after another. PyTorch's own does the same, with a warning."""

    def loop(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        def entry(i: int) -> list[Any]:
            pairs = zip(arguments, in_dims, strict=True)
            return [a.select(dim, i) if isinstance(a, Tensor) and dim is not None else a for a, dim in pairs]

        results = [operator(*entry(i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    operator.register_vmap(loop)
