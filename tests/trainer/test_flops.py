"""The share of a GPU's peak rate, by hand."""

import pytest
import torch
from torch import nn

import runs
from megabatch.world import World
from megabatch_train import machine
from megabatch_train.towers.tower import Tower
from megabatch_train.trainer import build


def test_a_forward_pass_by_hand():
    tower = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    assert build.forward_flops(tower, torch.randn(4, 3), torch.device("cpu")) == 2 * (3 * 5 + 5 * 7)
    assert tower.training


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_a_transformer_are_counted_one_by_one(training):
    """In evaluation mode PyTorch computes such a layer by one operator that its counter does not know."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(training)
    length, products = 5, 2 * 5 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 16)
    assert build.forward_flops(layer, torch.randn(2, length, 8), torch.device("cpu")) == products + 2 * 2 * length * length * 8


@pytest.mark.parametrize(
    ("locked", "times"), [({}, 6), ({"freeze": "first"}, 3), ({"freeze": "first", "keep_frozen": False}, 4)]
)
def test_a_step_counts_three_passes_of_a_trained_tower(tmp_path, monkeypatch, locked, times):
    monkeypatch.setattr(build, "_peak", lambda precision, device: 1e6)
    memory = runs.Memory()
    runs.trainer(tmp_path, {"steps": 2, "augment": False, **locked}, observers=[memory]).fit()
    forward = 2 * (runs.WIDTH * 40 + 40 * runs.EMBEDDING)
    for record in memory.records:
        assert record["mfu"] * 1e6 == pytest.approx(record["pairs_per_second"] * times * forward)


def test_no_share_on_a_cpu(tmp_path):
    assert build.Utilization([], [], "fp32", World(torch.device("cpu"))).numbers(1, 1.0) == {}


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_the_names_of_drivers(name, half):
    found = machine.peak_rates(name)
    assert (found and found.half) == half


def test_texts_are_counted_without_their_padding():
    tower = Tower(nn.Linear(2, 2), "text", print, list, lengths=lambda inputs: (inputs["mask"] > 0).sum(1))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    cut = build.trim_to_mean_length(tower, {"tokens": torch.zeros(2, 8, 3), "mask": mask, "ids": torch.arange(2)})
    assert [tuple(tensor.shape) for tensor in cut.values()] == [(2, 4, 3), (2, 4), (2,)]
    whole = Tower(nn.Linear(2, 2), "text", print, list)
    assert build.trim_to_mean_length(whole, mask) is mask


class Pool(nn.Module):
    """Attention with a learned query, as in SigLIP's vision tower: a layer is called with a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.latent, self.query = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        query = self.query(self.latent.expand(len(x), -1, -1))
        return nn.functional.scaled_dot_product_attention(query, x, x)[:, 0]


def test_a_view_of_a_parameter_can_be_pooled_with():
    assert build.forward_flops(Pool(), torch.randn(2, 5, 8), torch.device("cpu")) == 2 * 8 * 8 + 2 * 2 * 5 * 8
