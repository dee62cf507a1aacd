"""transformers encoders as towers: "hf:NAME" with pretrained weights, "hf-config:FOLDER" with random weights.

For text–text data, one encoder serves both sides. For image–text data, "hf:NAME" is a model of both sides with its own
projections, such as CLIP and SigLIP. Or the user names two encoders, "hf:IMAGES+TEXTS", and a linear layer projects the output
of each encoder to a common dimension. If a folder or name has the files of
sentence-transformers, texts are encoded as these files describe (`sentence_transformer`). Otherwise, the embedding of a text is
the mean over its tokens, or the last token of a causal model (a decoder). The embedding of an image is the mean over its
positions. All embeddings have unit length. With "hf-config:" nothing is downloaded. The config.json of a folder describes the
model, and if the folder has no tokenizer, words are hashed into the vocabulary.
"""

import copy
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached.sources import from_mask
from megabatch_train.data.dataset import AUDIO, blank
from megabatch_train.data.media.audio import AudioInputs
from megabatch_train.towers import sentence_transformer, vision_language
from megabatch_train.towers.huggingface_inputs import (
    HashedWords,
    ImageInputs,
    ModelFiles,
    TokenInputs,
    attends_to_padding,
    count_positions,
    divide_into_patches,
    fix_batch_norms,
    longest,
    media_of,
    part_of,
    read_scale,
    takes_audio,
    texts_of,
)
from megabatch_train.towers.layers.lora import ADAPTER_WEIGHTS, check_targets, freeze_unused, inject, quantization_options
from megabatch_train.towers.sentence_transformer import (
    POOLINGS,
    LayerConfig,
    SentenceModel,
    SentenceModelError,
    TextEncoder,
    layer_configs,
    make_head,
    widen,
)
from megabatch_train.towers.tokens import (
    AS_STORED,
    TokenSizes,
    check_image_size,
    check_one_model,
    resize_model,
    tokens_of_huggingface,
)
from megabatch_train.towers.tower import (
    LoraConfig,
    Pair,
    Tower,
    allows_remote_code,
    check_kernels,
    explain_remote_code,
    use_evaluation_mode,
)
from megabatch_train.towers.vision_language import VisionLanguageEncoder, is_vision_language

LOG = logging.getLogger("megabatch")
PAIR_DIM = 512  # embedding dimension of two encoders, as in CLIP
PATCH_KEYS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")  # inputs of a model that takes patches
PURPOSE = "A transformers encoder"
# Options of texts, and of vision-language models.
OPTIONS = ("max_length", "pooling", "include_prompt", "packed", *vision_language.OPTIONS)


class ImageEncoder(nn.Module):
    """A transformers model whose last layer is averaged over the positions of an image, and then projected."""

    def __init__(self, model: nn.Module, dim: int) -> None:
        super().__init__()
        self.model = model
        self.head = make_head(model, dim)
        self.tokens = tokens_of_huggingface(model)
        self._interpolates = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters

    def forward(self, pixel_values: Tensor, kept_patches: Tensor | None = None) -> Tensor:  # (n, 3, S, S) -> (n, D)
        """Returns embeddings of unit length. `kept_patches` are the numbers of the patches of each image to keep, (n, kept)."""
        model: Any = self.model
        options: dict[str, Any] = {}
        if self._interpolates and self.tokens is not None and pixel_values.shape[2:] != self.tokens.size:
            options["interpolate_pos_encoding"] = True
        with nullcontext() if self.tokens is None else self.tokens.use(pixel_values, kept_patches):
            output = model(pixel_values=pixel_values.to(model.dtype), **options)
        states = widen(output.last_hidden_state)  # (n, positions, H) or (n, H, h, w)
        pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
        return F.normalize(self.head(pooled), dim=-1)


class PairEncoder(nn.Module):
    """A transformers model of images or audio and texts that encodes one side at a time, with the projections of the model.

    The model has `get_image_features` or `get_audio_features`, and `get_text_features`, such as `CLIPModel` and `ClapModel`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        vision = getattr(model, "vision_model", None)
        options = {} if takes_audio(model) else inspect.signature(model.get_image_features).parameters
        self.takes_patches = "spatial_shapes" in options  # as in Siglip2Model
        self.tokens = tokens_of_huggingface(vision) if hasattr(vision, "config") else None
        self._interpolates = "interpolate_pos_encoding" in options

    def forward(
        self,
        pixel_values: Tensor | None = None,  # (n, 3, H, W), or (n, patches, values) of a model that takes patches
        pixel_attention_mask: Tensor | None = None,  # (n, patches)
        spatial_shapes: Tensor | None = None,  # (n, 2)
        input_ids: Tensor | None = None,  # (n, T)
        attention_mask: Tensor | None = None,  # (n, T)
        kept_patches: Tensor | None = None,  # (n, kept)
        input_features: Tensor | None = None,  # (n, channels, frames, bins)
    ) -> Tensor:  # (n, D)
        """Returns embeddings of images, recordings or texts, of unit length.

        Args:
            pixel_values: images. They are divided into patches if the model takes patches.
            pixel_attention_mask: 1 for patches and 0 for padding.
            spatial_shapes: numbers of patches of each image, vertically and horizontally.
            input_ids: tokens.
            attention_mask: 1 for tokens and 0 for padding, or None if the model attends to padding.
            kept_patches: the numbers of the patches of each image to keep, or None for all patches.
            input_features: recordings, as `AudioInputs` prepares them.
        """
        if sum(value is not None for value in (pixel_values, input_ids, input_features)) != 1:
            raise ValueError("one of pixel_values, input_ids and input_features must be given")
        if input_features is not None:
            is_longer = torch.zeros(len(input_features), 1, dtype=torch.bool, device=input_features.device)
            features = self.model.get_audio_features(input_features.to(self.model.dtype), is_longer=is_longer)
        elif pixel_values is None:
            features = self.model.get_text_features(input_ids=input_ids, attention_mask=attention_mask)
        else:
            inputs: dict[str, Any] = {"pixel_values": pixel_values.to(self.model.dtype)}
            if self._interpolates and self.tokens is not None and pixel_values.shape[2:] != self.tokens.size:
                inputs["interpolate_pos_encoding"] = True
            if self.takes_patches and pixel_values.dim() == 4:
                inputs |= divide_into_patches(inputs["pixel_values"], self.model.config.vision_config.patch_size)
            elif self.takes_patches:
                inputs |= {"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes}
            with nullcontext() if self.tokens is None else self.tokens.use(pixel_values, kept_patches):
                features = self.model.get_image_features(**inputs)
        features = getattr(features, "pooler_output", features)  # transformers 5 returns the states too
        return F.normalize(widen(features), dim=-1)


def is_pair(model: Any) -> bool:
    """Returns whether a transformers model encodes images (or recordings) and texts separately."""
    return hasattr(model, "get_text_features") and (hasattr(model, "get_image_features") or takes_audio(model))


def load(name: str, lora: LoraConfig | None = None, sizes: TokenSizes = AS_STORED, *, is_described: bool = True) -> Pair:
    """Loads encoders with weights, tokenizer and image processor from the hub or from folders. `lora` adds adapters.

    `sizes` replace the sizes of images and texts in the files. `is_described` reads their description.
    The options of the pair come from the files of sentence-transformers. They are not applied yet.
    """
    parts = [_locate(part, absolute=lora is not None) for part in _parts(name)]
    name = "+".join(parts)
    with _explain_missing_files(name):
        sentence_model = sentence_transformer.read(parts[-1]) if is_described else None
        of_parts = [None] * (len(parts) - 1) + [sentence_model]
        each = zip(parts, of_parts, sizes.split(len(parts)), strict=True)
        encoders = [_download(part, lora, sentences, own) for part, sentences, own in each]
        return _apply_sentence_model(_pair(f"hf:{name}", encoders, lora, sizes), sentence_model)


def load_config(folder: str, lora: LoraConfig | None = None, sizes: TokenSizes = AS_STORED) -> Pair:
    """Builds encoders with random weights from a config.json. Downloads nothing. The options of the pair are as for `load`."""
    folders = [Path(part) for part in _parts(folder)]
    sentence_model = sentence_transformer.read(folders[-1], offline=True) if folders[-1].is_dir() else None
    layers = () if sentence_model is None else sentence_model.layers
    return _apply_sentence_model(load_folders(f"hf-config:{folder}", folders, lora, layers, sizes), sentence_model)


def _apply_sentence_model(pair: Pair, model: SentenceModel | None) -> Pair:
    """Returns the pair with the options of a sentence-transformers model."""
    if model is None or isinstance(pair.second.module, PairEncoder):
        return pair
    if isinstance(pair.second.module, VisionLanguageEncoder):
        pair.second.module.files = model.files
        return replace(pair, options=vision_language.options_of(model))
    if model.generation_prompt is not None:
        raise SentenceModelError(f"{pair.name} must have no processing_kwargs, got a chat template for texts")
    encoder, texts = _text_parts(pair.second)
    encoder.files = model.files
    if model.lowercase:
        texts.lowercase()
    length = texts.limit_to(count_positions(encoder.model), model.max_length)
    options: dict[str, Any] = {"pooling": model.pooling, "max_length": length}
    options |= {} if model.include_prompt else {"include_prompt": False}
    for tower, key, prompt in zip(pair.towers, ("query_prompt", "document_prompt"), model.prompts, strict=True):
        options |= {key: prompt} if prompt and tower.kind == "text" else {}
    return replace(pair, options=options)


def _text_parts(tower: Tower) -> tuple[TextEncoder, TokenInputs | HashedWords]:
    """Returns the encoder and the preprocessing of a text tower. Raises a TypeError if another module made the tower."""
    encoder, texts = tower.module, getattr(tower.collate, "__self__", None)
    if not isinstance(encoder, TextEncoder) or not isinstance(texts, TokenInputs | HashedWords):
        raise TypeError(f"tower must have a TextEncoder, got {type(encoder).__name__}")
    return encoder, texts


def read_configs(spec: str) -> list[Any]:
    """Returns the configs of the encoders that `load` ("hf:…") or `load_config` ("hf-config:…") build. Downloads nothing."""
    family, _, name = spec.partition(":")
    if family == "hf-config":
        return [_config(Path(part)) for part in _parts(name)]
    transformers = extras.load("transformers", purpose=PURPOSE)
    configs = []
    for part in _parts(name):
        try:
            check_kernels(part, local_files_only=True)
            configs.append(transformers.AutoConfig.from_pretrained(part, local_files_only=True, trust_remote_code=False))
        except OSError as error:
            raise ValueError(
                f"{part} is not a folder with a config.json, and not in the local cache of the Hugging Face hub. A plan "
                f"downloads nothing, so fetch it first: `hf download {part} config.json`"
            ) from error
    return configs


def adapt(pair: Pair, options: Mapping[str, Any]) -> None:
    """Applies `OPTIONS` to the texts of towers from `load` and `load_config`.

    Args:
        pair: the towers, which are changed in place.
        options: `max_length` in tokens; `pooling`, one of `POOLINGS`; `include_prompt`, whether the tokens of a prompt are
            pooled too; `packed`, whether texts are encoded without padding (default: true if the model supports it). For
            vision-language models, see `vision_language.adapt`.
    """
    if isinstance(pair.first.module, VisionLanguageEncoder):
        vision_language.adapt(pair, options)
        return
    if others := [key for key in options if key in vision_language.OPTIONS]:
        raise ValueError(f"model_options.{others[0]} is for vision-language models such as Qwen2-VL, got {pair.name!r}")
    for tower in pair.towers:
        if tower.kind != "text":
            continue
        if isinstance(tower.module, PairEncoder):
            _adapt_pair(tower, options)
            continue
        try:
            encoder, texts = _text_parts(tower)
        except TypeError:
            named = ", ".join(f"model_options.{key}" for key in options)
            raise ValueError(f'{named} is for models "hf:" and "hf-config:", got {pair.name!r}') from None
        if "max_length" in options:
            texts.longest = _check_length(options["max_length"], count_positions(encoder.model))
        if (pooling := options.get("pooling", encoder.pooling)) not in POOLINGS:
            raise ValueError(f"model_options.pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        encoder.pooling = pooling
        included = options.get("include_prompt", encoder.include_prompt)
        if not isinstance(included, bool) or not (included or isinstance(texts, TokenInputs)):
            raise ValueError(
                f"model_options.include_prompt must be true, or false for a model with a tokenizer, got {included!r}"
            )
        encoder.include_prompt = included
        packed = options.get("packed", encoder.packed and included)
        if not isinstance(packed, bool):
            raise ValueError(f"model_options.packed must be true or false, got {packed!r}")
        if packed and not included:
            raise ValueError("model_options.packed must be false or not set with model_options.include_prompt = false")
        if not packed:
            encoder.pad()
        elif not encoder.packed and not encoder.pack():
            raise ValueError(
                f"model_options.packed must be false or not set for {pair.name!r}: texts without padding need a model with "
                "the attention of PyTorch, and transformers 5 or newer (decoders: 4.53)"
            )


def _adapt_pair(tower: Tower, options: Mapping[str, Any]) -> None:
    """Applies `max_length` to the texts of a `PairEncoder`. Its pooling is part of the model."""
    if others := [key for key in options if key != "max_length"]:
        raise ValueError(
            f"model_options.{others[0]} must not be set for a model of images and texts, which has its own pooling, got "
            f"{options[others[0]]!r}"
        )
    texts: Any = getattr(tower.collate, "__self__", None)
    assert isinstance(texts, TokenInputs), "a pair has a tokenizer"
    if "max_length" in options:
        texts.longest = _check_length(options["max_length"], count_positions(tower.module.get_submodule("model")))


def exclude_prompt(tower: Tower, prompt: str) -> Tower:
    """Returns the tower. If its encoder does not pool the tokens of a prompt, its inputs get a mask of the pooled tokens."""
    assert isinstance(tower.module, TextEncoder), "the caller checks it"
    if tower.module.include_prompt:
        return tower
    texts = copy.copy(_text_parts(tower)[1])
    assert isinstance(texts, TokenInputs), "`adapt` checks it"
    texts.prompt_tokens = texts.count_prompt(prompt)
    return replace(tower, prepare=texts.prepare, collate=texts.collate)


def describe(pair: Pair, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes the files that sentence-transformers needs in addition to the files of the text encoder.

    Writes nothing if the texts have no tokenizer.

    Args:
        pair: the towers.
        folder: folder of the text encoder.
        weights: full tensors of the encoder's `layers` and `head` by name, on the CPU.
    """
    encoder, texts = _text_parts(pair.second)
    if not isinstance(texts, TokenInputs):
        return
    layers, files = layer_configs(encoder), encoder.files
    tensors = {name.removeprefix("layers."): value for name, value in weights.items() if name.startswith("layers.")}
    if isinstance(encoder.head, nn.Linear):
        tensors[f"{len(layers)}.linear.weight"] = weights["head.weight"]
        layers.append(LayerConfig("Dense", encoder.head.in_features, encoder.head.out_features, False, "Identity"))
        files = replace(files, normalize=True, similarity="cosine")  # similarities to images are inner products
    prompts = (pair.options.get("query_prompt", ""), pair.options.get("document_prompt", ""))
    model = SentenceModel(encoder.pooling, encoder.include_prompt, tuple(layers), tensors, prompts, files=files)
    sentence_transformer.write(folder, encoder.model.config.hidden_size, texts.longest, model)


def _check_length(length: Any, most: Any) -> int:
    if not isinstance(length, int) or length < 1 or (isinstance(most, int) and length > most):
        raise ValueError(f"model_options.max_length must be from 1 to {most or 'any number of'} tokens, got {length!r}")
    return length


def random_encoders(
    configs: Sequence[Any], name: str, lora: LoraConfig | None = None
) -> list[TextEncoder | ImageEncoder | PairEncoder]:
    """Returns an encoder of texts, of images and of texts, or of both, with random weights. Trains adapters with `lora`."""
    transformers = extras.load("transformers", purpose=PURPOSE)
    models = [transformers.AutoModel.from_config(config) for config in configs]
    if lora is not None:
        for model in models:
            inject(model, lora)
    if len(models) == 1:
        return [PairEncoder(models[0]) if is_pair(models[0]) else _text_encoder(models[0], None, name)]
    images, texts = models
    return [_image_encoder(images, name), _text_encoder(texts, PAIR_DIM, name)]


def load_folders(
    name: str,
    folders: Sequence[Path],
    lora: LoraConfig | None = None,
    layers: Sequence[LayerConfig] = (),
    sizes: TokenSizes = AS_STORED,
) -> Pair:
    """Builds encoders with random weights from the folders that towers of this name were saved to.

    Args:
        name: name of the pair.
        folders: folders with a config.json.
        lora: configuration of the adapters.
        layers: layers after the pooling of the text encoder.
        sizes: sizes of images and texts that replace the sizes in the folders.
    """
    with explain_remote_code(name):
        each = zip(folders, sizes.split(len(folders)), strict=True)
        return _pair(name, [_build_from_config(folder, lora, layers, own) for folder, own in each], lora, sizes)


@dataclass(frozen=True)
class _ModelParts:
    """A transformers model, and functions that build the preprocessing of its texts or images."""

    model: Any
    texts: Callable[[], TokenInputs | HashedWords]
    images: Callable[[], ImageInputs | AudioInputs]
    layers: Sequence[LayerConfig] = ()  # layers after the pooling of texts
    weights: Mapping[str, Tensor] | None = None  # weights of the layers
    processor: Callable[[], Any] = lambda: None  # the preprocessing of a vision-language model

    def __post_init__(self) -> None:
        """Records the class name in the config, as `save_pretrained` does, because FSDP renames the class later."""
        self.model.config.architectures = [type(self.model).__name__]


def _parts(name: str) -> list[str]:
    parts = name.split("+")
    if len(parts) > 2 or not all(parts):
        raise ValueError(f'model must be one name, or two with "+" between them (images+texts), got {name!r}')
    return parts


def _locate(part: str, *, absolute: bool) -> str:
    """Returns a name on the hub, or the path of an existing folder. Runs with adapters load it again by an absolute path."""
    if os.path.isdir(part):
        return os.path.abspath(part) if absolute else part
    if part.startswith(("/", "./", "../", "~")) or part.count("/") > 1:
        raise ValueError(f"{part} must be a folder with an encoder of transformers, got no such folder")
    return part


def _download(name: str, lora: LoraConfig | None, sentences: SentenceModel | None, sizes: TokenSizes) -> _ModelParts:
    transformers = extras.load("transformers", purpose=PURPOSE)
    options: dict[str, Any] = {"trust_remote_code": allows_remote_code()}
    place = {"subfolder": sentences.subfolder} if sentences is not None and sentences.subfolder else {}
    options |= place
    check_kernels(name, **place)
    if lora is None:
        model = transformers.AutoModel.from_pretrained(name, **options).float()  # small updates need float32
    else:
        model = transformers.AutoModel.from_pretrained(name, **options, **quantization_options(lora.quantize))
        if lora.quantize != "none" and sizes != AS_STORED:
            raise ValueError(f'lora.quantize must be "none" for a model with other sizes, got {lora.quantize!r} and {sizes}')
    made_for = getattr(part_of(model.config, "vision"), "image_size", None)
    model = _resize(model, sizes, keep_weights=True)
    if lora is not None:
        inject(model, lora, name)
    return _ModelParts(
        model,
        lambda: TokenInputs(
            transformers.AutoTokenizer.from_pretrained(name, **options), longest(part_of(model.config, "text"))
        ),
        lambda: media_of(model, name, options, made_for),
        () if sentences is None else sentences.layers,
        None if sentences is None else sentences.weights,
        lambda: transformers.AutoProcessor.from_pretrained(name, **options),
    )


def _resize(model: Any, sizes: TokenSizes, *, keep_weights: bool) -> Any:
    """Returns the model with other sizes of images or texts. Without such sizes, returns the same model."""
    if sizes == AS_STORED or is_pair(model) or is_vision_language(model):
        return model
    takes_images = model.main_input_name == "pixel_values"
    if takes_images != (sizes.image_size is not None):
        return model  # `_pair` raises the error
    if sizes.image_size is not None:
        check_image_size(sizes.image_size, tokens_of_huggingface(model))
    return resize_model(model, sizes, keep_weights=keep_weights)


def _build_from_config(folder: Path, lora: LoraConfig | None, layers: Sequence[LayerConfig], sizes: TokenSizes) -> _ModelParts:
    transformers = extras.load("transformers", purpose=PURPOSE)
    config = _config(folder)
    model = transformers.AutoModel.from_config(config, trust_remote_code=allows_remote_code()).float()
    made_for = getattr(part_of(config, "vision"), "image_size", None)
    model = _resize(model, sizes, keep_weights=False)
    config = model.config
    if lora is not None:
        if lora.quantize != "none":
            raise ValueError(f'lora.quantize must be "none" for models "hf-config:", got {lora.quantize!r}')
        inject(model, lora)
    return _ModelParts(
        model,
        lambda: texts_of(part_of(config, "text"), folder),
        lambda: media_of(model, folder, {"local_files_only": True, "trust_remote_code": allows_remote_code()}, made_for),
        layers=layers,
        processor=lambda: transformers.AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=allows_remote_code()
        ),
    )


def _config(folder: Path) -> Any:
    transformers = extras.load("transformers", purpose=PURPOSE)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a folder with a config.json, got {str(folder)!r}")
    check_kernels(folder, local_files_only=True)
    allowed = allows_remote_code()
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=allowed)


@contextmanager
def _explain_missing_files(name: str) -> Iterator[None]:
    """Replaces the error for missing files by an error that describes valid names."""
    try:
        with explain_remote_code(name):
            yield
    except OSError as error:
        if (Path(name) / ADAPTER_WEIGHTS).is_file():
            raise ValueError(
                f"{name} is an adapter, not a full model; `megabatch export RUN --to hf FOLDER` writes a model from the run"
            ) from error
        raise ValueError(
            f"{name} is not a folder, and cannot be fetched from the Hugging Face hub: {str(error).splitlines()[0]} "
            '"hf-config:FOLDER" builds an encoder with random weights from a config.json and downloads nothing'
        ) from error


def _pair(name: str, encoders: list[_ModelParts], lora: LoraConfig | None, sizes: TokenSizes) -> Pair:
    if lora is not None:
        check_targets([parts.model for parts in encoders], lora)
    if len(encoders) == 1 and is_vision_language((parts := encoders[0]).model):
        processor = vision_language.load_processor(parts.processor)
        return vision_language.build_pair(parts.model, processor, name, lora, sizes, parts.layers)
    if len(encoders) == 1:
        check_one_model(sizes, has_images=is_pair(encoders[0].model))
    if len(encoders) == 1 and is_pair(encoders[0].model):
        return _pair_of_one_model(encoders[0], name, lora)
    if len(encoders) == 1:
        tower = _text_tower(encoders[0], None, name)
        return Pair(tower, tower, name=name, lora=lora)
    images, texts = encoders
    return Pair(_image_tower(images, name), _text_tower(texts, PAIR_DIM, name), name=name, lora=lora)


def _pair_of_one_model(parts: _ModelParts, name: str, lora: LoraConfig | None) -> Pair:
    """Returns the towers of a model with its own projections, and its scale and bias."""
    model, texts, images = parts.model, parts.texts(), parts.images()
    if not isinstance(texts, TokenInputs):
        raise ValueError(
            f"{name} must have a tokenizer, because the model pools the tokens that the tokenizer adds, got none: copy "
            "tokenizer.json and tokenizer_config.json into the folder"
        )
    encoder = PairEncoder(model)
    texts.longest = texts.limit_to(count_positions(model))
    if isinstance(images, AudioInputs):
        fix_batch_norms(model)
        pixels = images.collate([images.prepare(blank(AUDIO), None)])
    else:
        images.keys = PATCH_KEYS if encoder.takes_patches else images.keys
        pixels = {"pixel_values": torch.zeros(1, 3, *images.size)}
    try:
        with torch.no_grad(), use_evaluation_mode(encoder):
            if attends_to_padding(encoder, texts):
                texts.pad_fully()
            tokens = texts.collate(["a"])
            same_dim = encoder(**pixels).shape[1:] == encoder(**tokens).shape[1:]
    except Exception as error:  # a model with other inputs can raise any error
        media, reason = (
            "audio" if isinstance(images, AudioInputs) else "image",
            (str(error) or type(error).__name__).splitlines(),
        )
        raise ValueError(
            f"{name} must have get_{media}_features and get_text_features that take {next(iter(pixels))} and input_ids, got an "
            f"error of {type(model).__name__}: {reason[0]}"
        ) from error
    if not same_dim:
        raise ValueError(f"{name} must have one embedding dimension for both sides, got a {type(model).__name__}")
    freeze_unused(encoder, pixels, tokens)
    files = ModelFiles(model, (texts, images))
    numbers: dict[str, Any] = read_scale(model)
    if isinstance(images, AudioInputs):
        first = Tower(encoder, AUDIO, images.prepare, images.collate, files.write)
    else:
        options: dict[str, Any] = {"training_images": images.training, "tokens": encoder.tokens}
        first = Tower(encoder, "image", images.prepare, images.collate, files.write, **options)
    lengths = None if texts.fixed else from_mask
    second = Tower(encoder, "text", texts.prepare, texts.collate, files.write, lengths)
    return Pair(first, second, name=name, lora=lora, **numbers)


def _text_encoder(model: Any, dim: int | None, name: str, layers: Sequence[LayerConfig] = ()) -> TextEncoder:
    _check(model, "input_ids", "texts", name)
    return TextEncoder(model, dim, layers)


def _image_encoder(model: Any, name: str) -> ImageEncoder:
    _check(model, "pixel_values", "images", name)
    return ImageEncoder(model, PAIR_DIM)


def _text_tower(parts: _ModelParts, dim: int | None, name: str) -> Tower:
    encoder = _text_encoder(parts.model, dim, name, parts.layers)
    if parts.weights is not None:
        encoder.layers.load_state_dict(parts.weights)
    texts = parts.texts()
    encoder.pack()
    freeze_unused(encoder, {key: torch.ones(1, 2, dtype=torch.int64) for key in ("input_ids", "attention_mask")})
    return Tower(encoder, "text", texts.prepare, texts.collate, ModelFiles(parts.model, (texts,)).write, from_mask)


def _image_tower(parts: _ModelParts, name: str) -> Tower:
    encoder = _image_encoder(parts.model, name)
    images = parts.images()
    assert isinstance(images, ImageInputs), "an encoder of images"
    freeze_unused(encoder, {"pixel_values": torch.zeros(1, 3, *images.size)})
    options: dict[str, Any] = {"training_images": images.training, "tokens": encoder.tokens}
    return Tower(encoder, "image", images.prepare, images.collate, ModelFiles(parts.model, (images,)).write, **options)


def _check(model: Any, expected: str, what: str, name: str) -> None:
    takes = "images and texts" if hasattr(model.config, "vision_config") else model.main_input_name
    if takes != expected:
        raise ValueError(
            f'model must have an encoder of {what} in this place ("hf:TEXTS" for text–text data, "hf:IMAGES+TEXTS" or a pair '
            f"such as CLIP for image–text data), got {type(model).__name__} in {name!r}, which takes {takes}"
        )
