"""Exponential moving average of the weights (EMA), which often generalises better. It is evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megabatch.cached import batchnorm
from megabatch.cached.dtensors import local


class Average:
    """Exponential moving average of parameters and running statistics.

    Args:
        modules: by name. The average of a sharded parameter is sharded in the same way.
        decay: weight of the old average in each step. In step t it is at most (1 + t) / (10 + t), so that the initial
            weights are soon forgotten.
    """

    def __init__(self, modules: dict[str, nn.Module], decay: float) -> None:
        self._live: dict[str, Tensor] = {}
        for name, module in modules.items():
            self._live |= {f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            # Running statistics are averaged too: those of the live weights belong to other activations, while the mean of a
            # linear layer's output is linear in its weights. Other buffers are constants and are not averaged.
            self._live |= {f"{name}.{key}": value for key, value in batchnorm.running_statistics(module).items()}
        self._decay = decay
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average after step `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        averages = [local(self.values[name]) for name in self._live]
        torch._foreach_lerp_(averages, [local(value.detach()) for value in self._live.values()], share)  # a few launches

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the averages into the modules, and restores the live values afterwards."""
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
