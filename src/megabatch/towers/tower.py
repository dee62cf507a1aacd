"""A tower: a module that encodes samples, and its preprocessing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.data.crops import TrainingImages
from megabatch.towers.lora import LoraConfig

INITIAL_SCALE = 1 / 0.07  # CLIP's
SIDES = ("first", "second")  # names of the two towers of a pair, in files and settings


@dataclass(frozen=True)
class Tower:
    """One side of a model. `module(collate([prepare(sample, generator), …]))` gives the embeddings of samples."""

    module: nn.Module
    kind: str  # "image" or "text"
    prepare: Callable[[Any, torch.Generator | None], Any]  # preprocesses one sample; augments it if there is a generator
    collate: Callable[[list[Any]], Any]  # results of `prepare` → inputs of the module
    keep: Callable[[Path], None] | None = None  # writes the files, besides weights, that rebuild the tower
    # Tokens used of each sample of collated inputs; the module takes inputs that are cut after the longest.
    lengths: Callable[[Any], Tensor | None] | None = None
    training_images: TrainingImages | None = None  # preprocesses images in training, in place of `prepare` and `collate`


@dataclass(frozen=True)
class Pair:
    """Two towers, which may share a module, with the initial scale and bias of the loss."""

    first: Tower
    second: Tower
    logit_scale: float = INITIAL_SCALE  # exponentiated
    logit_bias: float | None = None  # for sigmoid losses
    name: str = ""  # argument of `load`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of `load`
    lora: LoraConfig | None = None  # of the adapters that are trained; None if there are none

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """Both towers, in the order of a dataset's sides."""
        return self.first, self.second

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of both towers, which may be one."""
        return [tower.module for tower in self.towers]

    @property
    def base_is_elsewhere(self) -> bool:
        """Whether frozen weights can be loaded again by the pair's name, so that its files hold trained weights only."""
        return self.lora is not None and self.name.startswith("hf:")

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of both towers, each once."""
        return list({id(p): p for tower in self.towers for p in tower.module.parameters()}.values())
