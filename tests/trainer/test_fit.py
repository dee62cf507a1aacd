"""Chunk sizes and memory for graphs: what the search tries, and what it settles on."""

import contextlib
import json

import pytest
import torch
from torch import nn

import runs
from megabatch.world import World
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.trainer import build, loop, step
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def choose(monkeypatch):
    """`choose_fit` with measurements that are made up, because this machine may have no GPU, and their number."""

    class Trial:
        def __init__(self, module, inputs, world):
            pass

        def __call__(self, size):
            measured.append(size)
            return 1000 * size

    measured, memory = [], {"free": 10**6, "device": "one GPU"}
    monkeypatch.setattr(step, "_Trial", Trial)
    monkeypatch.setattr(step, "_count_later_bytes", lambda *given: 0)
    monkeypatch.setattr(step, "free_memory", lambda device: memory["free"])
    monkeypatch.setattr(step, "describe_device", lambda world: memory["device"])
    monkeypatch.setattr(step.second_pass, "preserve_generators", lambda devices: contextlib.nullcontext())
    world, modules = World(torch.device("cuda")), [nn.Linear(3, 2), nn.Linear(3, 2, bias=False)]

    def call(pairs=1000, about=(("model", "tiny"),), width=3, free=10**6, device="one GPU", layers=modules, **settings):
        memory.update(free=free, device=device)
        measured.clear()
        config = MemoryConfig(**{"chunk": 0.5, **settings})
        fit = choose_fit(config, "auto", layers, lambda side, count: torch.zeros(count, width), pairs, world, dict(about))
        assert fit.is_reused == (not measured)
        return fit.chunk_sizes, fit.is_reused

    return call


def test_measured_chunk_sizes_are_reused(cache, choose):
    assert choose() == ((256, 256), False)
    assert choose() == ((256, 256), True)
    assert choose(free=int(1.05e6)) == ((256, 256), True)  # a little more memory is free
    changes = [
        {"pairs": 100},
        {"about": (("model", "tiny"), ("precision", "bf16"))},
        {"width": 4, "layers": [nn.Linear(4, 2), nn.Linear(4, 2, bias=False)]},
        {"device": "another GPU"},
        {"chunk": 0.25},
        {"checkpointing": "off"},
        {"layers": [nn.Linear(3, 2), nn.Linear(3, 2)]},
        {"layers": [nn.Linear(3, 2), nn.Linear(3, 2, bias=False).requires_grad_(False)]},
    ]
    for change in changes:
        assert not choose(**change)[1], change
        assert choose(**change)[1], change
    assert choose() == ((256, 256), True)


def test_chunk_sizes_of_another_amount_of_free_memory_are_measured_again(cache, choose):
    choose()
    assert choose(free=5 * 10**5) == ((128, 128), False)  # another program uses the GPU
    assert choose(free=5 * 10**5) == ((128, 128), True)
    assert choose() == ((256, 256), False)


def test_a_run_can_measure_again_and_stores_the_result(cache, choose):
    choose()
    (file,) = (cache / "chunk_sizes").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunk_sizes": [7, 7]}))
    assert choose() == ((7, 7), True)
    assert choose(reuse=False) == ((256, 256), False)
    assert choose() == ((256, 256), True)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "[]",
        "{",
        '{"chunk_sizes": [8, 8], "checkpointing": false}',
        '{"chunk_sizes": [8], "checkpointing": false, "budget": 500000}',
        '{"chunk_sizes": [0, 8], "checkpointing": false, "budget": 500000}',
        '{"chunk_sizes": [8.5, 8], "checkpointing": false, "budget": 500000}',
        '{"chunk_sizes": "88", "checkpointing": false, "budget": 500000}',
        '{"chunk_sizes": [8, 8], "checkpointing": 1, "budget": 500000}',
        '{"chunk_sizes": [8, 8], "checkpointing": false, "budget": "much"}',
        b"\xff\xfe",
    ],
)
def test_damaged_chunk_sizes_are_measured_again(cache, choose, entry):
    choose()
    (file,) = (cache / "chunk_sizes").iterdir()
    file.write_bytes(entry if isinstance(entry, bytes) else entry.encode())
    assert choose() == ((256, 256), False)
    assert choose() == ((256, 256), True)


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, choose, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "file"))
    assert choose() == choose() == ((256, 256), False)


def test_memory_that_runs_out_with_reused_chunk_sizes_measures_them_again(tmp_path, monkeypatch, caplog):
    """Then the step is repeated with the same random numbers, and the chunk sizes are not measured twice."""

    def choose(config, *given):
        asked.append(config.reuse)
        return Fit((8, 8), 0, is_reused=True) if config.reuse else Fit((6, 6), 0)

    def limited(module, inputs):
        if len(inputs[0]) > 4 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    caplog.set_level("INFO")
    asked, choose_plainly = [], loop.choose_fit
    monkeypatch.setattr(loop, "choose_fit", choose)
    made = runs.trainer(tmp_path / "a", {"chunk_size": "auto", "memory": {"reuse": True}}, pair=runs.tiny(0.2))
    made.pair.first.module.hidden.register_forward_pre_hook(limited)
    made.fit()
    assert asked == [True, False]
    assert "8 images and 8 texts, measured before on this GPU" in caplog.text
    assert [line for line in caplog.messages if "memory ran out" in line] == [
        "memory ran out, so the step is repeated with chunks of (6, 6) samples",
        "memory ran out, so the step is repeated with chunks of (3, 3) samples",
    ]
    monkeypatch.setattr(loop, "choose_fit", choose_plainly)
    wanted = runs.trainer(tmp_path / "b", {"chunk_size": 3}, pair=runs.tiny(0.2))
    wanted.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []


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
