"""All settings of a training run, and recipes with other defaults for some models and datasets.

Settings come from defaults, the recipe for the model and the data, a TOML file, flags, and `--set`. In this order, later
sources override earlier ones. The comment after each setting is its description in `megabatch config`,
`megabatch train --help` and docs/settings.md.
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
from megabatch_train.data.batches import MiningConfig
from megabatch_train.evaluation.corpus import RetrievalConfig
from megabatch_train.towers.models import anchor as anchor_model
from megabatch_train.towers.tower import LoraConfig

WARMUP_FRACTION, WARMUP_STEPS = 0.1, 50  # default warm-up: the longer of the two, but at most half of the run
WSD_DECAY = 0.2  # default fraction of the run for the decay of "wsd"
SCRATCH_RATE = 5e-4  # highest learning rate of a model with random weights, as in CLIP and open_clip
# Largest rise of the learning rate per warm-up step. Transformers with random weights collapse if the rate of Adam rises much
# faster, probably because the first gradients point in one direction and Adam moves all weights of a matrix together
# (docs/log.md, "A fast warm-up").
STEEPEST_RISE = 5e-6
SHORTEST_INTERVAL = 30.0  # seconds between two checkpoints of a run without `checkpoint.every`

Name = Literal["clip", "siglip", "info_nce", "dcl", "hcl", "nt_xent", "sup_con", "matryoshka", "distill", "late_interaction"]
LATE = "late_interaction"  # loss of models with one vector per token
CONTRASTS = ("info_nce", "dcl", "hcl")  # losses with the options hard negatives, margin, guide and symmetric


@dataclass(frozen=True)
class LossConfig:
    """The loss and its initial values."""

    name: Name = "clip"  # name of the loss
    ids: bool = True  # exclude pairs that share an image or a text from each other's negatives
    scale: float | None = None  # initial logit scale (default: the scale of the model)
    bias: float | None = None  # siglip: initial logit bias (default: the bias of the model)
    max_scale: float = 100.0  # upper limit of the learned logit scale
    symmetric: bool = False  # info_nce, dcl, hcl, late_interaction: use the mean of both directions
    margin: float | None = None  # info_nce, dcl, hcl: exclude negatives whose similarity exceeds the match by more than this
    guide: str = ""  # info_nce, dcl, hcl: a run or a model whose similarities exclude false negatives (GIST)
    beta: float = 1.0  # hcl: weight of hard negatives
    tau_plus: float = 0.1  # hcl: expected share of false negatives
    widths: tuple[int, ...] = ()  # matryoshka: dims that embeddings can be cut to. The full dim is always added
    teacher: str = ""  # distill: a run or a model whose similarities are the targets
    teacher_weight: float = 1.0  # distill: weight of the distillation loss. The CLIP loss has weight 1

    def __post_init__(self) -> None:
        """Checks the numbers, and that only settings of the selected loss differ from their defaults."""
        for name in ("scale", "max_scale", "beta", "teacher_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"loss.{name} must be a finite number above 0, got {value}")
        if not 0 <= self.tau_plus < 1:
            raise ValueError(f"loss.tau_plus must be at least 0 and less than 1, got {self.tau_plus}")
        of = {
            "bias": ("siglip",),
            "symmetric": (*CONTRASTS, LATE),
            **dict.fromkeys(("margin", "guide"), CONTRASTS),
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

    name: Literal["adamw", "muon", "adafactor", "lion"] = "adamw"  # Muon is for matrices of layers, AdaFactor saves memory
    lr: float | Literal["auto"] = "auto"  # highest learning rate; "auto" is 5e-6 times the warm-up steps, at most 5e-4
    scaling: Literal["none", "sqrt", "linear"] = "none"  # multiply `lr` by this function of batch_size / reference_batch
    reference_batch: int = 1024  # batch size for which `lr` is the rate. Ignored if `scaling` is "none"
    weight_decay: float = 0.2  # weight decay of matrices. Norms, biases and the loss have none
    layer_decay: float = 1.0  # factor of the learning rate from a layer to the layer before it, such as 0.75
    betas: tuple[float, float] = (0.9, 0.98)  # decay rates of the averages. AdaFactor uses only the first
    eps: float = 1e-6  # epsilon of AdamW
    clip_norm: float = 0.0  # largest gradient norm; 0 for no clipping

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.lr != "auto" and not 0 < self.lr < math.inf:
            raise ValueError(f'optimizer.lr must be "auto" or a finite number above 0, got {self.lr}')
        if self.reference_batch < 1:
            raise ValueError(f"optimizer.reference_batch must be at least 1, got {self.reference_batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be at least 0 and less than 1, got {self.betas}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay must be above 0 and at most 1, got {self.layer_decay}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be a finite number of at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate of each step: a linear warm-up, then a cosine, a constant, or a constant and a linear decay (WSD)."""

    name: Literal["cosine", "constant", "wsd"] = "cosine"  # learning rate after the warm-up; "wsd" is warmup-stable-decay
    warmup_steps: int | None = None  # length of the warm-up in steps
    warmup_fraction: float | None = None  # length as a fraction of the run (default: 0.1, at least 50 steps or half the run)
    decay_fraction: float | None = None  # wsd: last fraction of the run, in which the rate falls linearly (default: 0.2)
    end: float = 0.0  # last rate of cosine and wsd, as a fraction of the highest rate
    unmask_fraction: float = 0.0  # last fraction of the run, whose steps keep all patches (model_options.patch_dropout)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps must be at least 0, got {self.warmup_steps}")
        if self.warmup_fraction is not None and not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"schedule.warmup_fraction must be from 0 to 1, got {self.warmup_fraction}")
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"schedule.warmup_steps must not be set with schedule.warmup_fraction = {self.warmup_fraction}, "
                f"got {self.warmup_steps}"
            )
        if self.decay_fraction is not None and self.name != "wsd":
            raise ValueError(
                f'schedule.decay_fraction must not be set for schedules other than "wsd", got {self.decay_fraction} for '
                f"{self.name!r}"
            )
        if self.decay_fraction is not None and not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"schedule.decay_fraction must be from 0 to 1, got {self.decay_fraction}")
        for name in ("end", "unmask_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name} must be from 0 to 1, got {getattr(self, name)}")

    def warm_up(self, steps: int) -> int:
        """Returns the number of warm-up steps.

        The default is a tenth of the run, but at least 50 steps, or half of a run of fewer than 100 steps.
        """
        if self.warmup_steps is not None:
            return min(self.warmup_steps, steps)
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * steps)
        return max(round(WARMUP_FRACTION * steps), min(WARMUP_STEPS, steps // 2))


@dataclass(frozen=True)
class MemoryConfig:
    """The use of the free memory."""

    chunk: float = 0.25  # fraction of the free device memory for the activations of a chunk, if chunk_size is "auto"
    graphs: float = 0.6  # fraction of the free device memory for graphs that the first pass keeps; 0 keeps none
    inputs: float = 0.3  # fraction of free host memory for samples of the second pass; 0 reads samples twice
    resident: float = 0.0  # fraction of the free device memory for the whole decoded dataset; 0 reads it in every epoch
    checkpointing: Literal["auto", "on", "off"] = "auto"  # activation checkpointing; "auto" uses it if it is faster
    reuse: bool = True  # take chunk sizes that an earlier run measured for this model on this kind of GPU
    offload: bool = False  # fsdp: keep weights, gradients and optimizer state in host memory between their uses

    def __post_init__(self) -> None:
        """Checks the fractions."""
        for name in ("chunk", "graphs", "inputs", "resident"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"memory.{name} must be a fraction from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save a checkpoint, and how many to keep."""

    every: int = 0  # steps between checkpoints; 0 writes up to ten per run, 30 s apart. The last step always has one
    minutes: float = 15.0  # longest time between checkpoints, in minutes; 0 for no limit
    keep: int = 2  # number of checkpoints that are kept
    best: str = "auto"  # metric that selects the weights in best/; "auto" is recall@1 by text, "none" keeps none

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be at least 0, got {self.every}")
        if not 0 <= self.minutes < math.inf:
            raise ValueError(f"checkpoint.minutes must be a finite number of at least 0, got {self.minutes}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")

    def due(self, step: int, steps: int) -> bool:
        """Returns whether a checkpoint is due after step `step` of `steps`."""
        return step == steps or step % (self.every or max(1, steps // 10)) == 0

    def early(self, seconds: float) -> bool:
        """Returns whether a checkpoint can be skipped because the last one is only `seconds` old.

        A short run would otherwise spend much of its time on ten checkpoints. `every` sets a fixed number of steps.
        """
        return self.every == 0 and seconds < SHORTEST_INTERVAL

    def late(self, seconds: float) -> bool:
        """Returns whether a checkpoint is due because the last one is `seconds` old."""
        return self.minutes > 0 and seconds >= 60 * self.minutes


@dataclass(frozen=True)
class StageConfig:
    """A stage of a run, `[[stage]]` in a TOML file. Stages follow each other, and each has its own warm-up and schedule."""

    steps: int = 0  # number of steps of the stage; 0 trains for its `epochs`
    epochs: float = 0.0  # passes over the data in the stage
    image_size: int | None = None  # side of the training images in pixels (default: the size of the model)
    patch_dropout: float | None = None  # fraction of the patches that a step drops (default: model_options.patch_dropout)
    batch_size: int | None = None  # pairs in a step (default: batch_size)
    lr: float | Literal["auto"] | None = None  # highest learning rate (default: optimizer.lr)

    def __post_init__(self) -> None:
        """Checks the numbers. The model determines which image sizes and fractions are possible."""
        if self.steps < 0 or not 0 <= self.epochs < math.inf or bool(self.steps) == bool(self.epochs):
            raise ValueError(
                f"stage.steps or stage.epochs must be more than 0, and not both, got {self.steps} and {self.epochs:g}"
            )
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"stage.image_size must be at least 1, got {self.image_size}")
        if self.batch_size is not None and self.batch_size < 2:
            raise ValueError(f"stage.batch_size must be at least 2, got {self.batch_size}")
        if self.lr is not None and self.lr != "auto" and not 0 < self.lr < math.inf:
            raise ValueError(f'stage.lr must be "auto" or a finite number above 0, got {self.lr}')


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    data: str = "emoji"  # training data: a table, shards, an image folder, emoji or wordnet
    validation: str | tuple[str, ...] = ""  # evaluation data, a name or a list; "" is the test split of emoji or wordnet
    holdout: float = 0.0  # fraction of `data` that is held out for evaluation, such as 0.01
    model: str = "small"  # towers to train, such as open_clip:ViT-B-32 or hf:NAME
    batch_size: int = 1024  # pairs in a step, over all processes; at least 2
    batches: Literal["random", "source", "mined"] = "random"  # samples of a batch: any, of one source, groups of hard negatives
    batch_groups: str = ""  # mined: file of `megabatch mine --batches`; "" mines with the weights of the first step
    chunk_size: int | Literal["auto"] = "auto"  # samples that a tower encodes at once
    epochs: float = 32.0  # passes over the data
    steps: int = 0  # number of steps; 0 trains for `epochs`
    seed: int = 0  # seed of the initial weights, the order and the augmentation
    device: Literal["auto", "cuda", "mps", "xpu", "cpu"] = "auto"  # "auto" is the accelerator of PyTorch, else the CPU
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # dtype of matmuls; "auto" is bf16 if the GPU has it, else fp32
    compile: Literal["auto", "on", "off"] = "auto"  # compile the towers with torch.compile; "auto" does so on CUDA
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun: DDP replicates the towers, FSDP2 shards them
    collapse: Literal["stop", "warn"] = "stop"  # "stop" ends a run that learns nothing with an error, "warn" only warns
    ema: float = 0.0  # decay of the averaged weights, such as 0.999, which the run evaluates and saves; 0 for none
    evaluate_every: int = 0  # steps between evaluations; 0 evaluates only at the end
    augment: bool = True  # augment the training images, for example by random crops
    workers: int | Literal["auto"] = "auto"  # data-loader workers; "auto" is 0 on a CPU, else the cores per rank less one
    freeze: Literal["none", "first", "second"] = "none"  # the side that is frozen (LiT)
    keep_frozen: bool = True  # encode the frozen side once, without augmentation, and store its embeddings
    data_options: dict[str, Any] = field(default_factory=dict)  # options of the training data, such as columns of a table
    validation_options: dict[str, Any] = field(default_factory=dict)  # options of the evaluation data, such as columns
    model_options: dict[str, Any] = field(default_factory=dict)  # patch_dropout, image_size, context_length, options of texts
    stage: tuple[StageConfig, ...] = ()  # stages of the run, which replace `steps` and `epochs`: [[stage]] in a TOML file
    mining: MiningConfig = field(default_factory=MiningConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
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
        if self.batches != "mined" and (self.batch_groups or self.mining != MiningConfig()):
            raise ValueError(f'batch_groups and mining must not be set unless batches is "mined", got {self.batches!r}')
        if self.batches == "mined" and not (self.batch_groups or self.mining.every):
            raise ValueError('batch_groups or mining.every must be set with batches = "mined", got none of them')
        for name, least in (("chunk_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f'{name} must be at least {least}, or "auto", got {value}')
        if self.stage and self.steps:
            raise ValueError(f"steps must be 0 for a run with stages, which have their own numbers of steps, got {self.steps}")
        if self.stage and self.schedule.unmask_fraction:
            raise ValueError(
                "schedule.unmask_fraction must be 0 for a run with stages, whose last stage can have patch_dropout = 0, got "
                f"{self.schedule.unmask_fraction}"
            )
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
        """Replaces "auto" in the settings that depend only on the device. `config.toml` keeps "auto"."""
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        compiled = ("on" if device.type == "cuda" else "off") if self.compile == "auto" else self.compile
        return dataclasses.replace(self, precision=precision, compile=compiled)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Returns the number of steps of the run."""
        return self.steps or max(1, round(self.epochs * batches_per_epoch))


def scale_rate(config: OptimizerConfig, batch_size: int) -> float:
    """Returns the learning rate for a batch size: lr · (batch_size / reference_batch)^p, with p = 0, ½ or 1 for `scaling`."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.scaling]
    rate = SCRATCH_RATE if config.lr == "auto" else config.lr
    return rate * math.pow(batch_size / config.reference_batch, power)


def highest_rate(config: OptimizerConfig, schedule: ScheduleConfig, batch_size: int, steps: int) -> float:
    """Returns the highest learning rate of a run of `steps`. If `lr` is "auto", the length of the warm-up limits it."""
    rate = scale_rate(config, batch_size)
    if config.lr != "auto":
        return rate
    return min(rate, STEEPEST_RISE * max(1, schedule.warm_up(steps)))


def learning_rate(config: ScheduleConfig, highest: float, step: int, steps: int) -> float:
    """Returns the learning rate of step `step` of `steps`. Steps are counted from 0.

    In a warm-up of n steps, step i has (i + 1) / n of the highest rate. After a linear decay, a step would have the last rate.
    """
    warm_up = config.warm_up(steps)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    if config.name == "constant":
        return highest
    if config.name == "wsd":
        decay = WSD_DECAY if config.decay_fraction is None else config.decay_fraction
        length = min(round(decay * steps), steps - warm_up)
        return highest * (1 - (1 - config.end) * max(0, step - (steps - length)) / max(1, length))
    position = (step - warm_up) / max(1, steps - warm_up)
    return highest * (config.end + (1 - config.end) * 0.5 * (1 + math.cos(math.pi * position)))


MOST_READERS = 32


def reader_count(config: TrainConfig, world: World) -> int:
    """Returns the number of data-loader workers of this rank.

    "auto" is 0 on a CPU, because the towers need all cores. On a GPU it is the number of cores that this process may use,
    divided by the ranks of the machine, less one.
    """
    if isinstance(config.workers, int):
        return config.workers
    if world.device.type == "cpu":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // world.local_size - 1, MOST_READERS))


# Settings that a resumed run must not change. They include the options of the data, because the options determine the samples
# and their order.
FIXED = (
    "batch_size",
    "batches",
    "mining",
    "stage",
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
    "optimizer.layer_decay",
    "ema",
)
# Settings that a resumed run may change.
FREE = (
    "epochs",
    "batch_groups",  # the run keeps a copy
    "steps",
    "optimizer",  # except its name and layer_decay
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
    "retrieval",
)


# Other names of settings. An error for such a name suggests the setting.
MEANINGS = {
    **{
        key.rpartition(".")[2]: key
        for key in settings.keys(TrainConfig)
        if "." in key and not key.endswith((".name", ".every"))
    },
    **dict.fromkeys(("patch_dropout", "image_size", "context_length"), "model_options"),
    **dict.fromkeys(("stages",), "stage"),
    **dict.fromkeys(("learning_rate", "rate", "max_lr", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("grad_clip", "grad_clip_norm", "gradient_clip", "max_grad_norm", "clip"), "optimizer.clip_norm"),
    **dict.fromkeys(("warmup", "warm_up", "warm_up_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "warm_up_fraction"), "schedule.warmup_fraction"),
    **dict.fromkeys(("num_workers", "readers", "num_readers"), "workers"),
    **dict.fromkeys(("mine_every", "mining_every", "mine_steps"), "mining.every"),
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
    **dict.fromkeys(("layerwise_decay", "layer_wise_decay", "llrd", "lr_decay"), "optimizer.layer_decay"),
    **dict.fromkeys(("cooldown", "cooldown_fraction"), "schedule.decay_fraction"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "memory.checkpointing"),
    **dict.fromkeys(("cpu_offload", "offload_params"), "memory.offload"),
    **dict.fromkeys(("lora_rank", "lora_r"), "lora.rank"),
    **dict.fromkeys(("lock",), "freeze"),
    **dict.fromkeys(("keep_locked",), "keep_frozen"),
    **dict.fromkeys(("largest_scale",), "loss.max_scale"),
}

# For models that start from trained weights: the learning rate of sentence-transformers' examples, and few epochs.
FINE_TUNING: settings.Table = {"optimizer": {"lr": 2e-5, "weight_decay": 0.01}, "epochs": 3.0}
ADAPTERS: settings.Table = {"optimizer": {"lr": 2e-4, "weight_decay": 0.0}}  # with LoRA, as in the QLoRA paper
WARMUPS = ("warmup_steps", "warmup_fraction")  # alternatives for the length of the warm-up


def resolve(*given: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings of a run. The given tables override the recipe for its model and data, and later tables win."""
    asked = merge(*given)
    chosen = settings.build(TrainConfig, asked, meanings=MEANINGS)
    suited = merge(recipe(chosen.model, chosen.data), ADAPTERS if chosen.lora.rank else {})
    if chosen.stage and asked.get("epochs", TrainConfig.epochs) not in (TrainConfig.epochs, suited.get("epochs")):
        raise ValueError(f"epochs must not be set for a run with stages, which have their own lengths, got {chosen.epochs:g}")
    return settings.build(TrainConfig, merge(suited, asked))


def merge(*tables: Mapping[str, Any]) -> settings.Table:
    """Merges tables. Later values replace earlier ones.

    Some settings are alternatives. A later warm-up in steps replaces an earlier warm-up as a fraction, later epochs replace
    earlier steps, and vice versa.
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
    """Returns the settings that suit a model and its data. docs/log.md, "Emoji", lists the measurements."""
    # Two encoders that were trained separately learn a common space with random projections, so they use the rate of models
    # with random weights.
    found: settings.Table = dict(FINE_TUNING) if names.has_weights(model) and "+" not in model else {}
    if model == "small":
        optimizer = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}
        found = {"optimizer": optimizer, "schedule": {"warmup_steps": 20}}
    if (model, data) == ("small", "emoji"):
        # This run takes a minute or two on two cores. It averages weights instead of lowering the learning rate, because a
        # cosine would fall before the model has learned much in so few steps.
        schedule = {"name": "constant", "warmup_fraction": 0.3}
        found |= {"batch_size": 512, "epochs": 28.0, "schedule": schedule, "ema": 0.95, "model_options": {"buckets": 8192}}
    if data == "wordnet":
        found["epochs"] = 4.0
    return found


def anchor_paths(values: Mapping[str, Any], directory: str | None = None) -> settings.Table:
    """Returns the settings. Relative paths that exist in a directory become absolute.

    Args:
        values: the settings as a table (`settings.table`).
        directory: the working directory of the run that has these settings (default: the current one).
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
    paths = {"batch_groups": found.get("batch_groups"), **dict(found.get("retrieval") or {})}
    absolute = {key: str(place / path) for key, path in paths.items() if path and (place / path).exists()}
    found |= {"batch_groups": absolute.pop("batch_groups")} if "batch_groups" in absolute else {}
    found |= {"retrieval": {**found["retrieval"], **absolute}} if absolute else {}
    if isinstance(loss := found.get("loss"), Mapping):
        models = {key: anchor_model(loss[key], place) for key in ("teacher", "guide") if loss.get(key)}
        found["loss"] = {**loss, **models}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the `FIXED` settings that have changed, each with both values. The arguments are tables (`settings.table`)."""
    found: list[str] = []
    before = settings.merge(settings.table(TrainConfig()), before)  # an older version may have fewer settings
    for key in FIXED:
        _compare(key, _at(before, key), _at(now, key), found)
    return found


def _compare(key: str, old: Any, new: Any, found: list[str]) -> None:
    """Compares tables entry by entry, so that messages contain the name of a setting as users write it."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            _compare(f"{key}.{name}", old.get(name), new.get(name), found)
    elif old != new:
        was, is_now = ("not set" if value is None else repr(value) for value in (old, new))
        found.append(f"{key} was {was} and is {is_now}")


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
