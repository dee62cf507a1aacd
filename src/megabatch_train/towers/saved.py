"""Saves a trained model to a folder, and loads it: the weights, and the description that rebuilds its towers.

`model.safetensors` has both: the tensors, and in its header the name of the towers, scale and bias, in one atomic file.
An open_clip model is saved under open_clip's own names, with its config beside it:
`open_clip.create_model("local-dir:FOLDER")` loads it. A text encoder of transformers is saved under its own names, with config
and tokenizer beside it: `AutoModel.from_pretrained(FOLDER)` and `SentenceTransformer(FOLDER)` load it. Layers after its pooling
are in the file too, under names that transformers ignores. Two encoders of transformers have their configs and tokenizers in
the folders `first` and `second`, and their weights in one file, so that they are never of different steps; `megabatch export`
writes a model of each.

Adapters are in the folders `first` and `second` too, as PEFT reads them, beside config and tokenizer: with these in the folder
of the run, transformers would load a model without adapters. With LoRA on "hf:NAME" the file holds trained tensors only, and
the rest is loaded by that name.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch.world import World, default_group
from megabatch_train import settings
from megabatch_train.towers import huggingface, lora, open_clip
from megabatch_train.towers.load import adapt_texts, load
from megabatch_train.towers.sentence_transformer import LayerConfig, write_tensors
from megabatch_train.towers.tower import SIDES, Pair

WEIGHTS = "model.safetensors"
_HEADER = "megabatch"
_LAYERS = "megabatch_layers."  # prefix of the layers after the pooling of one text encoder
_FORMAT = 1


def save(pair: Pair, folder: str | Path, *, step: int | None = None) -> Path:
    """Writes the pair with `pair.logit_scale` and `pair.logit_bias`, and returns the file.

    With FSDP2 all ranks must call it; the first one writes.

    Args:
        pair: from `towers.load`; after training with the learned scale, `dataclasses.replace(pair, logit_scale=…)`.
        folder: created if it does not exist.
        step: of the training run, recorded in the file.
    """
    place = Path(folder)
    weights = _weights(pair)  # on all ranks: sharded weights are gathered
    if World.of(default_group()).rank == 0:
        description = {
            "format": _FORMAT,
            "name": pair.name,
            "kinds": [tower.kind for tower in pair.towers],
            "options": dict(pair.options),
            "logit_scale": pair.logit_scale,
            "logit_bias": pair.logit_bias,
            "layers": huggingface.layer_configs(pair.second.module),
            "bases": _bases(pair, place),
            "frozen": _type_of_frozen(pair),
            "lora": dataclasses.asdict(pair.lora) if pair.lora is not None and not pair.lora.merge else None,
            "step": step,
        }
        keep(pair, place)
        if pair.lora is not None:
            weights = _with_adapters(pair, weights, place)
        if isinstance(pair.second.module, huggingface.TextEncoder):
            if _is_one_model(pair):
                huggingface.describe(pair, place, {f"layers.{key}": value for key, value in _of(_LAYERS, weights).items()})
            elif pair.lora is not None and pair.lora.merge:
                huggingface.describe(pair, place / SIDES[1], _of(f"{SIDES[1]}.", weights))
        safetensors = extras.load("safetensors.torch", extra="train", purpose="Saving a model")
        # transformers asks for the format "pt".
        about = {"format": "pt", _HEADER: json.dumps(description, default=dataclasses.asdict)}
        parts = _sort_metadata(safetensors.save(weights, about))
        file_io.write(place / WEIGHTS, lambda file: file.writelines(parts))
    return place / WEIGHTS


def load_saved(folder: str | Path, device: torch.device | str = "cpu") -> Pair:
    """Loads a saved pair with its weights, scale and bias, in evaluation mode.

    Args:
        folder: of a run, or another one that `save` wrote to.
        device: of the modules.
    """
    place = Path(folder)
    description, weights = _read(place / WEIGHTS)
    pair = _build(description, place)
    for prefix, module in _modules(pair).items():
        own = _of(prefix, weights)
        module.load_state_dict(own, strict=not pair.base_is_elsewhere)
        if missing := lora.find_trained(module) - set(own) if pair.base_is_elsewhere else ():
            raise ValueError(f"{place / WEIGHTS} must have all trained weights, got none for {', '.join(sorted(missing))}")
    if frozen := description.get("frozen"):
        if not isinstance(dtype := getattr(torch, str(frozen), None), torch.dtype):
            raise ValueError(f"{place / WEIGHTS} must name a dtype of its frozen weights, got {frozen!r}")
        lora.store_frozen(pair.modules, dtype)
    for module in pair.modules:
        module.to(device).eval()
    return dataclasses.replace(pair, logit_scale=description["logit_scale"], logit_bias=description["logit_bias"])


def _type_of_frozen(pair: Pair) -> str | None:
    """The type that a run stores the weights beside its adapters in, such as "bfloat16"."""
    if not pair.base_is_elsewhere:
        return None
    frozen = [p.dtype for p in pair.parameters() if not p.requires_grad and p.is_floating_point()]
    return str(frozen[0]).removeprefix("torch.") if frozen else None


def step(folder: str | Path) -> int | None:
    """The training step of a folder's model; None if there is no model that records one."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        return None
    found: int | None = _header(path).get("step")
    return found


def _build(description: dict[str, Any], place: Path) -> Pair:
    """The towers, before their weights are loaded."""
    family, _, name = description["name"].partition(":")
    if family == "open_clip":
        return adapt_texts(open_clip.load_folder(name, place), description["options"])
    if family in ("hf", "hf-config"):
        adapters = settings.build(lora.LoraConfig, description["lora"]) if description.get("lora") else None
        if family == "hf" and adapters is not None:
            pair = huggingface.load(_find_bases(name, place, description.get("bases", {})), adapters)
            pair = dataclasses.replace(pair, options={})  # the file has them
        else:
            sides = SIDES if "+" in name else SIDES[:1] if adapters is not None else ("",)
            folders = [place / side for side in sides]
            layers = [settings.build(LayerConfig, layer) for layer in description.get("layers", ())]
            pair = huggingface.load_folders(description["name"], folders, adapters, layers)
        return adapt_texts(pair, description["options"])
    return load(description["name"], tuple(description["kinds"]), **description["options"])


def _bases(pair: Pair, place: Path) -> dict[str, str]:
    """The folders of the weights beside the adapters, by their absolute paths: relative to the folder of the model."""
    if not pair.base_is_elsewhere:
        return {}
    folders = [part for part in pair.name.partition(":")[2].split("+") if os.path.isabs(part)]
    return {part: os.path.relpath(part, place.absolute()) for part in folders}


def _find_bases(name: str, place: Path, bases: Mapping[str, str]) -> str:
    """The encoders that adapters were trained on, whose folders may have been moved together with the model."""
    found = []
    for part in name.split("+"):
        moved = place.absolute() / str(bases.get(part, ""))
        found.append(os.path.normpath(moved) if part in bases and not os.path.isdir(part) and moved.is_dir() else part)
    return "+".join(found)


def _is_one_model(pair: Pair) -> bool:
    """Whether the folder is a model of open_clip or transformers, with its names of weights and its files."""
    known = pair.name.startswith(("open_clip:", "hf:", "hf-config:"))
    return known and pair.first.module is pair.second.module and (pair.lora is None or pair.lora.merge)


def _modules(pair: Pair) -> dict[str, nn.Module]:
    """The modules to save by the prefix of their tensors' names; a module of both sides occurs once."""
    if _is_one_model(pair):
        encoder: Any = pair.first.module
        return {"": encoder.model, **({_LAYERS: encoder.layers} if huggingface.layer_configs(encoder) else {})}
    if pair.first.module is pair.second.module:
        return {f"{SIDES[0]}.": pair.first.module}
    return {f"{side}.": tower.module for side, tower in zip(SIDES, pair.towers, strict=True)}


def _weights(pair: Pair) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in _modules(pair).items():
        for key, value in module.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            tensor = whole.detach().to("cpu").contiguous()
            # safetensors refuses two names for one tensor, so tied weights are stored twice.
            found[prefix + key] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    if pair.name.startswith("open_clip:"):
        found["logit_scale"] = torch.full_like(found["logit_scale"], math.log(pair.logit_scale))
        if pair.logit_bias is not None and "logit_bias" in found:
            found["logit_bias"] = torch.full_like(found["logit_bias"], pair.logit_bias)
    return found


def _with_adapters(pair: Pair, weights: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """Writes adapters, or two merged models, into the folders of their towers; returns the weights of the pair's file."""
    assert pair.lora is not None
    found: dict[str, Tensor] = {}
    for prefix, module in _modules(pair).items():
        own, folder = _of(prefix, weights), place / prefix.rstrip(".")
        inner = "model." if prefix else ""  # a tower of two has a projection beside its model
        if pair.lora.merge:
            own = lora.merge_adapters(module, own)
            if prefix not in ("", _LAYERS):
                write_tensors(folder / WEIGHTS, _of(inner, own))
        else:
            write_tensors(folder / lora.ADAPTER_WEIGHTS, lora.adapter(_of(inner, own)))
            model: Any = module.get_submodule(inner.rstrip("."))
            model.peft_config[lora.NAME].save_pretrained(folder)
            if pair.base_is_elsewhere:
                names = lora.find_trained(module)
                own = {key: value for key, value in own.items() if key in names}
        found |= {prefix + key: value for key, value in own.items()}
    return found


def _of(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it; for an empty one, those without a prefix."""
    if not prefix:
        return {key: value for key, value in weights.items() if not key.startswith(_LAYERS)}
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _sort_metadata(data: bytes) -> tuple[bytes, memoryview]:
    """A safetensors file as header and tensors, with its metadata sorted: safetensors writes them in random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, memoryview(data)[end:]


def keep(pair: Pair, place: Path) -> None:
    """Writes the files, besides weights, that rebuild the towers and their preprocessing."""
    place.mkdir(parents=True, exist_ok=True)
    for number, tower in enumerate(pair.towers):
        if tower.keep is not None and (number == 0 or pair.first.module is not pair.second.module):
            tower.keep(place / folder_of(pair, number))


def folder_of(pair: Pair, side: int) -> str:
    """The folder, inside the folder of the pair, that `keep` writes the files of a side to; empty for the folder itself."""
    if _is_one_model(pair):
        return ""
    return SIDES[0] if pair.first.module is pair.second.module else SIDES[side]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"the folder {path.parent} must have a {path.name}, got none: has the run come to its end?")
    header = _header(path)
    with _open(path) as file:
        # safe_open has keys and is no mapping.
        return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _header(path: Path) -> dict[str, Any]:
    with _open(path) as file:
        try:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"{path} must be a model that megabatch saved in format {_FORMAT}, got a header of {header!r}")
    return header


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    safetensors = extras.load("safetensors", extra="train", purpose="Loading a model")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got one that is not: {error}") from error
