"""Random shifts, rotations and colours, in two steps: numbers are drawn per sample, images are changed per chunk.

A sample's numbers come from its own generator, so they are the same in every reading. They are applied to a whole chunk in a
few tensor operations, which makes augmentation cheap on a CPU.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 10  # drawn for each sample
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
        return torch.rand(NUMBERS, generator=generator).mul_(2).sub_(1)

    def apply(self, images: Tensor, numbers: Tensor) -> Tensor:  # (n, 3, H, W) uint8, (n, NUMBERS) -> (n, 3, H, W) float32
        """The changed images, in [0, 1]."""
        zoom, stretch, right, down, turn, flip, *colours = numbers.unbind(1)  # (n,) each
        moved = self._moved(images, (zoom, stretch, right, down, turn, flip))
        return self._coloured(moved, colours).clamp_(0, 1)

    def _moved(self, images: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
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

    def _coloured(self, images: Tensor, numbers: list[Tensor]) -> Tensor:
        brightness, contrast, saturation, hue = (number[:, None, None, None] for number in numbers)  # (n, 1, 1, 1)
        grey = sum(weight * images[:, i : i + 1] for i, weight in enumerate(_LUMINANCE))  # (n, 1, H, W)
        colour = (images - grey) * (1 + self.saturation * saturation)
        if self.hue:
            colour = _turned(colour, hue.flatten() * (2 * math.pi * self.hue))
        return (grey - 0.5 + colour) * (1 + self.contrast * contrast) + 0.5 + self.brightness * brightness


def unchanged(images: Tensor) -> Tensor:  # (n, 3, H, W) uint8 -> float32
    """The images without changes, in [0, 1]."""
    return images.float() / 255


def _turned(colour: Tensor, angle: Tensor) -> Tensor:
    """Rotates colours about the grey axis of the colour cube (Rodrigues' formula)."""
    cosine, sine = angle.cos(), angle.sin() / 3**0.5
    same, up, down = (1 + 2 * cosine) / 3, (1 - cosine) / 3 - sine, (1 - cosine) / 3 + sine
    rows = [torch.stack(row, 1) for row in ((same, up, down), (down, same, up), (up, down, same))]
    return (torch.stack(rows, 1) @ colour.flatten(2)).view_as(colour)
