"""Optimizers by name, parameter groups for weight decay, and the learning rate: by batch size, and from step to step."""

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
MOMENTS = {"adamw": 2.0, "lion": 1.0, "adafactor": 0.5}  # bytes of an optimizer's state for each byte of a parameter, about
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings."""

    name: Literal["adamw", "adafactor", "lion"] = "adamw"  # which optimizer; AdaFactor stores a quarter of the bytes
    lr: float = 5e-4  # highest learning rate, for a batch of `reference_batch` pairs
    scaling: Literal["none", "sqrt", "linear"] = "none"  # growth of `lr` with batch_size / reference_batch
    reference_batch: int = 1024  # pairs that `lr` is for; unused if `scaling` is "none"
    weight_decay: float = 0.2  # for matrices; not for norms, biases and the loss
    betas: tuple[float, float] = (0.9, 0.98)  # AdaFactor uses only the first
    eps: float = 1e-6  # of AdamW
    clip_norm: float = 0.0  # largest gradient norm; 0 for no clipping

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optimizer.lr must be a finite number above 0, got {self.lr}")
        if self.reference_batch < 1:
            raise ValueError(f"optimizer.reference_batch must be at least 1, got {self.reference_batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be at least 0 and less than 1, got {self.betas}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be a finite number of at least 0, got {getattr(self, name)}")


def scaled_rate(config: OptimizerConfig, batch_size: int) -> float:
    """The learning rate for a batch size: lr · (batch_size / reference_batch)^p, with p = 0, ½ or 1 for `scaling`."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    return config.lr * math.pow(batch_size / config.reference_batch, power)


def parameter_groups(towers: Iterable[nn.Module], loss: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Three parameter groups: matrices, with weight decay; norms and biases, without; and the parameters of the loss.

    The last is a group of its own because FSDP2 shards the others and not these.
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
    """The optimizer of these groups. Its learning rate is set before every step."""
    if config.name == "adafactor":
        return AdaFactor(groups, lr=config.lr, momentum=config.betas[0])
    if config.name == "lion":
        lion = extras.load("timm.optim", extra="open_clip", purpose="The optimizer Lion").Lion
        made: torch.optim.Optimizer = lion(groups, lr=config.lr, betas=config.betas)
        return made
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # One pass over the weights: 8.4 million of them take 6 ms on one core, and in PyTorch's default form 50.
    fused = devices in ({"cuda"}, {"cpu"})
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate from step to step: linear warm-up, then a cosine or a constant."""

    name: Literal["cosine", "constant"] = "cosine"  # after the warm-up
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
    """The learning rate of step `step`, counted from 0, of `steps`.

    Step i of a warm-up of n steps, from 1 to n, has i/n of the highest rate.
    """
    warm_up = config.warm_up(steps)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    if config.name == "constant":
        return highest
    position = (step - warm_up) / max(1, steps - warm_up)
    return highest * (config.end + (1 - config.end) * 0.5 * (1 + math.cos(math.pi * position)))
