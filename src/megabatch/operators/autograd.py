"""Code that all operators use: their definition with a derivative, the passes that they run, and the last step from sums to
gradients.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from megabatch.dispatch import constant, transforms_are_active
from megabatch.ring.lap import Tensors
from megabatch.ring.passes import RingPasses, RingTriangle
from megabatch.ring.ranks import Ranks, agree, choose_route
from megabatch.tiles.block import (
    FLOAT16,
    Block,
    ColumnGradients,
    Needs,
    Passes,
    RowGradients,
    RowWork,
    accumulator_dtype,
    backend_for,
    sums_dtype,
)
from megabatch.tiles.sums import exact_dtype
from megabatch.tiles.symmetric import Triangle

# ----------------------------------------------------------------------------------------------------------------------
# Operators under `torch.func`: grad, vjp, jacrev and vmap work, and forward mode raises an error.
#
# PyTorch's custom operators do not support these transforms. Reverse mode raises an error about autograd.Function, and forward
# mode drops the tangents silently. So every operator is also an `autograd.Function`, and `apply` calls this function if a
# transform is active.

NO_FORWARD_MODE = (
    "megabatch's operations have no forward-mode derivative, which torch.func.jvp, jacfwd and hessian and "
    "torch.autograd.forward_ad require. Use reverse mode: loss.backward(), torch.autograd.grad(), torch.func.grad() or vjp()."
)

_FUNCTIONS: dict[CustomOpDef, Callable[..., Any]] = {}


def differentiable(
    operator: CustomOpDef, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """Registers the derivative and the vmap rule of an operator. Transforms support it if it is called through `apply`."""
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
    """Calls a `differentiable` operator."""
    if transforms_are_active():
        _allow_in_graph()
        return _FUNCTIONS[operator](*arguments)
    return operator(*arguments)


@constant
def _allow_in_graph() -> None:
    """Makes the compiler, if it is loaded, call the functions untraced, because it cannot trace a function with a jvp."""
    if "torch._dynamo" in sys.modules:
        allow: Callable[..., Any] = torch.compiler.allow_in_graph
        for function in _FUNCTIONS.values():
            allow(function)


def loop_under_vmap(operator: CustomOpDef) -> None:
    """Registers a vmap rule that calls the operator once per entry. PyTorch's default rule also does this, but it warns."""

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
# The definition of an operator. Its inputs are a NamedTuple, and its backward operator takes the same tuple.
#
# PyTorch operators take a flat list of arguments. `define` derives the list from the fields of the tuple, and `derivative`
# connects an operator with its backward operator.


TWICE = (
    "megabatch's operations cannot be differentiated twice: no graph of their gradients is recorded. "
    "Call backward() or torch.autograd.grad() without create_graph=True, or torch.func.grad() once."
)
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "int", str: "str"}


def define(
    inputs: Callable[..., Any], more: str = "", *, results: int, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Turns a function of (inputs, further arguments) into a PyTorch operator with the function's name.

    Args:
        inputs: a NamedTuple class. Its first fields are tensors, followed by booleans, integers and strings.
        more: the types and names of further arguments, in the format of PyTorch's schemas.
        results: the number of tensors that the function returns.
        fake: a function with the same arguments that returns empty results of the right shapes.
    """
    fields = inputs.__annotations__
    parameters = [f"{_TYPES[kind]} {name}" for name, kind in fields.items()] + ([more] if more else [])
    schema = f"({', '.join(parameters)}) -> ({', '.join(['Tensor'] * results)})"

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
    """Makes the device of x current, for kernel launches, and disables autocast.

    `compute_precision` has already applied autocast. Inside an operator, autocast would round fp32 sums.
    """
    with torch.autocast(x.device.type, enabled=False), torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        yield


def derivative(
    operator: CustomOpDef,
    backward: CustomOpDef,
    inputs_type: Any,
    *,
    learned: int,
    results: int,
    saved: int = 0,
    materialize: bool = True,
) -> None:
    """Makes `backward` the derivative of `operator`. `backward` itself has no derivative.

    The arguments of `backward` are the inputs and the last outputs of the operator, the gradients of its first outputs, and
    `needs`.

    Args:
        operator: the operator that gets a derivative.
        backward: an operator that returns the gradients of the first inputs.
        inputs_type: the NamedTuple class that defines the inputs of both operators.
        learned: the number of inputs that have a gradient. They come first.
        results: the number of outputs that have a gradient. They come first.
        saved: the number of outputs that `backward` takes. They come last.
        materialize: whether the gradient of an unused output is a tensor of zeros. Otherwise it is None.
    """
    tensors = sum(kind in (Tensor, Tensor | None) for kind in inputs_type.__annotations__.values())

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output[len(output) - saved :])
        ctx.mark_non_differentiable(*(result for result in output if not result.is_floating_point()))
        ctx.set_materialize_grads(materialize)

    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        kept, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:learned])
        nothing = (None,) * (tensors + len(ctx.options) - learned)
        given = gradients[:results]
        if all(gradient is None for gradient in given):
            return *(None,) * learned, *nothing
        grads = apply(backward, *kept[:tensors], *ctx.options, *kept[tensors:], *given, needs)
        return *(gradient if need else None for gradient, need in zip(grads, needs, strict=True)), *nothing

    differentiable(operator, run, save)
    differentiable(backward, refuse)


def refuse(ctx: Any, *gradients: Any) -> NoReturn:
    """Refuses a second derivative."""
    raise RuntimeError(TWICE)


# ----------------------------------------------------------------------------------------------------------------------
# The passes over a block, in one process or over all ranks of a group.

Visitor = Callable[[Tensors, bool], None]  # tensors of some blocks, and whether they are this rank's own


@dataclass(frozen=True)
class BlockPasses:
    """The passes over a block, of one process or of all ranks, and the weight of a pair in a mean over the batch."""

    tiles: Passes | RingPasses
    local: RowWork  # the work on rows, which needs no other rank
    mean_weight: float  # (Σ over local pairs) · mean_weight, averaged over the ranks, is the mean over all pairs of the batch
    rank: int = 0
    size: int = 1

    def visit(self, own: list[Tensor], visit_block: Visitor) -> None:
        """Calls `visit_block` with the tensors of the own block, then with the tensors of all other ranks."""
        if isinstance(self.tiles, RingPasses):
            self.tiles.visit(own, visit_block)
        else:
            visit_block(own, True)

    def largest(self, number: Tensor) -> Tensor:  # ()
        """Returns the maximum over ranks, or NaN if a rank has NaN. The result is equal on all ranks."""
        return (
            torch.cat(self.tiles.ranks.all_gather(number.reshape(1))).amax() if isinstance(self.tiles, RingPasses) else number
        )

    def total(self, number: Tensor) -> Tensor:  # ()
        """Returns the sum over ranks."""
        return torch.cat(self.tiles.ranks.all_gather(number.reshape(1))).sum() if isinstance(self.tiles, RingPasses) else number

    def symmetric(self, triangle: Triangle) -> Triangle | RingTriangle:
        """Returns the passes over the upper triangle of a symmetric block."""
        return RingTriangle(triangle, self.tiles) if isinstance(self.tiles, RingPasses) else triangle


def passes_for(
    group: str,
    backend: str,
    block: Block,
    operation: str,
    *,
    needs: Needs | None = None,
    mean: bool = False,
    terms: Mapping[str, Any] = MappingProxyType({}),
) -> BlockPasses:
    """Returns the passes over `block`. In a group, all ranks have to call this function with the same terms.

    Args:
        group: the address of the process group (`ring.ranks`), which is empty for one process.
        backend: the engine of this rank.
        block: the local rows and columns.
        operation: the name of the operation, for error messages.
        needs: the gradients that the pass has to compute.
        mean: whether at least one rank must have a pair.
        terms: further values, by name, that must be equal on all ranks.
    """
    if not group:
        own = backend_for(backend, block)
        return BlockPasses(own, own, 1 / max(block.N, 1))
    ranks = Ranks.at(group, operation, block.x.device)
    ranks = agree(ranks, {**_terms(ranks, backend, block, needs), **terms}, block.N, block.M)
    if mean and sum(ranks.rows) == 0:
        raise ValueError("the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank")
    column_bytes = block.D * (block.y.element_size() + block.dtype.itemsize)
    local = backend_for(backend, block)
    ring = RingPasses(
        ranks, choose_route(ranks, column_bytes), partial(backend_for, backend), local, sums_dtype(backend, block.dtype)
    )
    return BlockPasses(ring, local, ranks.size / max(sum(ranks.rows), 1), ranks.rank, ranks.size)


def _terms(ranks: Ranks, backend: str, block: Block, needs: Needs | None) -> dict[str, Any]:
    dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (block.x, block.y))
    return {
        "the embedding dimension": block.D,
        "the dtype of the embeddings": dtypes,
        "the precision": block.precision,
        "the backend": backend,
        "the device type": block.x.device.type,
        "the route": ranks.route,
        "the set of excluded pairs": _describe_exclusions(block),
        "the meaning of equal ids": "positives" if block.ids_are_positives else "no negatives",
        "the second model": _describe_second_model(block),
        "the column bias": "given" if block.col_bias is not None else "None",
        "the set of inputs that need a gradient": _describe_needs(needs),
        "the set of outputs that have a gradient": "empty",
    }


def _describe_exclusions(block: Block) -> str:
    in_two_columns = block.row_ids is not None and block.row_ids.dim() == 2
    ids = "ids in two columns" if in_two_columns else "ids"
    reasons = {ids: block.row_ids is not None, "diagonal": block.skip_diagonal, "above a limit": block.limit is not None}
    return " and ".join(reason for reason, applies in reasons.items() if applies) or "nothing"


def _describe_second_model(block: Block) -> str:
    if block.second_model is None:
        return "none"
    return f"of dimension {block.second_model.D} in {str(block.second_model.y.dtype).removeprefix('torch.')}"


def _describe_needs(needs: Needs | None) -> str:
    if needs is None:
        return "empty"
    return " ".join(name[1:] for name, is_needed in zip(Needs._fields, needs, strict=True) if is_needed) or "empty"


# ----------------------------------------------------------------------------------------------------------------------
# From the sums of a pass to gradients.
#
# The sums of a pass are not yet multiplied by the scale, and they exclude the matching pairs if the diagonal is separate. A
# matching pair is usually the largest entry of its row. Its gradient and the gradients of the rest of the row nearly cancel,
# and a tile in half precision would lose the difference. So `finish` adds the matching pairs in full precision, before it
# rounds the gradients to the dtype of the inputs.

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dx, dy, dscale, drow_bias, dcol_bias; empty if not needed


def fill_mean_weight(x: Tensor, mean_weight: float) -> Tensor:  # ()
    """Returns the factor that turns a sum over local pairs into this rank's part of a mean, in `exact_dtype`."""
    return torch.full((), mean_weight, dtype=exact_dtype(x.device), device=x.device)


def statistic(x: Tensor, *shape: int) -> Tensor:
    """Returns an uninitialized tensor in the accumulator dtype of x."""
    return x.new_empty(shape, dtype=accumulator_dtype(x.dtype))


def logit(x: Tensor, *shape: int) -> Tensor:
    """Returns an uninitialized tensor in `exact_dtype` for logits or logsumexps, which losses subtract (`LogSum.value`)."""
    return x.new_empty(shape, dtype=exact_dtype(x.device))


def empty_gradients(x: Tensor, y: Tensor, scale: Tensor, needs: Needs, dtype: torch.dtype | None = None) -> Gradients:
    """Returns uninitialized gradients of the right shapes. `dtype` applies to dx and dy (default: the dtype of x and of y)."""
    return (
        x.new_empty(x.shape if needs.dx else (0,), dtype=dtype),
        y.new_empty(y.shape if needs.dy else (0,), dtype=dtype),
        torch.empty_like(scale),
        statistic(x, x.shape[0] if needs.drow_bias else 0),
        statistic(x, y.shape[0] if needs.dcol_bias else 0),
    )


def column_sums(block: Block, needs: Needs) -> ColumnGradients:
    """Returns the zeroed accumulators of a gradient pass."""
    return ColumnGradients(
        dy=block.zeros(block.M, block.D) if needs.dy else None,
        dcol_bias=block.zeros(block.M) if needs.dcol_bias else None,
    )


def choose_grad_scale(
    scale: Tensor,  # () of the block
    precision: str,
    *weights: Tensor | None,
    matches: Tensor | None = None,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # ()
    """Returns the divisor of gradients inside tiles, a power of two that makes the largest weight about 1.

    For fp16, the largest weight becomes 2¹⁴. A softmax over a million columns reduces it to 2⁻⁶, which fp16 still represents
    with all digits. The largest entry of a tile is the sum of two such weights, which is within the range of fp16. Sums of
    several ranks need the same divisor on all ranks, so `largest` returns the maximum over ranks.

    `matches` are the gradients of the matching pairs, which tiles exclude. If the match is almost certain, label smoothing or
    further negatives can make them 10³⁸ times larger than all weights. The quotient would overflow, so it is at most 2¹⁶.
    """
    if matches is not None:
        weights = *weights, matches * 2.0**-16
    sizes = [w.abs().amax() for w in weights if w is not None and w.numel()]
    size = torch.stack(sizes).amax() if len(sizes) > 1 else sizes[0] if sizes else torch.zeros_like(scale)
    size = size.to(scale.dtype)  # equal on all ranks, because weights may be float64 and a rank may have no weights
    if largest is not None:
        size = largest(size)
    grad_scale = size.log2().ceil().exp2()
    grad_scale = torch.where((size > 0) & grad_scale.isfinite(), grad_scale, 1.0)
    if precision == FLOAT16:
        grad_scale = grad_scale / 2**14
    return grad_scale.clamp_min(torch.finfo(grad_scale.dtype).tiny)  # a smaller divisor would be denormal


@overload
def divide_gradient(gradient: Tensor, grad_scale: Tensor) -> Tensor: ...


@overload
def divide_gradient(gradient: Tensor | None, grad_scale: Tensor) -> Tensor | None: ...


def divide_gradient(gradient: Tensor | None, grad_scale: Tensor) -> Tensor | None:
    """Returns gradient / grad_scale in the dtype of `grad_scale`, which is the dtype inside tiles."""
    return None if gradient is None else (gradient / grad_scale).to(grad_scale.dtype)


def finish(
    local: RowWork,
    block: Block,
    strips: Iterable[RowGradients],
    sums: ColumnGradients,
    needs: Needs,
    *,
    scale: Tensor,  # () the operator's argument
    grad_scale: Tensor,  # ()
    dmatch: Tensor | None = None,  # (N,) gradient of s_ii ÷ grad_scale if the diagonal is separate
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Runs the pass and returns gradients. Adds the diagonal to the sums, multiplies by scale · grad_scale, and rounds once."""
    dx, dy, dscale, drow_bias, dcol_bias = empty_gradients(block.x, block.y, scale, needs._replace(dy=False), dtype)
    factor = block.scale * grad_scale
    products: Tensor | None = None  # dot products of the matching pairs, computed on first use
    total_dscale = torch.zeros_like(dscale, dtype=exact_dtype(dscale.device))  # one number, so float64 takes no extra time
    for rows, dx_rows, dscale_rows, drow_bias_rows in strips:
        if dscale_rows is not None and dmatch is not None:
            products = local.matching_products(block) if products is None else products
            dscale_rows.addcmul_(dmatch[rows], products[rows])
        if dx_rows is not None:
            from_dx = local.finish_rows(
                dx_rows,
                dx[rows] if needs.dx else None,
                factor,
                own=block.x[rows] if needs.dscale and dscale_rows is None else None,
                partners=block.y[rows],
                dmatch=None if dmatch is None else dmatch[rows],
                precision=block.precision,
            )
            dscale_rows = from_dx if dscale_rows is None else dscale_rows
        if dscale_rows is not None:
            total_dscale += dscale_rows.sum(dtype=total_dscale.dtype)
        if drow_bias_rows is not None:
            drow_bias[rows] = drow_bias_rows
    dscale.copy_(total_dscale * grad_scale)
    if sums.dy is not None:
        final = dtype or block.y.dtype
        dy = sums.dy if sums.dy.dtype == final else torch.empty_like(sums.dy, dtype=final)
        local.finish_rows(sums.dy, dy, factor, own=None, partners=block.x, dmatch=dmatch, precision=block.precision)
    if sums.dcol_bias is not None:
        dcol_bias = sums.dcol_bias
    for dbias in (drow_bias, dcol_bias):
        if dbias.numel():
            if dmatch is not None:
                dbias += dmatch
            dbias *= grad_scale
    return dx, dy, dscale, drow_bias, dcol_bias


# ----------------------------------------------------------------------------------------------------------------------
# Functions that compute their gradients in the forward pass (`dense`, `one_gpu`). They are not operators, because the call of a
# custom operator takes longer on the host than a small loss takes on the device.


_UNCHANGED = nullcontext()


def use_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x the current one and disables autocast, because the precision is already chosen."""
    device = x.device
    kind = device.type
    autocast, other_device = torch.is_autocast_enabled(kind), kind == "cuda" and torch.cuda.current_device() != device.index
    if not autocast and not other_device:
        return _UNCHANGED
    contexts = ExitStack()
    if autocast:
        contexts.enter_context(torch.autocast(kind, enabled=False))
    if other_device:
        contexts.enter_context(torch.cuda.device(device))
    return contexts


def is_batched(dloss: Tensor) -> bool:
    """Returns whether `dloss` is a batch of gradients, as in `torch.autograd.grad(..., is_grads_batched=True)`."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(dloss) or torch._C._functorch.is_batchedtensor(dloss))


def scale_gradients(
    inputs: Sequence[Tensor | None],  # x, y, scale, and optionally a bias
    needs: Sequence[bool],
    dloss: Tensor,  # ()
    dx: Tensor | None,
    dy: Tensor | None,  # None if dx contains the rows of dy after its own rows
    numbers: Tensor | None,  # `scale_parts` parts of dscale, then dbias
    scale_parts: int = 1,
) -> list[Tensor | None]:
    """Returns the gradients of all inputs that need one, multiplied by `dloss`, in one launch."""
    x, y = inputs[:2]
    assert x is not None
    if is_batched(dloss):  # kernels cannot read it
        if dx is not None and dy is None and y is not None:
            dx, dy = dx[: len(x)], dx[len(x) :]
        parts = (None, None) if numbers is None else (numbers[:scale_parts].sum(), numbers[scale_parts])
        found = zip((dx, dy, *parts), inputs, needs, strict=False)
        return [None if d is None or value is None or not need else (d * dloss).to(value.dtype) for d, value, need in found]
    from megabatch.kernels.launch import kinds
    from megabatch.kernels.operands import multiply

    outs: list[Tensor | None] = [
        torch.empty_like(value, memory_format=torch.contiguous_format) if value is not None and need else None
        for value, need in zip(inputs, needs, strict=False)
    ]
    x_count, y_count = (0 if out is None else out.numel() for out in outs[:2])
    y_first = 0
    if dy is None and y_count > 0:
        dy, y_first = dx, x.numel()
    given = dloss.device, tuple([None if out is None else out.dtype for out in outs]), kinds(dx, dy, numbers, dloss)
    padded = outs if len(outs) == 4 else [*outs, None]
    multiply(x_count, y_count, y_first, scale_parts, given)(dx, dy, numbers, dloss, *padded)
    return refuse_second_derivative(inputs, outs) if torch.is_grad_enabled() else outs  # enabled by create_graph=True


def refuse_second_derivative(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients for create_graph=True. They depend on the inputs, and differentiating them raises an error."""
    return list(_RefuseSecondDerivative.apply(*inputs, *gradients))


class _RefuseSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs_and_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = inputs_and_gradients[len(inputs_and_gradients) // 2 :]
        return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

    backward = staticmethod(refuse)
