"""Decodes images: (3, H, W) uint8, transparency on white, rotated by the EXIF orientation.

Ordinary JPEGs are decoded by torchvision where it is installed: as exact as Pillow, and without the interpreter lock, so that
threads decode side by side. Pillow decodes everything else, and every file that torchvision rejects, since its messages name
the damage.
"""

import ctypes
import importlib
import io
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import extras
from megabatch.data.dataset import UnreadableSampleError

_ADDRESS = re.compile(r" <[^>]* at 0x[0-9a-f]+>")  # the address of a buffer in Pillow's messages
_START, _END = b"\xff\xd8\xff", b"\xff\xd9"  # of a JPEG
_XMP = b"http://ns.adobe.com/xap/1.0/"
MOST_PIXELS = 1 << 26  # of an image that is decoded without Pillow, which refuses files that claim to be huge
_FRAMES = (0xC0, 0xC1, 0xC2)  # markers with an image's size: baseline, extended, progressive


@dataclass(frozen=True)
class Encoded:
    """An image as it is stored."""

    data: bytes
    name: str  # for error messages


def decode(image: Encoded) -> Tensor:  # (3, H, W) uint8
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
    pillow = extras.load("PIL.Image", extra="data", purpose="Reading images")
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
        elif marker == 0xE1 and _rotated(data[place + 4 : place + 2 + length]):
            return None
        elif marker == 0xDA:  # the pixels follow
            return size if size is not None and 0 < size[0] * size[1] <= MOST_PIXELS else None
        place += 2 + length
    return None


@cache
def torchvision_io() -> Any | None:
    """The module torchvision.io; None if it is not installed, or does not fit this version of PyTorch."""
    if not extras.installed("torchvision"):
        return None
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # built for another version of PyTorch
        return None


def _rotated(exif: bytes) -> bool:
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
    return extras.load("PIL.ImageOps", extra="data", purpose="Reading images").exif_transpose(image)


def to_tensor(image: Any) -> Tensor:  # (3, H, W) uint8
    """A Pillow image as a tensor, with transparency on white."""
    pillow = extras.load("PIL.Image", extra="data", purpose="Reading images")
    if image.mode != "RGB":
        rgba = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def to_pillow(image: Tensor) -> Any:
    """A tensor as a Pillow image."""
    pillow = extras.load("PIL.Image", extra="data", purpose="Drawing images")
    _, height, width = image.shape
    pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3)
    return pillow.frombytes("RGB", (width, height), ctypes.string_at(pixels.data_ptr(), pixels.numel()))


def fitted(image: Tensor, size: int) -> Tensor:  # (3, H, W) uint8 -> (3, size, size) uint8
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
