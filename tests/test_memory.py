"""Peak memory of forward and backward, measured in fresh processes, and the measuring itself."""

import sys

import pytest
import torch

import megabatch as mb
from megabatch_train.bench.measure import ProcessError, fresh_process, peak_memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MIB = 2**20


def step(loss: str, N: int, D: int, dtype: torch.dtype) -> int:
    """Bytes that one forward and backward take beyond the inputs, the gradients included."""

    def run(count: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(count, D, generator=generator).to(dtype).requires_grad_() for _ in range(2))
        return x, y

    def forward_backward(x, y):
        value = mb.clip_loss(x, y, 1.0) if loss == "clip" else mb.siglip_loss(x, y, 1.0, -5.0)
        value.backward()

    forward_backward(*run(8))  # threads and libraries
    inputs = run(N)
    return peak_memory(lambda: forward_backward(*inputs))[1]


def hold(megabytes: int) -> int:
    return int(peak_memory(lambda: torch.ones(megabytes * MIB, dtype=torch.uint8))[1])


def fail() -> None:
    raise KeyError("on purpose")


def die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def holds_no_matrix(size: int, N: int) -> None:
    embeddings, matrix = N * 64 * 4, N * N * 4
    allowed = 6 * embeddings + 40 * MIB  # gradients, accumulators, and two tiles
    assert size <= allowed < matrix / 4


@linux
def test_no_matrix_is_held():
    holds_no_matrix(fresh_process(step, "clip", 8192, 64, torch.float32), 8192)


@pytest.mark.thorough
@linux
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_times_the_batch_takes_at_most_four_times_the_memory(loss, dtype):
    small, large = (fresh_process(step, loss, N, 64, dtype) for N in (4096, 16384))  # not held in memory as a whole
    assert large <= 4.1 * small
    holds_no_matrix(large, 16384)


@linux
@pytest.mark.thorough
def test_32k_pairs_on_a_cpu():
    assert fresh_process(step, "clip", 32768, 64, torch.float32) < 350 * MIB  # dense: 4 GiB for one matrix of logits


@pytest.mark.thorough
@linux
def test_peak_memory_sees_what_is_held():
    assert 190 * MIB < fresh_process(hold, 200) < 260 * MIB


@pytest.mark.thorough
@linux
def test_a_limit_is_a_memory_error():
    with pytest.raises(MemoryError):
        fresh_process(hold, 2000, memory_limit=300 * MIB)


@pytest.mark.thorough
def test_errors_come_back_from_the_other_process():
    with pytest.raises(KeyError, match="on purpose"):
        fresh_process(fail)
    with pytest.raises(ProcessError, match="die"):
        fresh_process(die)
