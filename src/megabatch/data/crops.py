"""Images of training: decoded, randomly cropped and normalised.

A reader draws the numbers of a crop from the sample's own generator, so the crop is the same for any number of readers, ranks
and chunks, and in both passes. Readers decode and crop (`images.decode`, then PyTorch's antialiased bicubic resizing of bytes);
the tower's device normalises. A GPU could decode as well, but beside training its decoder is slower than a few cores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.cached.streaming import joined
from megabatch.data import images
from megabatch.data.images import Encoded

NUMBERS = 5  # drawn for each crop


class Box(NamedTuple):
    """The part of an image that becomes the crop."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop, as in the training of CLIP on photographs."""

    size: tuple[int, int]  # height, width
    area: tuple[float, float] = (0.9, 1.0)  # least and most of the image's area
    shape: tuple[float, float] = (3 / 4, 4 / 3)  # least and most aspect ratio, width over height
    flip: bool = False  # left to right, half of the images; off, because "left of" in a caption would become wrong

    def draw(self, generator: torch.Generator) -> tuple[float, ...]:
        """The random numbers of one crop, uniform in [0, 1)."""
        return tuple(torch.rand(NUMBERS, generator=generator).tolist())

    def box(self, numbers: Sequence[float], height: int, width: int) -> Box:
        """The crop of an image of this size."""
        area, shape, down, right, mirror = numbers
        wanted = height * width * (self.area[0] + area * (self.area[1] - self.area[0]))
        ratio = math.exp(math.log(self.shape[0]) + shape * (math.log(self.shape[1]) - math.log(self.shape[0])))
        h = min(height, max(1, round((wanted / ratio) ** 0.5)))
        w = min(width, max(1, round((wanted * ratio) ** 0.5)))
        return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w, self.flip and mirror < 0.5)

    def parts(self, numbers: Tensor, shapes: Tensor) -> Tensor:  # (n, NUMBERS), (n,) aspect ratios -> (n, 5)
        """`box` of many images, in fractions of their sides: top, left, height, width; then -1 if mirrored, else 1."""
        area, shape, down, right, mirror = numbers.unbind(1)
        wanted = self.area[0] + area * (self.area[1] - self.area[0])
        low, high = (math.log(limit) for limit in self.shape)
        ratio = (low + shape * (high - low)).exp()
        height = (wanted * shapes / ratio).sqrt().clamp_max(1.0)
        width = (wanted * ratio / shapes).sqrt().clamp_max(1.0)
        side = torch.where((mirror < 0.5) & self.flip, -1.0, 1.0)
        return torch.stack([down * (1 - height), right * (1 - width), height, width, side], 1)

    def many(self, images: Tensor, parts: Tensor) -> Tensor:  # (n, 3, H, W) float32, (n, 5) -> (n, 3, *size) float32
        """The crops of images that are little larger than a crop: sampled bilinearly, without antialiasing.

        Positions are from -1 to 1. Not by `F.affine_grid`: autocast would round its matrix product, by up to half a pixel.
        """
        top, left, height, width, side = (part[:, None] for part in parts.unbind(1))
        down, right = ((2 * torch.arange(n, device=images.device) + 1) / n - 1 for n in self.size)
        y = height * down + 2 * top + height - 1  # (n, size[0])
        x = width * side * right + 2 * left + width - 1  # (n, size[1])
        whole = len(images), *self.size
        grid = torch.stack([x[:, None].expand(whole), y[:, :, None].expand(whole)], 3)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def one(self, image: Tensor, box: Box) -> Tensor:  # (3, H, W) uint8 -> (3, *size) uint8
        """The crop of an image."""
        part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
        crop = F.interpolate(part, self.size, mode="bicubic", antialias=True)[0]
        return (crop.flip(2) if box.mirrored else crop).contiguous()


@dataclass(frozen=True)
class TrainingImages:
    """From stored images to the inputs of a tower, in training.

    Args:
        crop: of each image.
        mean: of the channels of normalised images, in [0, 1].
        deviation: of the channels.
        key: the name of the tower's argument.
    """

    crop: RandomCrop
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    key: str

    def read(self, image: Encoded | Tensor, generator: torch.Generator) -> Tensor:  # (3, *size) uint8
        """The crop of an image as it is stored. Runs in readers, beside others."""
        numbers = self.crop.draw(generator)
        pixels = images.decode(image) if isinstance(image, Encoded) else image
        return self.crop.one(pixels, self.crop.box(numbers, *pixels.shape[1:]))

    def inputs(self, crops: list[Tensor], device: torch.device | None) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """The inputs of the tower, on `device` (None for the CPU): normalised crops. Bytes are copied, not floats."""
        return self.normalised(joined(crops, device or torch.device("cpu")).float())

    def normalised(self, pixels: Tensor) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """The inputs of the tower, from crops with values of bytes, which are overwritten."""
        factor, offset = _normalisation(self.mean, self.deviation, pixels.device)
        return {self.key: torch.addcmul(offset, pixels, factor, out=pixels)}


@cache
def _normalisation(mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset (3, 1, 1) of the pixels. On the device once, because a copy waits for all kernels before it."""
    centre, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * spread)).float().to(device), (-centre / spread).float().to(device)
