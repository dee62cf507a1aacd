"""Tests of benchmarks."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts in benchmarks/ can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
