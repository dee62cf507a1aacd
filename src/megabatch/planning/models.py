"""Towers by name, without weights: a plan needs only a model's shape.

The names are the same as for `towers.load`. Nothing is allocated or downloaded: for "hf:NAME" the config.json must be on this
machine. If only the number of parameters is known, a transformer of that size stands in for the tower.
"""

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.names import MODELS
from megabatch.planning.choices import STAND_IN, number
from megabatch.planning.meter import nowhere, without_data
from megabatch.towers.demo import SmallConfig, SmallImageTower, SmallTextTower
from megabatch.towers.lora import LoraConfig, store_frozen

SMALL_TEXT_GRAMS = 64  # n-grams of a name or a short sentence
MOST_LAYERS = 1000


@dataclass(frozen=True)
class Side:
    """One tower without data: `module(**inputs(n))` are the embeddings of n samples."""

    name: str
    module: nn.Module
    inputs: Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """Two towers, which may share a module."""

    name: str
    sides: tuple[Side, Side]

    @property
    def is_one_tower(self) -> bool:
        """Whether both sides are encoded in the same way by the same module."""
        first, second = self.sides
        return first.module is second.module and first.inputs is second.inputs

    @property
    def parameters(self) -> int:
        """Number of parameters of both towers; shared ones count once."""
        return sum(p.numel() for p in self._each_once())

    @property
    def weight_bytes(self) -> int:
        """Bytes of these parameters."""
        return sum(p.numel() * p.element_size() for p in self._each_once())

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(p.numel() for p in self._each_once() if p.requires_grad)

    def _each_once(self) -> Iterable[nn.Parameter]:
        return {id(p): p for side in self.sides for p in side.module.parameters()}.values()


def model(
    spec: str,
    *,
    image_size: int | None = None,
    length: int | None = None,
    lora: int = 0,
    frozen: torch.dtype = torch.float32,
) -> Model:
    """The towers of a name, or of parameter counts.

    Args:
        spec: a name of `towers.load`, or `STAND_IN`.
        image_size: pixels of a side; None for the model's own.
        length: tokens of a text; None for the model's own.
        lora: rank of the adapters of a transformers model, which are trained in place of its weights; 0 for none.
        frozen: the type that weights beside adapters are stored in.
    """
    if lora and not spec.startswith(("hf:", "hf-config:")):
        raise ValueError(f'lora must be left out for models other than "hf:" and "hf-config:", got {lora} for {spec!r}')
    family, _, name = spec.partition(":")
    with torch.device("meta"), _offline():
        if spec == "small":
            made = _small(image_size, length)
        elif family == "open_clip" and name:
            made = _open_clip(name.partition("@")[0], image_size, length)
        elif family in ("hf", "hf-config") and name:
            made = _huggingface(spec, image_size, length, lora)
        elif spec[:1].isdigit():
            made = _stand_ins(spec)
        else:
            raise ValueError(f"No such model: {spec}. Possible are: {'; '.join(MODELS)}; or {STAND_IN}")
    with nowhere():
        for module in {id(side.module): side.module for side in made}.values():
            without_data(module)
        if family in ("hf", "hf-config"):
            _freeze_unused(made)
        if lora:
            store_frozen([side.module for side in made], frozen)
    return Model(spec, made)


def _small(image_size: int | None, length: int | None) -> tuple[Side, Side]:
    config = SmallConfig(image_size=image_size or SmallConfig.image_size)
    size, grams = config.image_size, length or SMALL_TEXT_GRAMS

    def texts(n: int) -> dict[str, Tensor]:
        return {"grams": _ids(n, grams), "mask": torch.ones(n, grams)}

    return (
        Side("image", SmallImageTower(config), lambda n: {"images": torch.zeros(n, 3, size, size)}),
        Side("text", SmallTextTower(config), texts),
    )


def _open_clip(architecture: str, image_size: int | None, length: int | None) -> tuple[Side, Side]:
    from megabatch.towers.open_clip import Sides, known

    package: Any = known(architecture)
    options: dict[str, Any] = {"force_image_size": image_size}
    if length is not None:
        options["force_context_length"] = length
    try:
        with _no_word_of_missing_weights():
            whole = package.create_model(architecture, device="meta", pretrained_hf=False, **options)
    except OSError as error:
        raise ValueError(
            f"the text tower of {architecture} is one of transformers; its config.json is not in the local cache of the "
            "Hugging Face hub, and a plan downloads nothing"
        ) from error
    for name in ("logit_scale", "logit_bias"):
        if getattr(whole, name, None) is not None:
            getattr(whole, name).requires_grad_(False)
    size = whole.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    tokens = length or int(whole.context_length)
    module = Sides(whole)
    return (
        Side("image", module, lambda n: {"image": torch.zeros(n, 3, height, width)}),
        Side("text", module, lambda n: {"text": _ids(n, tokens)}),
    )


@contextmanager
def _offline() -> Iterator[None]:
    """No requests to the Hugging Face hub, by any package."""
    if not extras.installed("huggingface_hub"):
        yield
        return
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _no_word_of_missing_weights() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _huggingface(spec: str, image_size: int | None, length: int | None, lora: int) -> tuple[Side, Side]:
    from megabatch.towers.huggingface import random_encoders, read_configs
    from megabatch.towers.huggingface_inputs import height_and_width, longest

    configs = read_configs(spec)
    if len(configs) == 2 and image_size is not None:
        configs[0].image_size = image_size
    most = getattr(configs[-1], "max_position_embeddings", None)
    if length is not None and most is not None and length > most:
        raise ValueError(f"length must be at most {most} tokens for {spec!r}, got {length}")
    encoders = random_encoders(configs, spec, LoraConfig(lora) if lora else None)
    tokens = length or longest(configs[-1])

    def texts(n: int) -> dict[str, Tensor]:
        return {"input_ids": _ids(n, tokens), "attention_mask": torch.ones(n, tokens, dtype=torch.int64)}

    if len(encoders) == 1:
        return Side("first", encoders[0], texts), Side("second", encoders[0], texts)
    height, width = height_and_width(configs[0])
    images, words = encoders
    return (
        Side("image", images, lambda n: {"pixel_values": torch.zeros(n, 3, height, width)}),
        Side("text", words, texts),
    )


def _freeze_unused(sides: tuple[Side, Side]) -> None:
    """The towers as `towers.load` makes them, without data; inside `nowhere`."""
    from megabatch.towers.huggingface import freeze_unused

    for side in {id(side.module): side for side in sides}.values():
        freeze_unused(side.module, side.inputs(2))


class StandIn(nn.Module):
    """A pre-norm transformer over vectors, with as many layers as give the number of parameters."""

    def __init__(self, parameters: int, tokens: int, width: int) -> None:
        super().__init__()
        layers = max(1, round(parameters / (12 * width**2)))
        if layers > MOST_LAYERS:
            raise ValueError(f"{parameters:,} parameters of width {width} are {layers:,} layers, more than {MOST_LAYERS:,}")
        heads = next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)
        self.position = nn.Parameter(torch.empty(tokens, width))
        self.blocks = nn.ModuleList([_Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:  # (n, tokens, width) -> (n, width)
        """Embeddings of unit length."""
        h = tokens + self.position
        for block in self.blocks:
            h = block(h)
        return F.normalize(self.norm(h).mean(1), dim=-1)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        a = self.before_attention(h)
        h = h + self.attention(a, a, a, need_weights=False)[0]
        added: Tensor = self.hidden(self.before_hidden(h))
        return h + added


_STAND_IN = re.compile(r"([^:]+):([1-9]\d*)x([1-9]\d*)")


def _stand_ins(spec: str) -> tuple[Side, Side]:
    towers = [_STAND_IN.fullmatch(text.strip()) for text in spec.split(",")]
    first, second = towers[0], towers[-1]  # one description stands for both
    if len(towers) > 2 or first is None or second is None:
        raise ValueError(f"model must be {STAND_IN}, got {spec!r}")
    try:
        return _stand_in(first, "first"), _stand_in(second, "second")
    except ValueError as error:
        raise ValueError(f"model must be {STAND_IN}, got {spec!r}: {error}") from error


def _stand_in(described: re.Match[str], name: str) -> Side:
    tokens, width = int(described[2]), int(described[3])
    module = StandIn(number(described[1]), tokens, width)
    return Side(name, module, lambda n: {"tokens": torch.zeros(n, tokens, width)})


def _ids(n: int, tokens: int) -> Tensor:
    return torch.zeros(n, tokens, dtype=torch.int64)
