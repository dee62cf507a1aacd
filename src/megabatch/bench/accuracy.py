"""Inputs of loss benchmarks, and the test of their results: the CLIP loss and its gradients in float64, in linear memory.

The reference is written from the definition, a few whole rows of logits at a time. It shares no code with the losses it checks.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 50.0  # logit scale; CLIP starts at 14 and learns 100
NOISE = 4.0  # length of the noise between an image and its text: at SCALE the match is likely, not certain
SAMPLED_ROWS = 64  # gradient rows that are compared with float64
LOGITS_AT_A_TIME = 2**24  # in the reference: 128 MiB of logits, and a few temporaries as large

# A product of two unit vectors in float32 is off by a few roundings, a logit by SCALE times that, and the loss by about as
# much. The relative error of a probability, and of a gradient, is that of the logit.
TOLERANCE = 4 * SCALE * torch.finfo(torch.float32).eps

# For bfloat16 inputs. A logit that is rounded to bfloat16 near SCALE is off by 0.1; float32 logits stay far below this.
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
    """Numbers of the gradient rows that are compared."""
    return torch.linspace(0, batch - 1, min(batch, SAMPLED_ROWS)).long()


def is_right(loss: float, loss_error: float, gradient_error: float, device: str = "cpu") -> bool:
    """Whether the relative errors are within the input's precision. NaN and a negative loss are wrong."""
    if device == "cuda":
        return loss >= 0 and loss_error <= HALF_TOLERANCE["loss"] and gradient_error <= HALF_TOLERANCE["gradient"]
    return loss >= 0 and loss_error * loss <= TOLERANCE and gradient_error <= TOLERANCE


class ClipTruth(NamedTuple):
    """Loss and gradients in float64."""

    loss: float
    dimage: Tensor  # (S, D) the sampled rows
    dtext: Tensor  # (S, D)

    def errors(self, loss: float, dimage: Tensor, dtext: Tensor) -> tuple[float, float]:
        """Relative errors of a loss, and of the sampled rows of its gradients: the worse of the two, each by its norm."""
        pairs = ((dimage, self.dimage), (dtext, self.dtext))
        gradients = torch.stack([(d.double() - right).norm() / right.norm() for d, right in pairs])
        return abs(loss - self.loss) / abs(self.loss), float(gradients.max())  # torch's max keeps a NaN, Python's may not


@torch.no_grad()
def clip_truth(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    scale: float | Tensor,
    sample: Tensor,  # (S,) int64
) -> ClipTruth:
    """The CLIP loss, and the rows `sample` of its gradients.

    Args:
        image: (N, D) embeddings, of any dtype and on any device.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        sample: row numbers of d image and d text.
    """
    x, y, scale, sample = image.double(), text.double(), float(scale), sample.to(image.device)
    row, col = _logsumexps(x, y, scale)
    match = scale * (x * y).sum(1)  # (N,)
    loss = ((row - match) + (col - match)).mean() / 2
    dimage = _gradient_rows(x, y, scale, row, col, sample)
    return ClipTruth(float(loss), dimage, _gradient_rows(y, x, scale, col, row, sample))


def truth_of(image: Tensor, text: Tensor, log_scale: Tensor) -> ClipTruth:
    """The reference for embeddings of `pairs`."""
    return clip_truth(image, text, log_scale.detach().exp(), sampled_rows(len(image)))


def _logsumexps(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    """log-sum-exp of the rows and of the columns of scale·x·yᵀ."""
    row, col = torch.empty_like(x[:, 0]), torch.full_like(y[:, 0], -torch.inf)
    for rows in _chunks(len(x), len(y)):
        s = scale * x[rows] @ y.T  # (n, N)
        row[rows] = s.logsumexp(1)
        col = torch.logaddexp(col, s.logsumexp(0))
    return row, col


def _gradient_rows(x: Tensor, y: Tensor, scale: float, row: Tensor, col: Tensor, sample: Tensor) -> Tensor:  # (S, D)
    """dx_i = scale / 2N · [Σ_j (p_ij + q_ij)·y_j − 2·y_i], where p sums to one over j and q over i."""
    out = torch.empty_like(x[sample])
    for part in _chunks(len(sample), len(y)):
        i = sample[part]
        s = scale * x[i] @ y.T  # (s, N)
        out[part] = ((s - row[i, None]).exp_() + (s - col).exp_()) @ y - 2 * y[i]
    return out * (scale / (2 * len(x)))


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, LOGITS_AT_A_TIME // columns)
    return (slice(start, start + size) for start in range(0, rows, size))
