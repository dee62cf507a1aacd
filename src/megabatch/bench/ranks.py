"""Several ranks on this machine: fresh processes in a gloo process group."""

import datetime
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megabatch.bench.measure import ProcessError

T = TypeVar("T")


def on_ranks(function: Callable[..., T], world: int, *args: Any, seconds: float = 900.0) -> list[T]:
    """What `function(rank, world, *args)` returns on each of `world` ranks, in processes that have a default group.

    The cores are shared out among them. If one fails, or takes longer than `seconds`, all are ended, and a `ProcessError` says
    why.
    """
    spawn = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    readers, processes = [], []
    try:
        for rank in range(world):
            reader, writer = spawn.Pipe(duplex=False)
            call = pickle.dumps((function, args))
            process = spawn.Process(target=_serve, args=(writer, rank, world, address, seconds, call), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        deadline = time.monotonic() + seconds
        return [_answer(reader, rank, deadline) for rank, reader in enumerate(readers)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, world: int, address: str, seconds: float) -> None:
    """Makes this process a rank of a default group; ranks share the cores evenly."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)


def _answer(reader: Connection, rank: int, deadline: float) -> Any:
    if not reader.poll(max(0.0, deadline - time.monotonic())):
        raise ProcessError(f"rank {rank} gave no answer in time")
    try:
        worked, answer = pickle.loads(reader.recv_bytes())
    except EOFError:
        raise ProcessError(f"rank {rank} ended without an answer") from None
    if not worked:
        raise ProcessError(f"rank {rank}: {answer}")
    return answer


def _serve(writer: Connection, rank: int, world: int, address: str, seconds: float, call: bytes) -> None:
    function, args = pickle.loads(call)
    try:
        join(rank, world, address, seconds)
        answer = (True, function(rank, world, *args))
    except Exception:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))
    writer.close()
    if answer[0]:
        dist.barrier()  # a rank that exits early would look dead to the others
    os._exit(0)
