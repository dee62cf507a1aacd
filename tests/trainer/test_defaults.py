"""What "auto" becomes: on a CPU, on a GPU, and for ranks that share a machine."""

import os

import pytest
import torch

import runs
from megabatch.world import World
from megabatch_train import settings
from megabatch_train.trainer.build import allow_tf32
from megabatch_train.trainer.config import TrainConfig, reader_count

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("device", "has_bf16", "found"), [(CPU, True, "fp32"), (CUDA, True, "bf16"), (CUDA, False, "fp32")])
def test_precision(monkeypatch, device, has_bf16, found):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert TrainConfig().on(device).precision == found
    assert TrainConfig().on(device).compile == ("on" if device == CUDA else "off")
    chosen = TrainConfig(precision="fp16", compile="on").on(device)
    assert (chosen.precision, chosen.compile) == ("fp16", "on")


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "found"),
    [(CPU, 16, 1, 0), (CUDA, 16, 1, 15), (CUDA, 64, 8, 7), (CUDA, 2, 4, 1), (CUDA, 256, 1, 32)],
)
def test_readers(monkeypatch, device, cores, ranks, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(World, "local_size", ranks)
    world = World(device)
    assert reader_count(TrainConfig(), world) == found
    assert reader_count(TrainConfig(workers=5), world) == 5


@pytest.mark.parametrize(
    ("device", "precision", "inside"), [(CPU, "bf16", "highest"), (CUDA, "bf16", "high"), (CUDA, "fp32", "highest")]
)
def test_float32_products_on_cuda_are_tf32_beside_half_precision(device, precision, inside):
    with allow_tf32(precision, device):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_settings_file_keeps_auto(tmp_path):
    """So that it means the fast way on another machine too; on the same machine it means the same again."""
    made = runs.trainer(tmp_path, {"steps": 1})
    made.fit()
    assert made.config.precision == "fp32"
    written = settings.read(tmp_path / "config.toml")
    assert (written["precision"], written["workers"]) == ("auto", "auto")
