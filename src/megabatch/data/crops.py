"""Images of training: decoded, randomly cropped and normalised, on the GPU where torchvision decodes JPEGs there.

A reader takes an image as it is stored and draws the numbers of its crop from the sample's own generator, so the crop is the
same for any number of readers, ranks and chunks, and in both passes. If the GPU decodes, an ordinary JPEG stays encoded until
its whole chunk is decoded, cropped and normalised there. Otherwise the reader decodes and crops, and the chunk holds pixels.

On a GPU a crop is two matrix products, Y · image · Xᵀ. Each row of Y and X has the weights of the antialiased bicubic filter
of `torch.nn.functional.interpolate` for one output pixel, so a chunk of crops of any size takes two products.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.data import images
from megabatch.data.dataset import IMAGE, UnreadableSampleError, blank
from megabatch.data.images import Encoded

NUMBERS = 5  # drawn for each crop
DECODED_AT_ONCE = 256  # JPEGs in a call of the GPU's decoder
PIXELS_AT_ONCE = 1 << 26  # of padded images in a group of crops: 192 MiB of bytes, 768 MiB of float32
_CUBIC = -0.5  # the parameter of the bicubic filter of antialiased resizing, in PyTorch and in Pillow


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
    shape: tuple[float, float] = (3 / 4, 4 / 3)  # least and most width over height
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

    def one(self, image: Tensor, numbers: Sequence[float]) -> Tensor:  # (3, H, W) uint8 -> (3, *size) uint8
        """The crop of one image on a CPU."""
        top, left, height, width, mirrored = self.box(numbers, *image.shape[1:])
        part = image[None, :, top : top + height, left : left + width]
        crop = F.interpolate(part, self.size, mode="bicubic", antialias=True)[0]
        return (crop.flip(2) if mirrored else crop).contiguous()

    def many(self, pictures: Sequence[Tensor], numbers: Sequence[Sequence[float]]) -> Tensor:  # (n, 3, *size) uint8
        """The crops of images on one device, by two matrix products for each group of images of similar size."""
        device = pictures[0].device
        boxes = [self.box(drawn, *image.shape[1:]) for image, drawn in zip(pictures, numbers, strict=True)]
        crops = torch.empty(len(pictures), 3, *self.size, dtype=torch.uint8, device=device)
        for group in _groups(boxes):
            crops[torch.tensor(group, device=device)] = self._group([pictures[i] for i in group], [boxes[i] for i in group])
        return crops

    def _group(self, pictures: list[Tensor], boxes: list[Box]) -> Tensor:  # (n, 3, *size) uint8
        device, (rows, columns) = pictures[0].device, self.size
        height, width = max(box.height for box in boxes), max(box.width for box in boxes)
        padded = torch.zeros(len(boxes), 3, height, width, dtype=torch.uint8, device=device)
        torch._foreach_copy_(
            [place[:, : box.height, : box.width] for place, box in zip(padded.unbind(0), boxes, strict=True)],
            [
                image[:, box.top : box.top + box.height, box.left : box.left + box.width]
                for image, box in zip(pictures, boxes, strict=True)
            ],
        )
        heights, widths, mirrored = (
            torch.tensor(values, device=device)
            for values in ([box.height for box in boxes], [box.width for box in boxes], [box.mirrored for box in boxes])
        )
        down = filter_weights(heights, rows, height)[:, None]  # (n, 1, rows, height)
        across = filter_weights(widths, columns, width)  # (n, columns, width)
        across = torch.where(mirrored[:, None, None], across.flip(1), across)[:, None].mT  # (n, 1, width, columns)
        return (down @ (padded.float() @ across)).round_().clamp_(0, 255).to(torch.uint8)


def filter_weights(lengths: Tensor, size: int, width: int) -> Tensor:  # (n,) int64 -> (n, size, width) float32
    """Weights of antialiased bicubic resizing of the first `lengths` of `width` pixels to `size` pixels, in one dimension."""
    scale = lengths.double()[:, None, None] / size  # (n, 1, 1)
    stretch = scale.clamp_min(1)
    centre = (torch.arange(size, device=lengths.device).double()[:, None] + 0.5) * scale  # (n, size, 1)
    pixels = torch.arange(width, device=lengths.device).double()  # (width,)
    first, last = ((centre + sign * 2 * stretch + 0.5).floor() for sign in (-1, 1))
    inside = (pixels >= first) & (pixels < last) & (pixels < lengths[:, None, None])
    t = ((pixels + 0.5 - centre) / stretch).abs()
    near = ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1
    far = _CUBIC * (((t - 5) * t + 8) * t - 4)
    weights = torch.where(inside, torch.where(t < 1, near, torch.where(t < 2, far, 0.0)), 0.0)
    return (weights / weights.sum(2, keepdim=True)).float()


def _groups(boxes: Sequence[Box]) -> list[list[int]]:
    """Boxes of similar size together, so that at most half of a group is padding."""
    groups: list[list[int]] = []
    height = width = area = 0
    for i in sorted(range(len(boxes)), key=lambda i: (boxes[i].height, boxes[i].width)):
        box = boxes[i]
        height, width, area = max(height, box.height), max(width, box.width), area + box.height * box.width
        padded = height * width * (len(groups[-1]) + 1) if groups else 0
        if groups and padded <= min(2 * area, PIXELS_AT_ONCE):
            groups[-1].append(i)
        else:
            groups.append([i])
            height, width, area = box.height, box.width, box.height * box.width
    return groups


@dataclass
class Picture:
    """An image between reader and chunk: encoded with the numbers of its crop, or its finished crop."""

    data: bytes
    name: str
    numbers: tuple[float, ...] | None  # None for a finished crop


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

    def read(self, image: Encoded | Tensor, generator: torch.Generator, encoded: bool) -> Picture:
        """An image, read by one reader. Runs beside others.

        Args:
            image: as it is stored.
            generator: of the sample.
            encoded: whether an ordinary JPEG stays encoded, for a GPU that decodes it.
        """
        numbers = self.crop.draw(generator)
        if isinstance(image, Encoded):
            if encoded and images.is_plain_jpeg(image.data):
                return Picture(image.data, image.name, numbers)
            image = images.decode(image)
        return Picture(self.crop.one(image, numbers).numpy().tobytes(), "", None)

    def finish(
        self, pictures: Sequence[Picture], device: torch.device | None, failed: Callable[[Picture, str], None]
    ) -> dict[str, Tensor]:  # (n, 3, height, width) float32
        """The inputs of a chunk, on `device` (None for the CPU).

        Args:
            pictures: of the chunk. An encoded image that is larger than its crop is replaced by the crop, which then serves
                the second pass.
            device: the tower's.
            failed: called with an image that cannot be decoded, and the reason. A blank takes its place.
        """
        device = device or torch.device("cpu")
        crops = torch.empty(len(pictures), 3, *self.crop.size, dtype=torch.uint8, device=device)
        ready = [i for i, picture in enumerate(pictures) if picture.numbers is None]
        if ready:
            pixels = torch.frombuffer(bytearray().join(pictures[i].data for i in ready), dtype=torch.uint8)
            crops[torch.tensor(ready, device=device)] = pixels.view(len(ready), *crops.shape[1:]).to(device)
        waiting = [i for i, picture in enumerate(pictures) if picture.numbers is not None]
        for start in range(0, len(waiting), DECODED_AT_ONCE):
            some = waiting[start : start + DECODED_AT_ONCE]
            crops[torch.tensor(some, device=device)] = self._crops([pictures[i] for i in some], device, failed)
        mean, deviation = (torch.tensor(values, device=device)[:, None, None] for values in (self.mean, self.deviation))
        return {self.key: crops.float().div_(255).sub_(mean).div_(deviation)}

    def _crops(self, pictures: list[Picture], device: torch.device, failed: Callable[[Picture, str], None]) -> Tensor:
        """Crops of encoded images, (n, 3, height, width) uint8."""
        decoded = _decoded(pictures, device, failed)
        crops = self.crop.many(decoded, [picture.numbers or () for picture in pictures])
        large = [i for i, picture in enumerate(pictures) if len(picture.data) > crops[0].numel()]
        for i, crop in zip(large, crops[large].cpu() if large else (), strict=True):
            pictures[i].data, pictures[i].numbers = crop.numpy().tobytes(), None
        return crops


def decodes_on(device: torch.device) -> bool:
    """Whether torchvision decodes JPEGs on this device: it is asked to decode a small one."""
    torchvision = images.torchvision_io()
    if device.type != "cuda" or torchvision is None:
        return False
    try:
        sample = torchvision.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        torchvision.decode_jpeg([sample], torchvision.ImageReadMode.RGB, device=device)
    except Exception:  # built without nvJPEG
        return False
    return True


def _decoded(pictures: list[Picture], device: torch.device, failed: Callable[[Picture, str], None]) -> list[Tensor]:
    """Encoded images on `device`, (3, H, W) uint8 each."""
    torchvision = images.torchvision_io()
    assert torchvision is not None, "an image stays encoded only where torchvision decodes it"
    whole = torch.frombuffer(bytearray().join(picture.data for picture in pictures), dtype=torch.uint8)
    try:
        parts = list(torch.split(whole, [len(picture.data) for picture in pictures]))
        found: list[Tensor] = torchvision.decode_jpeg(parts, torchvision.ImageReadMode.RGB, device=device)
        return found
    except RuntimeError:  # one of them is damaged: each by itself
        return [_decoded_alone(picture, failed).to(device) for picture in pictures]


def _decoded_alone(picture: Picture, failed: Callable[[Picture, str], None]) -> Tensor:  # (3, H, W) uint8
    try:
        return images.decode(Encoded(picture.data, picture.name))
    except UnreadableSampleError as error:
        failed(picture, str(error))
        blank_image: Tensor = blank(IMAGE)
        return blank_image
