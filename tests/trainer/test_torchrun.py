"""Under torchrun itself: two processes train as one, in float64 to rounding, and the command line as a user types it."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

import runs
from helpers import PATIENCE
from megabatch_train import settings
from megabatch_train.trainer.checkpoints import read_weights
from ranks import free_port

pytestmark = pytest.mark.thorough

WORDS = [f"{first}{second}" for first in ("red", "blue", "green", "old", "new") for second in ("cat", "dog", "tree", "car")]
# No dropout, so that it does not matter which rank draws what; learning rates that differ from step to step.
CONFIG = 'data = "pairs.jsonl"\nbatch_size = 10\nsteps = 6\n[model_options]\nwidth = 16\nbuckets = 64\ndropout = 0.0\n'


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps({"query": word, "document": f"a {word} of its own"}) for word in WORDS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(folder, *arguments):
    paths = os.pathsep.join([os.path.abspath("src"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    call = [sys.executable, *arguments]
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def started(folder, launcher, *arguments):
    return python(folder, *launcher, "-m", "megabatch", "train", "--config", "small.toml", "--no-report", *arguments)


def learned(folder, step):
    return read_weights(folder / "checkpoints" / f"step_{step:08d}")[0]


@pytest.mark.parametrize("changes", [{}, {"loss": {"name": "siglip"}, "batch_size": 13}])
def test_two_processes_train_as_one_in_float64(tmp_path, changes):
    runs.trainer(tmp_path / "one", changes).fit()
    python(tmp_path, *TORCHRUN, runs.__file__, json.dumps([str(tmp_path / "two"), changes, {}]))
    one, two = learned(tmp_path / "one", 7), learned(tmp_path / "two", 7)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-9)


def test_the_command_line_trains_as_one_and_continues(folder):
    started(folder, [], "--output", "one")
    started(folder, TORCHRUN, "--output", "two", "--resume", "auto")
    one, two = learned(folder / "one", 6), learned(folder / "two", 6)
    assert one.keys() == two.keys()
    for name in one:  # float32, six steps
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    told = started(folder, TORCHRUN, "--resume", "two", "--set", "steps=8")
    assert "continuing after step 6" in told
    assert settings.read(folder / "two" / "config.toml")["steps"] == 8


def test_hard_negatives_of_two_processes_are_those_of_one(folder):
    rows = [
        {"query": word, "document": f"a {word}", "negative": [f"no {word}", "a redcat"][: 1 + i % 2]}
        for i, word in enumerate(WORDS)
    ]
    (folder / "hard.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for launcher, name in ([], "one"), (TORCHRUN, "two"):
        started(folder, launcher, "--data", "hard.jsonl", "--loss", "info_nce", "--output", name)
    one, two = learned(folder / "one", 6), learned(folder / "two", 6)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


def test_a_killed_rank_is_told_with_the_step(folder):
    """The survivor's message names the step; nothing promises a checkpoint that is not there."""
    paths = os.pathsep.join([os.path.abspath("src"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    call = [sys.executable, "-m", "megabatch", "train", "--config", "small.toml", "--no-report", "--output", "run"]
    call += ["--steps", "100000", "--set", "checkpoint.every=100000"]
    ranks = [
        subprocess.Popen(
            call, cwd=folder, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    metrics = folder / "run" / "metrics.jsonl"
    began = time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.1)
    ranks[1].kill()
    told = ranks[0].communicate(timeout=PATIENCE)[1]
    ranks[1].communicate(timeout=PATIENCE)
    assert ranks[0].returncode == 1
    line = told.splitlines()[-1]
    assert line.startswith("megabatch train: rank 0 of 2 lost another rank in step ")
    assert "of 100000; there is no checkpoint to resume from" in line
    assert "Traceback" not in told
