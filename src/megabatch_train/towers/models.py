"""Models: towers by name ("small", "open_clip:…", "hf:…"), and trained towers, which are saved to and loaded from a folder."""

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
from megabatch_train.towers import (
    custom,
    huggingface,
    huggingface_inputs,
    late_interaction,
    open_clip,
    small,
    vision_language,
)
from megabatch_train.towers.layers import lora
from megabatch_train.towers.sentence_transformer import FileOptions, LayerConfig, TextEncoder, layer_configs, write_tensors
from megabatch_train.towers.tokens import TokenSizes, check_dropout
from megabatch_train.towers.tower import SIDES, LoraConfig, Pair
from megabatch_train.towers.vision_language import VisionLanguageEncoder

# ----------------------------------------------------------------------------------------------------------------------
# Towers by name, with prompts and options for their texts.

LOG = logging.getLogger("megabatch")
PROMPTS = ("query_prompt", "document_prompt")  # options for the first and the second side
TEXT_OPTIONS = (*PROMPTS, *huggingface.OPTIONS, *late_interaction.OPTIONS)
PATCH_DROPOUT = "patch_dropout"  # option of image towers with patches
SIZES = ("image_size", "context_length")  # options of `TokenSizes`, for models of open_clip and transformers


def load(spec: str, kinds: tuple[str, str] | None = (IMAGE, TEXT), *, lora: LoraConfig | None = None, **options: Any) -> Pair:
    """Loads towers by name, for data with sides of these kinds.

    Args:
        spec: see `megabatch_train.names.MODELS`.
        kinds: the `sides` of a dataset; None for the sides of the model.
        lora: adapters for all models except "small", which are trained instead of the weights. A rank of 0 means no adapters.
        options: the allowed options depend on the model. "small" has the fields of `small.SmallConfig`. All models have
            `query_prompt` and `document_prompt`, which texts of the first and second side begin with. "hf:" has the options of
            `huggingface.adapt`, which replace the options in the files of a sentence-transformers model. "open_clip:FILE.json"
            has `config`, the contents of the file; if it is given, the file is not read. Vision transformers have
            `patch_dropout`, the fraction of the patches of an image that a training step drops. "open_clip:" and "hf:" have the
            fields of `TokenSizes`, and interpolate the positions of trained weights. "python:" has the arguments of
            its function.
    """
    family, _, name = spec.partition(":")
    if family == "python" and name:
        return _check_kinds(custom.load(name, options, lora), kinds)
    texts = {key: options.pop(key) for key in TEXT_OPTIONS if key in options}
    lora = lora if lora is not None and lora.rank else None
    if lora is not None and spec == "small":
        raise ValueError(f'lora.rank must be 0 for "small", which has no trained weights to adapt, got {lora.rank}')
    dropout = options.pop(PATCH_DROPOUT, None)
    chosen = {} if spec == "small" else {key: options.pop(key) for key in SIZES if options.get(key) is not None}
    sizes = TokenSizes.of(chosen)
    config = options.pop("config", None) if family == "open_clip" else None
    if options and spec != "small":
        raise ValueError(
            f"model_options.{next(iter(options))} must not be set for {spec!r}; possible are: "
            f"{', '.join((*TEXT_OPTIONS, *SIZES, PATCH_DROPOUT))}"
        )
    if spec == "small":
        config = small.build_config(options)
        text = small.text_tower(config)
        first = small.image_tower(config) if kinds is None or kinds[0] == IMAGE else text
        pair = Pair(first, text, small.INITIAL_SCALE, name=spec, options=options)
    elif family == "open_clip" and name:
        pair = open_clip.load(name, config, sizes, lora)
    elif family in ("hf", "hf-config") and name:
        with_tokens = late_interaction.load(spec, lora, sizes, texts)
        load_pair = huggingface.load if family == "hf" else huggingface.load_config
        pair = load_pair(name, lora, sizes) if with_tokens is None else with_tokens
    else:
        raise ValueError(f"No such model: {spec}{nearest(spec, ['small'])}. Possible are: {'; '.join(MODELS)}")
    if kinds is not None and isinstance(pair.first.module, VisionLanguageEncoder):
        pair = vision_language.with_kinds(pair, kinds)
    _check_kinds(pair, kinds)
    if family == "hf":
        _log_choice(pair, texts)
    if chosen:
        pair = replace(pair, options={**pair.options, **chosen})
    if family in ("hf", "hf-config") and sizes.context_length is not None:
        texts = {"max_length": sizes.context_length, **texts}
    if dropout is not None:
        pair = replace(pair, options={**pair.options, PATCH_DROPOUT: check_dropout(dropout, pair.first.patches, spec)})
    return adapt_texts(pair, {**pair.options, **texts})


def _check_kinds(pair: Pair, kinds: tuple[str, str] | None) -> Pair:
    """Returns the pair. Raises an error if its towers are not for sides of these kinds."""
    if kinds is not None and (pair.first.kind, pair.second.kind) != tuple(kinds):
        raise ValueError(
            f"model must have towers for {kinds[0]} and {kinds[1]}, got {pair.name!r}, which is for {pair.first.kind} and "
            f"{pair.second.kind}; possible are: {'; '.join(MODELS)}"
        )
    return pair


def _log_choice(pair: Pair, given: Mapping[str, Any]) -> None:
    """Logs whether the files of the model or the defaults determine how texts are encoded."""
    encoder, name = pair.second.module, pair.name.partition(":")[2].rpartition("+")[2]
    if isinstance(encoder, huggingface.PairEncoder):
        described = name, type(encoder.model).__name__, pair.first.kind.replace("image", "images")
        LOG.info("%s is a %s, which encodes %s and texts with its own projections", *described)
        return
    if isinstance(encoder, VisionLanguageEncoder):
        template = "with" if vision_language.inputs_of(pair.second).chat else "without"
        LOG.info("%s is a vision-language model, which encodes texts and images %s a chat template", name, template)
        return
    assert isinstance(encoder, TextEncoder)
    if late_interaction.token_dim(pair):
        LOG.info("%s has one vector of %d dimensions per token", name, late_interaction.token_dim(pair))
        return
    if "pooling" in pair.options:
        chosen = {key: value for key, value in {**pair.options, **given}.items() if value != ""}
        dims = [f"a Dense layer of {layer.out_features}" for layer in layer_configs(encoder) if layer.out_features]
        description = ", ".join([*(f"{key} = {value!r}" for key, value in chosen.items()), *dims])
        LOG.info("%s is a model of sentence-transformers: %s", name, description)
    elif "pooling" not in given:
        LOG.info(
            '%s has no modules.json of sentence-transformers, so texts are encoded with pooling = "%s" and max_length = %d; '
            "model_options.pooling and model_options.max_length change this",
            *(name, encoder.pooling, given.get("max_length", huggingface_inputs.longest(encoder.model.config))),
        )


@dataclass(frozen=True)
class Prompted:
    """Preprocessing of texts that begin with a prompt."""

    prompt: str
    inner: Callable[[Any, torch.Generator | None], Any]

    def __call__(self, text: str, generator: torch.Generator | None) -> Any:
        """Preprocesses a text with its prompt."""
        return self.inner(self.prompt + text, generator)


def adapt_texts(pair: Pair, options: Mapping[str, Any]) -> Pair:
    """Applies the `TEXT_OPTIONS` among the options, such as prompts, maximum length and pooling. Returns the new pair."""
    unset = [key for key in late_interaction.OPTIONS if options.get(key) is None]
    given = {key: options[key] for key in TEXT_OPTIONS if key in options and key not in unset}
    if not late_interaction.token_dim(pair):
        late_interaction.check_unused(given, pair.name)
    if of_encoder := {key: given[key] for key in huggingface.OPTIONS if key in given}:
        huggingface.adapt(pair, of_encoder)
    for key in PROMPTS:
        if not isinstance(given.get(key, ""), str):
            raise ValueError(f"model_options.{key} must be a text, got {given[key]!r}")
    if given and isinstance(pair.first.module, VisionLanguageEncoder):
        pair = vision_language.with_prompts(pair, [given.get(key, "") for key in PROMPTS])
        return replace(pair, options={**pair.options, **given})
    towers = []
    for tower, key in zip(pair.towers, PROMPTS, strict=True):
        prompt = given.get(key, "")
        if tower.kind == TEXT:
            if isinstance(tower.module, TextEncoder):
                tower = huggingface.exclude_prompt(tower, prompt)
            tower = replace(tower, prepare=Prompted(prompt, tower.prepare)) if prompt else tower
        towers.append(tower)
    return replace(pair, first=towers[0], second=towers[1], options={**pair.options, **given}) if given else pair


def text_options(pair: Pair) -> dict[str, Any]:
    """Returns the `TEXT_OPTIONS` of a pair. They come from the user or from the files of the model."""
    return {key: value for key, value in pair.options.items() if key in TEXT_OPTIONS}


def anchor(spec: str, directory: Path) -> str:
    """Returns the model specification. Relative paths that exist in a directory become absolute.

    Args:
        spec: see `megabatch_train.names.MODELS`, or the folder of a run.
        directory: the directory that relative paths start from.
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
    """Returns the side length of the model's images in pixels, or None for any size. Emoji are rendered in this size."""
    sizes = {key: value for key, value in options.items() if key not in TEXT_OPTIONS}
    return small.build_config(sizes).image_size if spec == "small" else None


# ----------------------------------------------------------------------------------------------------------------------
# A trained model is saved to a folder and loaded from it: the weights, and the description that rebuilds its towers.
#
# `model.safetensors` is one atomic file. It contains the tensors, and its header contains the name of the towers, the scale and
# the bias.
#
# - An open_clip model has open_clip's tensor names, with its config in the same folder, so
#   `open_clip.create_model("local-dir:FOLDER")` loads it.
# - A text encoder of transformers has the tensor names of transformers, with its config and tokenizer in the same folder, so
#   `AutoModel.from_pretrained(FOLDER)` and `SentenceTransformer(FOLDER)` load it. The file also contains the layers after its
#   pooling, under names that transformers ignores.
# - A model of images and texts of transformers, such as CLIP, is saved in the same way, with its image processor, so
#   `AutoModel.from_pretrained(FOLDER)` loads it.
# - Two encoders of transformers have their configs and tokenizers in the folders `first` and `second`. Their weights are in one
#   file, so both are always from the same step. `megabatch export` writes a separate model of each.
# - LoRA adapters are in the folders `first` and `second`, in the format of PEFT, next to config and tokenizer. They are not in
#   the folder of the run, because transformers would load the model there without its adapters. With LoRA on "hf:NAME",
#   `model.safetensors` contains only trained tensors, and the other tensors are loaded by that name.


WEIGHTS = "model.safetensors"
_HEADER = "megabatch"
_LAYERS = "megabatch_layers."  # prefix of the layers after the pooling of a single text encoder
_FORMAT = 1


def save(pair: Pair, folder: str | Path, *, step: int | None = None) -> Path:
    """Writes the pair with `pair.logit_scale` and `pair.logit_bias`, and returns the path of the file.

    With FSDP2, all ranks must call it. Rank 0 writes.

    Args:
        pair: a pair from `towers.load`. After training, pass the learned scale: `dataclasses.replace(pair, logit_scale=…)`.
        folder: folder to write to. It is created if it does not exist.
        step: training step, which is recorded in the file.
    """
    place = Path(folder)
    weights = _weights(pair)  # all ranks call it, because it gathers sharded weights
    if World.of(default_group()).rank == 0:
        description = {
            "format": _FORMAT,
            "name": pair.name,
            "kinds": [tower.kind for tower in pair.towers],
            "options": dict(pair.options),
            "logit_scale": pair.logit_scale,
            "logit_bias": pair.logit_bias,
            "layers": layer_configs(pair.second.module),
            "sentence_transformer": getattr(pair.second.module, "files", None),
            "bases": list_bases(pair.name, place) if pair.base_is_elsewhere else {},
            "frozen": _dtype_of_frozen(pair),
            "lora": dataclasses.asdict(pair.lora) if pair.lora is not None and not pair.lora.merge else None,
            "step": step,
        }
        keep(pair, place)
        if pair.lora is not None:
            weights = _with_adapters(pair, weights, place)
        if isinstance(pair.second.module, TextEncoder):
            if late_interaction.token_dim(pair):
                late_interaction.describe(pair, place, _of(_LAYERS, weights))
            elif _is_one_model(pair):
                huggingface.describe(pair, place, {f"layers.{key}": value for key, value in _of(_LAYERS, weights).items()})
            elif pair.lora is not None and pair.lora.merge:
                huggingface.describe(pair, place / SIDES[1], _of(f"{SIDES[1]}.", weights))
        if isinstance(pair.second.module, VisionLanguageEncoder) and _is_one_model(pair):
            vision_language.describe(pair, place)
        safetensors = extras.load("safetensors.torch", purpose="Saving a model")
        # transformers requires the format "pt".
        about = {"format": "pt", _HEADER: json.dumps(description, default=dataclasses.asdict)}
        parts = _sort_metadata(safetensors.save(weights, about))
        file_io.write(place / WEIGHTS, lambda file: file.writelines(parts))
    return place / WEIGHTS


def load_saved(folder: str | Path, device: torch.device | str = "cpu") -> Pair:
    """Loads a saved pair with its weights, scale and bias, in evaluation mode.

    Args:
        folder: folder of a run, or another folder that `save` wrote to.
        device: device of the modules.
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


def _dtype_of_frozen(pair: Pair) -> str | None:
    """Returns the dtype of the frozen weights of a run with adapters, such as "bfloat16"."""
    if not pair.base_is_elsewhere:
        return None
    frozen = [p.dtype for p in pair.parameters() if not p.requires_grad and p.is_floating_point()]
    return str(frozen[0]).removeprefix("torch.") if frozen else None


def read_step(folder: str | Path) -> int | None:
    """Returns the training step of the model in a folder; None if there is no model or it records no step."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        return None
    step: int | None = _header(path).get("step")
    return step


def _build(description: dict[str, Any], place: Path) -> Pair:
    """Builds the towers without loading their weights."""
    family, _, name = description["name"].partition(":")
    custom.check(description["name"], place)
    adapters = settings.build(LoraConfig, description["lora"]) if description.get("lora") else None
    if family == "open_clip":
        folder = place if adapters is None else place / SIDES[0]
        pair = open_clip.load_folder(name, folder, TokenSizes.of(description["options"]), adapters)
        return _with_options(pair, description["options"])
    if family in ("hf", "hf-config"):
        if "token_dim" in description["options"]:
            layers = [settings.build(LayerConfig, layer) for layer in description["layers"]]
            pair = late_interaction.load_folder(description["name"], place, layers, description["options"])
        elif family == "hf" and adapters is not None:
            bases = _find_moved(name, place, description.get("bases", {}))
            pair = huggingface.load(bases, adapters, TokenSizes.of(description["options"]))
            pair = replace(pair, options={})  # the description has the options
        else:
            sides = SIDES if "+" in name else SIDES[:1] if adapters is not None else ("",)
            folders = [place / side for side in sides]
            layers = [settings.build(LayerConfig, layer) for layer in description.get("layers", ())]
            pair = huggingface.load_folders(description["name"], folders, adapters, layers)
            encoder = pair.second.module
            if isinstance(encoder, TextEncoder | VisionLanguageEncoder) and (files := description.get("sentence_transformer")):
                encoder.files = settings.build(FileOptions, files)
        if isinstance(pair.first.module, VisionLanguageEncoder):
            pair = vision_language.with_kinds(pair, description["kinds"])
        return _with_options(pair, description["options"])
    return load(description["name"], tuple(description["kinds"]), **description["options"])


def _with_options(pair: Pair, options: Mapping[str, Any]) -> Pair:
    """Returns the pair with the options of a saved model."""
    own = {key: options[key] for key in (*SIZES, PATCH_DROPOUT) if key in options}
    return adapt_texts(replace(pair, options={**pair.options, **own}), options)


def list_bases(spec: str, place: Path) -> dict[str, str]:
    """Returns the folders in the name of a transformers model, as {path: path relative to `place`}."""
    family, _, name = spec.partition(":")
    folders = [part for part in name.split("+") if family in ("hf", "hf-config") and os.path.isdir(part)]
    return {part: os.path.relpath(part, place.absolute()) for part in folders}


def find_bases(spec: str, place: Path, bases: Mapping[str, str]) -> str:
    """Returns the specification of a model whose folders may have been moved together with the folder `place`.

    Args:
        spec: the specification, with absolute paths of the folders that have not been moved.
        place: the present folder.
        bases: the result of `list_bases`, for the same folder before it was moved.
    """
    family, _, name = spec.partition(":")
    return f"{family}:{_find_moved(name, place, bases)}" if family in ("hf", "hf-config") else spec


def _find_moved(name: str, place: Path, bases: Mapping[str, str]) -> str:
    parts = []
    for part in name.split("+"):
        moved, is_here = place.absolute() / str(bases.get(part, "")), os.path.isabs(part) and os.path.isdir(part)
        parts.append(os.path.normpath(moved) if part in bases and not is_here and moved.is_dir() else part)
    return "+".join(parts)


def _is_one_model(pair: Pair) -> bool:
    """Returns whether the saved folder is a model of open_clip or transformers, with their tensor names and files."""
    has_own_format = pair.name.startswith(("open_clip:", "hf:", "hf-config:"))
    return has_own_format and pair.first.module is pair.second.module and (pair.lora is None or pair.lora.merge)


def _modules(pair: Pair) -> dict[str, nn.Module]:
    """Returns the modules to save by the prefix of their tensor names. A module that serves both sides occurs once."""
    if _is_one_model(pair):
        encoder: Any = pair.first.module
        return {"": encoder.model, **({_LAYERS: encoder.layers} if layer_configs(encoder) else {})}
    if pair.first.module is pair.second.module:
        return {f"{SIDES[0]}.": pair.first.module}
    return {f"{side}.": tower.module for side, tower in zip(SIDES, pair.towers, strict=True)}


def _weights(pair: Pair) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    stored_pointers: set[int] = set()
    for prefix, module in _modules(pair).items():
        for key, value in module.state_dict().items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            tensor = full.detach().to("cpu").contiguous()
            # safetensors refuses two names for one tensor, so tied weights are stored twice.
            weights[prefix + key] = tensor.clone() if tensor.data_ptr() in stored_pointers else tensor
            stored_pointers.add(tensor.data_ptr())
    if isinstance(pair.first.module, open_clip.Sides | huggingface.PairEncoder):
        _store_scale(weights, pair.logit_scale, pair.logit_bias)
    return weights


def _store_scale(weights: dict[str, Tensor], scale: float, bias: float | None) -> None:
    """Replaces the scale and the bias among the weights of a pair.

    Args:
        weights: the weights of a model of transformers or open_clip by name, which are changed in place.
        scale: scale of the loss.
        bias: bias of the loss, if it has one.
    """
    if scales := [name for name in huggingface_inputs.SCALES if name in weights]:
        weights |= {name: _fill_like(weights[name], math.log(scale)) for name in scales}
    elif "temperature" in weights:
        weights["temperature"] = _fill_like(weights["temperature"], 1 / scale)
    if bias is not None and "logit_bias" in weights:
        weights["logit_bias"] = _fill_like(weights["logit_bias"], bias)


def _fill_like(tensor: Tensor, value: float) -> Tensor:
    """Returns a tensor of this shape in at least float32. Frozen weights of a run with adapters can be in half precision."""
    return torch.full_like(tensor, value, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _with_adapters(pair: Pair, weights: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """Writes adapters, or two merged models, to one folder per tower. Returns the weights for `model.safetensors`."""
    assert pair.lora is not None
    remaining: dict[str, Tensor] = {}
    for prefix, module in _modules(pair).items():
        own, folder = _of(prefix, weights), place / prefix.rstrip(".")
        inner = "model." if prefix else ""  # each of two towers consists of `model` and a projection
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
        remaining |= {prefix + key: value for key, value in own.items()}
    return remaining


def _of(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with a prefix, without the prefix. An empty prefix excludes `_LAYERS`."""
    if not prefix:
        return {key: value for key, value in weights.items() if not key.startswith(_LAYERS)}
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _sort_metadata(data: bytes) -> tuple[bytes, memoryview]:
    """Returns header and tensors of a safetensors file with sorted metadata, because safetensors writes a random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text, memoryview(data)[end:]


def keep(pair: Pair, place: Path) -> None:
    """Writes the files that rebuild the towers and their preprocessing, except the weights."""
    place.mkdir(parents=True, exist_ok=True)
    for number, tower in enumerate(pair.towers):
        if tower.keep is not None and (number == 0 or tower.keep != pair.first.keep):
            tower.keep(place / folder_of(pair, number))


def folder_of(pair: Pair, side: int) -> str:
    """Returns the subfolder that `keep` writes the files of a side to; empty for the folder of the pair itself."""
    if _is_one_model(pair):
        return ""
    return SIDES[0] if pair.first.module is pair.second.module else SIDES[side]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"the folder {path.parent} must have a {path.name}, got none: is the run complete?")
    header = _header(path)
    with _open(path) as file:
        # safe_open has keys, but it is not a mapping.
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
        raise ValueError(f"{path} must be a complete safetensors file, got a damaged one: {error}") from error
