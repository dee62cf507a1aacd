"""A slow average of the parameters, which often finds more than the parameters themselves. Saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megabatch.cached import batchnorm


class Average:
    """The mean of what parameters have been, with weights that fall by `decay` a step.

    Args:
        modules: by name; parameters of theirs that are sharded have an average that is sharded alike.
        decay: how much of the average stays in a step. In step t it is at most (1 + t) / (10 + t), so that where training began
            is soon forgotten.
    """

    def __init__(self, modules: dict[str, nn.Module], decay: float) -> None:
        self._live: dict[str, Tensor] = {}
        for name, module in modules.items():
            self._live |= {f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            # Running statistics are averaged too: those of the live weights belong to other activations, while the mean of what
            # a linear layer gives is linear in its weights. All other buffers are constants, infinite ones too, and stay.
            self._live |= {f"{name}.{key}": value for key, value in batchnorm.running_statistics(module).items()}
        self._decay = decay
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step number `step`, from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for name, value in self._live.items():
            self.values[name].lerp_(value.detach(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages where the parameters and statistics are, and those back afterwards."""
        kept = {name: value.detach().clone() for name, value in self._live.items()}
        self._put(self.values)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in self._live.items():
            value.copy_(values[name])
