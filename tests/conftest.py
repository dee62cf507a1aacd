"""Before anything is compiled: a compile cache of this run's own, because PyTorch's does not notice a changed operator."""

import os
import tempfile

import pytest

_cache = tempfile.TemporaryDirectory(prefix="megabatch-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))
