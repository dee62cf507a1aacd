"""Before anything is imported: kernels are interpreted where there is no device for them, and compiled code is not kept.

PyTorch's compile cache does not notice a changed operator, so a run has one of its own.
"""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ranks import Pool

_cache = tempfile.TemporaryDirectory(prefix="megabatch-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches and strips of kernels so small that little inputs have several."""
    from megabatch.tiles import plan

    monkeypatch.setattr(plan, "MARCH_ROWS", 256)
    monkeypatch.setattr(plan, "MARCH_PANELS", 1)
    monkeypatch.setattr(plan, "strip_size", lambda N, M, D, element_size: plan.TileSize(256, 128))
    if importlib.util.find_spec("triton") is not None:
        from megabatch.tiles import triton_guided

        monkeypatch.setattr(triton_guided, "_COLUMNS", 16)


@pytest.fixture(scope="session")
def pool() -> Iterator["Pool"]:
    """Eight ranks, started when the first test asks for them."""
    from ranks import Pool

    processes = Pool()
    yield processes
    processes.close()
