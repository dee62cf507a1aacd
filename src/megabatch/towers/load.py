"""Towers by name: "small", "open_clip:…", "hf:…"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megabatch.data.dataset import IMAGE, TEXT
from megabatch.names import MODELS, nearest
from megabatch.towers import demo, huggingface, open_clip
from megabatch.towers.lora import LoraConfig
from megabatch.towers.tower import Pair

PROMPTS = ("query_prompt", "document_prompt")  # of the first and the second side
TEXT_OPTIONS = (*PROMPTS, *huggingface.OPTIONS)


def load(spec: str, kinds: tuple[str, str] = (IMAGE, TEXT), *, lora: LoraConfig | None = None, **options: Any) -> Pair:
    """Loads towers by name, for data with sides of these kinds.

    Args:
        spec: see `megabatch.names.MODELS`.
        kinds: a dataset's `sides`.
        lora: adapters for "hf:" and "hf-config:", which are then trained in place of the weights; a rank of 0 is none.
        options: fields of `demo.SmallConfig`, for "small"; `query_prompt` and `document_prompt`, which texts of the first and
            second side begin with, for all models; options of `huggingface.adapt`, for "hf:".
    """
    family, _, name = spec.partition(":")
    texts = {key: options.pop(key) for key in TEXT_OPTIONS if key in options}
    lora = lora if lora is not None and lora.rank else None
    if lora is not None and family not in ("hf", "hf-config"):
        raise ValueError(f'lora.rank must be 0 for models other than "hf:" and "hf-config:", got {lora.rank} for {spec!r}')
    if options and spec != "small":
        raise ValueError(f'model_options must be left out for models other than "small", got {", ".join(options)} for {spec!r}')
    if spec == "small":
        config = demo.configured(options)
        text = demo.text_tower(config)
        first = demo.image_tower(config) if kinds[0] == IMAGE else text
        pair = Pair(first, text, demo.INITIAL_SCALE, name=spec, options=options)
    elif family == "open_clip" and name:
        pair = open_clip.load(name)
    elif family == "hf" and name:
        pair = huggingface.load(name, lora)
    elif family == "hf-config" and name:
        pair = huggingface.load_config(name, lora)
    else:
        raise ValueError(f"No such model: {spec}{nearest(spec, ['small'])}. Possible are: {'; '.join(MODELS)}")
    if (pair.first.kind, pair.second.kind) != tuple(kinds):
        raise ValueError(
            f"model must have towers for {kinds[0]} and {kinds[1]}, got {spec!r}, which is for {pair.first.kind} and "
            f"{pair.second.kind}; possible are: {'; '.join(MODELS)}"
        )
    return adapted(pair, texts)


@dataclass(frozen=True)
class Prompted:
    """Preprocessing of texts that begin with a prompt."""

    prompt: str
    inner: Callable[[Any, torch.Generator | None], Any]

    def __call__(self, text: str, generator: torch.Generator | None) -> Any:
        """One text."""
        return self.inner(self.prompt + text, generator)


def adapted(pair: Pair, options: Mapping[str, Any]) -> Pair:
    """The pair with prompts, longest text, pooling and packing, where `TEXT_OPTIONS` are among the options."""
    found = {key: options[key] for key in TEXT_OPTIONS if key in options}
    if of_encoder := {key: found[key] for key in huggingface.OPTIONS if key in found}:
        huggingface.adapt(pair, of_encoder)
    towers = []
    for tower, key in zip(pair.towers, PROMPTS, strict=True):
        prompt = found.get(key, "")
        if not isinstance(prompt, str):
            raise ValueError(f"model_options.{key} must be a text, got {prompt!r}")
        prompted = prompt and tower.kind == TEXT
        towers.append(replace(tower, prepare=Prompted(prompt, tower.prepare)) if prompted else tower)
    return replace(pair, first=towers[0], second=towers[1], options={**pair.options, **found}) if found else pair


def image_size(spec: str, options: Mapping[str, Any]) -> int | None:
    """Pixels of a side of the model's images, for emoji, which are drawn in this size; None for any size."""
    sizes = {key: value for key, value in options.items() if key not in TEXT_OPTIONS}
    return demo.configured(sizes).image_size if spec == "small" else None
