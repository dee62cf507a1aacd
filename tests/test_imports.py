"""`import megabatch` needs torch alone, and offers what it promises."""

import inspect
import os
import subprocess
import sys

import pytest

import megabatch
from helpers import PATIENCE
from megabatch import reference

BLOCKED = (
    *("triton", "open_clip", "transformers", "matplotlib", "rich", "torchvision", "PIL", "webdataset", "pyarrow", "emoji"),
    *("safetensors", "tensorboard", "wandb", "accelerate", "lightning"),
)


def test_import_and_use_with_everything_optional_blocked():
    program = f"""
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(name + " is blocked")

sys.meta_path.insert(0, Block())
import torch
import megabatch as mb
import megabatch.data.emoji, megabatch.data.shards, megabatch.data.tables, megabatch.data.wordnet
import megabatch.evaluation.sheet, megabatch.towers, megabatch.display, megabatch.report, megabatch.cli
import megabatch.commands.eval, megabatch.commands.info, megabatch.commands.report, megabatch.commands.search
import megabatch.commands.train
import megabatch.integrations.open_clip, megabatch.integrations.transformers, megabatch.integrations.lightning
import megabatch.commands.plan, megabatch.commands.bench, megabatch.planning.report, megabatch.bench.parts
x = torch.eye(4, requires_grad=True)
mb.clip_loss(x, x, 2.0).backward()
assert not [name for name in sys.modules if name.split(".")[0] in {BLOCKED!r}], "imported behind our back"
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


@pytest.mark.thorough
def test_import_stays_quiet_and_touches_no_device():
    program = "import torch, megabatch; assert not torch.cuda.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not done.stdout


def test_public_names():
    assert sorted(megabatch.__all__) == [
        "ClipLoss",
        "DistillClipLoss",
        "Encoded",
        "HostSource",
        "Negatives",
        "ReplaySource",
        "SigLipLoss",
        "Source",
        "cached_backward",
        "clip_loss",
        "dcl",
        "hcl",
        "info_nce",
        "matryoshka_clip_loss",
        "nt_xent",
        "pairwise_logsumexp",
        "pairwise_rank",
        "pairwise_self_logsumexp",
        "pairwise_softplus",
        "siglip_loss",
        "soft_clip_loss",
        "sup_con",
    ]
    for name in megabatch.__all__:
        assert getattr(megabatch, name).__doc__


def test_reference_shares_no_code():
    assert "megabatch" not in inspect.getsource(reference)


@pytest.mark.thorough
def test_triton_asked_for_by_name_never_falls_back():
    program = """
import torch, megabatch as mb
try:
    mb.clip_loss(torch.eye(4), torch.eye(4), 1.0, backend="triton")
except ValueError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert "its kernels run on NVIDIA GPUs, and the inputs are on cpu" in done.stdout, done.stderr
