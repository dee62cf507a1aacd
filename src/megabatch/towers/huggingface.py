"""transformers encoders as towers: "hf:NAME" with pretrained weights, "hf-config:FOLDER" with random weights.

For text–text data one encoder serves both sides. For image–text data two names are given, "hf:IMAGES+TEXTS", and what each
encoder makes is brought to a common width by a linear layer. An embedding is the mean over a text's tokens, the last token of a
causal model (a decoder), or the mean over an image's places, to unit length. With "hf-config:" nothing is downloaded: a
folder's config.json says what is built, and where it has no tokenizer, words are hashed into the vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached.graphs import parameters_in
from megabatch.cached.lengths import from_mask
from megabatch.towers import packing, sentence_transformer
from megabatch.towers.huggingface_inputs import HashedWords, Images, Tokens, images_of, longest, texts_of
from megabatch.towers.lora import ADAPTER_WEIGHTS, LoraConfig, check_targets, inject, quantisation
from megabatch.towers.tower import Pair, Tower

WIDTH = 512  # of the embeddings of two encoders, CLIP's
PURPOSE = "A transformers encoder"
MEAN, LAST = "mean", "last"
POOLINGS = (MEAN, LAST)
OPTIONS = ("max_length", "pooling", "packed")  # of texts


class TextEncoder(nn.Module):
    """The last layer, pooled over the tokens of a text, with an optional projection.

    Attributes:
        causal: whether a token sees only the tokens before it.
        pooling: "mean" over the tokens, or "last" for the last token, which is the only one to see the whole text if the model
            is causal.
        packed: whether texts are encoded without padding (`packing`).
    """

    def __init__(self, model: Any, width: int | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.head = _head(model, width)
        self.causal = is_causal(model)
        self.pooling = LAST if self.causal else MEAN
        self.packed = False
        self._takes = set(inspect.signature(model.forward).parameters) if self.causal else set()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T), (n, T) -> (n, D)
        """Embeddings of unit length, of texts that are padded on either side."""
        if self.packed:
            packed = packing.Packed.of(input_ids, attention_mask)
            states = packed.states(self.model)  # (tokens, H)
            pooled = _wide(packed.last(states)) if self.pooling == LAST else packed.mean(_wide(states))
        else:
            states = self._padded_states(input_ids, attention_mask)  # (n, T, H)
            pooled = _wide(_last(states, attention_mask)) if self.pooling == LAST else _mean(_wide(states), attention_mask)
        return F.normalize(self.head(pooled), dim=-1)

    def _padded_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T, H)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if "position_ids" in self._takes:  # padding on the left would move them
            inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
        if "use_cache" in self._takes:  # for texts that go on; it would grow when a checkpoint computes again
            inputs["use_cache"] = False
        states: Tensor = self.model(**inputs).last_hidden_state
        return states

    def pack(self) -> bool:
        """Encodes texts without padding from now on, if this model then gives the same embeddings; returns whether it does.

        A text must also have the same embedding beside other texts: convolutions and recurrent layers see their tokens.
        """
        if not ("position_ids" in self._takes and packing.prepare(self.model)):
            return False
        device = next(self.parameters()).device
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], device=device)
        ids = torch.arange(mask.numel(), device=device).view_as(mask) % 7 + 1
        training = self.training
        self.eval()  # draws no random numbers
        try:
            with torch.no_grad():
                padded = self(ids, mask)
                self.packed = True
                found, other = self(ids, mask), self(torch.cat((ids[:2] + 1, ids[2:])), mask)
                precision = torch.finfo(self.model.dtype).eps
                same = (found - padded).abs().max() <= precision**0.5
                self.packed = bool(same and (found - other)[2].norm() <= precision)
        except Exception:  # of any model that was not made for it
            self.packed = False
        finally:
            self.train(training)
        if not self.packed:
            packing.undo(self.model)
        return self.packed

    def pad(self) -> None:
        """Encodes texts with padding from now on."""
        self.packed = False
        packing.undo(self.model)


def is_causal(model: nn.Module) -> bool:
    """Whether a token of a transformers model sees only the tokens before it."""
    config: Any = model.config
    found = any(getattr(part, "is_causal", False) is True for part in model.modules())
    return found and getattr(config, "is_causal", True) is not False


def _wide(states: Tensor) -> Tensor:
    """In float32 at least: a mean over many tokens in half precision would lose digits."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _mean(states: Tensor, mask: Tensor) -> Tensor:  # (n, T, H), (n, T) -> (n, H)
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def _last(states: Tensor, mask: Tensor) -> Tensor:  # (n, T, H), (n, T) -> (n, H)
    place = (mask.bool() * torch.arange(mask.shape[1], device=mask.device)).amax(1)
    return states[torch.arange(len(states), device=states.device), place]


class ImageEncoder(nn.Module):
    """Mean pooling of the last layer over the positions of an image, with a projection."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.head = _head(model, width)

    def forward(self, pixel_values: Tensor) -> Tensor:  # (n, 3, S, S) -> (n, D)
        """Embeddings of unit length."""
        model: Any = self.model
        states = _wide(model(pixel_values=pixel_values.to(model.dtype)).last_hidden_state)  # (n, places, H), or (n, H, h, w)
        pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
        return F.normalize(self.head(pooled), dim=-1)


def load(name: str, lora: LoraConfig | None = None) -> Pair:
    """Encoders with their weights, tokenizer and image processor, from the hub's names or folders; with adapters for `lora`."""
    with _within_reach(name):
        return _pair(f"hf:{name}", [_downloaded(part, lora) for part in _parts(name)], lora)


def load_config(folder: str, lora: LoraConfig | None = None) -> Pair:
    """Encoders with random weights, from a config.json. Nothing is downloaded."""
    return load_folders(f"hf-config:{folder}", [Path(part) for part in _parts(folder)], lora)


def read_configs(spec: str) -> list[Any]:
    """The configs of the encoders that `load` ("hf:…") or `load_config` ("hf-config:…") would make, from this machine alone."""
    family, _, name = spec.partition(":")
    if family == "hf-config":
        return [_config(Path(part)) for part in _parts(name)]
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    found = []
    for part in _parts(name):
        try:
            found.append(transformers.AutoConfig.from_pretrained(part, local_files_only=True))
        except OSError as error:
            raise ValueError(
                f"{part} is no folder with a config.json, and not in the local cache of the Hugging Face hub; a plan downloads "
                f"nothing. `hf download {part} config.json` fetches it"
            ) from error
    return found


def adapt(pair: Pair, options: Mapping[str, Any]) -> None:
    """Applies `OPTIONS` to the texts of towers from `load` and `load_config`.

    Args:
        pair: the towers, changed in place.
        options: `max_length` in tokens; `pooling`, one of `POOLINGS`; `packed`, whether texts are encoded without padding
            (default: if the model is causal and can).
    """
    for tower in pair.towers:
        if tower.kind != "text":
            continue
        encoder, texts = tower.module, getattr(tower.prepare, "__self__", None)
        if not isinstance(encoder, TextEncoder) or not isinstance(texts, Tokens | HashedWords):
            named = ", ".join(f"model_options.{key}" for key in options)
            raise ValueError(f'{named} is for models "hf:" and "hf-config:", got {pair.name!r}')
        if "max_length" in options:
            texts.longest = _checked_length(encoder, options["max_length"])
        if (pooling := options.get("pooling", encoder.pooling)) not in POOLINGS:
            raise ValueError(f"model_options.pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        encoder.pooling = pooling
        packed = options.get("packed", encoder.packed)
        if not isinstance(packed, bool):
            raise ValueError(f"model_options.packed must be true or false, got {packed!r}")
        if not packed:
            encoder.pad()
        elif not encoder.packed and not encoder.pack():
            raise ValueError(
                f"model_options.packed must be false or left out for {pair.name!r}: texts without padding need a causal model "
                "with PyTorch's attention, and transformers 4.53 or newer"
            )


def describe(pair: Pair, folder: Path) -> None:
    """Writes the files that sentence-transformers needs beside those of the text encoder; none without a tokenizer."""
    texts: Any = getattr(pair.second.collate, "__self__", None)
    if isinstance(texts, Tokens):
        prompts = {name: pair.options.get(f"{name}_prompt", "") for name in ("query", "document")}
        encoder: Any = pair.second.module
        width, given = encoder.model.config.hidden_size, {name: prompt for name, prompt in prompts.items() if prompt}
        sentence_transformer.write(folder, width, texts.longest, encoder.head, given, last_token=encoder.pooling == LAST)


def _checked_length(encoder: TextEncoder, length: Any) -> int:
    most = getattr(encoder.model.config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1 or (isinstance(most, int) and length > most):
        raise ValueError(f"model_options.max_length must be from 1 to {most or 'any number of'} tokens, got {length!r}")
    return length


def random_encoders(configs: Sequence[Any], name: str, lora: LoraConfig | None = None) -> list[TextEncoder | ImageEncoder]:
    """An encoder of texts, or one of images and one of texts, with random weights; adapters or all parameters are trained."""
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    models = [transformers.AutoModel.from_config(config) for config in configs]
    if lora is not None:
        for model in models:
            inject(model, lora)
    if len(models) == 1:
        return [_text_encoder(models[0], None, name)]
    images, texts = models
    return [_image_encoder(images, name), _text_encoder(texts, WIDTH, name)]


def load_folders(name: str, folders: Sequence[Path], lora: LoraConfig | None = None) -> Pair:
    """Encoders with random weights, as they were when towers of this name were saved into the folders."""
    return _pair(name, [_configured(folder, lora) for folder in folders], lora)


@dataclass(frozen=True)
class _Parts:
    """An encoder, and where its texts or images would come from."""

    model: Any
    texts: Callable[[], Tokens | HashedWords]
    images: Callable[[], Images]

    def __post_init__(self) -> None:
        """Names the class in the config, as `save_pretrained` does; FSDP will rename it."""
        self.model.config.architectures = [type(self.model).__name__]


def _parts(name: str) -> list[str]:
    parts = name.split("+")
    if len(parts) > 2 or not all(parts):
        raise ValueError(f'model must be one name, or two with "+" between them (images+texts), got {name!r}')
    return parts


def _downloaded(name: str, lora: LoraConfig | None) -> _Parts:
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    if lora is None:
        model = transformers.AutoModel.from_pretrained(name).float()  # an optimizer's small updates need float32
    else:
        model = transformers.AutoModel.from_pretrained(name, **quantisation(lora.quantize))
        inject(model, lora, name)
    return _Parts(
        model,
        lambda: Tokens(transformers.AutoTokenizer.from_pretrained(name), longest(model.config)),
        lambda: Images(model.config, transformers.AutoImageProcessor.from_pretrained(name)),
    )


def _configured(folder: Path, lora: LoraConfig | None) -> _Parts:
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    config = _config(folder)
    model = transformers.AutoModel.from_config(config).float()
    if lora is not None:
        if lora.quantize != "none":
            raise ValueError(f'lora.quantize must be "none" for models "hf-config:", got {lora.quantize!r}')
        inject(model, lora)
    return _Parts(model, lambda: texts_of(config, folder), lambda: images_of(config, folder))


def _config(folder: Path) -> Any:
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a folder with a config.json, got {str(folder)!r}")
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


@contextmanager
def _within_reach(name: str) -> Iterator[None]:
    """An error that describes valid names, if the files are not found."""
    try:
        yield
    except OSError as error:
        if (Path(name) / ADAPTER_WEIGHTS).is_file():
            raise ValueError(
                f"{name} is an adapter and no whole model; `megabatch export RUN --to hf FOLDER` writes one from the run"
            ) from error
        raise ValueError(
            f"{name} is no folder, and cannot be fetched from the Hugging Face hub: {str(error).splitlines()[0]} "
            '"hf-config:FOLDER" builds an encoder with random weights from a config.json and downloads nothing'
        ) from error


def _pair(name: str, encoders: list[_Parts], lora: LoraConfig | None) -> Pair:
    if lora is not None:
        check_targets([parts.model for parts in encoders], lora)
    if len(encoders) == 1:
        tower = _text_tower(encoders[0], None, name)
        return Pair(tower, tower, name=name, lora=lora)
    images, texts = encoders
    return Pair(_image_tower(images, name), _text_tower(texts, WIDTH, name), name=name, lora=lora)


def _text_encoder(model: Any, width: int | None, name: str) -> TextEncoder:
    _check(model, "input_ids", "texts", name)
    return TextEncoder(model, width)


def _image_encoder(model: Any, name: str) -> ImageEncoder:
    _check(model, "pixel_values", "images", name)
    return ImageEncoder(model, WIDTH)


def _text_tower(parts: _Parts, width: int | None, name: str) -> Tower:
    encoder = _text_encoder(parts.model, width, name)
    texts = parts.texts()
    encoder.pack()
    freeze_unused(encoder, {key: torch.ones(1, 2, dtype=torch.int64) for key in ("input_ids", "attention_mask")})
    return Tower(encoder, "text", texts.prepare, texts.collate, _Files(parts.model, texts).write, from_mask)


def _image_tower(parts: _Parts, name: str) -> Tower:
    encoder = _image_encoder(parts.model, name)
    images = parts.images()
    freeze_unused(encoder, {"pixel_values": torch.zeros(1, 3, *images.size)})
    return Tower(
        encoder, "image", images.prepare, images.collate, _Files(parts.model, images).write, training_images=images.training
    )


@dataclass(frozen=True)
class _Files:
    """Writes what `_configured` reads."""

    model: Any
    inputs: Tokens | HashedWords | Images

    def write(self, folder: Path) -> None:
        self.model.config.save_pretrained(folder)
        self.inputs.write(folder)


def _check(model: Any, expected: str, what: str, name: str) -> None:
    takes = "images and texts together" if hasattr(model.config, "vision_config") else model.main_input_name
    if takes != expected:
        raise ValueError(
            f'model must have an encoder of {what} in this place ("hf:TEXTS" for text–text data, "hf:IMAGES+TEXTS" for '
            f"image–text data), got {type(model).__name__} in {name!r}, which takes {takes}"
        )


def _head(model: nn.Module, width: int | None) -> nn.Module:
    if width is None:
        return nn.Identity()
    config: Any = model.config
    # Convolutional encoders have a width per stage; the last one is the output's.
    inner = getattr(config, "hidden_size", None) or config.hidden_sizes[-1]
    return nn.Linear(inner, width, bias=False)


def freeze_unused(encoder: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Parameters that embeddings do not depend on, such as a pooler's; DDP would wait for their gradients forever."""
    training = encoder.training
    encoder.eval()  # draws no random numbers
    with torch.enable_grad():
        reached = parameters_in([encoder(**inputs)])
    assert reached is not None, "no reentrant checkpoints"
    for parameter in encoder.parameters():
        if id(parameter) not in reached:
            parameter.requires_grad_(False)
    encoder.train(training)
