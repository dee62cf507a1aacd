"""What several test files share: sized tiles, float64 copies, bounds that follow from the arithmetic."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import dispatch
from megabatch.tiles import plan

if TYPE_CHECKING:
    from hypothesis import settings

PATIENCE = 900.0  # seconds; what has not ended by then never will, however busy the machine is


def correct_interpreter() -> None:
    """Triton's interpreter without a wrong check, and without a loop in Python over every element of a tile.

    Triton 3.4 and 3.5 count the elements of a row for its bytes and reject aligned rows. A reduction by a function of ours, a
    product of 64 terms, takes one element at a time: seconds for a tile. Here it takes whole vectors, in the same order.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if torch.__version__.startswith(("2.8.", "2.9.")):
        interpreter.TensorDescHandle.validate = lambda self: None
    one_at_a_time = interpreter.ReduceOps.generic_reduce

    def reduce(self, given):  # type: ignore[no-untyped-def]
        if self.axis is None or self.keep_dims or len(given) > 1 or given[0].handle.data.ndim < 2:
            return one_at_a_time(self, given)
        dtype = given[0].dtype
        if self.combine_fn.fn.__name__ == "_maximum":  # in any order, so by halves
            data = given[0].handle.data
            while (size := data.shape[self.axis]) > 1:
                halves = (data.take(range(*part), self.axis) for part in ((0, size // 2), (size // 2, size)))
                data = self.combine_fn.fn(*(self.to_tensor(half, dtype) for half in halves)).handle.data
            return [self.to_tensor(data.take(0, self.axis), dtype)]
        first, *others = (
            self.to_tensor(given[0].handle.data.take(place, self.axis), dtype)
            for place in range(given[0].handle.data.shape[self.axis])
        )
        for other in others:
            first = self.combine_fn.fn(first, other)
        return [first]

    interpreter.ReduceOps.generic_reduce = reduce


def examples(thorough: int, *, quick: int = 10) -> "settings":
    """How many examples hypothesis draws in `make test-all`, and in `make test`, where they are the same every time."""
    from hypothesis import settings

    return settings(max_examples=quick if settings.default.derandomize else thorough)


@contextmanager
def tile_size(rows: int, columns: int) -> Iterator[None]:
    """Tiles of another size, so that small inputs have several, and are not held in memory as a whole."""
    original, most = (plan.eager_tile, plan.CPU), math.isqrt(rows * columns)
    plan.eager_tile, plan.CPU = lambda device, dtype: plan.CPU, plan.TileSize(rows, columns)
    try:
        with dispatch.override(dense_cpu=most, dense_cpu_one_direction=most):
            yield
    finally:
        plan.eager_tile, plan.CPU = original


@contextmanager
def no_dense_path() -> Iterator[None]:
    """Inside, no batch is small enough for a path of one process that computes gradients with the loss."""
    with dispatch.override(**dict.fromkeys((field.name for field in dataclasses.fields(dispatch.Limits)), 0)):
        yield


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """Embeddings of unit length."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1).to(device, dtype)


def aligned_pairs(N: int, D: int, *, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Unit embeddings whose matching pairs are alike: small `noise` is a trained model, large an untrained one."""
    x = unit(N, D, seed=seed)
    return x, F.normalize(x + noise * unit(N, D, seed=seed + 1), dim=-1)


def dense_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """As open_clip writes it: the scale goes into the first factor, both directions are multiplied."""
    labels = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(scale * image @ text.T, labels) + F.cross_entropy(scale * text @ image.T, labels)) / 2


def dense_siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As open_clip writes it."""
    logits = scale * image @ text.T + bias
    signs = 2 * torch.eye(len(image), dtype=logits.dtype, device=image.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


def outcomes(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The value and all gradients, in float64."""
    value = function(*inputs)
    return [value.detach().double(), *(g.double() for g in torch.autograd.grad(value, inputs))]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def gradients(outputs: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of Σ ⟨weight, output⟩; outputs of −inf have weight 0, because 0·inf is not 0."""
    total = sum((torch.where(o.isinf(), 0.0, o) * w).sum() for o, w in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]


def assert_equal_to_rounding(actual: Tensor, expected: Tensor, exponent: float) -> None:
    """Float64 results of two ways to compute the same thing.

    Similarities of size `exponent` carry an absolute rounding error of `exponent` · eps, and so does their logsumexp; it is
    the relative error of every exponential, hence of every gradient. 500 covers the length of the sums.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    finite = expected.isfinite()
    torch.testing.assert_close(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    size = expected[finite].abs().max().item() if finite.any() else 0.0
    bound = 500 * torch.finfo(torch.float64).eps * (1 + exponent) * (1 + size)
    torch.testing.assert_close(actual[finite], expected[finite], rtol=0, atol=bound)


def assert_same_outcomes(
    mine: Callable[..., Tensor], wanted: Callable[..., Tensor], inputs: Sequence[Tensor], exponent: float = 20.0
) -> None:
    """Value and all gradients of two functions in float64, to rounding; what the second does not depend on has gradient 0."""
    results = []
    for function in (mine, wanted):
        value = function(*inputs)
        results.append([value.detach(), *torch.autograd.grad(value, inputs, allow_unused=True)])
    for actual, expected in zip(*results, strict=True):
        if expected is None:
            assert actual is None or not actual.any()
        else:
            assert actual is not None
            assert_equal_to_rounding(actual, expected, exponent)
