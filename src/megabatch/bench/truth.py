"""The CLIP loss and sampled rows of its gradients in float64, in linear memory: the reference of the benchmarks.

Written out from the definition, a few whole rows of logits at a time, and shares no code with the losses it checks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Logits held at a time: 128 MiB of them, and a few temporaries as large.
LOGITS_AT_A_TIME = 2**24


class ClipTruth(NamedTuple):
    """Loss and gradients in float64."""

    loss: float
    dimage: Tensor  # (S, D) the sampled rows
    dtext: Tensor  # (S, D)
    dscale: float | None

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
    *,
    want_dscale: bool = False,
) -> ClipTruth:
    """The loss of CLIP, and rows `sample` of its gradients.

    Args:
        image: (N, D) embeddings, of any dtype and on any device.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        sample: which rows of d image and d text are wanted.
        want_dscale: whether the gradient of the scale is wanted too; takes a second pass over all logits.
    """
    N = len(image)
    x, y, scale, sample = image.double(), text.double(), float(scale), sample.to(image.device)

    row, col = _logsumexps(x, y, scale)
    match = scale * (x * y).sum(1)  # (N,)
    loss = ((row - match) + (col - match)).mean() / 2

    dscale = None
    if want_dscale:
        total = -2 * match.sum()
        for rows in _chunks(N, N):
            s = scale * x[rows] @ y.T  # (n, N)
            total += (_probabilities(s, row[rows], col) * s).sum()
        dscale = float(total) / (2 * N * scale)

    return ClipTruth(
        loss=float(loss),
        dimage=_gradient_rows(x, y, scale, row, col, sample),
        dtext=_gradient_rows(y, x, scale, col, row, sample),
        dscale=dscale,
    )


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
        out[part] = _probabilities(s, row[i], col) @ y - 2 * y[i]
    return out * (scale / (2 * len(x)))


def _probabilities(s: Tensor, row: Tensor, col: Tensor) -> Tensor:  # (n, N)
    return (s - row[:, None]).exp_() + (s - col).exp_()


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, LOGITS_AT_A_TIME // columns)
    return (slice(start, start + size) for start in range(0, rows, size))
