"""The average of the weights: with running statistics of its own, on one rank and on two, saved and continued."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import runs
from megabatch.cached import second_pass
from megabatch.world import World
from megabatch_train.towers.tower import Pair, Tower
from megabatch_train.trainer.build import Average

SETTINGS = {"ema": 0.8, "chunk_size": 12, "steps": 5, "augment": False}  # chunks of a batch: nothing to warn of


class Normalised(nn.Module):
    """Has statistics, a counter of them, and a constant that no mean may touch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(runs.WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x):
        return F.normalize(self.head(F.gelu(self.norm(self.hidden(x)))), dim=1)


def normalised():
    torch.manual_seed(3)
    towers = [Tower(Normalised().double(), kind, runs.prepare, runs.collate) for kind in ("image", "text")]
    return Pair(*towers, 5.0, name="normalised")


class Statistics(runs.Memory):
    """Remembers the running statistics of every step."""

    def __init__(self, module):
        super().__init__()
        self.module, self.seen = module, []

    def step(self, record):
        self.seen.append({name: value.clone() for name, value in second_pass.running_statistics(self.module).items()})


def test_running_statistics_are_averaged_as_the_weights_are(tmp_path):
    pair = normalised()
    observer = Statistics(pair.first.module)
    wanted = {name: value.clone() for name, value in second_pass.running_statistics(pair.first.module).items()}
    made = runs.trainer(tmp_path, SETTINGS, pair=pair, observers=[observer])
    made.fit()
    for step, seen in enumerate(observer.seen, start=1):
        share = 1 - min(0.8, (1 + step) / (10 + step))
        wanted = {name: old + share * (seen[name] - old) for name, old in wanted.items()}
    assert set(wanted) == {"norm.running_mean", "norm.running_var"}
    for name, value in wanted.items():
        torch.testing.assert_close(made.average.values[f"first.{name}"], value, rtol=1e-12, atol=1e-12)
        live = pair.first.module.get_buffer(name)
        assert torch.equal(live, observer.seen[-1][name])  # as they were before the model was saved
        assert not torch.allclose(live, value)


def test_the_averaged_model_is_saved_and_continued_with_its_statistics(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason='pip install "megabatch[train]"')
    made = runs.trainer(tmp_path, SETTINGS, pair=normalised())
    made.fit()
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {"first.norm.running_mean", "second.norm.running_var"} <= made.average.values.keys()
    for name, value in made.average.values.items():
        if not name.startswith("loss."):
            assert torch.equal(saved[name], value), name
    assert torch.equal(saved["first.mask"], torch.tensor([0.0, -torch.inf], dtype=torch.float64))
    assert saved["first.norm.num_batches_tracked"] == 5
    again = runs.trainer(tmp_path, SETTINGS, pair=normalised())
    assert again.resume()
    assert runs.same_bits(again.average.values, made.average.values) == []


def test_statistics_that_stand_still_keep_their_bits():
    module = nn.BatchNorm1d(5)
    nn.init.normal_(module.running_mean)
    average, before = Average({"a": module}, 0.9), module.running_mean.clone()
    for step in range(1, 50):
        average.update(step)
    assert torch.equal(average.values["a.running_mean"], before)


@pytest.mark.filterwarnings(r"ignore:towers.[01]. has BatchNorm1d:UserWarning")
def test_a_step_that_is_done_again_moves_the_statistics_once(tmp_path):
    changes = {**SETTINGS, "steps": 1}
    made = runs.trainer(tmp_path / "a", {**changes, "chunk_size": 8}, pair=normalised())
    wanted = runs.trainer(tmp_path / "b", {**changes, "chunk_size": 4}, pair=normalised())

    def limited(module, inputs):
        if len(inputs[0]) > 4 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    made.pair.first.module.hidden.register_forward_pre_hook(limited)
    for trainer in (made, wanted):
        trainer.fit()
    for side, other in zip(made.pair.towers, wanted.pair.towers, strict=True):
        found, expected = (second_pass.running_statistics(tower.module) for tower in (side, other))
        assert runs.same_bits(found, expected) == []


def learned(group, rank, folder, changes):
    world = World(torch.device("cpu"), group)
    made = runs.trainer(folder, SETTINGS | changes, pair=normalised(), world=world, validation=runs.Numbers(samples=20))
    result = made.fit()
    averages = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in made.average.values.items()
    }
    return runs.weights(made) | averages, result


@pytest.mark.parametrize("changes", [{}, {"parallel": "fsdp"}, {"memory": {"graphs": 1.0}}])
def test_ranks_have_the_same_statistics(pool, tmp_path, changes):
    """Each normalises by its own pairs; what is evaluated in parts and saved by one is one model all the same."""
    (first, result), (second, other) = pool.run(learned, 2, tmp_path, changes)
    assert runs.same_bits(first, second) == []
    assert result == other
