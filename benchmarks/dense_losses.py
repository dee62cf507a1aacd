"""The losses that have a dense path for small batches, their dense formulas in plain PyTorch, and inputs for both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch_train.bench.losses import dense_clip, pairs
from megabatch_train.bench.measure import with_gradients

BIAS = -10.0  # bias of siglip_loss


def dense_siglip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    logits = scale * x @ y.T + BIAS
    signs = 2 * torch.eye(len(x), device=x.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(x)


def dense_info_nce(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x), device=x.device))


def dense_nt_xent(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    z = torch.cat((x, y))
    logits = (scale * z @ z.T).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(x)))


def labels_of(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) // 3


def dense_sup_con(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    labels = labels_of(x)
    logits = scale * x @ x.T
    own = torch.eye(len(x), dtype=torch.bool, device=x.device)
    positive = (labels[:, None] == labels) & ~own
    count = positive.sum(1)
    mean = logits.masked_fill(~positive, 0).sum(1) / count.clamp_min(1)
    losses = logits.float() if logits.dtype != torch.float64 else logits
    losses = losses.masked_fill(own, -torch.inf).logsumexp(1) - mean
    return losses[count > 0].mean()


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # (megabatch, dense)
    "clip_loss": (mb.clip_loss, dense_clip),
    "siglip_loss": (lambda x, y, s: mb.siglip_loss(x, y, s, BIAS), dense_siglip),
    "info_nce_loss": (lambda x, y, s: mb.info_nce_loss(x, y, scale=s), dense_info_nce),
    "nt_xent_loss": (mb.nt_xent_loss, dense_nt_xent),
    "sup_con_loss": (lambda x, y, s: mb.sup_con_loss(x, labels_of(x), s), dense_sup_con),
}


def inputs_of(B: int, D: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns embeddings, in bf16 on a GPU and in float32 on a CPU, and the scale."""
    x, y, log_scale = pairs(B, D, device)
    return x, y, log_scale.detach().exp().requires_grad_()


def step_of(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Returns a function that computes a loss and its gradients."""

    def step() -> None:
        torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)

    return step


def truth_of(dense: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the value and all gradients in float64."""
    return with_gradients(dense, tuple(tensor.detach().double().requires_grad_() for tensor in inputs))


def relative_errors(results: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Returns the relative errors of the value and of each gradient."""
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(results, truth, strict=True)]
