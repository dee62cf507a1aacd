"""Models: towers by name ("small", "open_clip:…", "hf:…"), and trained ones, which are saved to a folder and loaded from it."""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch.world import World, default_group
from megabatch_train import settings
from megabatch_train.data.dataset import IMAGE, TEXT
from megabatch_train.names import MODELS, nearest
from megabatch_train.towers import huggingface, huggingface_inputs, lora, open_clip, small
from megabatch_train.towers.lora import LoraConfig
from megabatch_train.towers.sentence_transformer import LayerConfig, write_tensors
from megabatch_train.towers.tower import SIDES, Pair

# ----------------------------------------------------------------------------------------------------------------------
# Towers by name, and with the prompts and options of their texts.

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


# ----------------------------------------------------------------------------------------------------------------------
# A trained model is saved to a folder and loaded from it: the weights, and the description that rebuilds its towers.
#
# `model.safetensors` has both: the tensors, and in its header the name of the towers, scale and bias, in one atomic file.
# An open_clip model is saved under open_clip's own names, with its config in the same folder:
# `open_clip.create_model("local-dir:FOLDER")` loads it. A text encoder of transformers is saved under its own names, with its
# config and tokenizer in the same folder: `AutoModel.from_pretrained(FOLDER)` and `SentenceTransformer(FOLDER)` load it. The
# file also contains the layers after its pooling, under names that transformers ignores. Two encoders of transformers have
# their configs and tokenizers in the folders `first` and `second`, and their weights in one file, so that both are always of
# the same step; `megabatch export` writes a model of each.
#
# The folders `first` and `second` also contain LoRA adapters, as PEFT reads them, next to config and tokenizer: with adapters
# in the folder of the run, transformers would load a model without them. With LoRA on "hf:NAME" the file contains only trained
# tensors, and the other tensors are loaded by that name.


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
        safetensors = extras.load("safetensors.torch", purpose="Saving a model")
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
    return replace(pair, logit_scale=description["logit_scale"], logit_bias=description["logit_bias"])


def _type_of_frozen(pair: Pair) -> str | None:
    """The type that a run stores the weights beside its adapters in, such as "bfloat16"."""
    if not pair.base_is_elsewhere:
        return None
    frozen = [p.dtype for p in pair.parameters() if not p.requires_grad and p.is_floating_point()]
    return str(frozen[0]).removeprefix("torch.") if frozen else None


def read_step(folder: str | Path) -> int | None:
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
        adapters = settings.build(LoraConfig, description["lora"]) if description.get("lora") else None
        if family == "hf" and adapters is not None:
            pair = huggingface.load(_find_bases(name, place, description.get("bases", {})), adapters)
            pair = replace(pair, options={})  # the file has them
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
    safetensors = extras.load("safetensors", purpose="Loading a model")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got one that is not: {error}") from error
