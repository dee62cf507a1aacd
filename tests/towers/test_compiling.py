"""Compiled towers: the same training, the same names, dropout that repeats, and a compiler that fails."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decoders
import megabatch as mb
import runs
from megabatch.world import World
from megabatch_train.towers import tower as blocks
from megabatch_train.towers.layers.fast_layers import PatchConv2d
from megabatch_train.towers.tower import Pair, Tower

QUICK = {"backend": "aot_eager"}  # traces and differentiates as always, and compiles nothing


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.hidden, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.hidden(self.norm(x))))


class Deep(nn.Module):
    """A small vision transformer: each sample is an image of 2×3 pixels, with three patches."""

    def __init__(self, dropout):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, (2, 1), stride=(2, 1))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, runs.EMBEDDING))

    def forward(self, x):
        x = self.stem(x.view(-1, 1, 2, 3)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.head(x.mean(1)), dim=1)


def deep(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(3)
    modules = [Deep(dropout).to(dtype), runs.Net(dropout).to(dtype)]
    return Pair(*(Tower(m, kind, runs.prepare, runs.collate) for m, kind in zip(modules, ("image", "text"), strict=True)), 5.0)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(blocks, "COMPILER_OPTIONS", QUICK)
    yield
    torch._dynamo.reset()


def test_layers_are_compiled_one_by_one_and_other_towers_whole():
    first, second = (tower.module for tower in deep().towers)
    assert blocks.layers(first) == list(first.blocks)
    assert blocks.layers(second) == [second]


def test_layers_of_known_models():
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    with torch.device("meta"):
        model = open_clip.create_model("ViT-S-32-alt", device="meta")
    assert blocks.layers(model) == [*model.visual.transformer.resblocks, *model.transformer.resblocks]


@pytest.mark.parametrize("changes", [{"ema": 0.5}, {"freeze": "first"}, {"freeze": "first", "keep_frozen": False}])
@pytest.mark.thorough
def test_training_is_that_of_the_plain_towers(tmp_path, quick, changes):
    """Dropout included: random numbers are those of PyTorch itself, the same with and without the compiler."""
    made = {}
    for how in ("off", "on"):
        options = {"pair": deep(dropout=0.3), "validation": runs.Numbers()}
        made[how] = runs.trainer(tmp_path / how, {"compile": how, "evaluate_every": 3, **changes}, **options)
        made[how].fit()
        tower = made[how].pair.towers[0].module
        assert any(part._compiled_call_impl for part in tower.modules()) is (how == "on")
        assert isinstance(tower.stem, PatchConv2d) is (how == "on")
    wanted, found = runs.weights(made["off"]), runs.weights(made["on"])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_a_compiled_run_continues_with_the_same_bits(tmp_path, quick):
    changes = {"compile": "on", "checkpoint": {"every": 3}}
    whole = runs.trainer(tmp_path / "whole", changes, pair=deep(dropout=0.3))
    whole.fit()
    half = runs.trainer(tmp_path / "half", changes, pair=deep(dropout=0.3))
    half.stages = [dataclasses.replace(half.stages[0], order=runs.Failing(half.order, 5))]
    with pytest.raises(FloatingPointError, match="meant to fail"):
        half.fit()
    again = runs.trainer(tmp_path / "half", changes, pair=deep(dropout=0.3))
    assert again.resume()
    assert again.step == 3
    again.fit()
    assert runs.same_bits(runs.weights(again), runs.weights(whole)) == []
    # Names in checkpoints are those of the plain towers, so that either can continue the other.
    plain = runs.trainer(tmp_path / "half", {"compile": "off", "steps": 8}, pair=deep(dropout=0.3))
    assert plain.resume()
    plain.fit()


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [0, 2])
def test_one_compilation_serves_all_layers_and_all_lengths(quick, lora):
    """One without a graph and one with it: not one for each layer, nor for each number of texts or tokens."""
    pytest.importorskip("transformers", reason='pip install "megabatch[huggingface]"')
    if lora:
        pytest.importorskip("peft", reason='pip install "megabatch[huggingface]"')
    way = decoders.Way(lora=lora, packed=True)
    encoder, plain = decoders.decoder(way), decoders.decoder(way)
    assert blocks.compile_towers([encoder, encoder], World.of(None, torch.device("cpu")))
    torch._dynamo.utils.counters.clear()
    for queries, negatives, chunk_size in ((5, 1, 6), (6, 7, 6), (7, 4, 8)):  # no chunk has one text, which is compiled apart
        inputs = decoders.batch(queries, negatives)
        for tower in (encoder, plain):
            tower.zero_grad()
            with blocks.compiler_settings(strict=True):
                mb.cached_backward(decoders.Loss(), [(tower, part) for part in inputs], chunk_size=chunk_size)
        wanted = decoders.gradients(plain)
        for name, gradient in decoders.gradients(encoder).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-11)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_compiler_that_misses_evaluation_is_not_used(quick, monkeypatch, caplog):
    """As on Python 3.13.0: the compiled code of training is called in evaluation too."""
    monkeypatch.setattr(blocks._CompiledLayer, "eval", lambda self: self)
    tower = deep().towers[0].module
    assert not blocks.compile_towers([tower], World.of(None, torch.device("cpu")))
    assert "cannot be compiled" in caplog.text
    assert "keep their dropout in evaluation, a bug of Python 3.13.0" in caplog.text
    assert not any(part._compiled_call_impl for part in tower.modules())


def broken(graph, inputs):
    raise RuntimeError("no C compiler")


def test_a_compiler_that_fails_is_told_once_and_training_goes_on(tmp_path, quick, monkeypatch, caplog):
    plain = runs.trainer(tmp_path / "plain", {"compile": "off"}, pair=deep())
    plain.fit()
    monkeypatch.setattr(blocks, "COMPILER_OPTIONS", {"backend": broken})
    made = runs.trainer(tmp_path / "broken", {"compile": "on"}, pair=deep())
    made.fit()
    told = [record.message for record in caplog.records if record.name == "megabatch" and "compil" in record.message]
    assert len(told) == 1
    assert "no C compiler" in told[0]
    assert type(made.pair.towers[0].module.stem) is nn.Conv2d
    assert runs.same_bits(runs.weights(made), runs.weights(plain)) == []


@pytest.mark.thorough
def test_a_chunk_too_large_for_memory_is_left_to_the_step(tmp_path, quick, monkeypatch):
    def runs_out(module, inputs):
        raise MemoryError("a chunk too large")

    monkeypatch.setattr(blocks, "forward_backward", runs_out)
    memory = runs.Memory()
    runs.trainer(tmp_path, {"compile": "on", "steps": 1}, pair=deep(), observers=[memory]).fit()
    assert len(memory.records) == 1


def on_rank(group, rank, folder, changes):
    blocks.COMPILER_OPTIONS = QUICK
    made = runs.trainer(folder, changes, pair=deep(), world=World(torch.device("cpu"), group))
    made.fit()
    torch._dynamo.reset()
    return runs.weights(made)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.thorough
def test_two_ranks_train_as_one(pool, tmp_path, parallel):
    made = runs.trainer(tmp_path / "one", {"parallel": parallel}, pair=deep())
    made.fit()
    wanted = runs.weights(made)
    for found in pool.run(on_rank, 2, tmp_path / "two", {"parallel": parallel, "compile": "on"}):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_the_compiler_itself_repeats_dropout(tmp_path):
    """The cached step warns, which is an error here, if the embeddings of both passes differ."""
    found = {}
    for how in ("off", "on"):
        made = runs.trainer(tmp_path / how, {"compile": how, "steps": 3}, pair=deep(dropout=0.5, dtype=torch.float64))
        made.fit()
        found[how] = runs.weights(made)
    for name, value in found["off"].items():
        torch.testing.assert_close(found["on"][name], value, rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()
