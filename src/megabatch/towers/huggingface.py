"""transformers encoders as towers: "hf:NAME" with pretrained weights, "hf-config:FOLDER" with random weights.

For text–text data one encoder serves both sides. For image–text data two names are given, "hf:IMAGES+TEXTS", and what each
encoder makes is brought to a common width by a linear layer. An embedding is the mean over a text's tokens, or over an image's
places, to unit length. With "hf-config:" nothing is downloaded: a folder's config.json says what is built, and where it has no
tokenizer, words are hashed into the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached.lengths import from_mask
from megabatch.towers import sentence_transformer
from megabatch.towers.huggingface_inputs import HashedWords, Images, Tokens, images_of, longest, texts_of
from megabatch.towers.tower import Pair, Tower

WIDTH = 512  # of the embeddings of two encoders, CLIP's
PURPOSE = "A transformers encoder"


class TextEncoder(nn.Module):
    """Mean pooling of the last layer over unmasked tokens, with an optional projection."""

    def __init__(self, model: nn.Module, width: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = _head(model, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, T), (n, T) -> (n, D)
        """Embeddings of unit length."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state  # (n, T, H)
        mask = attention_mask[..., None].to(states.dtype)
        return F.normalize(self.head((states * mask).sum(1) / mask.sum(1).clamp_min(1)), dim=-1)


class ImageEncoder(nn.Module):
    """Mean pooling of the last layer over the positions of an image, with a projection."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.head = _head(model, width)

    def forward(self, pixel_values: Tensor) -> Tensor:  # (n, 3, S, S) -> (n, D)
        """Embeddings of unit length."""
        states = self.model(pixel_values=pixel_values).last_hidden_state  # (n, places, H), or (n, H, h, w)
        pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
        return F.normalize(self.head(pooled), dim=-1)


def load(name: str) -> Pair:
    """Encoders with their weights, tokenizer and image processor, from the hub's names or folders."""
    with _within_reach(name):
        return _pair(f"hf:{name}", [_downloaded(part) for part in _parts(name)])


def load_config(folder: str) -> Pair:
    """Encoders with random weights, from a config.json. Nothing is downloaded."""
    return _pair(f"hf-config:{folder}", [_configured(Path(part)) for part in _parts(folder)])


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


def cut(pair: Pair, length: int) -> None:
    """Texts of at most this many tokens, for the towers of `load` and `load_config`."""
    for tower in pair.towers:
        texts: Any = getattr(tower.prepare, "__self__", None)
        if tower.kind == "text":
            if not isinstance(texts, Tokens | HashedWords):
                raise ValueError(f'model_options.max_length is for models "hf:" and "hf-config:", got {pair.name!r}')
            module: Any = tower.module
            most = getattr(module.model.config, "max_position_embeddings", None)
            if not isinstance(length, int) or length < 1 or (isinstance(most, int) and length > most):
                raise ValueError(f"model_options.max_length must be from 1 to {most or 'any number of'} tokens, got {length!r}")
            texts.longest = length


def describe(pair: Pair, folder: Path) -> None:
    """Writes the files that sentence-transformers needs beside those of the text encoder; none without a tokenizer."""
    texts: Any = getattr(pair.second.collate, "__self__", None)
    if isinstance(texts, Tokens):
        prompts = {name: pair.options.get(f"{name}_prompt", "") for name in ("query", "document")}
        encoder: Any = pair.second.module
        width = encoder.model.config.hidden_size
        sentence_transformer.write(folder, width, texts.longest, encoder.head, {k: v for k, v in prompts.items() if v})


def random_encoders(configs: Sequence[Any], name: str) -> list[TextEncoder | ImageEncoder]:
    """An encoder of texts, or one of images and one of texts, with random weights; all parameters are trained."""
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    models = [transformers.AutoModel.from_config(config) for config in configs]
    if len(models) == 1:
        return [_text_encoder(models[0], None, name)]
    images, texts = models
    return [_image_encoder(images, name), _text_encoder(texts, WIDTH, name)]


def load_folders(name: str, folders: Sequence[Path]) -> Pair:
    """Encoders with random weights, as they were when towers of this name were saved into the folders."""
    return _pair(name, [_configured(folder) for folder in folders])


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


def _downloaded(name: str) -> _Parts:
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    model = transformers.AutoModel.from_pretrained(name)
    return _Parts(
        model,
        lambda: Tokens(transformers.AutoTokenizer.from_pretrained(name), longest(model.config)),
        lambda: Images(model.config, transformers.AutoImageProcessor.from_pretrained(name)),
    )


def _configured(folder: Path) -> _Parts:
    transformers = extras.load("transformers", extra="huggingface", purpose=PURPOSE)
    config = _config(folder)
    model = transformers.AutoModel.from_config(config)
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
        raise ValueError(
            f"{name} is no folder, and cannot be fetched from the Hugging Face hub: {str(error).splitlines()[0]} "
            '"hf-config:FOLDER" builds an encoder with random weights from a config.json and downloads nothing'
        ) from error


def _pair(name: str, encoders: list[_Parts]) -> Pair:
    if len(encoders) == 1:
        tower = _text_tower(encoders[0], None, name)
        return Pair(tower, tower, name=name)
    images, texts = encoders
    return Pair(_image_tower(images, name), _text_tower(texts, WIDTH, name), name=name)


def _text_encoder(model: Any, width: int | None, name: str) -> TextEncoder:
    _check(model, "input_ids", "texts", name)
    return TextEncoder(model, width)


def _image_encoder(model: Any, name: str) -> ImageEncoder:
    _check(model, "pixel_values", "images", name)
    return ImageEncoder(model, WIDTH)


def _text_tower(parts: _Parts, width: int | None, name: str) -> Tower:
    encoder = _text_encoder(parts.model, width, name)
    texts = parts.texts()
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
    encoder(**inputs).sum().backward()
    for parameter in encoder.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    encoder.train(training)
