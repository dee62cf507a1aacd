"""The examples of loops and trainers on tiny data: they learn, on one process and two."""

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import PATIENCE

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))  # Python does so for a script; the examples import toy.py
CASES = {
    "plain_loop": ["--batch", "256", "--chunk", "100", "--steps", "12"],
    "accelerate_loop": ["--batch", "64", "--chunk", "25", "--pairs", "448", "--accumulate", "3", "--epochs", "4"],
    "lightning_module": ["--batch", "64", "--chunk", "25", "--pairs", "448", "--accumulate", "3", "--epochs", "4"],
    "open_clip_loop": ["--batch", "64", "--chunk", "25", "--steps", "12"],
}
PACKAGES = {"accelerate_loop": "accelerate", "lightning_module": "lightning", "open_clip_loop": "open_clip"}


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*fewer than the logging interval:UserWarning")
@pytest.mark.quick({"name": "plain_loop"}, {"name": "open_clip_loop"})
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thorough
def test_an_example_learns(name, capsys, monkeypatch, tmp_path):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    monkeypatch.chdir(tmp_path)
    if name == "accelerate_loop":
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](CASES[name])
    first, last, *_ = numbers(capsys.readouterr().out)
    assert last < first - 0.2, (first, last)


def test_open_clip_resumes_from_its_example(tmp_path, capsys):
    open_clip = pytest.importorskip("open_clip")
    example = runpy.run_path(str(FOLDER / "open_clip_loop.py"))
    example["main"](["--batch", "16", "--chunk", "8", "--steps", "1", "--checkpoint", str(tmp_path / "epoch_1.pt")])
    saved = torch.load(tmp_path / "epoch_1.pt")["state_dict"]
    torch.manual_seed(1)
    model = example["tiny_model"]()
    before = model.token_embedding.weight.clone()
    open_clip.load_checkpoint(model, str(tmp_path / "epoch_1.pt"))
    assert not torch.equal(model.token_embedding.weight, before)
    values = {name.removeprefix("module."): value for name, value in saved.items()}  # open_clip's trainer saves DDP's names
    assert values.keys() == model.state_dict().keys()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def shares(group, rank, options):
    example = runpy.run_path(str(FOLDER / "torchrun_loop.py"))
    return example["train"](argparse.Namespace(**options), torch.device("cpu"), group)


@pytest.mark.thorough
def test_two_processes_learn_what_one_learns(two):
    options = {"batch": 101, "chunk": 20, "steps": 3}
    found, alone = two.run(shares, 2, options), two.run(shares, 1, options)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(alone[0], rel=1e-4)  # float32, three steps
    assert found[0][-1] < found[0][0]


# Python's exit aborts or hangs if a thread of gloo still has a tensor to release (docs/log.md, "Threads of gloo at exit").
THREADS_AT_EXIT = """
import atexit, pathlib
def show():
    print("threads", *(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")))
atexit.register(show)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("torchrun_loop", ["--batch", "256", "--chunk", "50", "--steps", "8"]),
        ("open_clip_loop", ["--batch", "64", "--chunk", "25", "--steps", "12"]),
        ("accelerate_loop", ["--batch", "32", "--chunk", "25", "--pairs", "448", "--epochs", "4"]),
    ],
)
def test_under_torchrun(name, arguments, tmp_path):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    (tmp_path / "sitecustomize.py").write_text(THREADS_AT_EXIT)
    paths = os.pathsep.join([str(tmp_path), os.path.abspath("src"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    environment |= {"ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call = [*launch, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    first, last = numbers(done.stdout)[-2:]
    assert last < first - 0.2, done.stdout
    assert "gloo" not in done.stdout, done.stdout
