"""Autotuned tile sizes: opt-in, cached, and harmless if the cache is broken."""

import json

import pytest
import torch

import megabatch as mb
from megabatch.tiles import kernel_plan, plan, tuning
from megabatch.tiles.block import Block
from megabatch.tiles.kernel_plan import KernelTile

DEFAULT = KernelTile(64, 64, 32, 4, 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "ENABLED", True)
    monkeypatch.setattr(tuning, "_SMALLEST", 1)
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    tuning._remembered.cache_clear()
    yield tmp_path / "cache"
    tuning._remembered.cache_clear()


def block(D=40):
    return Block(torch.randn(50, D), torch.randn(60, D), torch.tensor(1.0), "float32")


def fastest_is(wanted, tried):
    """Replaces the timer: `wanted` is the fastest tile."""

    def milliseconds(trial, candidate):
        tried.append(candidate)
        trial(candidate)
        return 1.0 if candidate == wanted else 2.0

    return milliseconds


def test_the_fastest_is_kept_and_remembered(folder, monkeypatch):
    tried, ran = [], []
    wanted = KernelTile(128, 64, 32, 4, 2, per_multiprocessor=2)
    monkeypatch.setattr(tuning, "_milliseconds", fastest_is(wanted, tried))
    assert tuning.tile("logsumexp", block(), DEFAULT, ran.append) == wanted
    assert len(set(tried)) == len(tried) == len(ran) > 5
    assert tuning.tile("logsumexp", block(), DEFAULT, ran.append) == wanted
    tuning._remembered.cache_clear()  # another process
    assert tuning.tile("logsumexp", block(), DEFAULT, ran.append) == wanted
    assert len(tried) == len(ran)
    tuning.tile("logsumexp", block(D=41), DEFAULT, ran.append)
    assert len(tried) == 2 * len(set(tried))


@pytest.mark.parametrize("text", ['{"logsumexp": {"rows"', "[]", '{"logsumexp": 3}'])
def test_a_broken_file_is_no_obstacle(folder, monkeypatch, text):
    folder.mkdir()
    (folder / "tiles.json").write_text(text)
    monkeypatch.setattr(tuning, "_milliseconds", fastest_is(DEFAULT, []))
    assert tuning.tile("logsumexp", block(), DEFAULT, lambda size: None) == DEFAULT
    assert json.loads((folder / "tiles.json").read_text())


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder, monkeypatch):
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr(tuning, "_milliseconds", fastest_is(DEFAULT, []))
    assert tuning.tile("logsumexp", block(), DEFAULT, lambda size: None) == DEFAULT


def test_nothing_is_tried_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "ENABLED", False)
    monkeypatch.setattr(tuning, "_milliseconds", lambda *_: pytest.fail("measured"))
    assert tuning.tile("logsumexp", block(), DEFAULT, lambda size: None) == DEFAULT


def test_candidates_fit_the_chip(monkeypatch):
    monkeypatch.setattr(kernel_plan, "shared_memory", lambda device: 100 * 2**10)
    for size in tuning.candidates(block(), DEFAULT):
        assert size.per_multiprocessor * size.stages * (size.rows + size.columns) * size.width * 4 <= 100 * 2**10


def test_tuned_kernels_give_the_same_loss(folder, monkeypatch):
    """Every kernel is tuned, with trials that run it; the result does not depend on the tile that wins."""
    tried = []
    wanted = KernelTile(64, 64, 32, 4, 3)
    monkeypatch.setattr(tuning, "candidates", lambda block, default: iter((default, wanted)))
    monkeypatch.setattr(tuning, "_milliseconds", fastest_is(wanted, tried))
    monkeypatch.setattr(plan, "SMALL_PAIRS", 0)
    x, y = (torch.nn.functional.normalize(torch.randn(70, 24), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)
    results = []
    for backend in ("eager", "triton"):
        loss = mb.clip_loss(x, y, scale, backend=backend) + mb.siglip_loss(x, y, scale, -5.0, backend=backend)
        results.append((loss, *torch.autograd.grad(loss, (x, y, scale))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert len(json.loads((folder / "tiles.json").read_text())) == 3
    assert tried.count(wanted) == 3


def test_no_tile_is_too_wide_for_its_kernel(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(tuning, "_milliseconds", fastest_is(DEFAULT, tried))
    tuning.tile("gradient", block(), DEFAULT, lambda size: None, widest=128)
    assert max(size.columns for size in tried) == 128
