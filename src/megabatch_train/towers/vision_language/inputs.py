"""The inputs of vision-language models: tokens of texts, and patches of images of different sizes."""

import copy
import io
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras
from megabatch_train.data.dataset import Content, UnreadableSampleError
from megabatch_train.data.media.images import EncodedImage, to_pillow
from megabatch_train.towers.huggingface_inputs import longest

# Data-loader workers prepare one sample at a time: tokens, and the patches of the resized image as bytes, which take an
# eighth of the memory of normalized patches with both frames. The device normalizes the patches of a chunk.


@dataclass(frozen=True)
class Normalization:
    """The values of a patch: (channels, frames, height, width). Both frames of an image are equal, so only one is stored.

    Args:
        mean: mean of each channel, from 0 to 255.
        deviation: standard deviation of each channel, from 0 to 255.
        frames: number of frames in a patch.
        size: side length of a patch in pixels.
        merge: number of patches, in each direction, that become one visual token.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    frames: int
    size: int
    merge: int

    @property
    def values(self) -> int:
        """The number of stored values of a patch."""
        return len(self.mean) * self.size**2

    @staticmethod
    def of(processor: Any) -> "Normalization":
        """Returns the normalization of an image processor."""
        unit = 1 / processor.rescale_factor
        mean, deviation = (tuple(unit * value for value in values) for values in (processor.image_mean, processor.image_std))
        return Normalization(mean, deviation, processor.temporal_patch_size, processor.patch_size, processor.merge_size)

    def store(self, values: Tensor) -> Tensor:  # (P, channels · frames · size²) -> (P, values) uint8
        """Returns one frame of each patch as bytes."""
        frames = values.view(len(values), len(self.mean), self.frames, -1)
        return frames[:, :, 0].flatten(1).round().clamp(0, 255).to(torch.uint8)

    def apply(self, patches: Tensor) -> Tensor:  # (P, values) -> (P, channels · frames · size²) float32
        """Returns normalized patches with all frames."""
        mean, deviation = _on_device(self.mean, self.deviation, patches.device)
        channels = (patches.view(len(patches), len(self.mean), -1) - mean) / deviation
        return channels[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)


@cache
def _on_device(mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = (torch.tensor(values, dtype=torch.float32, device=device)[:, None] for values in (mean, deviation))
    return first, second


class VisionLanguageInputs:
    """The preprocessing of one side.

    Args:
        processor: the processor of the model, with a tokenizer and an image processor.
        model: the model.

    Attributes:
        prompt: text before each sample: the system message of the chat template, or else the beginning of the text.
        longest: maximum number of tokens of the text of a sample, without prompt, template and image. Longer texts are cut.
        chat: whether samples are messages of the chat template.
        generation_prompt: whether the beginning of an answer follows the message.
    """

    def __init__(self, processor: Any, model: Any) -> None:
        self.processor, self.prompt = processor, ""
        config = model.config
        self.longest = longest(config.text_config)
        self.chat = bool(getattr(processor, "chat_template", None))
        self.generation_prompt = True
        tokenizer = self._tokenizer = processor.tokenizer
        self._image_id = int(config.image_token_id)
        self._image_token = str(tokenizer.convert_ids_to_tokens(self._image_id))
        around = [getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end")]
        begin, end = ("" if number is None else str(tokenizer.convert_ids_to_tokens(number)) for number in around)
        self._image_text = f"{begin}{self._image_token}{end}"
        video = getattr(config, "video_token_id", None)
        self._reserved = [self._image_token] + ([] if video is None else [str(tokenizer.convert_ids_to_tokens(video))])
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._padding = 0 if padding is None else int(padding)
        self.pixels = Normalization.of(processor.image_processor)

    def prepare(self, sample: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens (T,), patches (P, values) and the grid (3,) of a text, an image (3, H, W) or a `Content`."""
        content = _as_content(sample)
        patches, grid = torch.empty(0, self.pixels.values, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
        if content.image is not None:
            patches, grid = self._divide(content.image)
        visual = int(grid.prod()) // self.pixels.merge**2
        text = self._render(content)
        if visual:
            text = text.replace(self._image_token, self._image_token * visual, 1)
        ids = torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int64)
        if not len(ids):
            ids = torch.tensor([self._padding])
        assert int((ids == self._image_id).sum()) == visual, "`check` has compared both"
        return ids, patches, grid

    def collate(self, samples: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Pads tokens and patches of a chunk."""
        ids, patches, grids = zip(*samples, strict=True)
        tokens = nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=self._padding)
        lengths = torch.tensor([len(one) for one in ids])
        most = max(len(one) for one in patches)
        padded = torch.zeros(len(samples), most, self.pixels.values, dtype=torch.uint8)
        for row, one in zip(padded, patches, strict=True):
            row[: len(one)] = one
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        return {"input_ids": tokens, "attention_mask": mask, "patches": padded, "grids": torch.stack(list(grids))}

    def measure(self, sample: Any) -> int:
        """Returns the number of tokens of a text, a stored image or a `Content`. Decodes no pixels."""
        content = _as_content(sample)
        tokens = len(self._tokenizer(self._render(content))["input_ids"])
        if content.image is None:
            return max(tokens, 1)
        height, width = _size_of(content.image)
        images = self.processor.image_processor
        try:
            patches = images.get_number_of_image_patches(height, width, {})
        except (AttributeError, ValueError):  # another kind of processor, or an image that cannot be resized
            patches = height * width // self.pixels.size**2
        return max(tokens - 1 + int(patches) // self.pixels.merge**2, 1)

    def _divide(self, image: Tensor) -> tuple[Tensor, Tensor]:  # (3, H, W) uint8 -> (P, values), (3,)
        """Returns the patches of the resized image as bytes, and their grid."""
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        try:
            outputs = self.processor.image_processor(images=[to_pillow(image)], **options)
        except ValueError as error:
            _, height, width = image.shape
            raise UnreadableSampleError(f"an image of {width} × {height} pixels cannot be encoded: {error}") from error
        return self.pixels.store(outputs["pixel_values"]), outputs["image_grid_thw"][0].long()

    def _render(self, content: Content) -> str:
        """Returns the text of a sample with one token for the image."""
        text = self._cut(content.text)
        if not self.chat:
            return f"{self.prompt}{self._image_text if content.image is not None else ''}{text}"
        parts: list[dict[str, str]] = [{"type": "image"}] if content.image is not None else []
        if text or not parts:
            parts.append({"type": "text", "text": text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if self.prompt:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": self.prompt}]})
        rendered = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=self.generation_prompt)
        return str(rendered)

    def _cut(self, text: str) -> str:
        """Returns at most the first `longest` tokens of a text. Tokens that stand for images become spaces."""
        for token in self._reserved:
            text = text.replace(token, " ")
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) <= self.longest:
            return text
        if not getattr(self._tokenizer, "is_fast", False):
            return str(self._tokenizer.decode(tokens[: self.longest]))
        places = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text[: places[self.longest][0]]

    def limit_pixels(self, least: int | None, most: int | None) -> None:
        """Changes the smallest and the largest number of pixels of an image. Images are resized to this range."""
        processor = copy.copy(self.processor)
        images = processor.image_processor
        size = dict(images.size)
        before = size.get("shortest_edge", 0), size.get("longest_edge", 0)
        least, most = before[0] if least is None else least, before[1] if most is None else most
        smallest = (self.pixels.size * self.pixels.merge) ** 2
        if not (isinstance(least, int) and isinstance(most, int) and smallest <= most and 0 < least <= most):
            raise ValueError(
                f"model_options.min_pixels and max_pixels must be integers with 1 <= min_pixels <= max_pixels, and max_pixels "
                f"at least {smallest}, which is one visual token, got {least!r} and {most!r}"
            )
        fields = {name: value for name, value in images.to_dict().items() if name not in ("min_pixels", "max_pixels")}
        processor.image_processor = type(images).from_dict(fields | {"size": {"shortest_edge": least, "longest_edge": most}})
        self.processor = processor

    def check(self, name: str) -> None:
        """Raises an error if these inputs differ from the inputs of the model's processor."""
        image = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        ids, patches, grid = self.prepare(Content("a", image), None)
        text = self._render(Content("a", image))
        wanted = self.processor(text=[text], images=[to_pillow(image)], return_tensors="pt")
        pixels = self.pixels.apply(patches)
        if (
            not torch.equal(ids, wanted["input_ids"][0])
            or not torch.equal(grid, wanted["image_grid_thw"][0])
            or pixels.shape != wanted["pixel_values"].shape
            or not bool((pixels - wanted["pixel_values"]).abs().max() <= 1e-5)
        ):
            raise ValueError(
                f"{name} must have a processor that resizes an image, divides it into patches and repeats one token for it, as "
                f"in Qwen2-VL, got a {type(self.processor).__name__} with other inputs"
            )

    def write(self, folder: Path) -> None:
        """Writes the files of the processor."""
        self.processor.save_pretrained(folder)


def _as_content(sample: Any) -> Content:
    if isinstance(sample, Content):
        return sample
    return Content(sample) if isinstance(sample, str) else Content(image=sample)


def _size_of(image: Any) -> tuple[int, int]:
    """Returns height and width of an image. Decodes no pixels. An image that cannot be read counts as one pixel."""
    if not isinstance(image, EncodedImage):
        return image.shape[1], image.shape[2]
    pillow = extras.load("PIL.Image", purpose="Reading images")
    try:
        with warnings.catch_warnings(), pillow.open(io.BytesIO(image.data)) as opened:
            warnings.simplefilter("ignore")  # the decoder reports them
            width, height = opened.size
            rotated = opened.getexif().get(_ORIENTATION, 1) in _ROTATED
    except Exception:  # a damaged image raises many kinds of errors; `images.decode` describes the damage
        return 1, 1
    return (width, height) if rotated else (height, width)


_ORIENTATION, _ROTATED = 0x0112, (5, 6, 7, 8)  # tag of EXIF, and its values for images that are turned by 90 degrees
