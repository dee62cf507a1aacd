"""Losses, gradient caching and training run on a device type that is neither "cuda" nor "cpu", and that has no float64.

    python tests/test_other_device.py FOLDER

PyTorch keeps a registered device until the process ends, so all checks run in one process of their own.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megabatch as mb
from megabatch.cached import second_pass
from megabatch.world import World, devices, free_memory, join_world

SOURCES = Path(mb.__file__).parent
N, D = 300, 24  # several tiles would take minutes, because every operator copies its tensors
DEVICE = "other"


@pytest.mark.skipif(shutil.which("g++") is None, reason="the device is compiled")
def test_another_device(tmp_path):
    from helpers import PATIENCE

    paths = os.pathsep.join([str(Path(__file__).parent / "support"), str(SOURCES.parent), *sys.path])
    without_interpreter = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**without_interpreter, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert done.stdout.split("checks: ")[1].split() == [name for name in globals() if name.startswith("check_")]


# Modules that serve one device type by design. In the others, a call of `torch.cuda` must be behind a check of the type.
OF_ONE_TYPE = ("kernels", "operators/one_gpu.py")


def test_no_module_asks_whether_cuda_is_available():
    """A device is given by its tensors or by `World`: a machine with an accelerator of another type has no CUDA."""
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES).as_posix().startswith(OF_ONE_TYPE):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            asks = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda.is_available"
            assert not asks, f"{path}:{node.lineno} decides by CUDA; `world.devices` lists what a machine has"


def test_float64_is_asked_for_by_the_device():
    """`.double()` and float64 constants fail on devices without float64; the CPU and the kernels' own code may use them."""
    allowed = {"reference.py", "operators/dense.py", "operators/one_gpu.py", "world.py"}
    for path in SOURCES.rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        if name in allowed or name.startswith(OF_ONE_TYPE):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "double"
            by_kernels = name == "tiles/block.py"  # `round_logits` after the return of the PyTorch engine
            assert not called or by_kernels, f"{name}:{node.lineno} needs float64; use `to_exact`"


# ----------------------------------------------------------------------------------------------------------------------
# The checks


def differences(loss, *, rounding=2e-5):
    """Compares a loss and its gradients on the device with those in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    sides = [F.normalize(torch.randn(N, D, generator=generator), dim=1) for _ in range(2)]
    results = []
    for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
        x, y = (side.to(device, dtype).requires_grad_() for side in (side.clone() for side in sides))
        scale = torch.tensor(20.0, dtype=dtype, device=device, requires_grad=True)
        value = loss(x, y, scale)
        assert value.device.type == device
        value.sum().backward()
        results.append([tensor.detach().cpu() for tensor in (value, x.grad, y.grad, scale.grad) if tensor is not None])
    for there, here in zip(*results, strict=True):
        error, size = (there - here).abs().max().item(), here.abs().max().item()
        assert error <= rounding * size, (error, size)


def check_losses():
    """Logits up to 20 have rounding errors of 2⁻²⁰ in float32, so a softmax has 1e-6 of itself."""
    index = torch.arange(N) // 3

    def labels(x):
        return index.to(x.device)

    def bias(x):
        return torch.tensor(-5.0, dtype=x.dtype, device=x.device)

    differences(lambda x, y, s: mb.clip_loss(x, y, s))
    differences(lambda x, y, s: mb.clip_loss(x, y, s, reduction="none"))
    differences(lambda x, y, s: mb.clip_loss(x, y, s, label_smoothing=0.1))
    differences(lambda x, y, s: mb.clip_loss(x, y, s, ids=labels(x)))
    differences(lambda x, y, s: mb.siglip_loss(x, y, s, bias(x)))
    differences(lambda x, y, s: mb.siglip_loss(x, y, s, bias(x), reduction="none"))
    differences(lambda x, y, s: mb.info_nce_loss(x, y, scale=s, negatives=mb.Negatives(y.detach().flip(0) * 0.5)))
    differences(lambda x, y, s: mb.dcl_loss(x, y, scale=s))
    differences(lambda x, y, s: mb.hcl_loss(x, y, scale=s))
    differences(lambda x, y, s: mb.nt_xent_loss(x, y, scale=s))
    differences(lambda x, y, s: mb.sup_con_loss(x, labels(x), scale=s) + 0 * y.sum())
    differences(lambda x, y, s: mb.sup_con_loss(x, labels(x), scale=s, form="in") + 0 * y.sum())
    differences(lambda x, y, s: mb.soft_clip_loss(x, y, s, y.detach(), x.detach(), 30.0))
    differences(lambda x, y, s: mb.matryoshka_clip_loss(x, y, s, widths=[8, 24]))
    differences(lambda x, y, s: mb.late_interaction_loss(x.view(-1, 4, D), y.view(-1, 4, D), scale=s))


def check_rank_and_topk():
    x, y = torch.randn(2, N, D)
    there, here = (mb.pairwise_rank(x.to(device), y.to(device)) for device in (DEVICE, "cpu"))
    assert torch.equal(there[0].cpu(), here[0])
    there, here = (mb.pairwise_topk(x.to(device), y.to(device), 5) for device in (DEVICE, "cpu"))
    assert torch.equal(there[1].cpu(), here[1])


def check_autocast():
    x, y = (side.to(DEVICE) for side in F.normalize(torch.randn(2, N, D), dim=2))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (x @ y.T).dtype == torch.bfloat16
        loss = mb.clip_loss(x, y, 20.0)
        assert second_pass.list_autocasts() == [DEVICE]
    rounded = mb.clip_loss(x.bfloat16().float(), y.bfloat16().float(), 20.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu(), rounded.cpu())
    with pytest.raises(ValueError, match=r"NVIDIA|not installed"):
        mb.clip_loss(x, y, 20.0, backend="triton")


def check_gradient_caching():
    """Dropout draws from the device's own generator: both passes must see the same numbers, and leave it as a step does."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(D, 32), nn.Dropout(0.3), nn.Linear(32, 16)).to(DEVICE)
    images, texts = torch.randn(2, 60, D).to(DEVICE)
    module = torch.get_device_module(DEVICE)
    module.manual_seed(7)
    encoded = [F.normalize(torch.cat([tower(part) for part in side.split(20)]), dim=1) for side in (images, texts)]
    wanted = torch.autograd.grad(mb.clip_loss(*encoded, 5.0), tower.parameters())
    state = module.get_rng_state()

    def loss(x, y):
        return mb.clip_loss(F.normalize(x, dim=1), F.normalize(y, dim=1), 5.0)

    for sides in (images, texts), (mb.HostSource(images.cpu()), mb.HostSource(texts.cpu())):
        module.manual_seed(7)
        tower.zero_grad()
        mb.cached_backward(loss, [(tower, side) for side in sides], chunk_size=20, budget=0)
        assert torch.equal(module.get_rng_state(), state)
        for parameter, gradient in zip(tower.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient.cpu(), rtol=1e-4, atol=1e-6)


def check_world():
    assert devices() == [DEVICE, "cpu"]
    with join_world("auto") as world:
        assert world.device == torch.device(DEVICE, 0)
    assert free_memory(world.device) > 0
    with pytest.raises(ValueError, match='one of "auto", "other", "cpu" on this machine, got "xpu"'), join_world("xpu"):
        pass


def check_training(folder):
    """The same run as on the CPU, with a checkpoint from which it continues; and its evaluation."""
    from megabatch_train.cli import main

    words = [f"{color} {thing}" for color in ("red", "blue", "green") for thing in ("cat", "dog", "tree", "car")]
    lines = [json.dumps({"query": word, "document": f"a {word}"}) for word in words]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "run.toml").write_text(
        'data = "pairs.jsonl"\nbatch_size = 6\nworkers = 0\ncompile = "off"\n[checkpoint]\nevery = 2\n'
        '[schedule]\nname = "constant"\nwarmup_steps = 1\n[model_options]\nwidth = 16\nbuckets = 64\ndropout = 0.0\n'
    )
    os.chdir(folder)

    def train(name, device, *more):
        status = main(["train", "--config", "run.toml", "--no-report", "--output", name, "--set", f"device={device}", *more])
        assert status == 0
        return [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]

    here, there = train("here", "cpu", "--steps", "4"), train("there", "auto", "--steps", "2")
    there = train("there", "auto", "--steps", "4", "--resume", "auto")
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (here, there)]
    assert len(losses[0]) == 4, losses
    for one, other in zip(*losses, strict=True):
        assert abs(one - other) < 1e-4 * abs(one), losses
    assert main(["eval", "there", "--data", "pairs.jsonl"]) == 0


if __name__ == "__main__":
    import inspect

    import other_device

    other_device.build(sys.argv[1])
    World(torch.device(DEVICE))
    names = [name for name in list(globals()) if name.startswith("check_")]
    for name in names:
        function = globals()[name]
        function(*([Path(sys.argv[1])] if inspect.signature(function).parameters else []))
    print("checks:", *names)
