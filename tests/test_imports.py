"""`import megabatch` needs torch alone, and offers what it promises."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

import megabatch
from helpers import PATIENCE
from megabatch import dispatch, reference

BLOCKED = (
    *("triton", "open_clip", "transformers", "matplotlib", "rich", "torchvision", "PIL", "webdataset", "pyarrow", "emoji"),
    *("safetensors", "tensorboard", "trackio", "wandb", "accelerate", "lightning"),
)


@pytest.mark.thorough
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
import megabatch_train.data.demo, megabatch_train.data.shards, megabatch_train.data.tables
import megabatch_train.display.plots, megabatch_train.towers, megabatch_train.display.report, megabatch_train.cli
import megabatch_train.commands.eval, megabatch_train.commands.small
import megabatch_train.commands.search, megabatch_train.commands.train
import megabatch.integrations.open_clip, megabatch.integrations.trainers
import megabatch_train.commands.plan, megabatch_train.commands.bench, megabatch_train.planning.step
import megabatch_train.bench.report
x = torch.eye(4, requires_grad=True)
mb.clip_loss(x, x, 2.0).backward()
assert not [name for name in sys.modules if name.split(".")[0] in {BLOCKED!r}], "imported behind our back"
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


@pytest.mark.thorough
def test_import_stays_quiet_and_touches_neither_device_nor_compiler():
    program = """
import sys, torch, megabatch
megabatch.clip_loss
assert not torch.cuda.is_initialized() and "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not done.stdout


def test_importing_the_package_alone_imports_no_torch():
    program = "import sys, megabatch; assert 'torch' not in sys.modules and 'clip_loss' in dir(megabatch)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="'megabatch' has no attribute 'clip_los'"):
        megabatch.clip_los  # noqa: B018


def test_public_names():
    assert sorted(megabatch.__all__) == [
        "ClipLoss",
        "DistillClipLoss",
        "Encoded",
        "HostSource",
        "Negatives",
        "ReplayMismatchError",
        "ReplaySource",
        "RingError",
        "SigLipLoss",
        "Source",
        "Tokens",
        "cached_backward",
        "clip_loss",
        "dcl_loss",
        "hcl_loss",
        "info_nce_loss",
        "late_distillation_loss",
        "late_interaction_loss",
        "matryoshka_clip_loss",
        "maxsim_logsumexp",
        "maxsim_scores",
        "maxsim_topk",
        "nt_xent_loss",
        "pairwise_logsumexp",
        "pairwise_rank",
        "pairwise_softplus",
        "pairwise_symmetric_logsumexp",
        "pairwise_topk",
        "siglip_loss",
        "soft_clip_loss",
        "sup_con_loss",
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


def test_constants_of_the_compiler_are_marked_as_pytorch_marks_them():
    assert vars(torch.compiler.assume_constant_result(lambda: 0)) == vars(dispatch.constant(lambda: 0))
