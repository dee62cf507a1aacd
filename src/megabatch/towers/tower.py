"""What a tower is to the rest: a module that encodes, and what it does to samples before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

INITIAL_SCALE = 1 / 0.07  # CLIP's


@dataclass(frozen=True)
class Tower:
    """One side of a model. `module(collate([prepare(sample, generator), …]))` are the embeddings of samples."""

    module: nn.Module
    kind: str  # "image" or "text"
    prepare: Callable[[Any, torch.Generator | None], Any]  # one sample; augmented where there is a generator
    collate: Callable[[list[Any]], Any]  # what `prepare` returned, as the module's inputs
    keep: Callable[[Path], None] | None = None  # writes into a folder what it takes to build the tower again, besides weights


@dataclass(frozen=True)
class Pair:
    """Two towers, which may share a module, and where the loss begins."""

    first: Tower
    second: Tower
    logit_scale: float = INITIAL_SCALE  # exponentiated
    logit_bias: float | None = None  # for sigmoid losses
    name: str = ""  # what `load` was asked for
    options: Mapping[str, Any] = field(default_factory=dict)  # and with which options

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """Both, in the order of a dataset's sides."""
        return self.first, self.second

    def parameters(self) -> list[nn.Parameter]:
        """Of both, each once."""
        return list({id(p): p for tower in self.towers for p in tower.module.parameters()}.values())
