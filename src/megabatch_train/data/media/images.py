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
from megabatch_train.data.dataset import Content, UnreadableSampleError

# ----------------------------------------------------------------------------------------------------------------------
# Decoding to (3, H, W) uint8. Transparent pixels become white, and the EXIF orientation is applied.
#
# torchvision, if installed, decodes ordinary JPEGs. It is as exact as Pillow and releases the interpreter lock, so threads
# decode in parallel. Pillow decodes all other files, and every file that torchvision rejects, because Pillow's messages
# describe the damage.

_ADDRESS = re.compile(r" <[^>]* at 0x[0-9a-f]+>")  # the memory address of a buffer in Pillow's messages
_START, _END = b"\xff\xd8\xff", b"\xff\xd9"  # first and last bytes of a JPEG
_XMP = b"http://ns.adobe.com/xap/1.0/"
MOST_PIXELS = 1 << 26  # limit for torchvision; Pillow itself refuses files that claim to be huge
_FRAMES = (0xC0, 0xC1, 0xC2)  # markers that precede an image's size: baseline, extended, progressive


@dataclass(frozen=True)
class EncodedImage:
    """An image as it is stored."""

    data: bytes
    name: str  # name for error messages


def decode(image: EncodedImage) -> Tensor:  # (3, H, W) uint8
    """Decodes an image."""
    if not image.data:
        raise UnreadableSampleError(f"{image.name} is empty")
    if (torchvision := torchvision_io()) is not None and plain_jpeg_size(image.data) is not None:
        try:
            pixels: Tensor = torchvision.decode_jpeg(
                torch.frombuffer(bytearray(image.data), dtype=torch.uint8), torchvision.ImageReadMode.RGB
            )
            return pixels
        except RuntimeError:
            pass  # Pillow can decode it or describes the damage
    pillow = extras.load("PIL.Image", purpose="Reading images")
    try:
        with pillow.open(io.BytesIO(image.data)) as pillow_image:
            pillow_image.load()
            return to_tensor(upright(pillow_image))
    except Exception as error:  # Pillow's decoders raise many kinds of errors for damaged files
        reason = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise UnreadableSampleError(f"{image.name} is not an image that can be read: {reason}") from error


def decode_content(sample: Any) -> Any:
    """Returns a sample of `Dataset.read_stored` with decoded images."""
    if isinstance(sample, Content):
        return sample if sample.image is None else sample._replace(image=decode_content(sample.image))
    return decode(sample) if isinstance(sample, EncodedImage) else sample


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Returns height and width of a JPEG that every decoder decodes to the same upright RGB image; None for other files.

    Such a JPEG is complete, has three channels of 8 bits and at most `MOST_PIXELS`, and has no EXIF rotation.
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
    """Returns the module torchvision.io; None if it is not installed or does not fit this version of PyTorch."""
    if not extras.is_installed("torchvision"):
        return None
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # built for another version of PyTorch
        return None


def _is_rotated(exif: bytes) -> bool:
    """Returns whether an APP1 segment may rotate the image. Any orientation in XMP counts, and Pillow then interprets it."""
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
    """Rotates a Pillow image by its EXIF orientation."""
    return extras.load("PIL.ImageOps", purpose="Reading images").exif_transpose(image)


def to_tensor(image: Any) -> Tensor:  # (3, H, W) uint8
    """Converts a Pillow image to a tensor. Transparent pixels become white."""
    pillow = extras.load("PIL.Image", purpose="Reading images")
    if image.mode != "RGB":
        rgba = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def to_pillow(image: Tensor) -> Any:
    """Converts a tensor to a Pillow image."""
    pillow = extras.load("PIL.Image", purpose="Drawing images")
    _, height, width = image.shape
    pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3)
    return pillow.frombytes("RGB", (width, height), ctypes.string_at(pixels.data_ptr(), pixels.numel()))


def fit_to_square(image: Tensor, size: int) -> Tensor:  # (3, H, W) uint8 -> (3, size, size) uint8
    """Resizes the shorter side to `size`, and crops the center."""
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
# Augmentation by random shifts, rotations and colors.
#
# The random numbers of a sample come from its own generator, so they are equal in every reading. They are applied to a whole
# chunk by a few tensor operations, so augmentation is cheap on a CPU.


AUGMENT_NUMBERS = 10  # drawn for each sample
_LUMINANCE = (0.299, 0.587, 0.114)  # weights of red, green and blue, ITU-R BT.601


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random changes. A range of 0 disables a change. Pixels from outside of an image are white."""

    zoom: float = 0.1  # largest relative change of size
    stretch: float = 0.05  # largest relative change of the aspect ratio
    shift: float = 0.05  # fraction of the side, in each direction
    turn: float = 5.0  # degrees, in both directions
    flip: bool = False  # left to right; off by default, because a flipped "left arrow" has a wrong caption
    brightness: float = 0.1  # largest change, in both directions
    contrast: float = 0.2  # relative change of the distance from gray
    saturation: float = 0.4  # relative change of the distance from the pixel's gray value
    hue: float = 0.05  # fraction of a full circle, in both directions

    def draw(self, generator: torch.Generator) -> Tensor:  # (NUMBERS,)
        """Draws the random numbers of a sample, uniform in [−1, 1]."""
        return torch.rand(AUGMENT_NUMBERS, generator=generator).mul_(2).sub_(1)

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:  # (n, 3, H, W) uint8, (n, NUMBERS) -> (n, 3, H, W) float32
        """Returns the changed images in [0, 1]."""
        zoom, stretch, right, down, turn, flip, *colors = numbers.unbind(1)  # (n,) each
        moved = self._move(images, (zoom, stretch, right, down, turn, flip))
        return self._change_colors(moved, colors).clamp_(0, 1)

    def _move(self, images: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        zoom, stretch, right, down, turn, flip = numbers
        size, shape = (1 + self.zoom) ** zoom, (1 + self.stretch) ** (stretch / 2)
        angle = turn * (self.turn * math.pi / 180)
        mirror = torch.where((flip > 0) & self.flip, -1.0, 1.0)
        cosine, sine = angle.cos(), angle.sin()
        # The matrix maps output pixels to source positions, so every change is inverted.
        across, along = size * shape, size / shape
        matrix = torch.stack(
            [
                torch.stack([mirror * cosine * across, -mirror * sine * across, 2 * self.shift * right], 1),
                torch.stack([sine * along, cosine * along, 2 * self.shift * down], 1),
            ],
            1,
        )  # (n, 2, 3)
        grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
        dark = 1 - images.float() / 255  # so that 0, the value outside of the image, is white
        return 1 - F.grid_sample(dark, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _change_colors(self, images: Tensor, numbers: list[Tensor]) -> Tensor:
        brightness, contrast, saturation, hue = (number[:, None, None, None] for number in numbers)  # (n, 1, 1, 1)
        gray = sum(weight * images[:, i : i + 1] for i, weight in enumerate(_LUMINANCE))  # (n, 1, H, W)
        color = (images - gray) * (1 + self.saturation * saturation)
        if self.hue:
            color = _rotate_colors(color, hue.flatten() * (2 * math.pi * self.hue))
        return (gray - 0.5 + color) * (1 + self.contrast * contrast) + 0.5 + self.brightness * brightness


def leave_unchanged(images: Tensor) -> Tensor:  # (n, 3, H, W) uint8 -> float32
    """Returns the images without changes, in [0, 1]."""
    return images.float() / 255


def _rotate_colors(color: Tensor, angle: Tensor) -> Tensor:
    """Rotates colors about the gray axis of the color cube (Rodrigues' formula)."""
    cosine, sine = angle.cos(), angle.sin() / 3**0.5
    same, up, down = (1 + 2 * cosine) / 3, (1 - cosine) / 3 - sine, (1 - cosine) / 3 + sine
    rows = [torch.stack(row, 1) for row in ((same, up, down), (down, same, up), (up, down, same))]
    return (torch.stack(rows, 1) @ color.flatten(2)).view_as(color)


# ----------------------------------------------------------------------------------------------------------------------
# Training images: decoded, randomly cropped and normalized.
#
# A worker draws the random numbers of a crop from the sample's own generator. Therefore the crop is equal in both passes, for
# any number of workers and ranks and any chunk size. Workers decode and crop (`images.decode`, then PyTorch's antialiased
# bicubic resizing of bytes), and the device of the tower normalizes. During training, the JPEG decoder of a GPU is slower than
# a few CPU cores.


CROP_NUMBERS = 5  # drawn for each crop


class Box(NamedTuple):
    """The part of an image that is cropped."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop, as in CLIP training on photographs."""

    size: tuple[int, int]  # height, width
    area: tuple[float, float] = (0.9, 1.0)  # smallest and largest fraction of the image's area
    shape: tuple[float, float] = (3 / 4, 4 / 3)  # smallest and largest aspect ratio, width over height
    flip: bool = False  # left to right, for half of the images; off by default, because of captions with "left of"

    def draw(self, generator: torch.Generator) -> tuple[float, ...]:
        """Draws the random numbers of one crop, uniform in [0, 1)."""
        return tuple(torch.rand(CROP_NUMBERS, generator=generator).tolist())

    def box(self, numbers: Sequence[float], height: int, width: int) -> Box:
        """Returns the crop of an image of this size."""
        area, shape, down, right, mirror = numbers
        target_area = height * width * (self.area[0] + area * (self.area[1] - self.area[0]))
        ratio = math.exp(math.log(self.shape[0]) + shape * (math.log(self.shape[1]) - math.log(self.shape[0])))
        h = min(height, max(1, round((target_area / ratio) ** 0.5)))
        w = min(width, max(1, round((target_area * ratio) ** 0.5)))
        return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w, self.flip and mirror < 0.5)

    def parts(self, numbers: Tensor, shapes: Tensor) -> Tensor:  # (n, NUMBERS), (n,) aspect ratios -> (n, 5)
        """Returns the boxes of many images in fractions of their sides: top, left, height, width, −1 if mirrored (else 1)."""
        area, shape, down, right, mirror = numbers.unbind(1)
        target_area = self.area[0] + area * (self.area[1] - self.area[0])
        low, high = (math.log(limit) for limit in self.shape)
        ratio = (low + shape * (high - low)).exp()
        height = (target_area * shapes / ratio).sqrt().clamp_max(1.0)
        width = (target_area * ratio / shapes).sqrt().clamp_max(1.0)
        side = torch.where((mirror < 0.5) & self.flip, -1.0, 1.0)
        return torch.stack([down * (1 - height), right * (1 - width), height, width, side], 1)

    def many(self, images: Tensor, parts: Tensor) -> Tensor:  # (n, 3, H, W) float32, (n, 5) -> (n, 3, *size) float32
        """Crops images that are slightly larger than a crop. Samples bilinearly without antialiasing.

        Positions range from -1 to 1. `F.affine_grid` is not used, because autocast would round its matmul by half a pixel.
        """
        top, left, height, width, side = (part[:, None] for part in parts.unbind(1))
        down, right = ((2 * torch.arange(n, device=images.device) + 1) / n - 1 for n in self.size)
        y = height * down + 2 * top + height - 1  # (n, size[0])
        x = width * side * right + 2 * left + width - 1  # (n, size[1])
        whole = len(images), *self.size
        grid = torch.stack([x[:, None].expand(whole), y[:, :, None].expand(whole)], 3)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def one(self, image: Tensor, box: Box) -> Tensor:  # (3, H, W) uint8 -> (3, *size) uint8
        """Crops one image."""
        part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
        crop = F.interpolate(part, self.size, mode="bicubic", antialias=True)[0]
        return (crop.flip(2) if box.mirrored else crop).contiguous()


@dataclass(frozen=True)
class TrainingImages:
    """Converts stored images to the inputs of a tower during training.

    Args:
        crop: the random crop.
        mean: mean of each channel for normalization, in [0, 1].
        deviation: standard deviation of each channel.
        key: name of the tower's argument.
    """

    crop: RandomCrop
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    key: str

    def read(self, image: EncodedImage | Tensor, generator: torch.Generator) -> Tensor:  # (3, *size) uint8
        """Returns a crop of a stored image. Runs in data-loader workers."""
        numbers = self.crop.draw(generator)
        pixels = decode(image) if isinstance(image, EncodedImage) else image
        return self.crop.one(pixels, self.crop.box(numbers, *pixels.shape[1:]))

    def inputs(self, crops: list[Tensor], device: torch.device | None) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """Returns normalized crops on `device` (None for the CPU) as tower inputs. The copy to the device transfers bytes."""
        return self.normalize(join_rows(crops, device or torch.device("cpu")).float())

    def normalize(self, pixels: Tensor) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """Returns tower inputs from crops with values from 0 to 255. The crops are overwritten."""
        factor, offset = _normalization(self.mean, self.deviation, pixels.device)
        return {self.key: torch.addcmul(offset, pixels, factor, out=pixels)}


@cache
def _normalization(mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns factor and offset (3, 1, 1) that normalize pixels. Cached, because each copy waits for earlier kernels."""
    center, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * spread)).float().to(device), (-center / spread).float().to(device)
