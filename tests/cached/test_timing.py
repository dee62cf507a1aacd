"""The clock: phases partition the time, and a cached step reports its own."""

import time

import pytest
import torch
from torch import nn

import megabatch as mb
from megabatch.cached import streaming
from megabatch.cached.sources import TensorSource


class Slow(TensorSource):
    """Waits before each chunk."""

    waits = 0.02

    def chunks(self, spans, device):
        for chunk in super().chunks(spans, device):
            time.sleep(self.waits)
            yield chunk


def test_phases_are_a_partition_of_the_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now)
    clock = streaming.Clock(torch.device("cpu"))
    now = 1.0  # other
    with clock.activate(), streaming.phase("forward"):
        now = 3.0
        with streaming.phase("data"):
            now = 7.0
        now = 15.0
    now = 31.0
    assert clock.lap() == {"other": 17.0, "forward": 10.0, "data": 4.0}
    now = 32.0
    with streaming.phase("nobody listens"):
        now = 40.0
    assert clock.lap() == {"other": 9.0}


def test_a_phase_ends_with_its_error(monkeypatch):
    now = 0.0
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now)
    clock = streaming.Clock(torch.device("cpu"))

    def fail(kind):
        nonlocal now
        with streaming.phase("data"):
            now += 1
            raise kind

    with clock.activate():
        for kind in (KeyError, StopIteration):
            with pytest.raises(kind):
                fail(kind)
            now += 2
    assert clock.lap() == {"data": 2.0, "other": 4.0}


def test_a_cached_step_reports_its_phases():
    tower = nn.Linear(3, 4)
    towers = [(tower, Slow(torch.randn(6, 3))), (tower, torch.randn(6, 3))]

    def slow_loss(first, second):
        time.sleep(0.03)
        return mb.clip_loss(first, second, 5.0)

    clock = streaming.Clock(torch.device("cpu"))
    began = time.perf_counter()
    with clock.activate():
        mb.cached_backward(slow_loss, towers, chunk_size=2)
    phases, seconds = clock.lap(), time.perf_counter() - began
    assert set(phases) == {"data", "forward", "loss", "backward", "other"}
    assert phases["data"] >= 6 * Slow.waits  # three chunks, in both passes
    assert phases["loss"] >= 0.03
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.01)
