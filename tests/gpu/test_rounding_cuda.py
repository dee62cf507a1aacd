"""On a GPU: forward and backward round a similarity differently, because of the order of dimensions or other tiles."""

import pytest
import torch

from helpers import unit
from megabatch.kernels import plan as kernel_plan
from rounding import gradients_rounded_differently, truth_and_bounds

pytestmark = pytest.mark.gpu

PRECISION = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.mark.parametrize("tile", ["as planned", "another in backward"])
@pytest.mark.parametrize("scale", [50.0, 1e4, 1e8])
@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_gradients_within_the_bound_of_similarities_rounded_twice(monkeypatch, tile, scale, dtype, backend):
    if tile == "another in backward":
        planned = kernel_plan.hopper_tile
        monkeypatch.setattr(kernel_plan, "hopper_tile", lambda block, task: planned(block, task) if task == "sums" else None)
        monkeypatch.setattr(kernel_plan, "gradient_tile", lambda *_: kernel_plan.KernelTile(64, 64, 32, 4, 2))
    x, y = (unit(size, 512, seed=seed, dtype=dtype, device="cuda") for seed, size in enumerate((700, 900)))
    found = gradients_rounded_differently(x, y, scale, PRECISION[dtype], backend)
    for gradient, (truth, bound) in zip(found, truth_and_bounds(x, y, scale), strict=True):
        largest = torch.finfo(dtype).max  # beyond it a gradient in the type of the inputs is infinite
        here = truth.abs() + bound < largest
        assert here.any()
        assert ((gradient.double() - truth).abs() <= bound)[here].all()
