"""Text encoders as in sentence-transformers: poolings, layers after the pooling, and the folders that describe them."""

import inspect
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
from megabatch_train.towers.layers.packed import Packed, disable_packing, enable_packing, first_position

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Poolings, which reduce the states of a text's tokens to one vector. They are defined as in sentence-transformers.

CLS, MEAN, MAX, LAST, WEIGHTED_MEAN, MEAN_SQRT_LEN = "cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len"
POOLINGS = (CLS, MEAN, MAX, LAST, WEIGHTED_MEAN, MEAN_SQRT_LEN)


def pool(how: str, states: Tensor, mask: Tensor, pooled: Tensor | None = None) -> Tensor:  # (n, T, H) -> (n, H)
    """Pools the tokens of texts in at least float32. Texts can be padded on either side.

    Args:
        how: "cls" for the first token, "last" for the last token, "mean", "max", "weighted_mean" with the position as weight,
            or "mean_sqrt_len", which is the sum divided by the square root of the number of tokens.
        states: (n, T, H) output of the last layer.
        mask: (n, T), 1 for tokens and 0 for padding.
        pooled: (n, T), 1 for tokens that are pooled, if some are excluded. If a text has no such token, all are pooled.
    """
    chosen = mask.bool()
    if pooled is not None:
        some = chosen & pooled.bool()
        chosen = some | (chosen & ~some.any(1, keepdim=True))
    if how in (CLS, LAST):
        positions = torch.arange(mask.shape[1], device=mask.device)
        position = (chosen * positions).amax(1) if how == LAST else chosen.int().argmax(1)
        return widen(states[torch.arange(len(states), device=states.device), position])
    states = widen(states)
    if how == MAX:
        return states.masked_fill(~chosen[..., None], -torch.inf).amax(1)
    weights = chosen.to(states.dtype)
    if how == WEIGHTED_MEAN:
        weights = weights * mask.bool().cumsum(1)  # positions of the whole text, from 1
    total, count = (states * weights[..., None]).sum(1), weights.sum(1, keepdim=True).clamp_min(1)
    return total / (count.sqrt() if how == MEAN_SQRT_LEN else count)


def widen(states: Tensor) -> Tensor:
    """Casts half precision to float32, because a mean over many tokens in half precision would lose digits."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


# ----------------------------------------------------------------------------------------------------------------------
# Folders of sentence-transformers: the files that describe the modules after the transformer.
#
# `modules.json` lists the modules: pooling, linear layers (Dense) and unit length (Normalize). Prompts and the maximum number
# of tokens are in separate files. Files of all versions of sentence-transformers can be read, and all versions can read the
# written files. No name in a file is imported, so a folder cannot run code.


MODULES, ABOUT, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_LIBRARY = "sentence_transformers.models"
_POOLINGS = {  # names that version 6 and later versions write
    "cls": CLS,
    "max": MAX,
    "mean": MEAN,
    "mean_sqrt_len_tokens": MEAN_SQRT_LEN,
    "weightedmean": WEIGHTED_MEAN,
    "lasttoken": LAST,
}
_FLAGS = {  # keys that all versions read
    "pooling_mode_cls_token": CLS,
    "pooling_mode_max_tokens": MAX,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": WEIGHTED_MEAN,
    "pooling_mode_lasttoken": LAST,
}
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # alternative names of the document prompt
_ACTIVATIONS = {
    kind.__name__: kind
    for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus)
}
_TEXT_FILES = (TEXTS, *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert")))
_TEXT_FILES += ("sentence_xlm-roberta_config.json", "sentence_xlnet_config.json")


class SentenceModelError(ValueError):
    """A folder of sentence-transformers that megabatch cannot represent."""


@dataclass(frozen=True)
class LayerConfig:
    """A module after the pooling."""

    kind: str  # "Dense" or "Normalize"
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation: str = "Tanh"  # a class of torch.nn

    def __post_init__(self) -> None:
        """Checks the values, which come from files."""
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
        """Returns the projected embeddings."""
        projected: Tensor = self.activation(self.linear(pooled))
        return projected


class UnitLength(nn.Module):
    """Normalizes embeddings to unit length between two layers."""

    config = LayerConfig("Normalize")

    def forward(self, pooled: Tensor) -> Tensor:  # (n, D)
        """Returns embeddings of unit length."""
        return F.normalize(pooled, dim=-1)


@dataclass(frozen=True)
class FileOptions:
    """Contents of the files that do not change the embeddings of megabatch. A saved model has the same contents."""

    normalize: bool = True  # whether the last module is Normalize
    similarity: str | None = "cosine"  # `similarity_fn_name`
    prompts: dict[str, str] = field(default_factory=dict)  # prompts by name, including other names than query and document
    default_prompt: str | None = None  # `default_prompt_name`


@dataclass(frozen=True)
class SentenceModel:
    """The description of a model in the files of a folder."""

    pooling: str  # one of `POOLINGS`
    include_prompt: bool = True  # whether the tokens of the prompt are pooled too
    layers: tuple[LayerConfig, ...] = ()  # layers after the pooling, without a final Normalize, which every tower has
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # weights of the layers, as `build_layers` names them
    prompts: tuple[str, str] = ("", "")  # prompts of queries and of documents
    max_length: int | None = None  # maximum number of tokens; None if only the tokenizer limits them
    lowercase: bool = False  # whether texts are converted to lower case before the tokenizer
    subfolder: str = ""  # subfolder of the transformer
    # Whether the beginning of an answer follows the messages of a vision-language model; None if the files do not contain it.
    generation_prompt: bool | None = None
    files: FileOptions = field(default_factory=FileOptions)


def read(name: str | Path, *, offline: bool = False) -> SentenceModel | None:
    """Reads the modules of a folder or of a name on the hub. Returns None if it has no `modules.json`.

    Args:
        name: as for `AutoModel.from_pretrained`.
        offline: whether only local files are read.
    """
    source = SourceFiles(str(name), offline)
    modules = source.read(MODULES)
    if modules is None:
        return None
    kinds = [read_kind(source, module) for module in modules]
    about = source.read(ABOUT) or {}
    if (model := about.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise SentenceModelError(f"{source} must be a SentenceTransformer, got a {model}")
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise SentenceModelError(f"{source} must begin with the modules Transformer and Pooling, got {', '.join(kinds)}")
    layers, weights = _layers(source, kinds[2:], modules[2:])
    similarity = about.get("similarity_fn_name")
    if normalize := bool(layers) and layers[-1].kind == "Normalize":
        layers = layers[:-1]
    elif similarity not in (None, "cosine"):
        raise SentenceModelError(
            f"{source} must end with a Normalize module or have cosine similarity, got {similarity!r} without Normalize: "
            "embeddings of megabatch have unit length"
        )
    subfolder = str(modules[0].get("path", ""))
    contents = (source.read(file, subfolder) for file in _TEXT_FILES)
    texts: Mapping[str, Any] = next((content for content in contents if content is not None), {})
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
        _template_options(texts).get("add_generation_prompt"),
        FileOptions(normalize, similarity, dict(about.get("prompts") or {}), about.get("default_prompt_name")),
    )


def build_layers(configs: Sequence[LayerConfig]) -> nn.Sequential:
    """Builds the modules after the pooling with random weights."""
    return nn.Sequential(*(DenseLayer(config) if config.kind == "Dense" else UnitLength() for config in configs))


class SourceFiles:
    """The JSON files and weights of a folder, or of a name on the hub."""

    def __init__(self, name: str, offline: bool) -> None:
        self._name, self._offline = name, offline

    def __str__(self) -> str:
        """Returns the folder or the name."""
        return self._name

    def find(self, file: str, folder: str = "") -> Path | None:
        """Returns the local path of a file, which is downloaded if necessary; None if the file does not exist."""
        if Path(self._name).is_dir():
            path = Path(self._name) / folder / file
            return path if path.is_file() else None
        hub = extras.load("transformers.utils.hub", purpose="A transformers encoder")
        try:
            cached = hub.cached_file(
                self._name,
                file,
                subfolder=folder,
                local_files_only=self._offline,
                _raise_exceptions_for_missing_entries=False,
            )
        except OSError as error:
            if file == MODULES:  # the other files exist only if `modules.json` exists
                LOG.warning(
                    "it is unknown whether %s has a %s, so it is loaded as a plain encoder: %s",
                    *(self._name, MODULES, str(error).splitlines()[0]),
                )
            return None
        return None if cached is None else Path(cached)

    def read(self, file: str, folder: str = "") -> Any:
        """Returns the contents of a JSON file; None if it does not exist."""
        path = self.find(file, folder)
        try:
            return None if path is None else json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise SentenceModelError(f"{path} must be JSON, got {error}") from error


def read_kind(source: SourceFiles, module: Any) -> str:
    """Returns the class name of a module. Raises an error if the class is not from sentence-transformers."""
    named = str(module.get("type", "")) if isinstance(module, Mapping) else ""
    if not named.startswith("sentence_transformers.") or "path" not in module:
        raise SentenceModelError(
            f"{source} must have only modules of sentence-transformers, got {named!r}, which is custom code"
        )
    return named.rpartition(".")[2]


def _pooling(source: SourceFiles, config: Mapping[str, Any]) -> str:
    mode = config.get("pooling_mode")
    if mode is None:
        poolings = [pooling for flag, pooling in _FLAGS.items() if config.get(flag)]
    else:
        poolings = [_POOLINGS.get(name, name) for name in ([mode] if isinstance(mode, str) else mode)]
    if len(poolings) > 1 or any(name not in _POOLINGS.values() for name in poolings):
        raise SentenceModelError(f"{source} must have one pooling of {', '.join(_POOLINGS)}, got {' + '.join(poolings)}")
    return poolings[0] if poolings else MEAN


def _layers(
    source: SourceFiles, kinds: Sequence[str], modules: Sequence[Mapping[str, Any]]
) -> tuple[list[LayerConfig], dict[str, Tensor]]:
    """Reads the modules after the pooling and their weights."""
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
        own = read_weights(source, str(module["path"]))
        weights |= {f"{len(layers)}.{name}": value for name, value in own.items()}
        layers.append(layer)
    return layers, weights


def read_weights(source: SourceFiles, folder: str) -> dict[str, Tensor]:
    """Returns the weights of a module. Raises an error if it has none."""
    if (path := source.find("model.safetensors", folder)) is not None:
        safetensors = extras.load("safetensors.torch", purpose="Loading a model")
        tensors: dict[str, Tensor] = safetensors.load_file(path)
    elif (path := source.find("pytorch_model.bin", folder)) is not None:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    else:
        raise SentenceModelError(f"{source} must have the weights of its module {folder}, got none")
    return tensors


def _check_texts(source: SourceFiles, texts: Mapping[str, Any]) -> None:
    """Raises an error for settings of the transformer that change its embeddings."""
    task = texts.get("transformer_task", "feature-extraction")
    usual = {"method": "forward", "method_output_name": "last_hidden_state"}
    method = (texts.get("modality_config") or {}).get("text", usual)
    if task != "feature-extraction" or {key: method.get(key) for key in usual} != usual:
        raise SentenceModelError(
            f"{source} must use the last hidden state of its transformer, got the task {task!r} with {method!r}"
        )
    is_plain = not _template_options(texts) or set(_template_options(texts)) == {"add_generation_prompt"}
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        if texts.get(key) and not (key == "processing_kwargs" and set(texts[key]) == {"chat_template"} and is_plain):
            raise SentenceModelError(f"{source} must have no {key} in its {TEXTS}, got {texts[key]!r}")


def _template_options(texts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the chat template, which the messages of a vision-language model have."""
    return (texts.get("processing_kwargs") or {}).get("chat_template") or {}


def _prompts(about: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompts of queries and documents. If neither has a prompt, both get the default prompt."""
    prompts = {name: prompt for name, prompt in (about.get("prompts") or {}).items() if prompt}
    query = prompts.get("query", "")
    document = next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")
    if not query and not document:
        query = document = prompts.get(about.get("default_prompt_name") or "", "")
    return query, document


def write(folder: Path, dim: int, longest: int | None, model: SentenceModel) -> None:
    """Adds the files of sentence-transformers to the folder of an encoder.

    Args:
        folder: folder with config, weights and tokenizer.
        dim: dimension of the encoder's states.
        longest: maximum number of tokens of a text; None for a vision-language model with a chat template.
        model: description of the modules after the encoder.
    """
    pooling = {flag: model.pooling == name for flag, name in _FLAGS.items()}
    modules: list[tuple[str, Mapping[str, Any] | None]] = [
        ("Transformer", None),
        ("Pooling", {"word_embedding_dimension": dim, **pooling, "include_prompt": model.include_prompt}),
    ]
    for layer in model.layers:
        kind = "linear.Identity" if layer.activation == "Identity" else f"activation.{layer.activation}"
        dense: dict[str, Any] = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias}
        dense["activation_function"] = f"torch.nn.modules.{kind}"
        modules.append((layer.kind, dense if layer.kind == "Dense" else {}))
    if model.files.normalize:
        modules.append(("Normalize", {}))
    described = []
    for number, (name, config) in enumerate(modules):
        path = f"{number}_{name}" if config is not None else ""
        described.append({"idx": number, "name": str(number), "path": path, "type": f"{_LIBRARY}.{name}"})
        if config is not None:
            write_json(folder / path / "config.json", config)
        if name == "Dense":
            prefix = f"{number - 2}."
            own = {key.removeprefix(prefix): value for key, value in model.weights.items() if key.startswith(prefix)}
            write_tensors(folder / path / "model.safetensors", own)
    texts: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": False}
    write_json(folder / TEXTS, texts if longest is not None else _describe_messages(model))
    write_json(folder / ABOUT, {**_collect_prompts(model), "similarity_fn_name": model.files.similarity})
    write_json(folder / MODULES, described)


def _describe_messages(model: SentenceModel) -> dict[str, Any]:
    """Returns the settings of a transformer whose samples are messages with texts and images."""
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": method, "image": method, "message": {**method, "format": "structured"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": bool(model.generation_prompt)}},
    }


def _collect_prompts(model: SentenceModel) -> dict[str, Any]:
    """Returns the prompts by name and the name of the default prompt, so that `_prompts` returns the prompts of the model.

    The prompts of queries and documents are always written, because versions of sentence-transformers differ in the prompt that
    replaces a missing one.
    """
    query, document = model.prompts
    names = ("document", *(name for name in _DOCUMENT_PROMPTS if name in model.files.prompts))
    prompts = {**model.files.prompts, "query": query, **dict.fromkeys(names, document)}
    default = model.files.default_prompt if query or document else None  # it would apply to both sides
    return {"prompts": prompts, "default_prompt_name": default}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file in PyTorch's format."""
    safetensors = extras.load("safetensors.torch", purpose="Saving a model")
    data = safetensors.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, {"format": "pt"})
    file_io.write(path, lambda file: file.write(data))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    file_io.write(path, lambda file: file.write(json.dumps(content, indent=2).encode()))


# ----------------------------------------------------------------------------------------------------------------------
# The encoder of texts that the files describe.

CHECKED_TOKENS = 5, 512  # minimum and maximum number of tokens of the longest text of the check in `TextEncoder.pack`


class TextEncoder(nn.Module):
    """A transformers model whose last layer is pooled over the tokens of a text, with optional layers after the pooling.

    Attributes:
        layers: layers of a sentence-transformers model after the pooling.
        head: projection to the dimension that both encoders of a pair have.
        causal: whether a token attends only to the tokens before it.
        pooling: one of `POOLINGS`. The default is "mean". If the model is causal, the default is "last", because only the last
            token depends on the whole text.
        include_prompt: whether the tokens of a prompt are pooled too.
        packed: whether texts are encoded without padding (`Packed`).
        files: contents of the files of a sentence-transformers model that a saved model keeps.
    """

    def __init__(self, model: Any, dim: int | None = None, layers: Sequence[LayerConfig] = ()) -> None:
        super().__init__()
        self.model: Any = model
        self.layers = build_layers(layers)
        last_dim = next((layer.out_features for layer in reversed(layers) if layer.out_features), None)
        self.head = nn.Identity() if last_dim is not None and last_dim == dim else make_head(model, dim, last_dim)
        self.causal = is_causal(model)
        self.pooling = LAST if self.causal else MEAN
        self.include_prompt = True
        self.packed = False
        self.files = FileOptions()
        self._takes = set(inspect.signature(model.forward).parameters)
        self._first_position = first_position(model)

    def forward(  # (n, T) each -> (n, D)
        self, input_ids: Tensor, attention_mask: Tensor, pooled_mask: Tensor | None = None
    ) -> Tensor:
        """Returns embeddings of unit length. Texts can be padded on either side.

        Args:
            input_ids: tokens.
            attention_mask: 1 for tokens and 0 for padding.
            pooled_mask: 1 for tokens that are pooled, if some are excluded. If it is given, texts must not be packed.
        """
        if self.packed:
            packed = Packed.of(input_ids, attention_mask)
            states = packed.states(self.model, self._first_position, "token_type_ids" in self._takes)  # (tokens, H)
            if self.pooling == CLS:
                pooled = widen(packed.first(states))
            elif self.pooling == LAST:
                pooled = widen(packed.last(states))
            elif self.pooling == MEAN:
                pooled = packed.mean(widen(states))
            else:
                pooled = pool(self.pooling, *packed.unpack(states))
        else:
            states = self._encode_padded(input_ids, attention_mask)  # (n, T, H)
            pooled = pool(self.pooling, states, attention_mask, pooled_mask)
        return F.normalize(self.head(self.layers(pooled)), dim=-1)

    def _encode_padded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T, H)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.causal and "position_ids" in self._takes:  # padding on the left would shift the positions
            inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
        # The cache is for generation. It would grow when a checkpointed block is computed again.
        if self.causal and "use_cache" in self._takes:
            inputs["use_cache"] = False
        states: Tensor = self.model(**inputs).last_hidden_state
        return states

    def pack(self) -> bool:
        """Encodes texts without padding from now on if the embeddings stay the same. Returns whether they do.

        The embedding of a text must not depend on the other texts of its chunk. With convolutions and recurrent layers it
        would, because such layers read the tokens of neighboring texts.
        """
        if "position_ids" not in self._takes:
            return False
        device = next(self.parameters()).device
        window = getattr(self.model.config, "sliding_window", None)
        least, most = CHECKED_TOKENS
        # The longest text is longer than the window of an encoder, whose size models define differently.
        length = least if self.causal or not isinstance(window, int) else min(max(least, 2 * window + 2), most)
        mask = torch.arange(length, device=device) < torch.tensor([[3], [length], [1]], device=device)
        ids = torch.arange(mask.numel(), device=device).view_as(mask) % 7 + 1
        mask = mask.long()
        training = self.training
        self.eval()  # evaluation draws no random numbers
        try:
            with torch.no_grad():
                padded = self(ids, mask)
                self.packed = enable_packing(self.model)
                if self.packed:
                    unpadded, other = self(ids, mask), self(torch.cat((ids[:2] + 1, ids[2:])), mask)
                    precision = torch.finfo(self.model.dtype).eps
                    same = (unpadded - padded).abs().max() <= precision**0.5
                    self.packed = bool(same and (unpadded - other)[2].norm() <= precision)
        except Exception:  # a model that does not support packing can raise any error
            self.packed = False
        finally:
            self.train(training)
        if not self.packed:
            disable_packing(self.model)
        return self.packed

    def pad(self) -> None:
        """Encodes texts with padding from now on."""
        self.packed = False
        disable_packing(self.model)


def layer_configs(encoder: nn.Module) -> list[LayerConfig]:
    """Returns the layers of a text encoder after its pooling. For another module, returns an empty list."""
    if not isinstance(encoder, TextEncoder):
        return []
    return [layer.config for layer in encoder.layers if isinstance(layer, DenseLayer | UnitLength)]


def is_causal(model: nn.Module) -> bool:
    """Returns whether a token of a transformers model attends only to the tokens before it."""
    config: Any = model.config
    has_causal_layer = any(getattr(part, "is_causal", False) is True for part in model.modules())
    return has_causal_layer and getattr(config, "is_causal", True) is not False


def make_head(model: nn.Module, dim: int | None, inner: int | None = None) -> nn.Module:
    """Returns a projection from `inner` (default: the model's hidden size) to `dim`, or the identity if `dim` is None."""
    if dim is None:
        return nn.Identity()
    config: Any = model.config
    # Convolutional encoders have a hidden size per stage. The last one is the size of the output.
    inner = inner or getattr(config, "hidden_size", None) or config.hidden_sizes[-1]
    return nn.Linear(inner, dim, bias=False)
