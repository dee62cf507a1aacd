"""A case of `family_gpu.py`: a loss of megabatch, its dense formula, the libraries it is known from, the products it needs.

Its functions take the embeddings that get gradients; whatever else a loss needs (a guide's embeddings, labels) they hold
themselves. `dense` works in every dtype: in float64 it is the truth, in bfloat16 it stands in where no library has the loss.
`products` counts matrix products of rows × rows × width, the least that an exact method can do: S, similarities (forward, and
again backward), dX and dY, their gradient's products with both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 20.0
LARGE = (65536, 16384, 4096)  # batches that a peer is tried at, until it fits
CUBIC = (4096, 2048, 1024)  # and one that holds rows³ numbers
DENSE = "dense PyTorch"

Loss = Callable[..., Tensor]
Products = tuple[float, float, float]  # S, dX, dY
TWO_SIDES: Products = (2, 1, 1)
SYMMETRIC: Products = (1, 0.5, 0.5)  # half of S, twice; a row's gradient comes from above and from below the diagonal


@dataclass(frozen=True)
class Peer:
    """Another implementation. Building it raises an ImportError where it is not installed."""

    build: Callable[[], Loss]
    batches: Sequence[int] = LARGE
    means: Loss | None = None  # its own definition, if it differs from the formula
    normalises: bool = True  # divides embeddings by their lengths, which are 1: its gradient has no part along them
    library: bool = True  # runs under autocast, as in training

    def loss(self, device: str) -> Loss:
        """As it is used on a device."""
        inner = self.build()
        if not self.library or device != "cuda":
            return inner

        def cast(*embeddings: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return inner(*embeddings)

        return cast


def normalised(loss: Loss) -> Loss:
    """Of embeddings brought to unit length."""
    return lambda *embeddings: loss(*(F.normalize(part, dim=1) for part in embeddings))


def formula(loss: Loss) -> Peer:
    """A peer of our own."""
    return Peer(lambda: loss, normalises=False, library=False)


@dataclass(frozen=True)
class Case:
    """One loss at one batch."""

    leaves: tuple[Tensor, ...]
    ours: Loss
    dense: Loss
    products: Products
    peers: dict[str, Peer] = field(default_factory=dict)
    note: str = ""

    def meant(self, system: str) -> Loss:
        """The definition that a system computes, for float64."""
        peer = self.peers.get(system)
        if peer is None:
            return self.dense
        means = peer.means or self.dense
        return normalised(means) if peer.normalises else means


@dataclass(frozen=True)
class Given:
    """The size and device of a case."""

    rows: int
    width: int
    device: str

    @property
    def backend(self) -> str:
        """The kernels by name on a GPU, so that nothing else is measured in their place."""
        return "triton" if self.device == "cuda" else "auto"

    def further(self) -> Tensor:  # (N, D)
        """Rows that match none of the batch."""
        generator = torch.Generator(self.device).manual_seed(1)
        rows = F.normalize(torch.randn(self.rows, self.width, generator=generator, device=self.device), dim=1)
        return rows.to(torch.bfloat16 if self.device == "cuda" else torch.float32)


def wide(x: Tensor) -> Tensor:
    """Logits in the type in which one would take their exponentials."""
    return x if x.dtype == torch.float64 else x.float()


def similarities(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, M)
    return wide(x @ y.to(x.dtype).T) * scale


def others(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, N)
    """Without the matching pairs."""
    return similarities(x, y, scale).fill_diagonal_(-torch.inf)


def found(logits: Tensor) -> Tensor:
    """Cross-entropy of column i in row i."""
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def sentence_losses() -> Any:
    try:
        from sentence_transformers.sentence_transformer import losses
    except ImportError:  # versions before 6
        from sentence_transformers import losses  # type: ignore[attr-defined,no-redef]
    return losses


def ranking(**options: Any) -> Callable[[], Loss]:
    """sentence-transformers' MultipleNegativesRankingLoss on embeddings."""

    def build() -> Loss:
        loss = sentence_losses().MultipleNegativesRankingLoss(None, scale=SCALE, **options)
        return lambda *embeddings: loss.compute_loss_from_embeddings(list(embeddings), None)

    return build


class Encoder(torch.nn.Module):
    """The model interface of sentence-transformers' losses, for given embeddings."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The given embeddings."""
        return {"sentence_embedding": features[self.key]}

    def get_embedding_dimension(self) -> None:
        """Unknown."""

    get_sentence_embedding_dimension = get_embedding_dimension  # its name before version 6
