"""Before anything is imported: kernels are interpreted where there is no device for them, and compiled code is not kept.

PyTorch's compile cache does not notice a changed operator, so a run has one of its own.
"""

import contextlib
import gc
import importlib.util
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from ranks import Pool

_cache = tempfile.TemporaryDirectory(prefix="megabatch-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from helpers import correct_interpreter

    correct_interpreter()


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples every time in `make test`, others every time where thorough tests run."""
    if importlib.util.find_spec("hypothesis") is not None:  # tests that need a GPU run without
        from hypothesis import settings

        settings.register_profile("quick", deadline=None, derandomize=True)
        settings.register_profile("thorough", deadline=None, derandomize=False, print_blob=True)
        settings.load_profile("quick" if "not thorough" in config.option.markexpr else "thorough")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(name: str) -> Generator[None, Any, Any]:
    """Of a test with the mark `quick(*cases)`, all other cases are thorough."""
    made = yield
    items = [item for item in made or () if item.get_closest_marker("quick")] if isinstance(made, list) else []
    for case in items[0].get_closest_marker("quick").args if items else ():
        if not any(_is(item, case) for item in items):
            raise ValueError(f"{name}: quick must name cases of the grid, got {case}")
    for item in items:
        if not any(_is(item, case) for case in item.get_closest_marker("quick").args):
            item.add_marker(pytest.mark.thorough)
    return made


def _is(item: pytest.Function, case: dict[str, Any]) -> bool:
    parameters = item.callspec.params
    return all(name in parameters and parameters[name] == value for name, value in case.items())


@pytest.hookimpl(trylast=True)  # after tests were chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first. Tests for a GPU are skipped where there is none. TEST_SHARD=i/n keeps every n-th test from i on.

    Tests with a pool of processes are all in the first shard: with a pool in each shard there would be more processes than a
    GPU serves at the same time.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # or one process would run them alone at the end
    shard = os.environ.get("TEST_SHARD")
    if shard is not None:
        number, count = map(int, shard.split("/"))
        pooled = [item for item in items if {"pool", "ranks"} & set(item.fixturenames)]  # type: ignore[attr-defined]
        others = [item for item in items if item not in pooled]
        items[:] = others[number::count] + (pooled if number == 0 else [])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


def _state() -> dict[str, Any]:
    """What tests share in one process, without the threads that libraries keep: tqdm its monitor, fsspec its event loop.

    A dummy stands for a thread that Python did not start, such as autograd's for a device, and stays when the thread has ended.
    """
    kept: tuple[str, ...] = ("tqdm_monitor", "fsspecIO", "asyncio_")
    if "torch._inductor.async_compile" in sys.modules:
        kept += ("ThreadPoolExecutor", "InductorSubproc", "subproc_worker_timer")  # threads of this project have its name
    ours = [t for t in threading.enumerate() if not t.name.startswith(kept) and not isinstance(t, threading._DummyThread)]
    ours = [t for t in ours if not t.name.endswith("(_read_thread)")]  # of the compiler's processes, in PyTorch 2.8
    return {f"thread {thread.name}": thread for thread in ours} | {
        "working directory": os.getcwd(),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "number of threads": torch.get_num_threads(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "process group": torch.distributed.is_initialized(),
    }


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Tests begin with the same random numbers and variables, in whatever order; one that changes anything else fails."""
    random.seed(0)
    torch.manual_seed(0)
    before, variables = _state(), dict(os.environ)
    yield
    for name in set(os.environ) - set(variables):  # libraries set some when they are imported
        del os.environ[name]
    os.environ.update(variables)
    end = time.monotonic() + 10  # threads that were told to stop, or whose pool waits for the garbage collector
    while (changed := _changes(before, _state())) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not changed, f"left behind: {changed}"


@pytest.fixture
def small_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes launches and strips so small that small inputs have several of each; no batch is small."""
    from megabatch import dispatch
    from megabatch.kernels import plan as kernel_plan
    from megabatch.tiles import plan

    monkeypatch.setattr(kernel_plan, "LAUNCH_ROWS", 256)
    monkeypatch.setattr(kernel_plan, "LAUNCH_PANELS", 1)
    monkeypatch.setattr(plan, "strip_size", lambda N, M, D, element_size: plan.TileSize(256, 128))
    monkeypatch.setattr(plan, "pair_strip", lambda N, element_size: plan.TileSize(256, 128))
    if importlib.util.find_spec("triton") is not None:
        from megabatch.kernels import two_models

        monkeypatch.setattr(two_models, "_BLOCK_M", 16)
    with dispatch.override(dense_triton=0):
        yield


@pytest.fixture(params=["in memory", "over tiles"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small batches as usual, and over tiles like large ones; PyTorch operations on a GPU have one way."""
    from megabatch import dispatch

    if request.param == "over tiles" and request.node.callspec.params.get("backend") == "eager":
        pytest.skip("the same as in memory")
    with dispatch.override(dense_triton=0) if request.param == "over tiles" else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator["Pool"]:
    """Eight ranks, started when the first test asks for them."""
    from ranks import Pool

    processes = Pool()
    yield processes
    processes.close()
