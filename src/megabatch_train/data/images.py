"""Images: decoding, random crops, and augmentation."""

import ctypes
import importlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import extras
from megabatch.cached.streaming import join_rows
from megabatch_train.data.dataset import UnreadableSampleError

# ----------------------------------------------------------------------------------------------------------------------
# Decodes images: (3, H, W) uint8, transparency on white, rotated by the EXIF orientation.
#
# Ordinary JPEGs are decoded by torchvision where it is installed: as exact as Pillow, and without the interpreter lock, so
# that threads decode side by side. Pillow decodes everything else, and every file that torchvision rejects, since its
# messages name the damage.

_ADDRESS = re.compile(r" <[^>]* at 0x[0-9a-f]+>")  # the address of a buffer in Pillow's messages
_START, _END = b"\xff\xd8\xff", b"\xff\xd9"  # of a JPEG
_XMP = b"http://ns.adobe.com/xap/1.0/"
MOST_PIXELS = 1 << 26  # of an image that is decoded without Pillow, which refuses files that claim to be huge
_FRAMES = (0xC0, 0xC1, 0xC2)  # markers with an image's size: baseline, extended, progressive


@dataclass(frozen=True)
class EncodedImage:
    """An image as it is stored."""

    data: bytes
    name: str  # for error messages


def decode(image: EncodedImage) -> Tensor:  # (3, H, W) uint8
    """Decodes an image."""
    if not image.data:
        raise UnreadableSampleError(f"{image.name} is empty")
    if (torchvision := torchvision_io()) is not None and plain_jpeg_size(image.data) is not None:
        try:
            found: Tensor = torchvision.decode_jpeg(
                torch.frombuffer(bytearray(image.data), dtype=torch.uint8), torchvision.ImageReadMode.RGB
            )
            return found
        except RuntimeError:
            pass  # Pillow may read it, or says what is wrong
    pillow = extras.load("PIL.Image", purpose="Reading images")
    try:
        with pillow.open(io.BytesIO(image.data)) as opened:
            opened.load()
            return to_tensor(upright(opened))
    except Exception as error:  # Pillow's decoders raise almost anything for damaged files
        reason = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise UnreadableSampleError(f"{image.name} is not an image that can be read: {reason}") from error


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG of which any decoder gives the upright RGB image; None for other files.

    Such a JPEG is complete, has three channels of 8 bits and at most `MOST_PIXELS`, and is not rotated by EXIF.
    """
    if data[:3] != _START or _END not in data[-64:]:
        return None
    place, size = 2, None
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker in _FRAMES and data[place + 4] == 8 and data[place + 9] == 3:
            size = int.from_bytes(data[place + 5 : place + 7], "big"), int.from_bytes(data[place + 7 : place + 9], "big")
        elif marker == 0xE1 and _is_rotated(data[place + 4 : place + 2 + length]):
            return None
        elif marker == 0xDA:  # the pixels follow
            return size if size is not None and 0 < size[0] * size[1] <= MOST_PIXELS else None
        place += 2 + length
    return None


@cache
def torchvision_io() -> Any | None:
    """The module torchvision.io; None if it is not installed, or does not fit this version of PyTorch."""
    if not extras.is_installed("torchvision"):
        return None
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # built for another version of PyTorch
        return None


def _is_rotated(exif: bytes) -> bool:
    """Whether an APP1 segment has an orientation other than upright; XMP may have one too, and then Pillow decides."""
    if exif.startswith(_XMP):
        return b"Orientation" in exif
    if exif[:6] != b"Exif\0\0" or len(exif) < 14:
        return False
    order: Literal["little", "big"] = "little" if exif[6:8] == b"II" else "big"
    first = 6 + int.from_bytes(exif[10:14], order)
    entries = int.from_bytes(exif[first : first + 2], order)
    for entry in range(first + 2, min(first + 2 + 12 * entries, len(exif) - 11), 12):
        if int.from_bytes(exif[entry : entry + 2], order) == 0x0112:
            return int.from_bytes(exif[entry + 8 : entry + 10], order) != 1
    return False


def upright(image: Any) -> Any:
    """Rotates an image by its EXIF orientation."""
    return extras.load("PIL.ImageOps", purpose="Reading images").exif_transpose(image)


def to_tensor(image: Any) -> Tensor:  # (3, H, W) uint8
    """A Pillow image as a tensor, with transparency on white."""
    pillow = extras.load("PIL.Image", purpose="Reading images")
    if image.mode != "RGB":
        rgba = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def to_pillow(image: Tensor) -> Any:
    """A tensor as a Pillow image."""
    pillow = extras.load("PIL.Image", purpose="Drawing images")
    _, height, width = image.shape
    pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3)
    return pillow.frombytes("RGB", (width, height), ctypes.string_at(pixels.data_ptr(), pixels.numel()))


def fit_to_square(image: Tensor, size: int) -> Tensor:  # (3, H, W) uint8 -> (3, size, size) uint8
    """Resizes the shorter side to `size`, and crops the centre."""
    _, height, width = image.shape
    if (height, width) == (size, size):
        return image
    shorter = min(height, width)
    target = [max(size, round(side * size / shorter)) for side in (height, width)]
    scaled = F.interpolate(image[None].float(), target, mode="bilinear", antialias=True)[0]
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    middle: Tensor = scaled[:, top : top + size, left : left + size]
    return middle.round().clamp(0, 255).to(torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Random shifts, rotations and colours, in two steps: numbers are drawn per sample, images are changed per chunk.
#
# A sample's numbers come from its own generator, so they are the same in every reading. They are applied to a whole chunk
# in a few tensor operations, which makes augmentation cheap on a CPU.


AUGMENT_NUMBERS = 10  # drawn for each sample
_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random changes; 0 switches one off. Pixels from outside of an image are white."""

    zoom: float = 0.1  # largest relative change of size
    stretch: float = 0.05  # largest relative change of the aspect ratio
    shift: float = 0.05  # of the side, in each direction
    turn: float = 5.0  # degrees, either way
    flip: bool = False  # left to right; off, because a flipped "left arrow" has a wrong caption
    brightness: float = 0.1  # largest change, up or down
    contrast: float = 0.2  # relative change of the distance from grey
    saturation: float = 0.4  # relative change of the distance from the pixel's grey
    hue: float = 0.05  # of a full circle, either way

    def draw(self, generator: torch.Generator) -> Tensor:  # (NUMBERS,)
        """The random numbers of a sample, uniform in [−1, 1]."""
        return torch.rand(AUGMENT_NUMBERS, generator=generator).mul_(2).sub_(1)

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:  # (n, 3, H, W) uint8, (n, NUMBERS) -> (n, 3, H, W) float32
        """The changed images, in [0, 1]."""
        zoom, stretch, right, down, turn, flip, *colours = numbers.unbind(1)  # (n,) each
        moved = self._move(images, (zoom, stretch, right, down, turn, flip))
        return self._change_colors(moved, colours).clamp_(0, 1)

    def _move(self, images: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        zoom, stretch, right, down, turn, flip = numbers
        size, shape = (1 + self.zoom) ** zoom, (1 + self.stretch) ** (stretch / 2)
        angle = turn * (self.turn * math.pi / 180)
        mirror = torch.where((flip > 0) & self.flip, -1.0, 1.0)
        cosine, sine = angle.cos(), angle.sin()
        # The source position of each output pixel, so every change is inverted.
        across, along = size * shape, size / shape
        matrix = torch.stack(
            [
                torch.stack([mirror * cosine * across, -mirror * sine * across, 2 * self.shift * right], 1),
                torch.stack([sine * along, cosine * along, 2 * self.shift * down], 1),
            ],
            1,
        )  # (n, 2, 3)
        grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
        dark = 1 - images.float() / 255  # outside is 0, which is white
        return 1 - F.grid_sample(dark, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _change_colors(self, images: Tensor, numbers: list[Tensor]) -> Tensor:
        brightness, contrast, saturation, hue = (number[:, None, None, None] for number in numbers)  # (n, 1, 1, 1)
        grey = sum(weight * images[:, i : i + 1] for i, weight in enumerate(_LUMINANCE))  # (n, 1, H, W)
        colour = (images - grey) * (1 + self.saturation * saturation)
        if self.hue:
            colour = _rotate_colors(colour, hue.flatten() * (2 * math.pi * self.hue))
        return (grey - 0.5 + colour) * (1 + self.contrast * contrast) + 0.5 + self.brightness * brightness


def leave_unchanged(images: Tensor) -> Tensor:  # (n, 3, H, W) uint8 -> float32
    """The images without changes, in [0, 1]."""
    return images.float() / 255


def _rotate_colors(colour: Tensor, angle: Tensor) -> Tensor:
    """Rotates colours about the grey axis of the colour cube (Rodrigues' formula)."""
    cosine, sine = angle.cos(), angle.sin() / 3**0.5
    same, up, down = (1 + 2 * cosine) / 3, (1 - cosine) / 3 - sine, (1 - cosine) / 3 + sine
    rows = [torch.stack(row, 1) for row in ((same, up, down), (down, same, up), (up, down, same))]
    return (torch.stack(rows, 1) @ colour.flatten(2)).view_as(colour)


# ----------------------------------------------------------------------------------------------------------------------
# Images of training: decoded, randomly cropped and normalised.
#
# A reader draws the numbers of a crop from the sample's own generator, so the crop is the same for any number of readers,
# ranks and chunks, and in both passes. Readers decode and crop (`images.decode`, then PyTorch's antialiased bicubic
# resizing of bytes); the tower's device normalises. A GPU could decode as well, but beside training its decoder is slower
# than a few cores.


CROP_NUMBERS = 5  # drawn for each crop


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
        return tuple(torch.rand(CROP_NUMBERS, generator=generator).tolist())

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

    def read(self, image: EncodedImage | Tensor, generator: torch.Generator) -> Tensor:  # (3, *size) uint8
        """The crop of an image as it is stored. Runs in readers, beside others."""
        numbers = self.crop.draw(generator)
        pixels = decode(image) if isinstance(image, EncodedImage) else image
        return self.crop.one(pixels, self.crop.box(numbers, *pixels.shape[1:]))

    def inputs(self, crops: list[Tensor], device: torch.device | None) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """The inputs of the tower, on `device` (None for the CPU): normalised crops. Bytes are copied, not floats."""
        return self.normalize(join_rows(crops, device or torch.device("cpu")).float())

    def normalize(self, pixels: Tensor) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """The inputs of the tower, from crops with values of bytes, which are overwritten."""
        factor, offset = _normalisation(self.mean, self.deviation, pixels.device)
        return {self.key: torch.addcmul(offset, pixels, factor, out=pixels)}


@cache
def _normalisation(mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset (3, 1, 1) of the pixels. On the device once, because a copy waits for all kernels before it."""
    centre, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * spread)).float().to(device), (-centre / spread).float().to(device)
