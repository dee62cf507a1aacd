"""Vision-language models as towers: decoders of transformers such as Qwen2-VL, which encode texts, images, or both together.

One model serves both sides. A sample is a text, an image, or both. Its tokens are the tokens of the text and the visual tokens
of the image, whose number depends on the size of the image. The embedding is the last token by default.
"""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.world import is_sharded
from megabatch_train.data.dataset import IMAGE, MIXED, TEXT, Content
from megabatch_train.towers.layers.lora import freeze_unused
from megabatch_train.towers.sentence_transformer import (
    LAST,
    POOLINGS,
    FileOptions,
    LayerConfig,
    SentenceModel,
    pool,
    write,
)
from megabatch_train.towers.tokens import AS_STORED, TokenSizes
from megabatch_train.towers.tower import LoraConfig, Pair, Tower
from megabatch_train.towers.vision_language.inputs import Normalization, VisionLanguageInputs

OPTIONS = ("min_pixels", "max_pixels", "chat_template", "generation_prompt")
KINDS = (IMAGE, TEXT, MIXED)  # the kinds of samples that these towers encode


def is_vision_language(model: Any) -> bool:
    """Returns whether a transformers model takes tokens and the patches of images of any size."""
    return {"input_ids", "pixel_values", "image_grid_thw"} <= set(inspect.signature(model.forward).parameters)


# ----------------------------------------------------------------------------------------------------------------------
# The encoder. Its inputs are rectangular, with one row for each sample, so that the step can slice, repeat and copy them. The
# encoder removes the padding of the patches.


class VisionLanguageEncoder(nn.Module):
    """A transformers model whose last layer is pooled over the tokens of a sample.

    Args:
        model: the model.
        pixels: the normalization of patches.

    Attributes:
        pooling: one of `POOLINGS`.
        files: contents of the files of a sentence-transformers model that a saved model keeps.
    """

    def __init__(self, model: Any, pixels: Normalization) -> None:
        super().__init__()
        self.model: Any = model
        self.pixels, self.pooling, self.files = pixels, LAST, FileOptions()
        self._takes = set(inspect.signature(model.forward).parameters)
        self._image_token = int(model.config.image_token_id)
        _replace_patch_convolutions(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, patches: Tensor, grids: Tensor) -> Tensor:  # (n, D)
        """Returns embeddings of unit length.

        Args:
            input_ids: (n, T) tokens, with padding on the right.
            attention_mask: (n, T), 1 for tokens and 0 for padding.
            patches: (n, P, values) uint8, the patches of the image of each sample, with padding at the end.
            grids: (n, 3), numbers of patches of each image: in time, vertically and horizontally; zeros without an image.
        """
        rows = len(input_ids)
        counts = grids.prod(1)
        width, total = torch.stack([attention_mask.sum(1).max(), counts.sum()]).tolist()
        if not total and self._must_encode_images():
            input_ids, attention_mask, patches, grids = self._add_image(input_ids, attention_mask, patches, grids)
            counts, total = grids.prod(1), 1
        ids, mask = input_ids[:, : max(width, 1)], attention_mask[:, : max(width, 1)]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if total:
            is_patch = torch.arange(patches.shape[1], device=patches.device) < counts[:, None]
            inputs |= {"pixel_values": self.pixels.apply(patches[is_patch]), "image_grid_thw": grids[counts > 0]}
            if "mm_token_type_ids" in self._takes:
                inputs["mm_token_type_ids"] = (ids == self._image_token).int()
        states = self.model(**inputs).last_hidden_state  # (n, T, H)
        return F.normalize(pool(self.pooling, states, mask)[:rows], dim=-1)

    def _must_encode_images(self) -> bool:
        """Returns whether a chunk without images must call the vision layers, because other ranks may call them.

        FSDP2 gathers weights and DDP averages gradients by collective operations, which all ranks have to call.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return False
        text = {id(parameter) for parameter in self.model.get_decoder().parameters()}
        vision = [parameter for parameter in self.model.parameters() if id(parameter) not in text]
        return any(parameter.requires_grad or is_sharded(parameter) for parameter in vision)

    def _add_image(self, ids: Tensor, mask: Tensor, patches: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """Adds a row with the smallest image. The embedding of this row is dropped, so its gradient is zero."""
        side = self.pixels.merge
        padding = 0 if self._image_token else 1  # any other token, which the mask excludes
        row = F.pad(ids.new_tensor([[self._image_token]]), (0, ids.shape[1] - 1), value=padding)
        first = torch.arange(ids.shape[1], device=ids.device)[None] == 0
        blank = patches.new_zeros(len(ids) + 1, side * side, self.pixels.values)
        return (
            torch.cat([ids, row]),
            torch.cat([mask, first.to(mask.dtype)]),
            blank,
            torch.cat([grids, grids.new_tensor([[1, side, side]])]),
        )


class PatchConv3d(nn.Conv3d):
    """A convolution over single windows, computed as one matmul. Parameters and results equal `nn.Conv3d`."""

    def forward(self, input: Tensor) -> Tensor:  # (P, C, frames, H, W) -> (P, out_channels, 1, 1, 1)
        """Returns the convolution."""
        if tuple(input.shape[1:]) != (self.in_channels, *self.kernel_size):
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def _replace_patch_convolutions(model: nn.Module) -> None:
    """Replaces the convolutions that embed patches. In half precision, some versions of PyTorch compute them slowly."""
    for part in model.modules():
        if type(part) is nn.Conv3d and part.kernel_size == part.stride and set(part.padding) == {0} and part.groups == 1:
            part.__class__ = PatchConv3d


# ----------------------------------------------------------------------------------------------------------------------
# Towers.


@dataclass(frozen=True)
class _Files:
    """Writes the files that describe a model and its processor, except the weights."""

    model: Any
    inputs: VisionLanguageInputs

    def write(self, folder: Path) -> None:
        """Writes the config and the files of the processor."""
        self.model.config.save_pretrained(folder)
        self.inputs.write(folder)


def load_processor(load: Callable[[], Any]) -> Any:
    """Returns the result of `load`. Raises an error if torchvision, which processors resize images with, is not installed."""
    extras.load("torchvision", purpose="A vision-language model")
    return load()


def build_pair(
    model: Any, processor: Any, name: str, lora: LoraConfig | None, sizes: TokenSizes, layers: Sequence[LayerConfig]
) -> Pair:
    """Returns two towers that share a model. They encode texts, images and both together.

    Args:
        model: the transformers model.
        processor: its processor.
        name: name of the pair.
        lora: configuration of the adapters in the model.
        sizes: other sizes of images and texts, which must not be set.
        layers: layers of sentence-transformers after the pooling, which must be empty.
    """
    if sizes != AS_STORED:
        raise ValueError(
            f"model_options.image_size and context_length must not be set for a vision-language model, got {sizes}; max_pixels "
            "limits images, and max_length limits texts"
        )
    if layers:
        raise ValueError(f"{name} must have no Dense module after the pooling of a vision-language model, got {layers}")
    for part in ("tokenizer", "image_processor"):
        if getattr(processor, part, None) is None:
            raise ValueError(f"{name} must have a processor with a tokenizer and an image processor, got none")
    inputs = VisionLanguageInputs(processor, model)
    inputs.check(name)
    encoder = VisionLanguageEncoder(model, inputs.pixels)
    first, second = (_tower(encoder, MIXED, own) for own in (inputs, copy.copy(inputs)))
    freeze_unused(encoder, _inputs_of_all_parts(first))
    return Pair(first, second, name=name, lora=lora)


def _tower(encoder: Any, kind: str, inputs: VisionLanguageInputs) -> Tower:
    files = _Files(encoder.model, inputs)
    return Tower(encoder, kind, inputs.prepare, inputs.collate, files.write, measure=inputs.measure)


def _inputs_of_all_parts(tower: Tower) -> dict[str, Tensor]:
    """Returns the inputs of a sample with a text and an image, which all parts of the model encode."""
    image, device = torch.zeros(3, 32, 32, dtype=torch.uint8), next(tower.module.parameters()).device
    collated = tower.collate([tower.prepare(Content("a", image), None)])
    return {name: value.to(device) for name, value in collated.items()}


def inputs_of(tower: Tower) -> VisionLanguageInputs:
    """Returns the preprocessing of a tower of `build_pair`."""
    inputs: Any = getattr(tower.collate, "__self__", None)
    assert isinstance(inputs, VisionLanguageInputs), "the caller checks it"
    return inputs


def with_kinds(pair: Pair, kinds: Sequence[str]) -> Pair:
    """Returns the pair with towers for samples of these kinds. Every tower encodes texts, images and both together."""
    if any(kind not in KINDS for kind in kinds):
        return pair
    first, second = (replace(tower, kind=kind) for tower, kind in zip(pair.towers, kinds, strict=True))
    return replace(pair, first=first, second=second)


def with_prompts(pair: Pair, prompts: Sequence[str]) -> Pair:
    """Returns the pair with a prompt for each side."""
    towers = []
    for tower, prompt in zip(pair.towers, prompts, strict=True):
        inputs = copy.copy(inputs_of(tower))
        inputs.prompt = prompt
        towers.append(_tower(tower.module, tower.kind, inputs))
    return replace(pair, first=towers[0], second=towers[1])


def adapt(pair: Pair, options: Mapping[str, Any]) -> None:
    """Applies options to the towers, which are changed in place.

    Args:
        pair: towers of `build_pair`.
        options: `max_length` in tokens of the text; `pooling`, one of `POOLINGS`; `min_pixels` and `max_pixels` of an image;
            `chat_template`, whether samples are messages of the chat template; `generation_prompt`, whether the beginning of
            an answer follows the message.
    """
    encoder: Any = pair.first.module
    for key in ("include_prompt", "packed"):
        if key in options:
            raise ValueError(f"model_options.{key} must not be set for a vision-language model, got {options[key]!r}")
    for key in ("chat_template", "generation_prompt"):
        if not isinstance(options.get(key, True), bool):
            raise ValueError(f"model_options.{key} must be true or false, got {options[key]!r}")
    if (pooling := options.get("pooling", encoder.pooling)) not in POOLINGS:
        raise ValueError(f"model_options.pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    encoder.pooling = pooling
    length = options.get("max_length", 1)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"model_options.max_length must be at least 1 token, got {length!r}")
    for inputs in {id(one): one for one in map(inputs_of, pair.towers)}.values():
        inputs.longest = options.get("max_length", inputs.longest)
        inputs.chat = options.get("chat_template", inputs.chat)
        inputs.generation_prompt = options.get("generation_prompt", inputs.generation_prompt)
        if inputs.chat and not getattr(inputs.processor, "chat_template", None):
            raise ValueError(f"model_options.chat_template must be false for {pair.name!r}, which has no chat template")
        if "min_pixels" in options or "max_pixels" in options:
            inputs.limit_pixels(options.get("min_pixels"), options.get("max_pixels"))


def options_of(model: SentenceModel) -> dict[str, Any]:
    """Returns the options of a pair from the files of sentence-transformers."""
    options: dict[str, Any] = {"pooling": model.pooling, "generation_prompt": bool(model.generation_prompt)}
    for key, prompt in zip(("query_prompt", "document_prompt"), model.prompts, strict=True):
        options |= {key: prompt} if prompt else {}
    return options | ({} if model.max_length is None else {"max_length": model.max_length})


def describe(pair: Pair, folder: Path) -> None:
    """Writes the files that sentence-transformers needs in addition to the files of the model.

    Writes nothing for samples without a chat template, because sentence-transformers encodes images only with one.
    """
    encoder: Any = pair.first.module
    inputs = inputs_of(pair.first)
    if not inputs.chat:
        return
    prompts = (pair.options.get("query_prompt", ""), pair.options.get("document_prompt", ""))
    files = replace(encoder.files, normalize=True)
    model = SentenceModel(encoder.pooling, prompts=prompts, files=files, generation_prompt=inputs.generation_prompt)
    write(folder, encoder.model.config.text_config.hidden_size, None, model)


_EXAMPLE = """
from megabatch_train import towers
from megabatch_train.data.dataset import Content
from megabatch_train.data.media.images import to_tensor
from megabatch_train.evaluation import encode
from PIL import Image

page = to_tensor(Image.new("RGB", (256, 256), "red"))  # or Image.open("page.png")
pair = towers.load("hf:{folder}", None, query_prompt={query}, document_prompt={document})
queries, documents = encode(pair.first, ["a question"]), encode(pair.second, [Content("a caption", page)])
"""


def write_example(pair: Pair, folder: str) -> str:
    """Returns a program that encodes a text, and a text with an image, by the model in a folder."""
    query, document = (json.dumps(pair.options.get(key, "")) for key in ("query_prompt", "document_prompt"))
    return _EXAMPLE.format(folder=folder, query=query, document=document)
