"""Text encoders for late interaction (ColBERT): one vector per token, in the formats of PyLate and sentence-transformers.

A tower returns one row of numbers for each text, like every other tower, so that gradient caching, evaluation and files need no
other code for it. A row contains the vectors of a text one after another, and zeros in place of vectors that do not count.
`unpack` and `pack` convert rows to vectors.
"""

import copy
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.cached.sources import from_mask
from megabatch.late import Tokens
from megabatch_train.data.dataset import TEXT
from megabatch_train.towers import huggingface
from megabatch_train.towers.huggingface_inputs import ModelFiles, TokenInputs
from megabatch_train.towers.sentence_transformer import (
    ABOUT,
    MODULES,
    TEXTS,
    LayerConfig,
    SentenceModelError,
    SourceFiles,
    TextEncoder,
    layer_configs,
    read_kind,
    read_weights,
    write_json,
    write_tensors,
)
from megabatch_train.towers.tokens import TokenSizes
from megabatch_train.towers.tower import LoraConfig, Pair, Tower

# ----------------------------------------------------------------------------------------------------------------------
# Options of a model, which are part of `model_options`.

OPTIONS = ("token_dim", "query_length", "query_expansion", "attend_expansion", "skiplist")
DIM, QUERY_LENGTH, DOCUMENT_LENGTH = 128, 32, 180  # defaults, as in ColBERT and PyLate
PREFIXES = ("[Q] ", "[D] ")  # default prompts of a new model. Each becomes one token
SCALE = 1.0  # initial scale of the loss, because a score is a sum over the vectors of a query


@dataclass(frozen=True)
class LateOptions:
    """How texts become vectors. `max_length` and the prompts are options of all text encoders."""

    token_dim: int = DIM  # dim of a vector
    query_length: int = QUERY_LENGTH  # maximum number of tokens of a query
    query_expansion: bool = True  # whether queries are filled up with mask tokens, whose vectors count
    attend_expansion: bool = False  # whether other tokens attend to the mask tokens
    skiplist: tuple[str, ...] = tuple(string.punctuation)  # tokens of documents whose vectors do not count
    max_length: int = DOCUMENT_LENGTH  # maximum number of tokens of a document

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("token_dim", "query_length", "max_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"model_options.{name} must be an integer of at least 1, got {value!r}")
        for name in ("query_expansion", "attend_expansion"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"model_options.{name} must be true or false, got {value!r}")
        if not isinstance(self.skiplist, tuple) or not all(isinstance(word, str) for word in self.skiplist):
            raise ValueError(f"model_options.skiplist must be a list of tokens, got {self.skiplist!r}")

    @staticmethod
    def of(options: Mapping[str, Any]) -> "LateOptions":
        """Returns the options among the options of a model. None stands for a default."""
        given = {key: options[key] for key in (*OPTIONS, "max_length") if options.get(key) is not None}
        if isinstance(words := given.get("skiplist"), list | tuple):
            given["skiplist"] = tuple(words)
        return LateOptions(**given)

    def as_dict(self) -> dict[str, Any]:
        """Returns the options of a model."""
        return {**{key: getattr(self, key) for key in (*OPTIONS, "max_length")}, "skiplist": list(self.skiplist)}


# ----------------------------------------------------------------------------------------------------------------------
# Rows of numbers, which contain the vectors of texts.


def unpack(rows: Tensor, dim: int) -> Tokens:  # (n, L · dim)
    """Returns the vectors of rows, (n, L, dim), with a mask of the vectors that count. L is at most as large as necessary."""
    vectors = rows.view(len(rows), rows.shape[1] // dim, dim)
    mask = (vectors.detach() != 0).any(2)  # vectors have unit length, and NaN differs from 0
    longest = int((mask * torch.arange(1, mask.shape[1] + 1, device=rows.device)).amax()) if len(rows) else 1
    return Tokens(vectors[:, : max(1, longest)], mask[:, : max(1, longest)])


def pack(rows: Tensor, dim: int) -> Tokens:  # (n, L · dim)
    """Returns the vectors of rows that count, (T, dim), and their numbers. A row without vectors gets one zero vector."""
    vectors, mask, _ = unpack(rows, dim)
    assert mask is not None, "`unpack` returns a mask"
    mask[:, 0] |= ~mask.any(1)
    return Tokens(vectors[mask], lengths=mask.sum(1))


def average(rows: Tensor, dim: int) -> Tensor:  # (n, L · dim) -> (n, dim)
    """Returns the mean of the vectors of each row, which summarizes a text."""
    vectors, mask, _ = unpack(rows, dim)
    assert mask is not None, "`unpack` returns a mask"
    return vectors.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def token_dim(pair: Pair) -> int:
    """Returns the dim of a vector; 0 for a model with one vector per sample."""
    return getattr(pair.second.module, "token_dim", 0)


# ----------------------------------------------------------------------------------------------------------------------
# The encoder and its inputs.


class TokenEncoder(TextEncoder):
    """A transformers model and linear layers that return one vector of unit length for each token.

    Attributes:
        token_dim: dim of a vector.
        query_length: number of vectors in the row of a query.
        document_length: number of vectors in the row of a document.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerConfig], options: LateOptions) -> None:
        super().__init__(model, None, layers)
        self.token_dim, self.query_length, self.document_length = options.token_dim, options.query_length, options.max_length

    def forward(  # (n, T) each -> (n, L · token_dim)
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        query_mask: Tensor | None = None,
        document_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns one row for each query or document.

        Args:
            input_ids: tokens, with padding on the right.
            attention_mask: 1 for tokens that are attended to.
            query_mask: 1 for tokens of queries whose vectors count.
            document_mask: 1 for tokens of documents whose vectors count. One of the two masks must be given.
        """
        mask, length = (document_mask, self.document_length) if query_mask is None else (query_mask, self.query_length)
        if mask is None:
            raise ValueError("query_mask or document_mask must be given")
        cache = {"use_cache": False} if self.causal and "use_cache" in self._takes else {}
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, **cache).last_hidden_state  # (n, T, H)
        vectors = F.normalize(self.layers(states.to(next(self.layers.parameters()).dtype)), dim=-1)
        vectors = vectors.masked_fill(~mask.bool()[..., None], 0.0)
        return F.pad(vectors, (0, 0, 0, length - vectors.shape[1])).flatten(1)

    def pack(self) -> bool:
        """Returns False, because vectors of padding can count."""
        return False


class LateTexts(TokenInputs):
    """Tokens of queries or of documents, with a mask of the tokens whose vectors count."""

    def __init__(self, tokenizer: Any, options: LateOptions, *, is_query: bool) -> None:
        super().__init__(tokenizer, options.max_length)
        self.options, self.is_query = options, is_query
        # ColBERT fills queries up with mask tokens, and PyLate with end tokens if a model has no mask token.
        self._filler = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
        if options.query_expansion and self._filler is None:
            raise ValueError("model_options.query_expansion must be false for a tokenizer without a mask token, got true")
        numbers = (tokenizer.convert_tokens_to_ids(word) for word in options.skiplist)
        unknown = tokenizer.unk_token_id
        self._skipped = torch.tensor([number for number in numbers if number not in (None, unknown)], dtype=torch.int64)

    def collate(self, samples: list[str]) -> dict[str, Tensor]:
        """Returns the tokens of a chunk. Queries have `query_length` tokens, and documents are padded to the longest one."""
        if self.is_query:
            return self._collate_queries(samples)
        inputs = super().collate(samples)
        counted = inputs["attention_mask"].bool() & ~torch.isin(inputs["input_ids"], self._skipped)
        counted[:, 0] |= ~counted.any(1)
        return {**inputs, "document_mask": counted.long()}

    def _collate_queries(self, samples: list[str]) -> dict[str, Tensor]:
        expands = self.options.query_expansion
        padding, longest = "max_length" if expands else "longest", self.options.query_length
        tokens = self._tokenizer(samples, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
        ids, mask = (tokens[key].long() for key in ("input_ids", "attention_mask"))
        if ids.shape[1] == 0:
            ids, mask = ids.new_full((len(samples), 1), self.padding_id), mask.new_ones(len(samples), 1)
        counted = mask.clone()
        if expands:
            ids, counted = ids.masked_fill(mask == 0, self._filler), torch.ones_like(mask)
            mask = counted if self.options.attend_expansion else mask
        mask[:, 0] |= ~mask.any(1)
        counted = counted | mask if not expands else counted
        return {"input_ids": ids, "attention_mask": mask, "query_mask": counted}


# ----------------------------------------------------------------------------------------------------------------------
# Models by name, and from the folder of a run.


@dataclass(frozen=True)
class LateModel:
    """The description of a late-interaction model in the files of a folder."""

    layers: tuple[LayerConfig, ...]
    weights: Mapping[str, Tensor]
    options: dict[str, Any]


def load(spec: str, lora: LoraConfig | None, sizes: TokenSizes, given: Mapping[str, Any]) -> Pair | None:
    """Loads "hf:NAME" or "hf-config:FOLDER" for late interaction. Returns None if it is a model with one vector per text.

    It is a late-interaction model if its files say so, or if `token_dim` is among the given options.

    Args:
        spec: name of the model.
        lora: adapters, which are not supported.
        sizes: sizes that replace the sizes in the files.
        given: the options of the user. They override the options in the files.
    """
    family, _, name = spec.partition(":")
    offline = family == "hf-config"
    described = None if "+" in name or (offline and not Path(name).is_dir()) else read(name, offline=offline)
    if described is None and "token_dim" not in given:
        return None
    if lora is not None:
        raise ValueError(f"lora.rank must be 0 for late interaction, got {lora.rank}")
    if family == "hf":
        pair = huggingface.load(name, None, sizes, is_described=False)
    else:
        pair = huggingface.load_folders(spec, [Path(name)], None, (), sizes)
    if pair.first.kind != TEXT or not isinstance(pair.second.module, TextEncoder):
        raise ValueError(f"model must be an encoder of texts for late interaction, got {spec!r}")
    dim = given.get("token_dim")
    if described is not None:
        stored = described.layers[-1].out_features
        if dim not in (None, stored):
            raise ValueError(f"model_options.token_dim must be {stored} or not set for {spec!r}, got {dim!r}")
        weights = described.weights if family == "hf" else None
        return _build(pair, described.layers, weights, {**described.options, **_without_none(given)}, is_new=False)
    options = {"query_prompt": PREFIXES[0], "document_prompt": PREFIXES[1], **_without_none(given)}
    hidden = pair.second.module.model.config.hidden_size
    layer = LayerConfig("Dense", hidden, LateOptions.of(options).token_dim, False, "Identity")
    return _build(pair, (layer,), None, options, is_new=True)


def load_folder(spec: str, folder: Path, layers: Sequence[LayerConfig], options: Mapping[str, Any]) -> Pair:
    """Builds a saved model, without its weights, from the folder of a run."""
    pair = huggingface.load_folders(spec, [folder])
    return _build(pair, layers, None, dict(options), is_new=False)


def check_unused(options: Mapping[str, Any], name: str) -> None:
    """Raises an error if a model without late interaction has options for it."""
    for key in OPTIONS:
        if key in options:
            raise ValueError(
                f"model_options.{key} is for late-interaction models, got {options[key]!r} for {name!r}; "
                'model_options.token_dim makes a text encoder "hf:" or "hf-config:" such a model'
            )


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _build(
    pair: Pair,
    layers: Sequence[LayerConfig],
    weights: Mapping[str, Tensor] | None,
    options: dict[str, Any],
    *,
    is_new: bool,
) -> Pair:
    """Returns the towers of a late-interaction model from towers with one vector per text."""
    texts, before = getattr(pair.second.collate, "__self__", None), pair.second.module
    assert isinstance(before, TextEncoder), "the caller checks it"
    if not isinstance(texts, TokenInputs):
        raise ValueError(f"model must have a tokenizer for late interaction, got none in {pair.name!r}")
    for name in ("pooling", "include_prompt", "packed"):
        if name in options:
            raise ValueError(f"model_options.{name} must not be set for late interaction, got {options[name]!r}")
    before.pad()
    most = getattr(before.model.config, "max_position_embeddings", None)
    given = LateOptions.of(options)
    if isinstance(most, int) and most > 2:  # some models number positions from the padding id on
        limits = {"query_length": most - 2, "max_length": most - 2} if is_new else {"query_length": most, "max_length": most}
        for name, limit in limits.items():
            if options.get(name) is not None and options[name] > most:
                raise ValueError(f"model_options.{name} must be from 1 to {most} tokens, got {options[name]}")
            if options.get(name) is None:
                given = replace(given, **{name: min(getattr(given, name), limit)})
    prompts = [options.get(key, "") for key in ("query_prompt", "document_prompt")]
    if is_new:
        _add_tokens(texts.tokenizer, before.model, prompts)
    _register(texts.tokenizer, prompts)
    encoder = TokenEncoder(before.model, layers, given)
    if weights is not None:
        encoder.layers.load_state_dict(dict(weights))
    encoder.train(before.training)
    # A tokenizer stores its maximum length and its padding, and threads read queries and documents at the same time.
    tokenizers = copy.deepcopy(texts.tokenizer), texts.tokenizer
    inputs = [LateTexts(own, given, is_query=is_query) for own, is_query in zip(tokenizers, (True, False), strict=True)]
    keep = ModelFiles(encoder.model, (inputs[1],)).write
    # All queries have the same length, and their mask tokens may count although nothing attends to them.
    first = Tower(encoder, TEXT, inputs[0].prepare, inputs[0].collate, keep)
    second = Tower(encoder, TEXT, inputs[1].prepare, inputs[1].collate, keep, from_mask)
    options = {
        **{key: value for key, value in options.items() if key in ("query_prompt", "document_prompt")},
        **given.as_dict(),
    }
    return replace(pair, first=first, second=second, logit_scale=SCALE, options=options)


def _add_tokens(tokenizer: Any, model: Any, prefixes: Sequence[str]) -> None:
    """Makes each default prefix one token, as PyLate does. The embeddings of new tokens are random."""
    vocabulary = tokenizer.get_vocab()
    new = [prefix for prefix in prefixes if prefix in PREFIXES and prefix not in vocabulary]
    if new:
        from transformers import AddedToken

        tokenizer.add_tokens([AddedToken(prefix, normalized=False, special=True) for prefix in new], special_tokens=True)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


def _register(tokenizer: Any, prompts: Sequence[str]) -> None:
    """Makes prompts that are in the vocabulary one token, wherever they are in a text, as sentence-transformers does."""
    divided = [
        prefix for prefix in map(partial(_find_prefix, tokenizer), prompts) if prefix and tokenizer.tokenize(prefix) != [prefix]
    ]
    if divided:
        from transformers import AddedToken

        tokenizer.add_tokens([AddedToken(prefix, normalized=False, special=True) for prefix in divided], special_tokens=True)


def _find_prefix(tokenizer: Any, prompt: str) -> str:
    """Returns the token of the vocabulary that a prompt is or begins with; empty if there is none."""
    vocabulary = tokenizer.get_vocab()
    candidates = [prompt, *(prefix for prefix in PREFIXES if prompt.startswith(prefix)), *prompt.split(None, 1)[:1]]
    return next((prefix for prefix in candidates if prefix and prefix in vocabulary), "")


# ----------------------------------------------------------------------------------------------------------------------
# The files of PyLate and of sentence-transformers. Files are written in PyLate's format, which both can read.


def read(name: str | Path, *, offline: bool = False) -> LateModel | None:
    """Reads the description of a late-interaction model. Returns None if the files describe another model, or nothing.

    Args:
        name: as for `AutoModel.from_pretrained`.
        offline: whether only local files are read.
    """
    source = SourceFiles(str(name), offline)
    about, modules = source.read(ABOUT) or {}, None
    kind = about.get("model_type", "ColBERT" if "query_prefix" in about else None)
    if kind in ("ColBERT", "MultiVectorEncoder"):
        modules = source.read(MODULES)
    if modules is None:
        return None
    for module in modules:
        if isinstance(module, dict) and str(module.get("type", "")).startswith("pylate.models.Dense"):
            module["type"] = "sentence_transformers.models.Dense"
    kinds = [read_kind(source, module) for module in modules]
    if kinds[0] != "Transformer" or modules[0].get("path"):
        raise SentenceModelError(f"{source} must begin with the module Transformer in its own folder, got {kinds[0]}")
    layers, weights = _read_layers(source, kinds, modules)
    if not layers:
        raise SentenceModelError(f"{source} must have a module Dense, got {', '.join(kinds)}")
    if (similarity := about.get("similarity_fn_name")) not in (None, "MaxSim", "maxsim"):
        raise SentenceModelError(f'{source} must have the similarity "maxsim", got {similarity!r}')
    options = _read_pylate(about) if kind == "ColBERT" else _read_native(source, about, kinds, modules)
    return LateModel(tuple(layers), weights, {**options, "token_dim": layers[-1].out_features})


def _read_layers(
    source: SourceFiles, kinds: Sequence[str], modules: Sequence[Mapping[str, Any]]
) -> tuple[list[LayerConfig], dict[str, Tensor]]:
    layers: list[LayerConfig] = []
    weights: dict[str, Tensor] = {}
    for kind, module in zip(kinds, modules, strict=True):
        if kind in ("Transformer", "MultiVectorMask", "Normalize"):
            continue
        config = source.read("config.json", str(module["path"])) or {}
        names = {config.get(key) for key in ("module_input_name", "module_output_name")}
        if kind != "Dense" or config.get("use_residual") or names - {None, "token_embeddings"}:
            raise SentenceModelError(
                f"{source} must have modules Dense on token embeddings without a residual connection, got {kind} with {config}"
            )
        activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
        own = read_weights(source, str(module["path"]))
        weights |= {f"{len(layers)}.{key}": value.float() for key, value in own.items()}
        layers.append(
            LayerConfig("Dense", config["in_features"], config["out_features"], bool(config.get("bias", True)), activation)
        )
    return layers, weights


def _read_pylate(about: Mapping[str, Any]) -> dict[str, Any]:
    prompts = about.get("prompts") or {}
    options = {
        f"{side}_prompt": (prefix if (prefix := about.get(f"{side}_prefix")) is not None else default)
        + (prompts.get(side) or "")
        for side, default in zip(("query", "document"), PREFIXES, strict=True)
    }
    stored = {"query_length": "query_length", "max_length": "document_length", "skiplist": "skiplist_words"}
    stored |= {"query_expansion": "do_query_expansion", "attend_expansion": "attend_to_expansion_tokens"}
    return options | {key: about[name] for key, name in stored.items() if about.get(name) is not None}


def _read_native(
    source: SourceFiles, about: Mapping[str, Any], kinds: Sequence[str], modules: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Reads the options of sentence-transformers' own format."""
    texts = source.read(TEXTS) or {}
    expansion, prompts = texts.get("query_expansion"), about.get("prompts") or {}
    options: dict[str, Any] = {f"{side}_prompt": prompts.get(side) or "" for side in ("query", "document")}
    skiplist: list[str] = []
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "MultiVectorMask":
            mask = source.read("config.json", str(module["path"])) or {}
            if mask.get("keep_only_token_ids") or mask.get("skiplist_tasks", ["document"]) != ["document"]:
                raise SentenceModelError(f"{source} must skip only tokens of documents, got {mask}")
            skiplist = list(mask.get("skiplist_words") or [])
    if expansion is not None and (expansion.get("strategy") != "fixed" or expansion.get("token") is not None):
        raise SentenceModelError(
            f"{source} must expand queries with mask tokens to a fixed length, got query_expansion = {expansion}"
        )
    longest = texts.get("max_seq_length")
    document_length = texts.get("document_length") or longest
    options |= {"skiplist": skiplist, "query_expansion": expansion is not None}
    if expansion is not None:
        options |= {"query_length": expansion["length"], "attend_expansion": bool(expansion.get("attend"))}
    elif (query_length := texts.get("query_length") or longest) is not None:
        options["query_length"] = query_length
    return options | ({} if document_length is None else {"max_length": document_length})


def describe(pair: Pair, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes the files that PyLate and sentence-transformers need in addition to the files of the transformer.

    Args:
        pair: the towers.
        folder: folder of the transformer.
        weights: weights of the encoder's `layers` by name, on the CPU.
    """
    options = LateOptions.of(pair.options)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, layer in enumerate(layer_configs(pair.second.module)):
        path, kind = (
            f"{number + 1}_Dense",
            "linear.Identity" if layer.activation == "Identity" else f"activation.{layer.activation}",
        )
        modules.append({"idx": number + 1, "name": str(number + 1), "path": path, "type": "pylate.models.Dense.Dense"})
        dense = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias}
        write_json(folder / path / "config.json", {**dense, "activation_function": f"torch.nn.modules.{kind}"})
        own = {key.removeprefix(f"{number}."): value for key, value in weights.items() if key.startswith(f"{number}.")}
        write_tensors(folder / path / "model.safetensors", own)
    query, document = (pair.options.get(key, "") for key in ("query_prompt", "document_prompt"))
    texts = getattr(pair.second.collate, "__self__", None)
    assert isinstance(texts, LateTexts), "the caller checks it"
    # A prefix of PyLate is one token. The rest of a prompt is a text.
    prefixes = {name: _find_prefix(texts.tokenizer, prompt) for name, prompt in (("query", query), ("document", document))}
    about: dict[str, Any] = {f"{name}_prefix": prefix for name, prefix in prefixes.items()}
    about |= {
        "prompts": {"query": query.removeprefix(prefixes["query"]), "document": document.removeprefix(prefixes["document"])}
    }
    about |= {"query_length": options.query_length, "document_length": options.max_length}
    about |= {"do_query_expansion": options.query_expansion, "attend_to_expansion_tokens": options.attend_expansion}
    known = set(texts.tokenizer.get_vocab())  # PyLate would skip unknown tokens for a word that is not in the vocabulary
    about |= {
        "skiplist_words": [word for word in options.skiplist if word in known],
        "similarity_fn_name": "MaxSim",
        "default_prompt_name": None,
    }
    write_json(folder / ABOUT, {"model_type": "ColBERT", **about})
    write_json(folder / TEXTS, {"max_seq_length": options.max_length, "do_lower_case": False})
    write_json(folder / MODULES, modules)


def describe_scores(pair: Pair) -> str:
    """Returns the sentences of a model card about the vectors and the scores."""
    return (
        f"A text has a vector of {token_dim(pair)} dimensions for each token, and a score is the sum of the best matches of "
        f"the query's vectors (MaxSim). The loss multiplies scores by {pair.logit_scale:.4g}."
    )


def write_example(folder: str) -> str:
    """Returns code that loads a saved model and scores texts."""
    return f"""from sentence_transformers import MultiVectorEncoder

model = MultiVectorEncoder("{folder}")  # or pylate.models.ColBERT
queries, documents = model.encode_query(["what do cats eat?"]), model.encode_document(["Cats eat fish.", "The sky is blue."])
print(model.similarity(queries, documents))
"""
