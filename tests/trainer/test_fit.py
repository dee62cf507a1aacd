"""Chunk sizes and memory for graphs: what the search tries, and what it settles on."""

import pytest
import torch
from torch import nn

import runs
from megabatch.world import World
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.trainer import build, step
from megabatch_train.trainer.config import MemoryConfig
from megabatch_train.trainer.step import Fit, choose_fit, largest_chunk


@pytest.mark.parametrize(
    ("most", "budget", "limit", "wanted", "tried"),
    [
        (4096, 1000 + 10 * 512, 10**9, 256, [32, 64, 128, 256]),  # 512 would take 6,120 bytes at most 7,120
        (100, 10**9, 10**9, 100, [32, 64, 100]),
        (7, 10**9, 10**9, 7, [7]),
        (4096, 10**9, 64, 64, [32, 64, 128, 64]),  # runs out although it should not
        (4096, 10**9, 5, 4, [32, 16, 8, 4]),
        (4096, 10, 10**9, 32, [32]),  # the budget is small, and it fits
    ],
)
def test_chunks_grow_until_the_budget_and_shrink_when_memory_runs_out(most, budget, limit, wanted, tried):
    asked = []

    def peak(size):
        asked.append(size)
        return None if size > limit else 1000 + 10 * size

    assert largest_chunk(most, peak, budget) == wanted
    assert asked == tried


def test_a_single_sample_that_does_not_fit_is_an_error():
    with pytest.raises(MemoryError, match="a chunk of one sample must fit"):
        largest_chunk(10, lambda size: None, 10**9)


def test_what_a_run_is_given(monkeypatch):
    pair, data = runs.tiny(), runs.Numbers()
    modules = [tower.module for tower in pair.towers]

    def samples(side, count):
        return torch.stack([data.read(i, side) for i in range(count)])

    monkeypatch.setattr(step, "free_memory", lambda device: 10**9)
    world = World(torch.device("cpu"))
    found = choose_fit(MemoryConfig(graphs=0.5), "auto", modules, samples, 1000, world)
    assert found.chunk_sizes == (step.ON_CPU, step.ON_CPU)
    parameters = sum(p.numel() * 8 for module in modules for p in module.parameters())
    assert found.graph_bytes == int(0.5 * (10**9 - 3 * parameters - 4 * 2 * 1000 * runs.EMBEDDING * 4))
    assert choose_fit(MemoryConfig(), "auto", modules, samples, 9, world).chunk_sizes == (9, 9)
    assert choose_fit(MemoryConfig(graphs=0), 5, modules, samples, 9, world) == Fit((5, 5), 0)
    monkeypatch.setattr(step, "free_memory", lambda device: 10)
    assert choose_fit(MemoryConfig(), 5, modules, samples, 9, world).graph_bytes == 0
    assert Fit((5, 1), 100).halve() == Fit((2, 1), 50)


def test_towers_that_are_looked_at_keep_their_statistics():
    tower = nn.Sequential(nn.Linear(runs.WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    states = torch.get_rng_state()
    samples = torch.randn(3, runs.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    choose_fit(MemoryConfig(), 4, [tower, tower], lambda side, count: samples[:count], 9, World(torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), states)
    assert not build._has_unused(tower, [samples], torch.device("cpu"))
    tower.unused = nn.Parameter(torch.zeros(1))
    assert build._has_unused(tower, [samples], torch.device("cpu"))
    assert tower.training
    assert runs.same_bits(before, {name: value for name, value in tower.state_dict().items() if name != "unused"}) == []


def test_what_is_memory_that_ran_out():
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert ran_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"))
    assert not ran_out_of_memory(RuntimeError("shapes do not match"))
    with pytest.raises(ValueError, match=r"memory.chunk must be a fraction from 0 to 1, got 2"):
        MemoryConfig(chunk=2.0)
