"""Partial sums and their merging."""

import pytest
import torch

from megabatch.tiles.sums import LogSum


def of(values):
    sums = LogSum.empty(values.shape[0], dtype=torch.float64, device=torch.device("cpu"))
    sums.add_exponentials_(values, dim=1, out=torch.empty_like(values))
    return sums


@pytest.mark.parametrize("spread", [1.0, 300.0, 1e4])
def test_merging_is_adding_in_any_order(spread):
    values = spread * torch.randn(20, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[3] = -torch.inf
    values[4, :6] = -torch.inf
    parts = [values[:, :2], values[:, 2:6], values[:, 6:]]
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = LogSum.empty(20, dtype=torch.float64, device=torch.device("cpu"))
        for part in order:
            merged.add_(of(parts[part]))
        torch.testing.assert_close(merged.value(), values.logsumexp(1), rtol=1e-13, atol=1e-13)
        assert merged.value()[3] == -torch.inf


def test_packing():
    sums = of(torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    again = LogSum.unpack(sums.pack())
    assert torch.equal(again.shift, sums.shift)
    assert torch.equal(again.total, sums.total)
