"""Optimizers, parameter groups and learning-rate schedules."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from megabatch import extras

WARMUP_FRACTION, WARMUP_STEPS = 0.1, 50  # the longer of both, but at most half of the run
SCRATCH_RATE = 5e-4  # highest learning rate of a model with random weights, as in CLIP and open_clip
# Learning rate per step. Transformers with random weights collapse if the rate of Adam rises much faster, probably because the
# first gradients point in one direction and Adam moves all weights of a matrix together (docs/training.md has the runs).
STEEPEST_RISE = 5e-6
MOMENTS = {"adamw": 2.0, "lion": 1.0, "adafactor": 0.5}  # bytes of an optimizer's state for each byte of a parameter, about
SHORTEST_FACTORED = 32  # AdaFactor stores the whole second moment of matrices with a shorter dimension
OLDEST_TIMM = (1, 0, 29)  # earlier versions average AdaFactor's second moment over the wrong dimension of some matrices
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its settings."""

    name: Literal["adamw", "adafactor", "lion"] = "adamw"  # which optimizer; AdaFactor stores a quarter of the bytes
    lr: float | Literal["auto"] = "auto"  # highest learning rate; "auto": 5e-4, but at most 5e-6 per step of the warm-up
    scaling: Literal["none", "sqrt", "linear"] = "none"  # growth of `lr` with batch_size / reference_batch
    reference_batch: int = 1024  # pairs that `lr` is for; unused if `scaling` is "none"
    weight_decay: float = 0.2  # for matrices; not for norms, biases and the loss
    betas: tuple[float, float] = (0.9, 0.98)  # AdaFactor uses only the first
    eps: float = 1e-6  # of AdamW
    clip_norm: float = 0.0  # largest gradient norm; 0 for no clipping

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.lr != "auto" and not 0 < self.lr < math.inf:
            raise ValueError(f'optimizer.lr must be "auto" or a finite number above 0, got {self.lr}')
        if self.reference_batch < 1:
            raise ValueError(f"optimizer.reference_batch must be at least 1, got {self.reference_batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be at least 0 and less than 1, got {self.betas}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be a finite number of at least 0, got {getattr(self, name)}")


def scale_rate(config: OptimizerConfig, batch_size: int) -> float:
    """The learning rate for a batch size: lr · (batch_size / reference_batch)^p, with p = 0, ½ or 1 for `scaling`."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    rate = SCRATCH_RATE if config.lr == "auto" else config.lr
    return rate * math.pow(batch_size / config.reference_batch, power)


def highest_rate(config: OptimizerConfig, schedule: "ScheduleConfig", batch_size: int, steps: int) -> float:
    """The highest learning rate of a run of `steps`. If `lr` is "auto", it is as high as the warm-up allows."""
    rate = scale_rate(config, batch_size)
    if config.lr != "auto":
        return rate
    return min(rate, STEEPEST_RISE * max(1, schedule.warm_up(steps)))


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
    rate = scale_rate(config, config.reference_batch)
    if config.name == "adafactor":
        return _build_adafactor(groups, rate, config.betas[0])
    if config.name == "lion":
        return _load_timm("Lion").Lion(groups, lr=rate, betas=config.betas)  # type: ignore[no-any-return]
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # One pass over the weights: 8.4 million of them take 6 ms on one core, and in PyTorch's default form 50.
    fused = devices in ({"cuda"}, {"cpu"})
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused or None)


def _build_adafactor(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """AdaFactor as in "Scaling Vision Transformers" (arXiv 2106.04560): the quality of Adam with a quarter of its memory.

    The second moment of a matrix is stored as the means of its rows and columns, the first moment in bfloat16. Weight decay is
    decoupled and times the learning rate, as in AdamW.
    """
    made: torch.optim.Optimizer = _load_timm("AdaFactor").AdafactorBigVision(
        groups, lr=rate, momentum=momentum or None, min_dim_size_to_factor=SHORTEST_FACTORED
    )
    return made


def _load_timm(optimizer: str) -> Any:
    """timm's optimizers."""
    optimizers = extras.load("timm.optim", purpose=f"The optimizer {optimizer}")
    found = version("timm")
    if tuple(map(int, found.split(".")[:3])) < OLDEST_TIMM:
        raise ImportError(
            f"The optimizer {optimizer} needs timm {'.'.join(map(str, OLDEST_TIMM))} or later, got {found}; "
            f"{extras.install_command('timm')} installs it"
        )
    return optimizers


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate from step to step: linear warm-up, then a cosine or a constant."""

    name: Literal["cosine", "constant"] = "cosine"  # after the warm-up
    warmup_steps: int | None = None  # length of the warm-up in steps
    warmup_fraction: float | None = None  # or as a fraction of the run; default: 0.1, but at least 50 steps or half of the run
    end: float = 0.0  # fraction of the highest rate that a cosine ends with

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps must be at least 0, got {self.warmup_steps}")
        if self.warmup_fraction is not None and not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"schedule.warmup_fraction must be from 0 to 1, got {self.warmup_fraction}")
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"schedule.warmup_steps must be left out with schedule.warmup_fraction = {self.warmup_fraction}, "
                f"got {self.warmup_steps}"
            )
        if not 0 <= self.end <= 1:
            raise ValueError(f"schedule.end must be from 0 to 1, got {self.end}")

    def warm_up(self, steps: int) -> int:
        """Steps of the warm-up. By default it is a tenth of the run, but at least 50 steps or half of the run."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, steps)
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * steps)
        return max(round(WARMUP_FRACTION * steps), min(WARMUP_STEPS, steps // 2))


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
