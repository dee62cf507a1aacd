"""Towers of open_clip, by name, from a config file, or from a saved model."""

import difflib
import hashlib
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch.integrations.open_clip import CausalTexts
from megabatch_train.data.media.images import RandomCrop, TrainingImages, to_pillow
from megabatch_train.towers.layers.lora import check_targets, freeze_unused, inject, merge_adapters
from megabatch_train.towers.tokens import AS_STORED, TokenSizes, check_image_size, take_dropout, tokens_of_open_clip
from megabatch_train.towers.tower import (
    LoraConfig,
    Pair,
    Tower,
    allows_remote_code,
    check_kernels,
    explain_remote_code,
    sample_inputs,
)

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Configs of open_clip models. They come from an architecture by name, a file, or a saved model.
#
# A config can come from an untrusted source. It may contain architectures and sizes, but nothing that runs code.

PURPOSE = "An open_clip model"
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")
_FILE = ".json"
_TOKENIZER_OPTIONS = ("clean", "strip_sep_token", "language", "reduction_mask", "additional_special_tokens")
_SHOWN = 80  # number of characters of a file in an error message


@dataclass(frozen=True)
class ModelConfig:
    """The contents of an open_clip config file."""

    model: Mapping[str, Any]  # embed_dim, vision_cfg, text_cfg …
    images: Mapping[str, Any]  # mean, std, interpolation and resize_mode, if they are not open_clip's defaults

    @classmethod
    def parse(cls, text: str, source: str) -> "ModelConfig":
        """Parses a plain config, or an `open_clip_config.json`, which also contains the preprocessing.

        Args:
            text: JSON.
            source: name of the source for error messages.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source} must be JSON, got {str(error) or 'too many levels'}") from error
        model = content.get("model_cfg", content) if isinstance(content, dict) else None
        parts = ("embed_dim", "vision_cfg", "text_cfg")
        kinds = (int, dict, dict)
        if not isinstance(model, dict) or not all(isinstance(model.get(p), kind) for p, kind in zip(parts, kinds, strict=True)):
            raise ValueError(f"{source} must be a config of open_clip with {', '.join(parts)}, got {_shorten(text)}")
        _check_names(model, source)
        images = content.get("preprocess_cfg", {}) if model is not content else {}
        return cls(model, {key: images[key] for key in PREPROCESSING if key in images})

    @property
    def tokenizer(self) -> str:
        """The name of the transformers tokenizer; empty for open_clip's own tokenizers."""
        return str(self.model["text_cfg"].get("hf_tokenizer_name") or "")

    def check_text_model(self) -> None:
        """Raises if the config of the transformers text tower names kernels, which transformers would download and run."""
        if name := self.model["text_cfg"].get("hf_model_name"):
            check_kernels(name)

    def resize(self, sizes: TokenSizes) -> "ModelConfig":
        """Returns the config with other sizes of images and texts."""
        changes = {"vision_cfg": ("image_size", sizes.image_size), "text_cfg": ("context_length", sizes.context_length)}
        parts = {part: {**self.model[part], key: size} for part, (key, size) in changes.items() if size is not None}
        return ModelConfig({**self.model, **parts}, self.images)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the text of an `open_clip_config.json`."""
        return json.dumps({"model_cfg": self.model, "preprocess_cfg": self.images}, indent=indent)

    def register(self, stem: str) -> str:
        """Registers the config in open_clip, and returns its name there."""
        open_clip, text = package(), json.dumps(self.model, sort_keys=True)
        # The name contains a hash of the contents, because two configs can have the same file name, and no config may replace
        # a model of open_clip.
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', stem)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if open_clip.get_model_config(name) is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.json"
                path.write_text(text)
                open_clip.add_model_config(path)
        return name


def _check_names(model: Mapping[str, Any], source: str) -> None:
    """Raises an error if the timm model is not the name of an architecture, or if tokenizer options can run code."""
    vision, text = model["vision_cfg"], model["text_cfg"]
    if not re.fullmatch(r"[\w.-]*", str(vision.get("timm_model_name") or "")):
        raise ValueError(
            f"{source} must have a timm_model_name that is an architecture of timm, got {vision['timm_model_name']!r}"
        )
    further = [key for key in text.get("tokenizer_kwargs") or {} if key not in _TOKENIZER_OPTIONS]
    if further:
        raise ValueError(
            f"{source} must have tokenizer_kwargs of {', '.join(_TOKENIZER_OPTIONS)}, got {', '.join(further)}: other options "
            "can run code"
        )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …")


def package() -> Any:
    """Imports open_clip. Raises an error with the install command if it is missing."""
    return extras.load("open_clip", purpose=PURPOSE)


def split_name(name: str) -> tuple[str, str]:
    """Returns the architecture or config file, and the weights ("" without weights)."""
    if name.endswith(_FILE):
        return name, ""
    if f"{_FILE}@" in name:
        file, _, weights = name.partition(f"{_FILE}@")
        return file + _FILE, weights
    architecture, _, weights = name.partition("@")
    return architecture, weights


def read_config(name: str) -> str | None:
    """Returns the contents of the config file in a model name, as one line; None for an architecture of open_clip."""
    file, _ = split_name(name)
    if not file.endswith(_FILE):
        return None
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"No such config file of open_clip: {file}")
    return ModelConfig.parse(path.read_text("utf-8"), file).to_json(None)


def find_architecture(name: str, config: str | None = None) -> tuple[str, ModelConfig]:
    """Returns the model's name in open_clip, and its config. Raises an error if open_clip is missing or lacks the model.

    Args:
        name: an architecture or a config file, without weights.
        config: the contents of the config file (default: the file is read).
    """
    open_clip, models = package(), package().list_models()
    if name.endswith(_FILE):
        parsed = ModelConfig.parse(config or read_config(name) or "", name)
        parsed.check_text_model()
        return parsed.register(Path(name).stem), parsed
    if config is not None:
        raise ValueError(f'model_options.config must not be set for models other than "open_clip:FILE.json", got {name!r}')
    if name not in models:
        raise ValueError(f"open_clip has no model {name}; {nearest(name, models)}")
    return name, ModelConfig(open_clip.get_model_config(name), {})


def nearest(word: str, names: Sequence[str]) -> str:
    """Returns a hint for an error message: the most similar names, or else a few of all names."""
    by_letters = {name.lower(): name for name in names}
    near = [by_letters[name] for name in difflib.get_close_matches(word.lower(), by_letters, n=3, cutoff=0.65)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(names[:10])}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# ----------------------------------------------------------------------------------------------------------------------
# An open_clip model as two towers. Its name is "ViT-B-32", "ViT-B-32@laion2b_s34b_b79k" with trained weights, or a config file
# of open_clip, "FILE.json".
#
# Both towers are the same module, which is called with images or with texts, because open_clip's CLIP has no separate module
# for its text side. open_clip can load the state of `module.model`. The loss has its own scale, which starts at the scale of
# the model. The model's scale is frozen, and `models.save` replaces it by the trained scale of the loss.


CONFIG = "open_clip_config.json"


class Sides(nn.Module):
    """An open_clip model that encodes one side at a time, to unit length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.causal = CausalTexts.of(model)
        self.tokens = tokens_of_open_clip(model)

    def forward(  # (n, …) -> (n, D)
        self, image: Tensor | None = None, text: Tensor | None = None, kept_patches: Tensor | None = None
    ) -> Tensor:
        """Returns embeddings of images or of texts. `kept_patches` are the numbers of the patches of each image to keep."""
        model: Any = self.model
        if (image is None) == (text is None):
            raise ValueError("image or text must be given, and not both")
        if text is None:
            assert image is not None, "one of them is given"
            with nullcontext() if self.tokens is None else self.tokens.use(image, kept_patches):
                features = model.encode_image(image)
        elif self.causal is not None and text.shape[1] < model.context_length:
            features = self.causal.encode(text)
        else:
            features = model.encode_text(text)
        return F.normalize(features, dim=-1)


def load(name: str, config: str | None = None, sizes: TokenSizes = AS_STORED, lora: LoraConfig | None = None) -> Pair:
    """Loads the towers of a model. "NAME@WEIGHTS" loads pretrained weights.

    Args:
        name: an architecture or a config file, optionally with weights.
        config: the contents of the config file (default: the file is read).
        sizes: sizes of images and texts that replace the sizes of the architecture.
        lora: adapters, which are trained instead of the weights.

    Returns:
        The pair. Its options contain the prompts of the run of megabatch that saved the weights, which are not applied yet, and
        the patch dropout of the config.
    """
    chosen, weights = split_name(name)
    architecture, parsed = find_architecture(chosen, config)
    open_clip = package()
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if weights and weights not in tags and not Path(weights).exists():
        raise ValueError(f"{chosen} has no weights {weights}, and there is no such file; {nearest(weights, tags)}")
    try:
        with explain_remote_code(chosen):
            loaded = open_clip.create_model_and_transforms(
                architecture,
                pretrained=weights or None,
                force_image_size=sizes.image_size,
                force_context_length=sizes.context_length,
                **{f"image_{key}": value for key, value in parsed.images.items()},
            )
            length = {} if sizes.context_length is None else {"context_length": sizes.context_length}
            tokenizer = open_clip.get_tokenizer(architecture, **length, **_tokenizer_options(parsed))
    except (OSError, RuntimeError) as error:
        if not weights:
            raise
        raise OSError(
            f"the weights {weights} of {chosen} could not be loaded; the first use downloads them, later uses read the local "
            f"cache. {str(error).splitlines()[0]}"
        ) from error
    pair = _pair(name, loaded, tokenizer, parsed.resize(sizes), _prompts_of(weights), lora)
    _check_sizes(pair, sizes)
    return pair


def _check_sizes(pair: Pair, sizes: TokenSizes) -> None:
    """Raises an error if the towers cannot encode images or texts of these sizes."""
    if sizes.image_size is not None:
        check_image_size(sizes.image_size, pair.first.tokens)
    model: Any = pair.first.module
    most = getattr(getattr(getattr(model.model, "text", None), "config", None), "max_position_embeddings", None)
    if sizes.context_length is not None and most is not None and sizes.context_length > most:
        raise ValueError(
            f"model_options.context_length must be at most {most} for {pair.name!r}, whose text tower is a transformers model, "
            f"got {sizes.context_length}"
        )


def load_folder(name: str, folder: Path, sizes: TokenSizes = AS_STORED, lora: LoraConfig | None = None) -> Pair:
    """Builds the towers of a model that is saved in open_clip's format. The caller loads the weights.

    Args:
        name: name of the pair.
        folder: folder with an `open_clip_config.json`, and with the files of a transformers tokenizer if the model has one.
        sizes: the sizes in the options of the model. For image towers of timm, open_clip does not read them from the config.
        lora: adapters that the saved model has.
    """
    open_clip, path = package(), folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} must have a {CONFIG}, got none")
    config = ModelConfig.parse(path.read_text("utf-8"), str(path))
    config.check_text_model()
    with explain_remote_code(str(folder)), quiet():
        loaded = open_clip.create_model_and_transforms(
            f"local-dir:{folder}", load_weights=False, pretrained_text=False, force_image_size=sizes.image_size
        )
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}", **_tokenizer_options(config))
    return _pair(name, loaded, tokenizer, config, {}, lora)


def _tokenizer_options(config: ModelConfig) -> dict[str, Any]:
    """Returns arguments of a transformers tokenizer, whose files could contain code. open_clip's own tokenizers need none."""
    return {"trust_remote_code": allows_remote_code()} if config.tokenizer else {}


@contextmanager
def quiet() -> Iterator[None]:
    """Hides open_clip's warnings about the weights in a folder, because other weights follow. Other warnings are shown."""

    def is_shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("No pretrained weights loaded", "Multiple checkpoints found"))

    logging.root.addFilter(is_shown)  # open_clip calls `logging.warning`
    try:
        yield
    finally:
        logging.root.removeFilter(is_shown)


def _prompts_of(weights: str) -> dict[str, str]:
    """Returns the prompts of the run that saved these weights. For other weights, returns an empty dict."""
    if not weights.endswith(".safetensors") or not Path(weights).is_file():
        return {}
    safetensors = extras.load("safetensors", purpose="Loading a model")
    with safetensors.safe_open(weights, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("megabatch", "{}"))
    options = about.get("options", {})
    return {key: options[key] for key in ("query_prompt", "document_prompt") if isinstance(options.get(key), str)}


def _pair(
    name: str,
    loaded: tuple[Any, Any, Any],
    tokenizer: Any,
    config: ModelConfig,
    options: Mapping[str, Any],
    lora: LoraConfig | None,
) -> Pair:
    model, _, evaluation = loaded
    if dropout := take_dropout(model.visual):
        options = {"patch_dropout": dropout, **options}
    if lora is not None:
        adapt(model, lora)
    bias = getattr(model, "logit_bias", None)
    for parameter in (model.logit_scale, bias):
        if parameter is not None:
            parameter.requires_grad_(False)
    module, images, texts = Sides(model), _OpenClipImages(model.visual, evaluation), _OpenClipTexts(tokenizer)
    lengths = None if module.causal is None else module.causal.lengths
    if lora is not None:
        size = (2, 3, *images.size)
        freeze_unused(module, {"image": torch.zeros(size)}, texts.collate([texts.prepare("a", None)]))
    return Pair(
        Tower(
            module,
            "image",
            images.prepare,
            images.collate,
            Description(config, model.visual).write,
            training_images=images.make_training(),
            tokens=module.tokens,
        ),
        Tower(module, "text", texts.prepare, texts.collate, texts.write, lengths),
        logit_scale=model.logit_scale.detach().exp().item(),
        logit_bias=None if bias is None else bias.detach().item(),
        name=f"open_clip:{name}",
        options=options,
        lora=lora,
    )


def adapt(model: nn.Module, lora: LoraConfig) -> None:
    """Adds adapters to an open_clip model in place, and freezes its other weights."""
    if lora.quantize != "none":
        raise ValueError(f'lora.quantize must be "none" for open_clip models, got {lora.quantize!r}; hf: models support it')
    inject(model, lora)
    check_targets([model], lora)


@dataclass(frozen=True)
class Description:
    """The config file that open_clip needs in addition to the weights."""

    config: ModelConfig
    visual: Any

    @staticmethod
    def of(pair: Pair) -> "Description":
        """Returns the description of a pair that this module built."""
        description = getattr(pair.first.keep, "__self__", None)
        if not isinstance(description, Description):
            raise TypeError(f"pair must be an open_clip model, got {pair.name!r}")
        return description

    def write(self, folder: Path) -> None:
        """Writes open_clip's config file."""
        preprocessing = getattr(self.visual, "preprocess_cfg", {})
        images = {key: preprocessing[key] for key in PREPROCESSING if key in preprocessing}
        text = ModelConfig(self.config.model, images).to_json()
        file_io.write(folder / CONFIG, lambda file: file.write(text.encode()))


class _OpenClipImages:
    """Evaluation uses open_clip's transform. Training uses open_clip's random crop, drawn from the sample's generator."""

    def __init__(self, visual: Any, evaluation: Any) -> None:
        size = visual.image_size
        self.size: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        constants = package()
        self._mean = tuple(getattr(visual, "image_mean", None) or constants.OPENAI_DATASET_MEAN)
        self._deviation = tuple(getattr(visual, "image_std", None) or constants.OPENAI_DATASET_STD)
        self._evaluation = evaluation

    def make_training(self) -> TrainingImages:
        """Returns the random crops for training."""
        return TrainingImages(RandomCrop(self.size), self._mean, self._deviation, "image")

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> Tensor:  # (3, S, S)
        """Returns the pixels of one image for evaluation."""
        prepared: Tensor = self._evaluation(to_pillow(image))
        return prepared

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Stacks the images of a chunk."""
        return {"image": torch.stack(samples)}


class _OpenClipTexts:
    """Tokenizes each text in the data-loader worker that reads it, because open_clip's own tokenizer is Python code."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prepare(self, text: str, generator: torch.Generator | None) -> bytes:
        """Returns the padded tokens of a text as bytes of int32."""
        tokens: bytes = self.tokenizer([text])[0].to(torch.int32).numpy().tobytes()
        return tokens

    def collate(self, samples: list[bytes]) -> dict[str, Tensor]:
        """Stacks the tokens of a chunk."""
        tokens = torch.frombuffer(bytearray().join(samples), dtype=torch.int32).view(len(samples), -1)
        return {"text": tokens.long()}

    def write(self, folder: Path) -> None:
        """Writes a transformers tokenizer, which open_clip expects in the model's folder. open_clip's own need no files."""
        inner: Any = getattr(self.tokenizer, "tokenizer", None)
        if hasattr(inner, "save_pretrained"):
            inner.save_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Export of a CLIP model from open_clip to `CLIPModel` of transformers, with tokenizer and image processor.


TOLERANCE = 1e-4  # largest difference of embeddings of unit length in float32
_CLIP_PURPOSE = "Export to transformers"
_CLIP_BLOCK = {  # names in a transformer block
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_CLIP_NAMES = {
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",  # spelled so in transformers
    "visual.ln_post": "vision_model.post_layernorm",
    "logit_scale": "logit_scale",
}
_RESBLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")


def export_clip(pair: Pair, folder: Path) -> None:
    """Writes the model. Raises an error if it is not a plain CLIP with a vision transformer.

    The embeddings of the original and the converted model are compared before anything is written.
    """
    transformers = extras.load("transformers", purpose=_CLIP_PURPOSE)
    module: Any = pair.first.module
    described = dict(Description.of(pair).config.model)
    try:
        config = _clip_config(transformers, described, module.model)
        model = transformers.CLIPModel(config)
        weights = module.model.state_dict()
        state = convert_weights(weights if pair.lora is None else merge_adapters(module.model, weights))
        state["logit_scale"] = torch.tensor(math.log(pair.logit_scale))
        model.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"--to hf must have a CLIP model with a vision transformer and a plain text transformer, got {pair.name!r}; "
            f"--to open_clip and --to onnx accept it ({str(error).splitlines()[0]})"
        ) from error
    model.eval()
    _compare_clip(model.get_image_features, pair.first, "pixel_values")
    _compare_clip(model.get_text_features, pair.second, "input_ids")
    model.save_pretrained(folder)
    _clip_processor(transformers, module.model).save_pretrained(folder)
    _write_clip_tokenizer(transformers, pair.second, config.text_config.max_position_embeddings, folder)


def _clip_config(transformers: Any, described: dict[str, Any], model: Any) -> Any:
    vision, text = described["vision_cfg"], described["text_cfg"]
    activation = "quick_gelu" if described.get("quick_gelu") else "gelu"
    shared = {"projection_dim": described["embed_dim"], "hidden_act": activation, "layer_norm_eps": 1e-5}
    width = vision["width"]
    return transformers.CLIPConfig(
        projection_dim=described["embed_dim"],
        vision_config={
            **shared,
            "hidden_size": width,
            "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": width // vision.get("head_width", 64),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
        text_config={
            **shared,
            "vocab_size": model.token_embedding.num_embeddings,
            "hidden_size": text["width"],
            "intermediate_size": int(text["width"] * text.get("mlp_ratio", 4.0)),
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": model.context_length,
            # If eos_token_id is 2, as in old configs, transformers pools the token of the largest id, not the first end token.
            "bos_token_id": model.token_embedding.num_embeddings - 2,
            "eos_token_id": model.token_embedding.num_embeddings - 1,
            "pad_token_id": model.token_embedding.num_embeddings - 1,
        },
    )


def convert_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of an open_clip model by their names in transformers."""
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in ("visual.proj", "text_projection"):
            converted[{"visual.proj": "visual_projection"}.get(name, name) + ".weight"] = value.T.contiguous()
        elif block := _RESBLOCK.fullmatch(name):
            prefix = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}"
            inner, _, kind = block[3].rpartition(".")
            if kind.startswith("in_proj_"):
                for part, piece in zip("qkv", value.chunk(3), strict=True):
                    converted[f"{prefix}.self_attn.{part}_proj.{kind.removeprefix('in_proj_')}"] = piece.contiguous()
            else:
                converted[f"{prefix}.{_CLIP_BLOCK[inner]}.{kind}"] = value
        elif name in _CLIP_NAMES:
            converted[_CLIP_NAMES[name]] = value
        elif name != "attn_mask":
            inner, _, kind = name.rpartition(".")
            converted[f"{_CLIP_NAMES[inner]}.{kind}"] = value
    return converted


@torch.no_grad()
def _compare_clip(features: Any, tower: Tower, name: str) -> None:
    inputs = sample_inputs(tower)
    embeddings = features(**{name: next(iter(inputs.values()))})
    embeddings = getattr(embeddings, "pooler_output", embeddings)  # transformers 5 returns the states too
    worst = (F.normalize(embeddings, dim=-1) - tower.module(**inputs)).abs().max().item()
    if not worst <= TOLERANCE:
        raise ValueError(
            f"--to hf must have a model that transformers' CLIPModel can represent, got a difference of {worst:.1e} in the "
            f"embeddings of {tower.kind}s; --to open_clip and --to onnx accept it"
        )
    LOG.info("the %s embeddings of transformers' CLIPModel differ from the model's by at most %.1e", tower.kind, worst)


def _clip_processor(transformers: Any, model: Any) -> Any:
    visual = model.visual
    size = visual.image_size if isinstance(visual.image_size, int) else visual.image_size[0]
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=list(visual.image_mean),
        image_std=list(visual.image_std),
    )


def _write_clip_tokenizer(transformers: Any, tower: Tower, longest: int, folder: Path) -> None:
    """Writes CLIP's tokenizer with the vocabulary of open_clip. For another tokenizer, writes nothing."""
    texts: Any = getattr(tower.collate, "__self__", None)
    own: Any = getattr(texts, "tokenizer", None)
    if not hasattr(own, "bpe_ranks"):
        return
    # The last two entries are the tokens before and after a text. transformers has its own names for them.
    words = [*list(own.encoder)[:-2], "<|startoftext|>", "<|endoftext|>"]
    vocabulary = json.dumps({word: number for number, word in enumerate(words)})
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in own.bpe_ranks)])
    for name, text in (("vocab.json", vocabulary), ("merges.txt", merges)):
        file_io.write(folder / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    transformers.CLIPTokenizer(*files, model_max_length=longest).save_pretrained(folder)
