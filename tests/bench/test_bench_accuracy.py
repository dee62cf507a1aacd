"""The benchmark's own truth against the reference: a wrong truth would pass wrong results."""

import platform
from pathlib import Path

import pytest
import torch

from helpers import aligned_pairs, leaves
from megabatch import reference
from megabatch_train import machine
from megabatch_train.bench import losses


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 1000])
def test_clip_truth_is_the_reference(monkeypatch, rows_at_a_time):
    monkeypatch.setattr(losses, "LOGITS_AT_A_TIME", rows_at_a_time * 50)
    x, y = leaves(*aligned_pairs(50, 12, noise=1.0, seed=0))
    scale = torch.tensor(20.0, dtype=torch.float64)
    loss = reference.clip_loss(x, y, scale)
    dx, dy = torch.autograd.grad(loss, (x, y))
    sample = torch.tensor([0, 3, 49])
    found = losses.clip_truth(x.detach(), y.detach(), scale, sample)
    assert abs(found.loss - loss.item()) < 1e-12
    torch.testing.assert_close(found.dimage, dx[sample])
    torch.testing.assert_close(found.dtext, dy[sample])
    assert max(found.errors(loss.item(), dx[sample], dy[sample])) < 1e-12
    wrong = found.errors(loss.item() * 1.1, dx[sample], dy[sample] * 1.01)
    assert wrong == pytest.approx((0.1, 0.01), rel=1e-6)


def test_the_machine_is_described_without_names_or_paths():
    about = machine.describe()
    assert {"cpu", "cores", "torch", "python"} <= set(about)
    told = f"{about} {machine.summary(about)}"
    assert platform.node() not in told
    assert str(Path.home()) not in told
