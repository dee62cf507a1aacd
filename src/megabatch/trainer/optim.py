"""Optimizers: which parameters decay, how the learning rate follows the batch, and AdamW, AdaFactor or Lion by name."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from megabatch import extras
from megabatch.trainer.adafactor import AdaFactor

WARM_UP_FRACTION = 0.1
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters follow their gradients."""

    name: Literal["adamw", "adafactor", "lion"] = "adamw"
    lr: float = 5e-4  # the highest of the schedule, for a batch of `reference_batch` pairs
    scaling: Literal["none", "sqrt", "linear"] = "none"  # how it grows with batch_size / reference_batch
    reference_batch: int = 1024  # pairs that `lr` is meant for; plays no part while `scaling` is "none"
    weight_decay: float = 0.2  # of matrices; norms, biases, scale and bias of the loss have none
    betas: tuple[float, float] = (0.9, 0.98)  # AdaFactor uses the first alone
    eps: float = 1e-6  # AdamW's
    clip_norm: float = 0.0  # gradients that are longer, all together, are shortened to this; 0 for never

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr must be more than 0, got {self.lr}")
        if self.reference_batch < 1:
            raise ValueError(f"optimizer.reference_batch must be at least 1, got {self.reference_batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be at least 0 and less than 1, got {self.betas}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name} must be at least 0, got {getattr(self, name)}")


def scaled_rate(config: OptimizerConfig, batch_size: int) -> float:
    """The learning rate for a batch: as it is, or times the root of how many times larger the batch is, or times that."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    return config.lr * math.pow(batch_size / config.reference_batch, power)


def parameter_groups(towers: Iterable[nn.Module], loss: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Three groups of what learns: matrices, which decay; norms and biases, which do not; and what the loss itself learns.

    The last is apart because under FSDP2 the others are sharded and it is not.
    """
    decaying: dict[int, nn.Parameter] = {}
    sparing: dict[int, nn.Parameter] = {}
    for tower in towers:
        for module in tower.modules():
            for name, parameter in module.named_parameters(recurse=False):
                spared = parameter.dim() < 2 or name.endswith("bias") or isinstance(module, _NORMS)
                if parameter.requires_grad:
                    (sparing if spared else decaying)[id(parameter)] = parameter
    of_loss = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    groups = [
        {"params": list(decaying.values()), "weight_decay": weight_decay},
        {"params": list(sparing.values()), "weight_decay": 0.0},
        {"params": of_loss, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of these groups; its learning rate is set before every step."""
    if config.name == "adafactor":
        return AdaFactor(groups, lr=config.lr, momentum=config.betas[0])
    if config.name == "lion":
        lion = extras.load("timm.optim", extra="open_clip", purpose="The optimizer Lion").Lion
        made: torch.optim.Optimizer = lion(groups, lr=config.lr, betas=config.betas)
        return made
    on_cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=on_cuda or None)


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate goes from step to step."""

    name: Literal["cosine", "constant"] = "cosine"
    warm_up_steps: int | None = None  # length of the warm-up in steps
    warm_up_fraction: float | None = None  # or as a fraction of the run; 0.1 where neither is given
    end: float = 0.0  # fraction of the highest rate that a cosine ends with

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.warm_up_steps is not None and self.warm_up_steps < 0:
            raise ValueError(f"schedule.warm_up_steps must be at least 0, got {self.warm_up_steps}")
        if self.warm_up_fraction is not None and not 0 <= self.warm_up_fraction <= 1:
            raise ValueError(f"schedule.warm_up_fraction must be from 0 to 1, got {self.warm_up_fraction}")
        if self.warm_up_steps is not None and self.warm_up_fraction is not None:
            raise ValueError(
                f"schedule.warm_up_steps must be left out with schedule.warm_up_fraction = {self.warm_up_fraction}, "
                f"got {self.warm_up_steps}"
            )
        if not 0 <= self.end <= 1:
            raise ValueError(f"schedule.end must be from 0 to 1, got {self.end}")

    def warm_up(self, steps: int) -> int:
        """Steps of the warm-up, in a run of `steps`."""
        if self.warm_up_steps is not None:
            return min(self.warm_up_steps, steps)
        return round((WARM_UP_FRACTION if self.warm_up_fraction is None else self.warm_up_fraction) * steps)


def learning_rate(config: ScheduleConfig, highest: float, step: int, steps: int) -> float:
    """The learning rate of step number `step`, from 0, of `steps`.

    The first step of a warm-up of n has 1/n of the highest rate, its last all of it.
    """
    warm_up = config.warm_up(steps)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    if config.name == "constant":
        return highest
    position = (step - warm_up) / max(1, steps - warm_up)
    return highest * (config.end + (1 - config.end) * 0.5 * (1 + math.cos(math.pi * position)))
