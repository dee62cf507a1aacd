"""The memory of a loss on a CUDA device, beside what `megabatch plan` says of it."""

import pytest
import torch

import megabatch as mb
from megabatch_train.bench.measure import peak_memory
from megabatch_train.planning.costs import MEGABATCH, Shape, loss_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("N", [4096, 8192, 16384, 32768, 65536])
def test_the_plan_knows_the_memory_of_small_batches(N):
    x, y = (torch.randn(N, 512, device="cuda", dtype=torch.bfloat16).div_(22).requires_grad_() for _ in range(2))

    def run():
        mb.clip_loss(x, y, 20.0).backward()

    run()
    x.grad = y.grad = None
    _, used = peak_memory(run, "cuda")
    assert loss_bytes(MEGABATCH, Shape(N, 1, 1, 512, 2, True)) == pytest.approx(used, rel=0.1)
