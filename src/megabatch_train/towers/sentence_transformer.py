"""Folders of sentence-transformers: poolings, dense layers, prompts and lengths, read and written."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras, file_io

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Poolings: how the states of a text's tokens become one vector, by the definitions of sentence-transformers.

CLS, MEAN, MAX, LAST, WEIGHTED_MEAN, MEAN_SQRT_LEN = "cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len"
POOLINGS = (CLS, MEAN, MAX, LAST, WEIGHTED_MEAN, MEAN_SQRT_LEN)


def pool(how: str, states: Tensor, mask: Tensor, pooled: Tensor | None = None) -> Tensor:  # (n, T, H) -> (n, H)
    """Pools the tokens of texts that are padded on either side, in float32 at least.

    Args:
        how: "cls" for the first token, "last" for the last one, "mean", "max", "weighted_mean" with the position as weight,
            or "mean_sqrt_len", which is the sum divided by the square root of the number of tokens.
        states: (n, T, H) of the last layer.
        mask: (n, T), 1 for tokens and 0 for padding.
        pooled: (n, T), 1 for tokens that are pooled, if some are excluded. A text in which all are excluded is pooled whole.
    """
    chosen = mask.bool()
    if pooled is not None:
        some = chosen & pooled.bool()
        chosen = some | (chosen & ~some.any(1, keepdim=True))
    if how in (CLS, LAST):
        place = torch.arange(mask.shape[1], device=mask.device)
        found = (chosen * place).amax(1) if how == LAST else chosen.int().argmax(1)
        return widen(states[torch.arange(len(states), device=states.device), found])
    states = widen(states)
    if how == MAX:
        return states.masked_fill(~chosen[..., None], -torch.inf).amax(1)
    weights = chosen.to(states.dtype)
    if how == WEIGHTED_MEAN:
        weights = weights * mask.bool().cumsum(1)  # positions of the whole text, from 1
    total, count = (states * weights[..., None]).sum(1), weights.sum(1, keepdim=True).clamp_min(1)
    return total / (count.sqrt() if how == MEAN_SQRT_LEN else count)


def widen(states: Tensor) -> Tensor:
    """In float32 at least: a mean over many tokens in half precision would lose digits."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


# ----------------------------------------------------------------------------------------------------------------------
# Folders of sentence-transformers: what follows the transformer, read from their files and written beside an encoder's own.
#
# `modules.json` lists the modules: pooling, linear layers (Dense), unit length (Normalize). Prompts and the largest number
# of tokens are in files of their own. All versions of sentence-transformers are read; files are written as all versions
# read them. Nothing that a file names is imported, so a folder cannot run code.


MODULES, ABOUT, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_LIBRARY = "sentence_transformers.models"
_POOLINGS = {  # by the name that versions from 6 on write
    "cls": CLS,
    "max": MAX,
    "mean": MEAN,
    "mean_sqrt_len_tokens": MEAN_SQRT_LEN,
    "weightedmean": WEIGHTED_MEAN,
    "lasttoken": LAST,
}
_FLAGS = {  # by the key that all versions read
    "pooling_mode_cls_token": CLS,
    "pooling_mode_max_tokens": MAX,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": WEIGHTED_MEAN,
    "pooling_mode_lasttoken": LAST,
}
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # names of one thing
_ACTIVATIONS = {
    kind.__name__: kind
    for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus)
}
_TEXT_FILES = (TEXTS, *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert")))
_TEXT_FILES += ("sentence_xlm-roberta_config.json", "sentence_xlnet_config.json")


class SentenceModelError(ValueError):
    """A folder of sentence-transformers that has what megabatch cannot represent."""


@dataclass(frozen=True)
class LayerConfig:
    """A module after the pooling."""

    kind: str  # "Dense" or "Normalize"
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation: str = "Tanh"  # a class of torch.nn

    def __post_init__(self) -> None:
        """Checks the names, which come from files."""
        if self.kind not in ("Dense", "Normalize"):
            raise SentenceModelError(f"a module after the pooling must be Dense or Normalize, got {self.kind!r}")
        if self.kind == "Dense" and min(self.in_features, self.out_features) < 1:
            raise SentenceModelError(
                f"a Dense module must have in_features and out_features, got {self.in_features} and {self.out_features}"
            )
        if self.kind == "Dense" and self.activation not in _ACTIVATIONS:
            raise SentenceModelError(
                f"the activation of a Dense module must be one of {', '.join(_ACTIVATIONS)}, got {self.activation!r}"
            )


class DenseLayer(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        self.activation: nn.Module = _ACTIVATIONS[config.activation]()

    def forward(self, pooled: Tensor) -> Tensor:  # (n, in_features) -> (n, out_features)
        """The projected embeddings."""
        found: Tensor = self.activation(self.linear(pooled))
        return found


class UnitLength(nn.Module):
    """Brings embeddings to unit length between two layers."""

    config = LayerConfig("Normalize")

    def forward(self, pooled: Tensor) -> Tensor:  # (n, D)
        """Embeddings of unit length."""
        return F.normalize(pooled, dim=-1)


@dataclass(frozen=True)
class SentenceModel:
    """What the files of a folder describe."""

    pooling: str  # one of `POOLINGS`
    include_prompt: bool = True  # whether the tokens of the prompt are pooled too
    layers: tuple[LayerConfig, ...] = ()  # after the pooling; the last Normalize is left out, because every tower ends with it
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # of the layers, as `build_layers` names them
    prompts: tuple[str, str] = ("", "")  # of queries and of documents
    max_length: int | None = None  # tokens; None if only the tokenizer limits them
    lowercase: bool = False  # whether texts are put into lower case before the tokenizer
    subfolder: str = ""  # of the transformer


def read(name: str | Path, *, offline: bool = False) -> SentenceModel | None:
    """The modules of a folder or of a name on the hub; None if it has no `modules.json`.

    Args:
        name: as for `AutoModel.from_pretrained`.
        offline: whether only files of this machine are read.
    """
    source = _Source(str(name), offline)
    modules = source.read(MODULES)
    if modules is None:
        return None
    kinds = [_kind_of(source, module) for module in modules]
    about = source.read(ABOUT) or {}
    if (model := about.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise SentenceModelError(f"{source} must be a SentenceTransformer, got a {model}")
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise SentenceModelError(f"{source} must begin with the modules Transformer and Pooling, got {', '.join(kinds)}")
    layers, weights = _layers(source, kinds[2:], modules[2:])
    if layers and layers[-1].kind == "Normalize":
        layers = layers[:-1]
    elif (similarity := about.get("similarity_fn_name")) not in (None, "cosine"):
        raise SentenceModelError(
            f"{source} must have a Normalize module at its end or the similarity cosine, got {similarity!r} without one: "
            "embeddings of megabatch have unit length"
        )
    subfolder = str(modules[0].get("path", ""))
    texts: Mapping[str, Any] = next((found for file in _TEXT_FILES if (found := source.read(file, subfolder)) is not None), {})
    _check_texts(source, texts)
    pooling = source.read("config.json", str(modules[1]["path"]))
    if pooling is None:
        raise SentenceModelError(f"{source} must have the config.json of its pooling, got none in {modules[1]['path']!r}")
    return SentenceModel(
        _pooling(source, pooling),
        bool(pooling.get("include_prompt", True)),
        tuple(layers),
        weights,
        _prompts(about),
        texts.get("max_seq_length"),
        bool(texts.get("do_lower_case", False)),
        subfolder,
    )


def build_layers(configs: Sequence[LayerConfig]) -> nn.Sequential:
    """The modules after the pooling, with random weights."""
    return nn.Sequential(*(DenseLayer(config) if config.kind == "Dense" else UnitLength() for config in configs))


class _Source:
    """The JSON files and weights of a folder, or of a name on the hub."""

    def __init__(self, name: str, offline: bool) -> None:
        self._name, self._offline = name, offline

    def __str__(self) -> str:
        return self._name

    def find(self, file: str, folder: str = "") -> Path | None:
        """A file on this machine; None if there is none."""
        if Path(self._name).is_dir():
            path = Path(self._name) / folder / file
            return path if path.is_file() else None
        hub = extras.load("transformers.utils.hub", purpose="A transformers encoder")
        try:
            found = hub.cached_file(
                self._name,
                file,
                subfolder=folder,
                local_files_only=self._offline,
                _raise_exceptions_for_missing_entries=False,
            )
        except OSError as error:
            if file == MODULES:  # of the other files, `modules.json` says whether they exist
                LOG.warning(
                    "could not find out whether %s has a %s, so it is read as a plain encoder: %s",
                    *(self._name, MODULES, str(error).splitlines()[0]),
                )
            return None
        return None if found is None else Path(found)

    def read(self, file: str, folder: str = "") -> Any:
        """The contents of a JSON file; None if there is none."""
        path = self.find(file, folder)
        try:
            return None if path is None else json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise SentenceModelError(f"{path} must be JSON, got {error}") from error


def _kind_of(source: _Source, module: Any) -> str:
    """The name of a module's class, which is one of the library's own."""
    named = str(module.get("type", "")) if isinstance(module, Mapping) else ""
    if not named.startswith("sentence_transformers.") or "path" not in module:
        raise SentenceModelError(
            f"{source} must have modules of sentence-transformers itself, got {named!r}, which is code of its own"
        )
    return named.rpartition(".")[2]


def _pooling(source: _Source, config: Mapping[str, Any]) -> str:
    found = config.get("pooling_mode")
    if found is None:
        known = [pooling for flag, pooling in _FLAGS.items() if config.get(flag)]
    else:
        known = [_POOLINGS.get(name, name) for name in ([found] if isinstance(found, str) else found)]
    if len(known) > 1 or any(name not in _POOLINGS.values() for name in known):
        raise SentenceModelError(f"{source} must have one pooling of {', '.join(_POOLINGS)}, got {' + '.join(known)}")
    return known[0] if known else MEAN


def _layers(
    source: _Source, kinds: Sequence[str], modules: Sequence[Mapping[str, Any]]
) -> tuple[list[LayerConfig], dict[str, Tensor]]:
    """The modules after the pooling, with their weights."""
    layers: list[LayerConfig] = []
    weights: dict[str, Tensor] = {}
    for kind, module in zip(kinds, modules, strict=True):
        config = source.read("config.json", str(module["path"])) or {}
        for key, usual in (("module_input_name", "sentence_embedding"), ("module_output_name", "sentence_embedding")):
            if config.get(key) not in (None, usual):
                raise SentenceModelError(f"{source} must have {key} = {usual!r} in {module['path']}, got {config[key]!r}")
        if kind == "Normalize":
            layers.append(LayerConfig(kind))
            continue
        if kind != "Dense" or config.get("use_residual"):
            what = "Dense with a residual connection" if kind == "Dense" else kind
            raise SentenceModelError(f"{source} must have modules Dense and Normalize after its pooling, got {what}")
        activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        if not activation.startswith("torch.nn."):
            raise SentenceModelError(f"{source} must have an activation of torch.nn in {module['path']}, got {activation!r}")
        layer = LayerConfig(
            kind, config["in_features"], config["out_features"], config.get("bias", True), activation.rpartition(".")[2]
        )
        own = _tensors(source, str(module["path"]))
        weights |= {f"{len(layers)}.{name}": value for name, value in own.items()}
        layers.append(layer)
    return layers, weights


def _tensors(source: _Source, folder: str) -> dict[str, Tensor]:
    if (path := source.find("model.safetensors", folder)) is not None:
        safetensors = extras.load("safetensors.torch", purpose="Loading a model")
        found: dict[str, Tensor] = safetensors.load_file(path)
    elif (path := source.find("pytorch_model.bin", folder)) is not None:
        found = torch.load(path, map_location="cpu", weights_only=True)
    else:
        raise SentenceModelError(f"{source} must have the weights of its module {folder}, got none")
    return found


def _check_texts(source: _Source, texts: Mapping[str, Any]) -> None:
    """Raises an error for settings of the transformer that change its embeddings."""
    task = texts.get("transformer_task", "feature-extraction")
    usual = {"method": "forward", "method_output_name": "last_hidden_state"}
    method = (texts.get("modality_config") or {}).get("text", usual)
    if task != "feature-extraction" or {key: method.get(key) for key in usual} != usual:
        raise SentenceModelError(
            f"{source} must use the last hidden state of its transformer, got the task {task!r} with {method!r}"
        )
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        if texts.get(key):
            raise SentenceModelError(f"{source} must have no {key} in its {TEXTS}, got {texts[key]!r}")


def _prompts(about: Mapping[str, Any]) -> tuple[str, str]:
    """The prompts of queries and documents, or the default prompt for both if neither has one."""
    prompts = {name: prompt for name, prompt in (about.get("prompts") or {}).items() if prompt}
    query = prompts.get("query", "")
    document = next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")
    if not query and not document:
        query = document = prompts.get(about.get("default_prompt_name") or "", "")
    return query, document


def write(folder: Path, width: int, longest: int, model: SentenceModel) -> None:
    """Writes the files beside an encoder's own.

    Args:
        folder: with config, weights and tokenizer.
        width: of the encoder's states.
        longest: tokens of a text.
        model: what follows the encoder.
    """
    pooling = {flag: model.pooling == found for flag, found in _FLAGS.items()}
    modules: list[tuple[str, Mapping[str, Any] | None]] = [
        ("Transformer", None),
        ("Pooling", {"word_embedding_dimension": width, **pooling, "include_prompt": model.include_prompt}),
    ]
    for layer in model.layers:
        kind = "linear.Identity" if layer.activation == "Identity" else f"activation.{layer.activation}"
        dense: dict[str, Any] = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias}
        dense["activation_function"] = f"torch.nn.modules.{kind}"
        modules.append((layer.kind, dense if layer.kind == "Dense" else {}))
    modules.append(("Normalize", {}))
    described = []
    for number, (name, config) in enumerate(modules):
        path = f"{number}_{name}" if config is not None else ""
        described.append({"idx": number, "name": str(number), "path": path, "type": f"{_LIBRARY}.{name}"})
        if config is not None:
            _write(folder / path / "config.json", config)
        if name == "Dense":
            prefix = f"{number - 2}."
            own = {key.removeprefix(prefix): value for key, value in model.weights.items() if key.startswith(prefix)}
            write_tensors(folder / path / "model.safetensors", own)
    prompts = {name: prompt for name, prompt in zip(("query", "document"), model.prompts, strict=True) if prompt}
    _write(folder / TEXTS, {"max_seq_length": longest, "do_lower_case": False})
    _write(folder / ABOUT, {"prompts": prompts, "similarity_fn_name": "cosine"})
    _write(folder / MODULES, described)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file of PyTorch's format."""
    safetensors = extras.load("safetensors.torch", purpose="Saving a model")
    data = safetensors.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, {"format": "pt"})
    file_io.write(path, lambda file: file.write(data))


def _write(path: Path, content: Any) -> None:
    file_io.write(path, lambda file: file.write(json.dumps(content, indent=2).encode()))
