"""Encoded images as tensors, by Pillow: (3, H, W) uint8, transparency on white, turned as the camera was held."""

import ctypes
import io
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import extras
from megabatch.data.dataset import UnreadableSampleError

_ADDRESS = re.compile(r" <[^>]* at 0x[0-9a-f]+>")  # Pillow names the buffer it was given, which says nothing


def decode(data: bytes, name: str) -> Tensor:  # (3, H, W) uint8
    """The image in `data`; `name` is for the message where there is none."""
    if not data:
        raise UnreadableSampleError(f"{name} is empty")
    pillow = extras.load("PIL.Image", extra="data", purpose="Reading images")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            image.load()
            return to_tensor(upright(image))
    except Exception as error:  # Pillow raises whatever its decoders do, on damaged files almost anything
        reason = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise UnreadableSampleError(f"{name} is not an image that can be read: {reason}") from error


def upright(image: Any) -> Any:
    """The image as it was seen: cameras note how they were held, and leave turning to the reader."""
    return extras.load("PIL.ImageOps", extra="data", purpose="Reading images").exif_transpose(image)


def to_tensor(image: Any) -> Tensor:  # (3, H, W) uint8
    """A Pillow image on white as a tensor."""
    pillow = extras.load("PIL.Image", extra="data", purpose="Reading images")
    if image.mode != "RGB":
        rgba = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def to_pillow(image: Tensor) -> Any:
    """The way back, for transforms and sheets that work with Pillow."""
    pillow = extras.load("PIL.Image", extra="data", purpose="Drawing images")
    _, height, width = image.shape
    pixels = image.permute(1, 2, 0).contiguous()  # (H, W, 3)
    return pillow.frombytes("RGB", (width, height), ctypes.string_at(pixels.data_ptr(), pixels.numel()))


def fitted(image: Tensor, size: int) -> Tensor:  # (3, H, W) uint8 -> (3, size, size) uint8
    """The image scaled until its shorter side fits, and its middle."""
    _, height, width = image.shape
    if (height, width) == (size, size):
        return image
    shorter = min(height, width)
    target = [max(size, round(side * size / shorter)) for side in (height, width)]
    scaled = F.interpolate(image[None].float(), target, mode="bilinear", antialias=True)[0]
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    middle: Tensor = scaled[:, top : top + size, left : left + size]
    return middle.round().clamp(0, 255).to(torch.uint8)
