"""Eight processes that are started once and then run many cases, in groups of 1, 2, 3, 4 and 8 of them; they end by themselves.

Starting them takes most of the time of these tests. A case is a function at the top of a test module: it is called on every
rank of the group, with the group and the rank first, and what it returns comes back by rank.
"""

import datetime
import multiprocessing
import os
import pickle
import socket
import time
import traceback

import torch
import torch.distributed as dist

from helpers import PATIENCE, correct_interpreter

WORLDS = (1, 2, 3, 4, 8)


class RankFailedError(AssertionError):
    """What a rank raised where nothing should have been; or that it gave no answer."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank, size, port):
    """This process as a rank of the default group, which meets at a store that listens at the port already."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _serve(pipe, rank, size, port, seconds):
    correct_interpreter()
    join(rank, size, port)  # however long it takes to start
    limit = datetime.timedelta(seconds=seconds)  # a group has a timeout of its own, and not that of the default group
    groups = {world: dist.new_group(range(world), timeout=limit) for world in WORLDS if world <= size}
    if seconds == PATIENCE:
        groups[size] = dist.group.WORLD
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            break
        function, world, args = pickle.loads(call)
        try:
            answer = (True, function(groups[world], rank, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)  # without a word to the others, which may have gone


# Each rank would import these by itself: 5 s of a slow core, most of it PyTorch's compiler, which the first operator needs.
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "pytest", "hypothesis"),
    *("megabatch.cached", "megabatch_train.commands.eval"),
)


def starting():
    """How processes are started: with what ranks use imported once for all of them. CUDA does not survive a fork."""
    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))  # a module that cannot be imported is left out
    return context


class Pool:
    def __init__(self, size=8, seconds=PATIENCE):
        context = starting()
        self.size = size
        self._pipes, self.processes = [], []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a port that is free
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, self._store.port, seconds), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function, world, *args, seconds=PATIENCE):
        """What `function(group, rank, *args)` returns on each rank; a failure anywhere is a failure here."""
        answers = self.attempt(function, world, *args, seconds=seconds)
        for rank, (worked, answer) in enumerate(answers):
            if not worked:
                raise RankFailedError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def attempt(self, function, world, *args, seconds=PATIENCE):
        """The same as pairs: (True, result), or (False, how it failed)."""
        call = pickle.dumps((function, world, args))
        deadline = time.monotonic() + seconds
        for pipe in self._pipes[:world]:
            pipe.send_bytes(call)
        return [self._answer(rank, deadline) for rank in range(world)]

    def _answer(self, rank, deadline):
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, f"the process of rank {rank} has ended"
        self.close()
        raise RankFailedError(f"rank {rank} gave no answer in time")

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


class CountedReduceScatter:
    """Counts reductions of FSDP2 by watching the collective it calls, whose name depends on the version of PyTorch."""

    NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

    def __enter__(self):
        self.calls, self._original = 0, getattr(dist, self.NAME)

        def count(*args, **kwargs):
            self.calls += 1
            return self._original(*args, **kwargs)

        setattr(dist, self.NAME, count)
        return self

    def __exit__(self, *error):
        setattr(dist, self.NAME, self._original)
