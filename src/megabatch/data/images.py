"""Decodes images with Pillow: (3, H, W) uint8, transparency on white, rotated by the EXIF orientation."""

import ctypes
import io
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import extras
from megabatch.data.dataset import UnreadableSampleError

_ADDRESS = re.compile(r" <[^>]* at 0x[0-9a-f]+>")  # the address of a buffer in Pillow's messages


def decode(data: bytes, name: str) -> Tensor:  # (3, H, W) uint8
    """Decodes an image; `name` is for the error message."""
    if not data:
        raise UnreadableSampleError(f"{name} is empty")
    pillow = extras.load("PIL.Image", extra="data", purpose="Reading images")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            image.load()
            return to_tensor(upright(image))
    except Exception as error:  # Pillow's decoders raise almost anything for damaged files
        reason = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise UnreadableSampleError(f"{name} is not an image that can be read: {reason}") from error


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
