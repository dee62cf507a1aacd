"""The tiles of GPUs that are not present: the programs of a multiprocessor fit in its shared memory."""

import pytest
import torch

from megabatch.kernels import plan
from megabatch.tiles.block import BFLOAT16, FLOAT16, FLOAT32, TF32

DEVICE = torch.device("cpu")
# GPU: shared memory of one program and of a multiprocessor in bytes, and whether tiles are stored by the copy engine
GPUS = {
    gpu: (generation.shared_memory, generation.shared_memory + 1024, capability >= 90)
    for capability, generation in plan.GENERATIONS.items()
    for gpu in generation.gpus.split(", ")
}


@pytest.fixture
def gradient_tile(monkeypatch):
    def choose(gpu, precision):
        shared, _, has_copy_engine = GPUS[gpu]
        monkeypatch.setattr(plan, "shared_memory", lambda device: shared)
        monkeypatch.setattr(plan, "has_copy_engine", lambda device: has_copy_engine)
        return plan.gradient_tile(precision, DEVICE)

    return choose


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT16, TF32, FLOAT32])
@pytest.mark.parametrize("gpu", GPUS)
def test_the_programs_of_a_multiprocessor_fit_in_its_shared_memory(gradient_tile, gpu, precision):
    tile, size = gradient_tile(gpu, precision), 2 if precision in (BFLOAT16, FLOAT16) else 4
    stored = tile.rows * (tile.columns // 2) * size if GPUS[gpu][2] else 0
    loaded = tile.stages * (tile.rows + tile.columns) * tile.dims * size
    assert tile.stages >= 2
    assert tile.per_multiprocessor * (loaded + stored + 1024) <= GPUS[gpu][1]


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT16, TF32, FLOAT32])
@pytest.mark.parametrize("gpu", GPUS)
def test_the_operands_of_every_tile_fit(monkeypatch, gpu, precision):
    """All steps of the matmul that are loaded at once. For short vectors, `compile_kernels.py` compares what is allocated."""
    monkeypatch.setattr(plan, "shared_memory", lambda device: GPUS[gpu][0])
    size = 2 if precision in (BFLOAT16, FLOAT16) else 4
    for tile in plan.logsumexp_tile(precision, DEVICE), plan.maxsim_tile(precision, DEVICE, 512):
        assert tile.stages * (tile.rows + tile.columns) * tile.dims * size <= GPUS[gpu][0], tile


def test_the_measured_tiles_of_the_h200_do_not_change(gradient_tile):
    for precision, tile in ((BFLOAT16, plan._GRADIENT), (TF32, plan._GRADIENT_TF32), (FLOAT32, plan._GRADIENT_FLOAT32)):
        assert gradient_tile("H200", precision) == tile


def test_tiles_that_do_not_fit_get_fewer_stages_or_one_program(gradient_tile):
    def shape(gpu, precision):
        tile = gradient_tile(gpu, precision)
        return tile.stages, tile.per_multiprocessor

    assert shape("H200", BFLOAT16) == (3, 2)
    assert shape("A100", BFLOAT16) == (2, 2)
    assert shape("B200", BFLOAT16) == (3, 2)
    assert shape("A100", FLOAT32) == shape("L4", FLOAT32) == (2, 2)
    assert shape("RTX 5090", FLOAT32) == (2, 1)
    assert shape("L4", BFLOAT16) == (2, 1)
