"""Gradients are right although forward and backward round a similarity differently: other tiles, BLAS or compiler."""

import pytest
import torch

from helpers import unit
from megabatch import operators
from megabatch.kernels import plan as kernel_plan
from megabatch.operators.two_pass import ALL, KEPT, logsumexp_backward, symmetric_logsumexp_backward
from rounding import gradients_rounded_differently, truth_and_bounds

pytestmark = [
    pytest.mark.usefixtures("small_launches"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy on inf and NaN, which are meant
]

BACKENDS = ["eager", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [50.0, 1e3, 1e5, 1e8])
def test_gradients_within_the_bound_of_similarities_rounded_twice(backend, scale):
    x, y = (unit(size, 24, seed=seed, dtype=torch.float32) for seed, size in enumerate((70, 90)))
    found = gradients_rounded_differently(x, y, scale, "float32", backend)
    for gradient, (truth, bound) in zip(found, truth_and_bounds(x, y, scale), strict=True):
        assert ((gradient.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("columns", [32, 64])
def test_gradients_with_another_tile_in_backward(monkeypatch, columns):
    """The rounding of a product depends on its shape: the interpreter's BLAS chooses its kernel by the shape."""
    x, y = (unit(size, 40, seed=seed, dtype=torch.float32) for seed, size in enumerate((70, 90)))
    tile = kernel_plan.KernelTile(32, columns, 16, 4, 1)
    monkeypatch.setattr(kernel_plan, "gradient_tile", lambda *_: tile)
    found = gradients_rounded_differently(x, y, 1e8, "float32", "triton")
    for gradient, (truth, bound) in zip(found, truth_and_bounds(x, y, 1e8), strict=True):
        assert ((gradient.double() - truth).abs() <= bound).all()


# Sums that are too small by 20 nats and more simulate similarities that forward rounded down. The columns are unit vectors
# along the axes, so the gradient of x is scale times the weights.
SCALE = torch.tensor(300.0)
HIGH, LOW = torch.eye(24), 0.9 * torch.eye(24)
ONES = torch.ones(24)


def assert_largest(weights, most):
    """Weights on the diagonal, where the sums are too small, are exactly at the cap, up to the last digit of a product."""
    torch.testing.assert_close(weights.diagonal(), torch.full((24,), float(most)), rtol=1e-6, atol=0.0)
    assert (weights <= most * (1 + 1e-6)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_rows_and_columns_is_at_most_1(backend):
    options = (*(None,) * 7, True, KEPT, "float32", "float32", backend, "")
    *_, row, col = operators.logsumexp(LOW, HIGH, SCALE, *options)
    for drow, dcol in ((ONES, None), (None, ONES), (ONES, ONES)):
        dx, *_ = logsumexp_backward(HIGH, HIGH, SCALE, *options, row, col, drow, dcol, None, [True, True, True, False, False])
        weights, most = dx / SCALE, sum(given is not None for given in (drow, dcol))
        assert_largest(weights, most)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_with_a_guide_is_at_most_1(backend):
    limit, options = torch.full((24,), 2.0), (False, KEPT, "float32", "float32", backend, "")
    none = (None, None, None, None)
    *_, row, col = operators.logsumexp(LOW, HIGH, SCALE, *none, limit, HIGH, HIGH, *options)
    needs = [True, True, True, False, False]
    dx, *_ = logsumexp_backward(HIGH, HIGH, SCALE, *none, limit, HIGH, HIGH, *options, row, col, ONES, None, None, needs)
    assert_largest(dx / SCALE, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_of_rows_against_themselves_is_at_most_1(backend):
    options = (None, ALL, "float32", backend, "")
    _, row = operators.symmetric_logsumexp(0.95 * HIGH, SCALE, *options)
    dz, _ = symmetric_logsumexp_backward(HIGH, SCALE, *options, row, ONES, [True, True])
    assert_largest(dz / SCALE, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_student_s_weight_is_at_most_1(backend):
    from megabatch.tiles.block import Block, ColumnGradients, Needs, backend_for

    def block(x):
        return Block(x, HIGH, SCALE, "float32", second_model=Block(HIGH, HIGH, torch.tensor(0.0), "float32"))

    row, col = backend_for(backend, block(LOW)).soft_statistics(block(LOW))
    needs = Needs(True, False, False)
    strips = backend_for(backend, block(HIGH)).soft_gradients(
        block(HIGH), row, col, ONES, ONES, ColumnGradients(None, None), needs
    )
    (strip,) = strips
    teacher = 2 / 24  # its softmax is uniform
    assert_largest(strip.dx, 2 - teacher)
