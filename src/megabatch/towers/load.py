"""Towers by name: "small", "open_clip:…", "hf:…"."""

from collections.abc import Mapping
from typing import Any

from megabatch.data.dataset import IMAGE, TEXT
from megabatch.names import MODELS
from megabatch.towers import demo, huggingface, open_clip
from megabatch.towers.tower import Pair


def load(spec: str, kinds: tuple[str, str] = (IMAGE, TEXT), **options: Any) -> Pair:
    """Loads towers by name, for data with sides of these kinds.

    Args:
        spec: see `megabatch.names.MODELS`.
        kinds: a dataset's `sides`.
        options: fields of `demo.SmallConfig`, for "small".
    """
    family, _, name = spec.partition(":")
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
        pair = huggingface.load(name)
    elif family == "hf-config" and name:
        pair = huggingface.load_config(name)
    else:
        raise ValueError(f"No such model: {spec}. Possible are: {'; '.join(MODELS)}")
    if (pair.first.kind, pair.second.kind) != tuple(kinds):
        raise ValueError(
            f"model must have towers for {kinds[0]} and {kinds[1]}, got {spec!r}, which is for {pair.first.kind} and "
            f"{pair.second.kind}; possible are: {'; '.join(MODELS)}"
        )
    return pair


def image_size(spec: str, options: Mapping[str, Any]) -> int | None:
    """Pixels of a side of the model's images, for emoji, which are drawn in this size; None for any size."""
    return demo.configured(options).image_size if spec == "small" else None
