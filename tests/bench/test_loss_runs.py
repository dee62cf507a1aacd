"""What the benchmark says of losses: right ones are timed, wrong ones are named and get no speed."""

import math
import time
from dataclasses import asdict

import pytest
import torch

from megabatch_train.bench import losses, steps
from megabatch_train.bench.losses import (
    CHUNKS,
    CUDA_ONLY,
    DENSE,
    MEGABATCH,
    NAMES,
    LossResult,
    Products,
    is_right,
    loss_of,
    pairs,
)
from megabatch_train.bench.measure import LATE, MEMORY, MISSING, OK, WRONG
from megabatch_train.bench.report import tables


def measured(batches=(96, 200), memory=None, until=math.inf):
    found = list(losses.measure(list(batches), 24, "cpu", 0.0, memory, until))
    by = {(r.system, r.batch): r for r in found if isinstance(r, LossResult)}
    return by, [r for r in found if isinstance(r, Products)]


@pytest.mark.thorough
def test_all_systems_agree_and_are_timed_but_for_a_dense_loss_that_cannot_fit():
    by, products = measured(memory=16 * 100**2)
    assert [p.batch for p in products] == [96, 200]
    assert all(p.seconds > 0 for p in products)
    for name in (MEGABATCH, CHUNKS, DENSE):
        for batch in (96, 200):
            result = by[name, batch]
            if (name, batch) == (DENSE, 200):
                assert result.status == MEMORY
                continue
            assert result.status == OK
            assert result.forward > 0
            assert result.backward > 0
            assert max(result.loss_error, result.gradient_error) < 1e-5
    assert {by[name, 96].status for name in CUDA_ONLY} == {MISSING}


@pytest.mark.quick({"wrong": "gradient"})
@pytest.mark.parametrize("wrong", ["loss", "gradient", "nan", "negative"])
def test_a_wrong_result_has_no_speed(monkeypatch, wrong):
    right = loss_of(DENSE, "cpu")

    def loss(x, y, k):
        if wrong == "loss":
            return right(x, y, k) * 1.001
        if wrong == "gradient":
            return right(x, y.detach(), k) + 0.0 * y.sum()
        return right(x, y, k) * math.nan if wrong == "nan" else -right(x, y, k)

    monkeypatch.setitem(losses._BUILDERS, DENSE, lambda device: loss)
    by, _ = measured([96])
    result = by[DENSE, 96]
    assert result.status == WRONG
    assert (result.forward, result.backward, result.peak, result.seconds) == (None, None, None, None)
    assert result.loss_error is not None
    assert by[MEGABATCH, 96].status == OK
    if wrong == "loss":
        assert result.loss_error == pytest.approx(1e-3, rel=0.01)


def test_a_peer_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def loss(x, y, k):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setitem(losses._BUILDERS, DENSE, lambda device: loss)
    by, products = measured([96])
    assert by[DENSE, 96].status == "failed: RuntimeError: no such instruction"
    assert by[CHUNKS, 96].status == OK
    record = {"losses": [asdict(r) for r in by.values()], "products": [asdict(p) for p in products]}
    (table,) = tables({**record, "levels": [], "steps": [], "device": "cpu", "dtype": "float32", "width": 24}).values()
    assert [cells[2] for cells in table.rows if cells[:2] == ["96", DENSE]] == ["failed"]
    assert "open_clip failed: RuntimeError: no such instruction." in table.notes


def test_gradients_of_the_last_system_are_gone_before_memory_is_measured(monkeypatch):
    left = []

    def peak_memory(work, device):
        inputs = dict(zip(work.__code__.co_freevars, work.__closure__, strict=True))["inputs"].cell_contents
        left.append([tensor.grad is not None for tensor in inputs])
        return work(), 0

    monkeypatch.setattr(losses, "peak_memory", peak_memory)
    measured([96])
    assert left == [[False] * 3] * 3


def test_when_time_is_over():
    by, _ = measured([96], until=time.perf_counter() - 1)
    assert by[MEGABATCH, 96].status == LATE


def test_products_are_those_of_the_definition():
    """Each strip is multiplied: what is left in the buffers is that of the last one."""
    image, text, _ = (t.detach() for t in pairs(64, 8))
    work = losses.bare_products(image, text)
    assert list(work) == ["S", "dX", "dY"]
    names = dict(zip(work["S"].__code__.co_freevars, work["S"].__closure__, strict=True))
    work["S"]()
    torch.testing.assert_close(names["strip"].cell_contents, image @ text.T)


def test_nothing_but_what_precision_explains_is_right():
    assert is_right(1.0, 1e-6, 1e-6)
    for wrong in ((1.0, 1e-3, 0.0), (1.0, 0.0, 1e-3), (-1e-9, 0.0, 0.0), (math.nan, math.nan, 0.0), (1.0, 0.0, math.nan)):
        assert not is_right(*wrong)
    assert is_right(1.0, 1e-2, 1e-2, "cuda")
    assert not is_right(1.0, 1e-2, 4e-2, "cuda")


def test_every_name_has_a_line_about_it():
    assert set(losses.ABOUT) == set(NAMES)
    assert NAMES[0] == MEGABATCH


@pytest.mark.thorough
def test_steps_whose_gradients_are_wrong_have_no_speed():
    systems = ["plain step", "cached, budget 0", "accum-freq", "GradCache", "towers alone"]
    found = {r.system: r for r in steps.measure("tiny", [32], 16, "cpu", systems)}
    assert found["accum-freq"].status == WRONG
    assert found["accum-freq"].scale_ratio == pytest.approx(4, rel=1e-3)
    assert found["accum-freq"].seconds is None
    for name in ("plain step", "cached, budget 0", "GradCache"):
        assert (found[name].status, found[name].scale_ratio) == (OK, pytest.approx(1, abs=1e-3))
        assert found[name].seconds > 0
    assert found["towers alone"].error is None
