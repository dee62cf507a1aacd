"""A function in fresh processes: one process with a memory limit, or the ranks of a gloo process group.

A measurement needs a fresh process because the allocator often keeps memory that an earlier measurement freed, which would
hide the next peak. Memory is limited so that a loss that does not fit fails by itself, before the system kills other programs.
"""

import datetime
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from megabatch.bench.measure import process_status
from megabatch.machine import ran_out_of_memory

T = TypeVar("T")


class ProcessError(RuntimeError):
    """A process failed or was killed before it had a result."""


def fresh_process(function: Callable[..., T], *args: Any, memory_limit: int | None = None) -> T:
    """`function(*args)`, computed in a fresh process.

    An exception is raised here again. A failed allocation is a `MemoryError`, a killed process a `ProcessError`.

    Args:
        function: a function at the top of a module, so that the other process can import it.
        args: its arguments; like the result, anything that can be pickled.
        memory_limit: bytes that may be allocated beyond those in use after the start; Linux only.
    """
    if memory_limit is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_limit must be None on {sys.platform}: only Linux limits the memory of one process")
    call = pickle.dumps((function, args))  # not left to multiprocessing, which would put tensors in shared memory
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            result: T = pickle.loads(pool.submit(_run, call, memory_limit).result())
        except BrokenProcessPool:
            reason = "was killed, perhaps because the system ran out of memory"
            raise ProcessError(f"the process of {function.__name__} {reason}") from None
        except Exception as error:
            if ran_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
    return result


def _run(call: bytes, memory_limit: int | None) -> bytes:
    if memory_limit is not None:
        import resource

        # RLIMIT_DATA counts private writable pages. RLIMIT_AS would also count libraries that PyTorch maps and never touches.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = process_status("VmData") + memory_limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    function, args = pickle.loads(call)
    return pickle.dumps(function(*args))


def on_ranks(function: Callable[..., T], world: int, *args: Any, seconds: float = 900.0) -> list[T]:
    """`function(rank, world, *args)` of each of `world` ranks, in processes that have a default group and share the cores.

    If a rank fails, or takes longer than `seconds`, all processes are ended and a `ProcessError` says why.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        given = (function, world, args, folder, seconds)
        ranks: Any = spawn(_rank, given, world, join=False)  # type: ignore[no-untyped-call]
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise ProcessError(f"a rank took longer than {seconds:.0f} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise ProcessError(str(error).strip()) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, function: Callable[..., Any], world: int, args: tuple[Any, ...], folder: str, seconds: float) -> None:
    join(rank, world, f"file://{folder}/store", seconds)
    (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(function(rank, world, *args)))
    dist.barrier()  # a rank that exits early would look dead to the others
    os._exit(0)


def join(rank: int, world: int, address: str, seconds: float) -> None:
    """Makes this process a rank of the default group; ranks share the cores evenly."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
