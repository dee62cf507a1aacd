"""All settings of a training run, and recipes with defaults for a model and its data.

Each part of the config is defined beside the code it configures. Later sources override earlier ones: defaults, the recipe for
the model and the data, a TOML file, flags, `--set`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megabatch.world import World
from megabatch_train import names, settings
from megabatch_train.data import load as data
from megabatch_train.towers.lora import LoraConfig
from megabatch_train.towers.models import anchor as anchor_model

WARMUP_FRACTION, WARMUP_STEPS = 0.1, 50  # the longer of both, but at most half of the run
SCRATCH_RATE = 5e-4  # highest learning rate of a model with random weights, as in CLIP and open_clip
# Learning rate per step. Transformers with random weights collapse if the rate of Adam rises much faster, probably because the
# first gradients point in one direction and Adam moves all weights of a matrix together (docs/training.md has the runs).
STEEPEST_RISE = 5e-6

Name = Literal["clip", "siglip", "info_nce", "dcl", "hcl", "nt_xent", "sup_con", "matryoshka", "distill"]
CONTRASTS = ("info_nce", "dcl", "hcl")  # take hard negatives, a margin, a guide and a direction


@dataclass(frozen=True)
class LossConfig:
    """The loss and its initial values."""

    name: Name = "clip"  # which loss
    ids: bool = True  # whether pairs that share an image or a text are not each other's negatives
    scale: float | None = None  # initial value (default: the model's)
    bias: float | None = None  # initial value, of SigLIP (default: the model's)
    max_scale: float = 100.0  # the learned scale is clamped to it
    symmetric: bool = False  # of info_nce, dcl and hcl: the mean of both directions
    margin: float | None = None  # of info_nce, dcl and hcl: negatives that exceed the match by more are left out
    guide: str = ""  # of info_nce, dcl and hcl: a run's folder or a model whose similarities find false negatives (GIST)
    beta: float = 1.0  # of hcl: weight of hard negatives
    tau_plus: float = 0.1  # of hcl: expected share of false negatives
    widths: tuple[int, ...] = ()  # of matryoshka: dimensions that embeddings can be cut to; the full one is added
    teacher: str = ""  # of distill: a run's folder or a model whose similarities are the targets
    teacher_weight: float = 1.0  # of distill: weight of the teacher's targets beside CLIP's loss

    def __post_init__(self) -> None:
        """Checks the numbers, and that each setting is one of the loss."""
        for name in ("scale", "max_scale", "beta", "teacher_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"loss.{name} must be a finite number above 0, got {value}")
        if not 0 <= self.tau_plus < 1:
            raise ValueError(f"loss.tau_plus must be at least 0 and less than 1, got {self.tau_plus}")
        of = {
            "bias": ("siglip",),
            **dict.fromkeys(("symmetric", "margin", "guide"), CONTRASTS),
            **dict.fromkeys(("beta", "tau_plus"), ("hcl",)),
            "widths": ("matryoshka",),
            **dict.fromkeys(("teacher", "teacher_weight"), ("distill",)),
        }
        for name, losses in of.items():
            if getattr(self, name) != getattr(LossConfig, name) and self.name not in losses:
                raise ValueError(f"loss.{name} is for the losses {', '.join(losses)}, got loss.name = {self.name!r}")
        for name in ("widths", "teacher"):
            if self.name in of[name] and not getattr(self, name):
                raise ValueError(f"loss.{name} must be given for the loss {self.name!r}")


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


@dataclass(frozen=True)
class MemoryConfig:
    """How the free memory is used."""

    chunk: float = 0.25  # fraction for the activations of a chunk, if chunk_size is "auto"
    graphs: float = 0.6  # fraction for graphs kept from the first pass; 0 keeps none
    inputs: float = 0.3  # fraction of the host's memory for samples read ahead or waiting for the second pass; 0 reads twice
    resident: float = 0.0  # fraction for the whole dataset on the device, decoded and tokenized once; 0 reads it in every epoch
    checkpointing: Literal["auto", "on", "off"] = "auto"  # of activations; "auto" if small chunks are faster with it
    offload: bool = False  # weights, gradients and optimizer in host memory between their uses, with parallel = "fsdp"

    def __post_init__(self) -> None:
        """Checks the fractions."""
        for name in ("chunk", "graphs", "inputs", "resident"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memory.{name} must be a fraction from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save a checkpoint, and how many to keep."""

    every: int = 0  # steps between checkpoints; 0 for ten per run. The last step always has one
    minutes: float = 15.0  # and at most this many minutes between checkpoints; 0 for no limit
    keep: int = 2  # number of checkpoints
    best: str = "auto"  # metric by which the best weights are kept in best/; "auto" is recall@1 by text, "none" keeps none

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be at least 0, got {self.every}")
        if not 0 <= self.minutes < math.inf:
            raise ValueError(f"checkpoint.minutes must be a finite number of at least 0, got {self.minutes}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")

    def due(self, step: int, steps: int) -> bool:
        """Whether to save after `step` of `steps`."""
        return step == steps or step % (self.every or max(1, steps // 10)) == 0

    def late(self, seconds: float) -> bool:
        """Whether the last checkpoint is too many seconds ago."""
        return self.minutes > 0 and seconds >= 60 * self.minutes


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    data: str = "emoji"  # training data: a table, shards, emoji or wordnet
    validation: str | tuple[str, ...] = ""  # evaluation data, or a list; empty for the test split of `data`, if it has one
    holdout: float = 0.0  # fraction of `data` that is held out for evaluation, such as 0.01
    model: str = "small"  # towers to train, such as open_clip:ViT-B-32 or hf:NAME
    batch_size: int = 1024  # pairs in a step, over all processes; at least 2
    chunk_size: int | Literal["auto"] = "auto"  # samples a tower encodes at once
    epochs: float = 32.0  # passes over the data
    steps: int = 0  # 0 for as many as `epochs` has
    seed: int = 0  # of initial weights, order and augmentation
    device: Literal["auto", "cuda", "cpu"] = "auto"  # "auto" is CUDA if there is a device
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # "auto" is bf16 on a GPU that has it, else fp32
    compile: Literal["auto", "on", "off"] = "auto"  # layers of the towers by torch.compile; "auto" is "on" for CUDA
    parallel: Literal["ddp", "fsdp"] = "ddp"  # how ranks share the towers, under torchrun
    collapse: Literal["stop", "warn"] = "stop"  # whether a run that learns nothing ends with an error, or only warns
    ema: float = 0.0  # decay of averaged weights, such as 0.999, which are then evaluated and saved; 0 for none
    evaluate_every: int = 0  # steps between evaluations; 0 for one at the end
    augment: bool = True  # random crops of images in training
    workers: int | Literal["auto"] = "auto"  # readers of samples, or 0; "auto" is the cores less one on CUDA, else 0
    freeze: Literal["none", "first", "second"] = "none"  # LiT: the side of the model that is frozen
    keep_frozen: bool = True  # compute its embeddings once and keep them; its inputs are then not augmented
    data_options: dict[str, Any] = field(default_factory=dict)  # arguments of the dataset's class, such as a table's columns
    validation_options: dict[str, Any] = field(default_factory=dict)  # the same for the evaluation data
    model_options: dict[str, Any] = field(default_factory=dict)  # prompts, pooling and max_length; sizes of "small"
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, least in (("steps", 0), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, because the other pairs are the negatives, got {self.batch_size}")
        for name, least in (("chunk_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f'{name} must be at least {least}, or "auto", got {value}')
        if self.lora.rank and self.freeze != "none":
            raise ValueError(
                f'freeze must be "none" with lora.rank, got {self.freeze!r}: all weights beside the adapters are frozen'
            )
        if not self.epochs > 0 or not math.isfinite(self.epochs):
            raise ValueError(f"epochs must be more than 0, got {self.epochs}")
        if not 0 <= self.holdout < 1:
            raise ValueError(f"holdout must be at least 0 and less than 1, got {self.holdout}")
        if self.holdout and self.validation:
            raise ValueError(f"holdout must be 0 with validation data, got {self.holdout}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be at least 0 and less than 1, got {self.ema}")
        if self.precision == "fp16" and self.parallel == "fsdp":
            raise ValueError('precision must be "bf16" or "fp32" with parallel "fsdp", got "fp16"')
        if self.lora.quantize != "none" and self.parallel == "fsdp":
            raise ValueError(f'lora.quantize must be "none" with parallel "fsdp", got {self.lora.quantize!r}; "ddp" takes it')

    def on(self, device: torch.device) -> "TrainConfig":
        """The settings with "auto" replaced where the device alone decides; `config.toml` keeps "auto"."""
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        compiled = ("on" if device.type == "cuda" else "off") if self.compile == "auto" else self.compile
        return dataclasses.replace(self, precision=precision, compile=compiled)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Steps in all."""
        return self.steps or max(1, round(self.epochs * batches_per_epoch))


def scale_rate(config: OptimizerConfig, batch_size: int) -> float:
    """The learning rate for a batch size: lr · (batch_size / reference_batch)^p, with p = 0, ½ or 1 for `scaling`."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    rate = SCRATCH_RATE if config.lr == "auto" else config.lr
    return rate * math.pow(batch_size / config.reference_batch, power)


def highest_rate(config: OptimizerConfig, schedule: ScheduleConfig, batch_size: int, steps: int) -> float:
    """The highest learning rate of a run of `steps`. If `lr` is "auto", it is as high as the warm-up allows."""
    rate = scale_rate(config, batch_size)
    if config.lr != "auto":
        return rate
    return min(rate, STEEPEST_RISE * max(1, schedule.warm_up(steps)))


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


MOST_READERS = 32


def reader_count(config: TrainConfig, world: World) -> int:
    """`config.workers`. "auto" is one for each core that this process may use, less one, on CUDA, and 0 on a CPU.

    On a CPU the towers need all cores. Ranks of one machine share its cores.
    """
    if isinstance(config.workers, int):
        return config.workers
    if world.device.type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // world.local_size - 1, MOST_READERS))


# Settings that a resumed run must not change. Options of the data are among them, because they decide which samples there are,
# and so the meaning of the saved position in their order.
FIXED = (
    "batch_size",
    "seed",
    "data",
    "data_options",
    "holdout",
    "augment",
    "model",
    "model_options",
    "lora",
    "freeze",
    "keep_frozen",
    "loss",
    "optimizer.name",
    "ema",
)
# Settings that a resumed run may change.
FREE = (
    "epochs",
    "steps",
    "optimizer",  # but its name
    "schedule",
    "chunk_size",
    "memory",
    "workers",
    "device",
    "precision",
    "compile",
    "parallel",
    "checkpoint",
    "collapse",
    "evaluate_every",
    "validation",
    "validation_options",
)


# Other names for settings, for suggestions.
MEANINGS = {
    **{
        key.rpartition(".")[2]: key
        for key in settings.keys(TrainConfig)
        if "." in key and not key.endswith((".name", ".every"))
    },
    **dict.fromkeys(("learning_rate", "rate", "max_lr", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("grad_clip", "grad_clip_norm", "gradient_clip", "max_grad_norm", "clip"), "optimizer.clip_norm"),
    **dict.fromkeys(("warmup", "warm_up", "warm_up_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "warm_up_fraction"), "schedule.warmup_fraction"),
    **dict.fromkeys(("num_workers", "readers", "num_readers"), "workers"),
    **dict.fromkeys(("max_steps", "iterations", "num_steps"), "steps"),
    **dict.fromkeys(("num_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("val", "val_data", "eval_data", "test_data"), "validation"),
    **dict.fromkeys(("train_data", "dataset"), "data"),
    **dict.fromkeys(("eval_every", "eval_steps", "val_every"), "evaluate_every"),
    **dict.fromkeys(("save_every", "save_steps", "checkpoint_every"), "checkpoint.every"),
    **dict.fromkeys(("temperature", "logit_scale"), "loss.scale"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision"), "precision"),
    **dict.fromkeys(("micro_batch_size", "minibatch", "accum_freq"), "chunk_size"),
    **dict.fromkeys(("distributed", "strategy"), "parallel"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule.name"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "memory.checkpointing"),
    **dict.fromkeys(("cpu_offload", "offload_params"), "memory.offload"),
    **dict.fromkeys(("lora_rank", "lora_r"), "lora.rank"),
    **dict.fromkeys(("lock",), "freeze"),
    **dict.fromkeys(("keep_locked",), "keep_frozen"),
    **dict.fromkeys(("largest_scale",), "loss.max_scale"),
}

# For models that start from trained weights: a rate as in sentence-transformers' examples, and few epochs.
FINE_TUNING: settings.Table = {"optimizer": {"lr": 2e-5, "weight_decay": 0.01}, "epochs": 3.0}
ADAPTERS: settings.Table = {"optimizer": {"lr": 2e-4, "weight_decay": 0.0}}  # with LoRA, as in the QLoRA paper
WARMUPS = ("warmup_steps", "warmup_fraction")  # two ways to say one thing


def resolve(*given: Mapping[str, Any]) -> TrainConfig:
    """The settings of a run: the recipe for its model and data, overridden by the given tables, the last one winning."""
    asked = merge(*given)
    chosen = settings.build(TrainConfig, asked, meanings=MEANINGS)
    of_adapters = ADAPTERS if chosen.lora.rank else {}
    return settings.build(TrainConfig, merge(recipe(chosen.model, chosen.data), of_adapters, asked))


def merge(*tables: Mapping[str, Any]) -> settings.Table:
    """Later values in place of earlier ones.

    Two settings may say one thing in two ways. A later warm-up in steps replaces an earlier one as a fraction, later epochs
    replace earlier steps, and vice versa.
    """
    result: settings.Table = {}
    for one in tables:
        schedule, known = one.get("schedule"), result.get("schedule")
        if isinstance(schedule, Mapping) and isinstance(known, Mapping) and any(name in schedule for name in WARMUPS):
            result["schedule"] = {key: value for key, value in known.items() if key not in WARMUPS}
        if "epochs" in one and "steps" not in one:
            result["steps"] = 0
        result = settings.merge(result, one)
    return result


def recipe(model: str, data: str) -> settings.Table:
    """Settings that suit a model and data; the measurements are in docs/log.md, "Emoji"."""
    # Two encoders that were trained apart learn a common space from random projections, so they take the rate of new models.
    found: settings.Table = dict(FINE_TUNING) if names.has_weights(model) and "+" not in model else {}
    if model == "small":
        optimizer = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}
        found = {"optimizer": optimizer, "schedule": {"warmup_steps": 20}}
    if (model, data) == ("small", "emoji"):
        # A minute or two on two cores. Averaged weights replace a falling learning rate: in so few steps a cosine would fall
        # before the model has learned much.
        schedule = {"name": "constant", "warmup_fraction": 0.3}
        found |= {"batch_size": 512, "epochs": 28.0, "schedule": schedule, "ema": 0.95, "model_options": {"buckets": 8192}}
    if data == "wordnet":
        found["epochs"] = 4.0
    return found


def anchor_paths(values: Mapping[str, Any], directory: str | None = None) -> settings.Table:
    """Settings with the relative paths that exist in a directory made absolute.

    Args:
        values: as `settings.table` makes them.
        directory: the working directory of the run that they are of; None for the present one.
    """
    place, found = Path(directory or os.getcwd()), dict(values)
    for key in ("data", "validation"):
        if isinstance(value := found.get(key), str) and value:
            found[key] = data.anchor(value, place)
        elif isinstance(value, list | tuple):
            found[key] = [data.anchor(one, place) for one in value]
        if isinstance(options := found.get(f"{key}_options"), Mapping):
            found[f"{key}_options"] = data.anchor_options(options, place)
    if isinstance(model := found.get("model"), str):
        found["model"] = anchor_model(model, place)
    if isinstance(loss := found.get("loss"), Mapping):
        models = {key: anchor_model(loss[key], place) for key in ("teacher", "guide") if loss.get(key)}
        found["loss"] = {**loss, **models}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The `FIXED` settings that have changed, each with both values; arguments are as `settings.table` makes them."""
    found: list[str] = []
    for key in FIXED:
        _compare(key, _at(before, key), _at(now, key), found)
    return found


def _compare(key: str, old: Any, new: Any, found: list[str]) -> None:
    """Compares tables entry by entry, so that messages name a setting as users write it."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            _compare(f"{key}.{name}", old.get(name), new.get(name), found)
    elif old != new:
        was, is_now = ("left out" if value is None else repr(value) for value in (old, new))
        found.append(f"{key} was {was} and is {is_now}")


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
