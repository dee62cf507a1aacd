"""Towers by name: "small", "open_clip:…", "hf:…"."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megabatch_train.data.dataset import IMAGE, TEXT
from megabatch_train.names import MODELS, nearest
from megabatch_train.towers import huggingface, huggingface_inputs, open_clip, small
from megabatch_train.towers.lora import LoraConfig
from megabatch_train.towers.tower import Pair

LOG = logging.getLogger("megabatch")
PROMPTS = ("query_prompt", "document_prompt")  # of the first and the second side
TEXT_OPTIONS = (*PROMPTS, *huggingface.OPTIONS)


def load(spec: str, kinds: tuple[str, str] = (IMAGE, TEXT), *, lora: LoraConfig | None = None, **options: Any) -> Pair:
    """Loads towers by name, for data with sides of these kinds.

    Args:
        spec: see `megabatch_train.names.MODELS`.
        kinds: a dataset's `sides`.
        lora: adapters for "hf:" and "hf-config:", which are then trained in place of the weights; a rank of 0 is none.
        options: fields of `small.SmallConfig`, for "small"; `query_prompt` and `document_prompt`, which texts of the first and
            second side begin with, for all models; options of `huggingface.adapt`, for "hf:". They replace those that a model
            of sentence-transformers has in its files. `config` is the contents of the file of "open_clip:FILE.json", if it
            need not be read.
    """
    family, _, name = spec.partition(":")
    texts = {key: options.pop(key) for key in TEXT_OPTIONS if key in options}
    lora = lora if lora is not None and lora.rank else None
    if lora is not None and family not in ("hf", "hf-config"):
        raise ValueError(f'lora.rank must be 0 for models other than "hf:" and "hf-config:", got {lora.rank} for {spec!r}')
    config = options.pop("config", None) if family == "open_clip" else None
    if options and spec != "small":
        raise ValueError(f'model_options must be left out for models other than "small", got {", ".join(options)} for {spec!r}')
    if spec == "small":
        config = small.build_config(options)
        text = small.text_tower(config)
        first = small.image_tower(config) if kinds[0] == IMAGE else text
        pair = Pair(first, text, small.INITIAL_SCALE, name=spec, options=options)
    elif family == "open_clip" and name:
        pair = open_clip.load(name, config)
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
    if family == "hf":
        _log_choice(pair, texts)
    return adapt_texts(pair, {**pair.options, **texts})


def _log_choice(pair: Pair, given: Mapping[str, Any]) -> None:
    """Logs how texts are encoded: as the files of the model describe, or by default."""
    encoder, name = pair.second.module, pair.name.partition(":")[2].rpartition("+")[2]
    assert isinstance(encoder, huggingface.TextEncoder)
    if "pooling" in pair.options:
        found = {key: value for key, value in {**pair.options, **given}.items() if value != ""}
        widths = [
            f"a Dense layer of {layer.out_features}" for layer in huggingface.layer_configs(encoder) if layer.out_features
        ]
        told = ", ".join([*(f"{key} = {value!r}" for key, value in found.items()), *widths])
        LOG.info("%s is a model of sentence-transformers: %s", name, told)
    elif "pooling" not in given:
        LOG.info(
            '%s has no modules.json of sentence-transformers, so texts are encoded with pooling = "%s" and max_length = %d; '
            "model_options.pooling and model_options.max_length choose others",
            *(name, encoder.pooling, given.get("max_length", huggingface_inputs.longest(encoder.model.config))),
        )


@dataclass(frozen=True)
class Prompted:
    """Preprocessing of texts that begin with a prompt."""

    prompt: str
    inner: Callable[[Any, torch.Generator | None], Any]

    def __call__(self, text: str, generator: torch.Generator | None) -> Any:
        """One text."""
        return self.inner(self.prompt + text, generator)


def adapt_texts(pair: Pair, options: Mapping[str, Any]) -> Pair:
    """The pair with prompts, longest text, pooling and packing, if `TEXT_OPTIONS` are among the options."""
    found = {key: options[key] for key in TEXT_OPTIONS if key in options}
    if of_encoder := {key: found[key] for key in huggingface.OPTIONS if key in found}:
        huggingface.adapt(pair, of_encoder)
    towers = []
    for tower, key in zip(pair.towers, PROMPTS, strict=True):
        prompt = found.get(key, "")
        if not isinstance(prompt, str):
            raise ValueError(f"model_options.{key} must be a text, got {prompt!r}")
        if tower.kind == TEXT:
            tower = huggingface.exclude_prompt(tower, prompt)
            tower = replace(tower, prepare=Prompted(prompt, tower.prepare)) if prompt else tower
        towers.append(tower)
    return replace(pair, first=towers[0], second=towers[1], options={**pair.options, **found}) if found else pair


def text_options(pair: Pair) -> dict[str, Any]:
    """The `TEXT_OPTIONS` of a pair, whether they were given or were in the files that it was loaded from."""
    return {key: value for key, value in pair.options.items() if key in TEXT_OPTIONS}


def anchor(spec: str, directory: Path) -> str:
    """The model with the relative paths that exist in a directory made absolute.

    Args:
        spec: see `megabatch_train.names.MODELS`, or the folder of a run.
        directory: that relative paths are relative to.
    """
    if spec == "small":
        return spec

    def absolute(path: str) -> str:
        return str(directory / path) if path and (directory / path).exists() else path

    family, colon, name = spec.partition(":")
    if family in ("hf", "hf-config") and colon:
        return f"{family}:{'+'.join(absolute(part) for part in name.split('+'))}"
    if family == "open_clip" and colon:
        architecture, weights = open_clip.split_name(name)
        return f"{family}:{absolute(architecture)}" + (f"@{absolute(weights)}" if weights else "")
    return absolute(spec)


def image_size(spec: str, options: Mapping[str, Any]) -> int | None:
    """Pixels of a side of the model's images, for emoji, which are drawn in this size; None for any size."""
    sizes = {key: value for key, value in options.items() if key not in TEXT_OPTIONS}
    return small.build_config(sizes).image_size if spec == "small" else None
