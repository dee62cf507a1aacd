"""The training loss: CLIP or SigLIP over all ranks, with a learned scale and bias, over the pairs that could be read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megabatch.losses import clip_loss, siglip_loss
from megabatch.world import World

SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0  # initial values of the SigLIP paper


@dataclass(frozen=True)
class LossConfig:
    """The loss and its initial values."""

    name: Literal["clip", "siglip"] = "clip"  # which loss
    ids: bool = True  # whether pairs with equal ids of the dataset are not each other's negatives
    scale: float | None = None  # initial value (default: the model's)
    bias: float | None = None  # initial value, of SigLIP (default: the model's)
    largest_scale: float = 100.0  # the learned scale is clamped to it

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("scale", "largest_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"loss.{name} must be a finite number above 0, got {value}")


class Objective(nn.Module):
    """The loss with its learned scale and bias.

    Args:
        config: of the loss.
        scale: of the model, exponentiated.
        bias: of the model; None if it was not trained with SigLIP.
        dtype: of the two parameters.
    """

    def __init__(self, config: LossConfig, scale: float, bias: float | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.bias: nn.Parameter | None = None
        if config.name == "siglip":
            if bias is None:  # the model's scale is for another loss
                scale, bias = SIGLIP_SCALE, SIGLIP_BIAS
            self.bias = nn.Parameter(torch.tensor(bias if config.bias is None else config.bias, dtype=dtype))
        beginning = min(scale if config.scale is None else config.scale, config.largest_scale)
        self.log_scale = nn.Parameter(torch.tensor(math.log(beginning), dtype=dtype))

    def forward(self, first: Tensor, second: Tensor, ids: Tensor | None, world: World) -> Tensor:  # ()
        """This rank's share of the loss over all ranks."""
        scale = self.log_scale.exp()
        if self.bias is None:
            return clip_loss(first, second, scale, ids=ids, group=world.group)
        return siglip_loss(first, second, scale, self.bias, ids=ids, group=world.group)

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamps the scale to `largest_scale`, after a step of the optimizer."""
        self.log_scale.clamp_(max=math.log(self.config.largest_scale))

    def numbers(self) -> dict[str, float]:
        """Current scale and bias, for logs and for the saved model."""
        found = {"scale": self.log_scale.detach().exp().item()}
        return found if self.bias is None else {**found, "bias": self.bias.detach().item()}


class ReadablePairs:
    """The loss of one step as a function of embeddings; pairs with an unreadable side are skipped.

    Args:
        objective: the loss.
        world: the ranks.
        usable: returns a mask of this rank's readable pairs; called after both sides have been read.
        ids: of this rank's pairs, or None.
        known: embeddings of a locked side, by the index of the side.
    """

    def __init__(
        self, objective: Objective, world: World, usable: Callable[[], Tensor], ids: Tensor | None, known: dict[int, Tensor]
    ) -> None:
        self._objective, self._world, self._usable, self._ids, self._known = objective, world, usable, ids, known
        self.pairs = 0  # readable pairs on all ranks; set by the call

    def __call__(self, *encoded: Tensor) -> Tensor:  # ()
        """This rank's share of the loss; zero, with zero gradients, if no rank has a readable pair."""
        first, second = self._both(encoded)
        usable = self._usable().to(first.device)  # (n,)
        self.pairs = round(self._world.sum([int(usable.sum())])[0])
        if self.pairs == 0:
            return sum((part.sum() for part in encoded), self._objective.log_scale.sum()) * 0
        ids = None if self._ids is None else self._ids.to(first.device)
        if not bool(usable.all()):
            first, second, ids = first[usable], second[usable], None if ids is None else ids[usable]
        loss: Tensor = self._objective(first, second, ids, self._world)
        return loss

    def _both(self, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        waiting = iter(encoded)
        first, second = (self._known[side] if side in self._known else next(waiting) for side in (0, 1))
        return first, second
