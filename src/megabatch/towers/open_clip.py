"""Any open_clip model as two towers, by its name: "ViT-B-32", or with trained weights "ViT-B-32@laion2b_s34b_b79k".

Both towers are one module, called with an image or with a text, because in open_clip's CLIP they are one: its text side has no
module of its own. The state of `module.model` is what open_clip loads back. The model's own scale is where the loss begins; it
is frozen here, as the loss has one of its own; `saved.save` writes that into the model.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.data import cache
from megabatch.data.crops import RandomCrop, TrainingImages
from megabatch.data.images import to_pillow
from megabatch.towers.tower import Pair, Tower

_PURPOSE = "An open_clip model"
CONFIG = "open_clip_config.json"


class Sides(nn.Module):
    """An open_clip model that encodes one side at a time, to unit length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.causal = CausalTexts.of(model)

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Tensor:  # (n, …) -> (n, D)
        """Embeddings of images, or of texts."""
        model: Any = self.model
        if (image is None) == (text is None):
            raise ValueError("image or text must be given, and not both")
        if text is None:
            features = model.encode_image(image)
        elif self.causal is not None and text.shape[1] < model.context_length:
            features = self.causal.encode(text)
        else:
            features = model.encode_text(text)
        return F.normalize(features, dim=-1)


@dataclass(frozen=True)
class CausalTexts:
    """The text side of a model in which tokens after the end token have no influence, so that texts may be cut there.

    Attention is causal and the embedding is the end token's. open_clip's own `encode_text` takes texts of full width only.
    """

    parts: Any  # the module that has the transformer
    pool_type: str
    end_id: Any

    @classmethod
    def of(cls, model: Any) -> "CausalTexts | None":
        """None for models that pool another token, attend in both directions, or encode texts with a transformers model."""
        parts = getattr(model, "text", model)  # CustomTextCLIP has a module for it
        prefix = "text_" if parts is model else ""
        pool_type = getattr(parts, f"{prefix}pool_type", None)
        if pool_type not in ("argmax", "eos") or getattr(parts, "attn_mask", None) is None:
            return None
        if getattr(parts, "cls_emb", None) is not None or getattr(parts, "output_tokens", False):  # CoCa
            return None
        return cls(parts, pool_type, getattr(parts, f"{prefix}eos_id", None))

    def ends(self, text: Tensor) -> Tensor:  # (n, L) -> (n,)
        """The position of each end token: the largest id, or the first token with the id of the end token."""
        return (text if self.pool_type == "argmax" else text.eq(self.end_id).int()).argmax(1)

    def lengths(self, inputs: dict[str, Tensor]) -> Tensor:  # (n,)
        """Tokens up to and including the end token."""
        return self.ends(inputs["text"]) + 1

    def encode(self, text: Tensor) -> Tensor:  # (n, L) -> (n, D)
        """Equal to open_clip's `encode_text` of the texts at full width."""
        parts, tokens = self.parts, text.shape[1]
        dtype = parts.transformer.get_cast_dtype()
        x = parts.token_embedding(text).to(dtype) + parts.positional_embedding[:tokens].to(dtype)
        x = parts.transformer(x, attn_mask=parts.attn_mask[:tokens, :tokens])
        x = parts.ln_final(x[torch.arange(len(x), device=x.device), self.ends(text)])
        projection = parts.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        found: Tensor = x
        return found


def known(architecture: str) -> Any:
    """The module open_clip; an error if it is not installed or does not know this model."""
    open_clip = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
    models = open_clip.list_models()
    if architecture not in models:
        raise ValueError(f"open_clip has no model {architecture}; {_near(architecture, models)}")
    return open_clip


def _near(word: str, known: Sequence[str]) -> str:
    """The nearest names, or a few of all."""
    by_letters = {name.lower(): name for name in known}
    near = [by_letters[name] for name in difflib.get_close_matches(word.lower(), by_letters, n=3, cutoff=0.65)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(known[:10])}" + (f" and {len(known) - 10} more" if len(known) > 10 else "")


def load(name: str) -> Pair:
    """The towers of a model; "NAME@WEIGHTS" loads pretrained weights."""
    architecture, _, weights = name.partition("@")
    open_clip = known(architecture)
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if weights and weights not in tags and not Path(weights).exists():
        raise ValueError(f"{architecture} has no weights {weights}, and there is no such file; {_near(weights, tags)}")
    try:
        made = open_clip.create_model_and_transforms(architecture, pretrained=weights or None)
    except (OSError, RuntimeError) as error:
        if not weights:
            raise
        raise OSError(
            f"the weights {weights} of {architecture} could not be loaded; the first use needs a network, later ones the "
            f"local cache. {str(error).splitlines()[0]}"
        ) from error
    return _pair(name, made)


def load_folder(name: str, folder: Path) -> Pair:
    """The towers of a model saved in open_clip's format. Pretrained weights in `name` are not downloaded."""
    open_clip = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
    return _pair(name, open_clip.create_model_and_transforms(f"local-dir:{folder}"))


def _pair(name: str, made: tuple[Any, Any, Any]) -> Pair:
    open_clip = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
    model, _, evaluation = made
    architecture = name.partition("@")[0]
    bias = getattr(model, "logit_bias", None)
    for parameter in (model.logit_scale, bias):
        if parameter is not None:
            parameter.requires_grad_(False)
    module, images = Sides(model), _Images(model.visual, evaluation)
    texts = _Texts(open_clip.get_tokenizer(architecture))
    lengths = None if module.causal is None else module.causal.lengths
    return Pair(
        Tower(
            module,
            "image",
            images.prepare,
            images.collate,
            _Description(architecture, model.visual).write,
            training_images=images.training(),
        ),
        Tower(module, "text", texts.prepare, texts.collate, texts.write, lengths),
        logit_scale=model.logit_scale.detach().exp().item(),
        logit_bias=None if bias is None else bias.detach().item(),
        name=f"open_clip:{name}",
    )


@dataclass(frozen=True)
class _Description:
    """The files that open_clip needs beside the weights."""

    architecture: str
    visual: Any

    def write(self, folder: Path) -> None:
        """Writes open_clip's config file."""
        open_clip = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
        known = getattr(self.visual, "preprocess_cfg", {})
        images = {key: known[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in known}
        config = {"model_cfg": open_clip.get_model_config(self.architecture), "preprocess_cfg": images}
        text = json.dumps(config, indent=2)
        cache.write(folder / CONFIG, lambda file: file.write(text.encode()))


class _Images:
    """open_clip's transform for evaluation; in training its random crop, with the sample's own numbers."""

    def __init__(self, visual: Any, evaluation: Any) -> None:
        size = visual.image_size
        self._size: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        constants = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
        self._mean = tuple(getattr(visual, "image_mean", None) or constants.OPENAI_DATASET_MEAN)
        self._deviation = tuple(getattr(visual, "image_std", None) or constants.OPENAI_DATASET_STD)
        self._evaluation = evaluation

    def training(self) -> TrainingImages:
        """Random crops."""
        return TrainingImages(RandomCrop(self._size), self._mean, self._deviation, "image")

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> Tensor:  # (3, S, S)
        """One image, for evaluation."""
        prepared: Tensor = self._evaluation(to_pillow(image))
        return prepared

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """A chunk."""
        return {"image": torch.stack(samples)}


class _Texts:
    """Tokenizes each text where it is read, because open_clip's own tokenizer is Python code."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prepare(self, text: str, generator: torch.Generator | None) -> bytes:
        """The tokens of a text, padded, as int32."""
        tokens: bytes = self.tokenizer([text])[0].to(torch.int32).numpy().tobytes()
        return tokens

    def collate(self, samples: list[bytes]) -> dict[str, Tensor]:
        """A chunk."""
        tokens = torch.frombuffer(bytearray().join(samples), dtype=torch.int32).view(len(samples), -1)
        return {"text": tokens.long()}

    def write(self, folder: Path) -> None:
        """Writes a transformers tokenizer, which open_clip expects beside the model; its own tokenizers need no files."""
        inner: Any = getattr(self.tokenizer, "tokenizer", None)
        if hasattr(inner, "save_pretrained"):
            inner.save_pretrained(folder)
