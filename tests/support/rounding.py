"""Errors that float32 results may have, whatever the dense loss does.

A backward pass computes similarities again and rounds them differently than forward did. Two yardsticks: a bound on every entry
of a gradient, and the error of a computation in which nothing else is rounded. `half_units` is for the types of the results.

The bound: both passes round ⟨x_i, y_j⟩, and each is off by at most δ_ij = (D + 4)·u·scale·⟨|x_i|, |y_j|⟩. Here u is half a unit
in the last place of float32, and 4 covers the product with the scale and the subtraction of a shift. The logsumexp of row i is
then off by at most Δ_i = max_j δ_ij, and a softmax weight w_ij = exp(s_ij − lse_i) by at most w_ij·(exp(δ_ij + Δ_i) − 1). It is
never off by more than 1, because the true weight and the computed one are both between 0 and 1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from helpers import no_dense_path
from megabatch import operators
from megabatch.operators.two_pass import KEPT, logsumexp_backward
from megabatch.tiles import eager
from megabatch.tiles.eager import Tiles

UNIT = torch.finfo(torch.float32).eps / 2


def half_units(exact: Sequence[Tensor]) -> list[Tensor]:
    """Bounds on the errors of a loss and its gradients from roundings that float32 tensors impose.

    Each rounding is off by at most half a unit in the last place. A loss is rounded once. A gradient is rounded twice, because
    autograd also passes the gradient of one row's loss, 1/N, in float32: 1/1000 is off by 0.8 of that bound, and with it every
    gradient. The dense error of a single number, such as the gradient of the scale, can be smaller by chance.
    """
    return [(1 if i == 0 else 2) * UNIT * tensor.norm() for i, tensor in enumerate(exact)]


def gradients_rounded_differently(x, y, scale, precision, backend):
    """dx and dy of the sum of all row and column logsumexps; backward gets the dimensions in reverse order."""
    scale = torch.tensor(scale, dtype=torch.float32, device=x.device)
    options = (*(None,) * 7, True, KEPT, precision, precision, backend, "")
    *_, row, col = operators.logsumexp(x, y, scale, *options)
    drow, dcol = (torch.ones(len(side), device=x.device) for side in (x, y))
    needs = [True, True, True, False, False]
    dx, dy, *_ = logsumexp_backward(x.flip(1), y.flip(1), scale, *options, row, col, drow, dcol, None, needs)
    return dx.flip(1), dy.flip(1)


def truth_and_bounds(x, y, scale):
    """((dx, bound on its error), (dy, bound on its error)) in float64, entry by entry."""
    size = torch.finfo(x.dtype).eps / 2
    x, y = x.double(), y.double()
    s, noise = scale * x @ y.T, (x.shape[1] + 4) * UNIT * scale * x.abs() @ y.abs().T
    weights, errors = [], []
    for dim in (1, 0):
        log_w, off = s - s.logsumexp(dim, keepdim=True), noise + noise.amax(dim, keepdim=True)
        weights.append(log_w.exp())
        errors.append(torch.where(off < 1, log_w.exp() * torch.expm1(off), (log_w + off).clamp_max(0.0).exp()))
    g, error = sum(weights), sum(errors)
    results = []
    for g_side, error_side, others in ((g, error, y), (g.T, error.T, x)):
        # Float32 sums of len(others) terms; weights and the result are rounded to the type of the inputs.
        summing = len(others) * UNIT + 3 * size
        bound = scale * (error_side + (g_side + error_side) * summing) @ others.abs()
        results.append((scale * g_side @ others, bound))
    return results


@contextmanager
def similarities_rounded_twice() -> Iterator[None]:
    """Inside, a float64 loss of the eager backend is exact except for its products, which are float32 sums.

    Forward leaves the order of summation to the library, backward adds four terms at a time. The error of such a loss is the
    error that two roundings cause by themselves. It can be far above the error of a dense loss, whose softmax divides by a sum
    of the same rounded terms: if one term dominates the sum, the dense weight is 1 whatever the rounding.
    """
    forward = _tiles(lambda x, y: x @ y.T)
    backward = _tiles(lambda x, y: sum(a @ b.T for a, b in zip(x.split(4, 1), y.split(4, 1), strict=True)))
    with mock.patch.multiple(eager, Tiles=forward, gradient_tiles=backward), no_dense_path():
        yield


def _tiles(multiply: Callable[[Tensor, Tensor], Tensor]) -> type[Tiles]:
    class RoundedTiles(Tiles):
        def form_products(self, x: Tensor, y: Tensor) -> Tensor:
            return self.products(len(x), len(y)).copy_(multiply(x.float(), y.float()))

    return RoundedTiles
