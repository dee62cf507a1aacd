"""A trained model in evaluation suites: as an encoder of MTEB 2, and as a model of CLIP_benchmark; and prompts for ImageNet."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.cached.streaming import map_rows
from megabatch.cached.tower import call
from megabatch_train.data.dataset import IMAGE, TEXT, blank
from megabatch_train.data.media import images
from megabatch_train.evaluation.embedding import device_of, encode
from megabatch_train.towers.tower import Pair, Tower, use_evaluation_mode

# The 80 prompts that CLIP uses for ImageNet. "A thing" is in two prompts, with "a" and with "the".
_BOTH = (
    *("a bad photo of", "a sculpture of", "a photo of the hard to see|a photo of a hard to see", "a low resolution photo of"),
    *("a rendering of", "graffiti of", "a cropped photo of", "a tattoo of", "the embroidered|a embroidered"),
    *("a bright photo of", "a photo of the clean|a photo of a clean", "a photo of the dirty|a photo of a dirty"),
    *(
        "a dark photo of",
        "a drawing of",
        "the plastic|a plastic",
        "a photo of the cool|a photo of a cool",
        "a close-up photo of",
    ),
    *("a black and white photo of", "a painting of", "a pixelated photo of", "a jpeg corrupted photo of"),
    *("a blurry photo of", "a photo of", "a good photo of", "a doodle of", "the origami|a origami", "a sketch of"),
    *("the toy|a toy", "a rendition of", "a photo of the large|a photo of a large", "a photo of the nice|a photo of a nice"),
    *("a photo of the weird|a photo of a weird", "the cartoon|a cartoon", "art of", "itap of", "the plushie|a plushie"),
    "a photo of the small|a photo of a small",
)
_ONE = ("a photo of many {}.", "a photo of my {}.", "a photo of one {}.", "itap of my {}.")
IMAGENET = (
    *(f"{text} {{}}." for both in _BOTH for text in (both.split("|") if "|" in both else (f"{both} a", f"{both} the"))),
    *("a {} in a video game.", "the {} in a video game."),
    *_ONE,
)
TEMPLATE_SETS = {"imagenet": IMAGENET}


# ----------------------------------------------------------------------------------------------------------------------
# MTEB 2. An encoder gets batches of texts, of images or of both, and returns embeddings.
#
#     mteb.evaluate(MtebEncoder(pair), mteb.get_tasks(["SciFact"]))


class MtebEncoder:
    """A model as an encoder of MTEB 2 (`EncoderProtocol`).

    Queries are encoded by the first tower if it encodes texts. All other texts are encoded by the second tower, and images by
    the first tower.

    Args:
        pair: the towers.
        name: name of the model in the results, as in "organization/model".
        revision: revision of the model in the results.
    """

    def __init__(self, pair: Pair, name: str = "megabatch/run", revision: str = "1") -> None:
        self._pair, self._name, self._revision = pair, name, revision

    @property
    def mteb_model_meta(self) -> Any:
        """The metadata of the model, without which MTEB would not store results."""
        meta = extras.load("mteb.models.model_meta", purpose="The metadata of a model of MTEB").ModelMeta
        modalities = sorted({tower.kind for tower in self._pair.towers}, reverse=True)
        about = {"name": self._name, "revision": self._revision, "modalities": modalities, "similarity_fn_name": "cosine"}
        return meta.create_empty(overwrites=about)

    def encode(self, inputs: Iterable[dict[str, Any]], *, prompt_type: Any = None, **options: Any) -> Tensor:  # (n, D)
        """Returns the embeddings of all batches. A batch has the key "text" or "image".

        Args:
            inputs: the batches.
            prompt_type: "query" or "document", or None.
            options: other arguments of MTEB, such as the task, which are ignored.
        """
        is_query = str(getattr(prompt_type, "value", prompt_type)) == "query"
        return torch.cat([self._encode_batch(batch, is_query=is_query).float().cpu() for batch in inputs])

    def _encode_batch(self, batch: dict[str, Any], *, is_query: bool) -> Tensor:  # (n, D)
        kinds = [kind for kind in (TEXT, IMAGE) if batch.get(kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a batch of MTEB must have texts or images, and not both, got the keys {', '.join(batch)}")
        first, second = self._pair.towers
        tower = first if kinds[0] == IMAGE or (is_query and first.kind == TEXT) else second
        if tower.kind != kinds[0]:
            raise ValueError(f"a batch of MTEB must have {tower.kind}s for this model, got {kinds[0]}s")
        samples = batch[kinds[0]]
        return encode(tower, [images.to_tensor(sample.convert("RGB")) for sample in samples] if kinds[0] == IMAGE else samples)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:  # (n, D), (m, D) → (n, m)
        """Returns the cosine similarity of each two embeddings."""
        first, second = (_normalize(value) for value in (embeddings1, embeddings2))
        return first @ second.T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:  # (n, D), (n, D) → (n,)
        """Returns the cosine similarity of embeddings with equal positions."""
        first, second = (_normalize(value) for value in (embeddings1, embeddings2))
        return (first * second).sum(-1)


def _normalize(embeddings: Any) -> Tensor:  # (n, D) or (D,) → (n, D)
    rows = torch.as_tensor(embeddings)
    return torch.nn.functional.normalize(rows[None] if rows.dim() == 1 else rows, dim=-1)


# ----------------------------------------------------------------------------------------------------------------------
# CLIP_benchmark. A model has `encode_image` and `encode_text`. A dataset applies the transform to each image.
#
#     model, transform, tokenizer = clip_benchmark_model(pair)
#     classifier = zero_shot_classifier(model, tokenizer, names, templates, device)


class ClipBenchmarkModel:
    """A model with the methods of open_clip that CLIP_benchmark calls. `clip_benchmark_model` creates it."""

    def __init__(self, pair: Pair) -> None:
        self._image, self._text = pair.towers
        inputs = self._prepare(blank(IMAGE))
        # The name of the pixels, for a tower whose inputs have names. Workers of a data loader apply the transform elsewhere.
        self._key = next(iter(inputs)) if isinstance(inputs, dict) and len(inputs) == 1 else None
        if self._key is None and not isinstance(inputs, Tensor):
            raise ValueError("pair must encode images from one tensor of pixels, got a model with further inputs")

    def _prepare(self, image: Tensor) -> Any:  # (3, H, W) uint8
        return self._image.collate([self._image.prepare(image, None)])

    def transform(self, image: Any) -> Tensor:  # (3, H, W)
        """Returns the pixels of a PIL image, as the tower takes them."""
        inputs = self._prepare(images.to_tensor(image.convert("RGB")))
        pixels: Tensor = inputs if self._key is None else inputs[self._key]
        return pixels[0]

    def encode_image(self, batch: Tensor) -> Tensor:  # (n, 3, H, W) → (n, D)
        """Returns the embeddings of images that the transform has prepared."""
        return _call(self._image, batch if self._key is None else {self._key: batch})

    def encode_text(self, batch: "TokenizedTexts") -> Tensor:  # (n, D)
        """Returns the embeddings of texts that the tokenizer has prepared."""
        return _call(self._text, self._text.collate(batch.samples))

    def eval(self) -> "ClipBenchmarkModel":
        """Returns the model, which is always in evaluation mode."""
        return self

    def to(self, device: Any) -> "ClipBenchmarkModel":
        """Moves the towers to a device."""
        for tower in (self._image, self._text):
            tower.module.to(device)
        return self


class TokenizedTexts:
    """Prepared texts. `to` returns them unchanged, because the model moves them."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self.samples)

    def to(self, device: Any) -> "TokenizedTexts":
        """Returns the texts."""
        return self


@torch.no_grad()
def _call(tower: Tower, inputs: Any) -> Tensor:  # (n, D)
    device = device_of(tower.module)
    with use_evaluation_mode(tower.module):
        embeddings: Tensor = call(tower.module, map_rows(lambda tensor: tensor.to(device), inputs))
        return embeddings


def clip_benchmark_model(
    pair: Pair,
) -> tuple[ClipBenchmarkModel, Callable[[Any], Any], Callable[[str | Sequence[str]], TokenizedTexts]]:
    """Returns the model, the transform of PIL images and the tokenizer, as `load_clip` of CLIP_benchmark does.

    Args:
        pair: the towers, of images and of texts.
    """
    if (pair.first.kind, pair.second.kind) != (IMAGE, TEXT):
        raise ValueError(f"pair must encode images and texts, got {pair.first.kind}s and {pair.second.kind}s")

    model = ClipBenchmarkModel(pair)

    def tokenize(texts: str | Sequence[str]) -> TokenizedTexts:
        return TokenizedTexts([pair.second.prepare(text, None) for text in ([texts] if isinstance(texts, str) else texts)])

    return model, model.transform, tokenize
