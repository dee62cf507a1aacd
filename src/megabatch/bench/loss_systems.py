"""CLIP losses that benchmarks compare, by name: megabatch, one in plain PyTorch, and other projects' if installed.

Each is a function of image embeddings, text embeddings and scale that returns CLIP's symmetric loss. A loss that is not
installed, or does not run on the device, raises `ImportError`.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megabatch as mb
from megabatch.primitives import Backend

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
MEGABATCH, DENSE, CHUNKS = "megabatch", "open_clip", "checkpoint"
INF_CL, CUT, LIGER = "inf_cl", "cut-cross-entropy", "Liger"
CHUNK_ROWS = 1024


def open_clip_losses() -> Any:
    """open_clip's module of losses, loaded alone because the package imports many others."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ImportError("open_clip", name="open_clip")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).parent / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _megabatch(device: str) -> Loss:
    backend: Backend = "triton" if device == "cuda" else "auto"
    return lambda x, y, k: mb.clip_loss(x, y, k, backend=backend)


def _dense(device: str) -> Loss:
    module = open_clip_losses().ClipLoss()

    def loss(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=inputs[0].dtype == torch.bfloat16):
            value: Tensor = module(*inputs)
        return value

    return loss


def checkpointed_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Rows of logits in chunks, recomputed in the backward pass by activation checkpointing."""

    def part(rows: Tensor, others: Tensor, scale: Tensor, start: int) -> Tensor:
        logits = scale * rows @ others.T  # (n, N)
        labels = torch.arange(start, start + len(rows), device=rows.device)
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    total = image.new_zeros((), dtype=torch.float32)
    for x, y in ((image, text), (text, image)):
        for i, rows in enumerate(torch.split(x, CHUNK_ROWS)):
            total = total + checkpoint(part, rows, y, scale, i * CHUNK_ROWS, use_reentrant=False)
    return total / (2 * len(image))


def _both_ways(one_way: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """The mean over both directions of a cross-entropy of (queries, keys, scale, labels)."""

    def loss(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        return (one_way(x, y, k, labels) + one_way(y, x, k, labels)) / 2

    return loss


def _inf_cl(device: str) -> Loss:
    from inf_cl import cal_flash_loss

    return _both_ways(lambda x, y, k, labels: cal_flash_loss(x, y, labels, k).mean())


def _cut_cross_entropy(device: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    exact = partial(linear_cross_entropy, filter_eps=None, impl="cce")
    return _both_ways(lambda x, y, k, labels: exact((k * x).to(x.dtype), y, labels))


def _liger(device: str) -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return _both_ways(lambda x, y, k, labels: fused(y, (k * x).to(x.dtype), labels))


_BUILDERS: dict[str, Callable[[str], Loss]] = {
    MEGABATCH: _megabatch,
    CHUNKS: lambda device: checkpointed_loss,
    DENSE: _dense,
    INF_CL: _inf_cl,
    CUT: _cut_cross_entropy,
    LIGER: _liger,
}
NAMES = tuple(_BUILDERS)
CUDA_ONLY = (INF_CL, CUT, LIGER)
ABOUT = {
    MEGABATCH: "tiles",
    CHUNKS: "rows in chunks, by hand",
    DENSE: "dense",
    INF_CL: "the paper's code",
    CUT: "exact, both ways",
    LIGER: "fused linear cross-entropy, both ways",
}


def loss_of(name: str, device: str) -> Loss:
    """The loss. Raises `ImportError` if it is not installed or does not run on `device`."""
    if name in CUDA_ONLY and device != "cuda":
        raise ImportError(f"{name} runs on CUDA alone", name=name)
    return _BUILDERS[name](device)
