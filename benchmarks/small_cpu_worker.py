"""A process of `small_cpu.py`: one system with a fixed number of threads, timed whenever it is asked."""

import pickle
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from dense_losses import LOSSES, data, outcome, step_of
from small_cpu_report import DENSE, OURS
from timing import milliseconds
from torch import Tensor

SECONDS_A_ROUND = 0.03


class Worker:
    """Another process. PyTorch's first call of one function can make another one faster, so systems do not share a process."""

    def __init__(self, system: str, threads: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, system, threads), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is an EOFError here

    def prepare(self, loss: str, B: int, D: int) -> list[Tensor]:
        """The value and all gradients of a loss, which `time` then times."""
        self._pipe.send((loss, B, D))
        found: list[Tensor] = pickle.loads(self._pipe.recv())
        return found

    def time(self) -> float:
        """Milliseconds of forward and backward."""
        self._pipe.send("time")
        return float(self._pipe.recv())

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, system: str, threads: int) -> None:
    torch.set_num_threads(threads)
    step: Callable[[], Any] = int  # until the first loss is prepared
    while (asked := pipe.recv()) is not None:
        if asked == "time":
            pipe.send(milliseconds(step, "cpu", SECONDS_A_ROUND))
        else:
            name, B, D = asked
            loss, inputs = LOSSES[name][(OURS, DENSE).index(system)], data(B, D, torch.float32, "cpu")
            step = step_of(loss, inputs)
            pipe.send(pickle.dumps(outcome(loss, inputs)))  # by itself, the pipe would put tensors in shared memory
