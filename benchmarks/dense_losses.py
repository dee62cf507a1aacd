"""The losses with a path for small batches, their dense forms in plain PyTorch, and inputs for both."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.bench.accuracy import SCALE

BIAS = -10.0  # of siglip_loss


def dense_clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    logits, labels = scale * x @ y.T, torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


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


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # ours, dense
    "clip_loss": (mb.clip_loss, dense_clip),
    "siglip_loss": (lambda x, y, s: mb.siglip_loss(x, y, s, BIAS), dense_siglip),
    "info_nce_loss": (lambda x, y, s: mb.info_nce_loss(x, y, scale=s), dense_info_nce),
    "nt_xent_loss": (mb.nt_xent_loss, dense_nt_xent),
    "sup_con_loss": (lambda x, y, s: mb.sup_con_loss(x, labels_of(x), s), dense_sup_con),
}


def data(B: int, D: int, dtype: torch.dtype, device: str, noise: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(B + D)
    x, e = (F.normalize(torch.randn(B, D, generator=generator, device=device), dim=1) for _ in range(2))
    y = F.normalize(x + noise * e, dim=1)
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(), torch.tensor(SCALE, device=device, requires_grad=True)


def outcome(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The value and all gradients; 0 for an input that a loss does not use."""
    value = loss(*inputs)
    found = torch.autograd.grad(value, inputs, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True))]


def step_of(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Forward and backward."""

    def step() -> None:
        torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)

    return step


def errors(mine: Callable[..., Tensor], dense: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[float]:
    """Relative errors of the value and of each gradient."""
    return relative_errors(outcome(mine, inputs), truth_of(dense, inputs))


def truth_of(dense: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The value and all gradients in float64."""
    return outcome(dense, tuple(tensor.detach().double().requires_grad_() for tensor in inputs))


def relative_errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(found, truth, strict=True)]
