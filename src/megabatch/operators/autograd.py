"""How an operator is defined with its derivative, and how it behaves under `torch.func` and `torch.compile`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from megabatch import tracing
from megabatch.tracing import transforms_are_active

# ----------------------------------------------------------------------------------------------------------------------
# Operators under `torch.func`: grad, vjp, jacrev and vmap work as elsewhere, and forward mode is refused.
#
# PyTorch's custom operators have no part in these transforms: reverse mode raises an error about autograd.Function, and
# forward mode drops the tangents without a word. So every operator is an `autograd.Function` as well, and is called as one
# wherever a transform is active.

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


# ----------------------------------------------------------------------------------------------------------------------
# How an operator is defined: its inputs are a named tuple, which its backward operator takes as well.
#
# PyTorch operators take a flat list of arguments. `define` makes that list from the fields of the tuple, and `derivative`
# connects an operator with its backward operator.


TWICE = (
    "megabatch's operations cannot be differentiated twice: gradients come from recomputed tiles, of which no graph is "
    "recorded. Call backward() or torch.autograd.grad() without create_graph=True, or torch.func.grad() once."
)
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", str: "str"}


def define(
    inputs: Callable[..., Any], more: str = "", *, results: int, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function of (inputs, further arguments) an operator of PyTorch, with the function's name.

    Args:
        inputs: a NamedTuple; tensors first, then booleans, integers and strings.
        more: the types and names of further arguments, as in PyTorch's schemas.
        results: the number of tensors it returns.
        fake: the same function for the shapes of the results.
    """
    fields = inputs.__annotations__
    taken = [f"{_TYPES[kind]} {name}" for name, kind in fields.items()] + ([more] if more else [])
    schema = f"({', '.join(taken)}) -> ({', '.join(['Tensor'] * results)})"

    def decorate(function: Callable[..., Any]) -> CustomOpDef:
        def run(*arguments: Any) -> Any:
            with _on_its_device(arguments[0]):
                return function(inputs(*arguments[: len(fields)]), *arguments[len(fields) :])

        operator = torch.library.custom_op(f"megabatch::{function.__name__}", run, mutates_args=(), schema=schema)
        operator.register_fake(lambda *arguments: fake(inputs(*arguments[: len(fields)]), *arguments[len(fields) :]))
        operator.__doc__ = function.__doc__
        return operator

    return decorate


@contextmanager
def _on_its_device(x: Tensor) -> Iterator[None]:
    """Inside an operator: kernels are launched where x is, and autocast is off.

    Autocast was settled before (`compute_precision`); inside, it would round fp32 sums.
    """
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        yield


def derivative(
    operator: CustomOpDef, backward: CustomOpDef, taken: Any, *, learned: int, results: int, saved: int = 0, whole: bool = True
) -> None:
    """Makes `backward` the derivative of `operator`; it has no derivative itself.

    It is called with the inputs and the last outputs of the operator, the gradients of the first outputs, and `needs`.

    Args:
        operator: has a derivative.
        backward: returns the gradients of the first inputs.
        taken: the NamedTuple of inputs that both are defined with.
        learned: the number of inputs that have a gradient.
        results: the number of outputs whose gradients `backward` takes.
        saved: the number of outputs that it takes.
        whole: whether an unused output has a gradient of zeros; otherwise it is None.
    """
    tensors = sum(kind in (Tensor, Tensor | None) for kind in taken.__annotations__.values())

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output[len(output) - saved :])
        ctx.mark_non_differentiable(*(result for result in output if not result.is_floating_point()))
        ctx.set_materialize_grads(whole)

    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        kept, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:learned])
        nothing = (None,) * (tensors + len(ctx.options) - learned)
        given = gradients[:results]
        if all(gradient is None for gradient in given):
            return *(None,) * learned, *nothing
        found = apply(backward, *kept[:tensors], *ctx.options, *kept[tensors:], *given, needs)
        return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *nothing

    differentiable(operator, run, save)
    differentiable(backward, _refuse)


def _refuse(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(TWICE)


def refuse_second_derivative(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients for create_graph=True: they depend on the inputs, and cannot be differentiated."""
    return list(_Refusing.apply(*inputs, *gradients))


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs_and_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = inputs_and_gradients[len(inputs_and_gradients) // 2 :]
        return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

    backward = staticmethod(_refuse)
