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
from megabatch_train.trainer.checkpoints import CheckpointConfig
from megabatch_train.trainer.chunk_size import MemoryConfig
from megabatch_train.trainer.loss import LossConfig
from megabatch_train.trainer.optim import OptimizerConfig, ScheduleConfig


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
