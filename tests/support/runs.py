"""Tiny towers in float64 and data that is computed, for tests of whole runs; importable by processes of their own."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from helpers import PATIENCE
from megabatch.world import World, join_world
from megabatch_train import settings
from megabatch_train.data.dataset import Dataset, UnreadableSampleError
from megabatch_train.towers.tower import Pair, Tower
from megabatch_train.trainer.config import TrainConfig
from megabatch_train.trainer.health import StoppedError
from megabatch_train.trainer.loop import Trainer
from megabatch_train.trainer.run import MetricsFile
from ranks import free_port

SAMPLES = 40
WIDTH = 6
EMBEDDING = 33  # enough for AdaFactor to factor, and no multiple of two ranks
SETTINGS = {
    "data": "numbers",
    "model": "tiny",
    "batch_size": 12,
    "chunk_size": 4,
    "steps": 7,
    "checkpoint": {"every": 2},
    "optimizer": {"lr": 1e-2},
    "memory": {"graphs": 0.0, "reuse": False},
}


class Numbers(Dataset):
    """Sample i is a vector that follows from i, on both sides; two samples share an id; some cannot be read."""

    def __init__(self, broken=(), samples=SAMPLES):
        super().__init__()
        self.broken, self.samples = broken, samples
        self.reads = self.killed_at = self.signalled_at = 0

    def __len__(self):
        return self.samples

    def read(self, index, side):
        self.reads += 1
        if self.reads == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.reads == self.signalled_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if index in self.broken and side == 0:
            raise UnreadableSampleError(f"sample {index} is damaged")
        generator = torch.Generator().manual_seed(index * 2 + side)
        return torch.randn(WIDTH, generator=generator, dtype=torch.float64)

    def name(self, index):
        return f"number {index}"

    def ids(self, indices):
        return torch.as_tensor(indices) // 2


def prepare(sample, generator):
    if isinstance(sample, str) or sample.dtype == torch.uint8:  # a blank
        return torch.zeros(WIDTH, dtype=torch.float64)
    if generator is None:
        return sample
    return sample + 0.1 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)


def collate(samples):
    return torch.stack(samples)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, 40)
        self.norm = nn.LayerNorm(40)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(40, EMBEDDING)

    def forward(self, x):
        return F.normalize(self.head(self.dropout(F.gelu(self.norm(self.hidden(x))))), dim=1)


class Both(nn.Module):
    """Both sides in one module, with a parameter that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Net(), Net(dropout=0.3)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, first=None, second=None):
        return self.first(first) if second is None else self.second(second)


def tiny(dropout=0.0, shared=False, dtype=torch.float64):
    torch.manual_seed(3)
    if shared:
        both = Both().to(dtype)
        first = Tower(both, "image", prepare, lambda samples: {"first": collate(samples)})
        second = Tower(both, "text", prepare, lambda samples: {"second": collate(samples)})
        return Pair(first, second, 5.0, name="tiny")
    nets = [Net(dropout).to(dtype) for _ in range(2)]
    return Pair(
        *(Tower(net, kind, prepare, collate) for net, kind in zip(nets, ("image", "text"), strict=True)), 5.0, name="tiny"
    )


def config(**changes):
    return settings.build(TrainConfig, settings.merge(SETTINGS, changes))


class Memory:
    """An observer that remembers."""

    def __init__(self):
        self.records, self.evaluations, self.files, self.calls = [], [], [], []

    def start(self, run):
        self.calls.append(("start", run.first_step))

    def step(self, record):
        self.records.append(record)

    def on_evaluation(self, record):
        self.evaluations.append(record)

    def on_save(self, path):
        self.files.append(path)

    def finish(self, run):
        self.calls.append(("finish", run.step))


def trainer(folder, changes=None, *, pair=None, data=None, world=None, **options):
    return Trainer(config(**(changes or {})), pair or tiny(), data or Numbers(), Path(folder), world=world, **options)


def weights(made):
    """Everything that has been learned, whole and on this process."""
    found = {}
    for side, tower in enumerate(made.pair.towers):
        for name, value in tower.module.state_dict().items():
            found[f"{side}.{name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found | {f"loss.{name}": value.clone() for name, value in made.objective.state_dict().items()}


def same_bits(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


class Failing:
    """An order of batches that ends with an error, on all ranks alike."""

    def __init__(self, order, number):
        self.order, self.number = order, number

    @property
    def batches_per_epoch(self):
        return self.order.batches_per_epoch

    def batches(self, start, stop):
        for batch in self.order.batches(start, stop):
            if batch.number == self.number:
                raise FloatingPointError("meant to fail")
            yield batch


def on_rank(group, rank, folder, changes, how):
    """A whole run as one rank of a group; ends with what it has learned."""
    return whole(World(torch.device("cpu"), group), folder, changes, **how)


def whole(
    world, folder, changes, *, dropout=0.0, shared=False, resume=False, kill_at_read=0, signal_at_read=0, fails_at=0, **data
):
    numbers = Numbers(**data)
    numbers.killed_at, numbers.signalled_at = kill_at_read, signal_at_read
    observers = [MetricsFile()] if world.rank == 0 else []
    made = trainer(folder, changes, pair=tiny(dropout, shared), data=numbers, world=world, observers=observers)
    if fails_at:
        made.stages = [dataclasses.replace(made.stages[0], order=Failing(made.order, fails_at))]
    if resume:
        assert made.resume()
    made.fit()
    return weights(made)


def processes(folder, changes, *, ranks=1, **how):
    """The same in processes of their own, as torchrun starts them: exit statuses and what they said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    call = [sys.executable, __file__, json.dumps([str(folder), changes, how])]
    started = [
        subprocess.Popen(
            call, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    started[-1].wait(PATIENCE)
    answers = []
    for process in started:
        if how.get("kill_at_read") and process.poll() is None:
            process.kill()  # what waits for one that is gone
        answers.append((process.communicate(timeout=PATIENCE)[0], process.returncode))
    return answers


def under_torchrun(folder, changes, *, ranks, **how):
    """The same as a job of torchrun, which ends all ranks when one ends with an error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    call = [*launcher, __file__, json.dumps([str(folder), changes, how])]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def main():
    folder, changes, how = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with join_world("cpu") as world:
        if world.rank != world.size - 1:  # it hits one of several
            how = {key: value for key, value in how.items() if key not in ("kill_at_read", "signal_at_read")}
        try:
            whole(world, folder, changes, **how)
        except StoppedError as stopped:
            print(stopped)
            sys.exit(3)


if __name__ == "__main__":
    main()
