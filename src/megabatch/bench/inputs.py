"""Deterministic embeddings for benchmarks of losses; pairs match about as well as those of a trained model."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 50.0  # logit scale; CLIP starts at 14 and learns 100
NOISE = 4.0  # length of the noise between an image and its text: at SCALE the match is likely, not certain
SAMPLED_ROWS = 64  # gradient rows that are compared with float64

# A product of two unit vectors in float32 is off by a few roundings; a logit by SCALE times that, and the loss by about as
# much; a probability, and with it a gradient, by that part of itself.
TOLERANCE = 4 * SCALE * torch.finfo(torch.float32).eps

# Of bfloat16 inputs: a logit that is rounded to bfloat16 near SCALE is off by 0.1; float32 logits stay far below this.
HALF_TOLERANCE = {"loss": 2e-2, "gradient": 3e-2}


def pairs(batch: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:  # (N, D), (N, D), ()
    """Unit-length embeddings, float32 on a CPU and bfloat16 on CUDA, and the logarithm of a learned scale."""
    generator = torch.Generator(device).manual_seed(0)
    image, noise = (F.normalize(torch.randn(batch, width, generator=generator, device=device), dim=1) for _ in range(2))
    text = F.normalize(image + NOISE * noise, dim=1)
    log_scale = torch.tensor(math.log(SCALE), device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return image.to(dtype).requires_grad_(), text.to(dtype).requires_grad_(), log_scale.requires_grad_()


def sampled_rows(batch: int) -> Tensor:  # (S,)
    """The gradient rows that are compared."""
    return torch.linspace(0, batch - 1, min(batch, SAMPLED_ROWS)).long()


def is_right(loss: float, loss_error: float, gradient_error: float, device: str = "cpu") -> bool:
    """Whether the relative errors are within the input's precision. NaN and a negative loss are wrong."""
    if device == "cuda":
        return loss >= 0 and loss_error <= HALF_TOLERANCE["loss"] and gradient_error <= HALF_TOLERANCE["gradient"]
    return loss >= 0 and loss_error * loss <= TOLERANCE and gradient_error <= TOLERANCE
