"""A slow average of the parameters, which often finds more than the parameters themselves. Saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The mean of what parameters have been, with weights that fall by `decay` a step.

    Args:
        parameters: by name; those that are sharded have an average that is sharded alike.
        decay: how much of the average stays in a step. In step t it is at most (1 + t) / (10 + t), so that where training began
            is soon forgotten.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._decay = decay
        self.values: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step number `step`, from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self.values[name].lerp_(parameter.detach(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages where the parameters are, and the parameters back afterwards."""
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._put(self.values)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
