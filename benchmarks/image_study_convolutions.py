"""The convolutional image tower of `image_study.py`, as a model of timm, which open_clip finds by its name.

docs/log.md, "Image study", has the transformers that were tried first. GroupNorm instead of BatchNorm: an embedding
depends on its own image alone, so batch sizes differ in nothing but the batch.
"""

from typing import Any

import timm
from timm.models import register_model
from torch import Tensor, nn

PATCH, GROUP = 4, 16  # pixels of a side of the first layer's patches; channels of a group


class _Block(nn.Module):
    """x + two convolutions of 3 × 3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(channels // GROUP, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:  # (n, C, H, W)
        added: Tensor = x + self.layers(x)
        return added


class Convolutions(nn.Module):
    """Patches, stages of residual blocks, each at half the resolution of the stage before, and the mean over all places."""

    def __init__(self, blocks: int, channels: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels[0], PATCH, PATCH)]
        for number, width in enumerate(channels):
            if number > 0:
                layers.append(nn.Conv2d(channels[number - 1], width, 2, 2))
            layers += [_Block(width) for _ in range(blocks)]
        self.layers = nn.Sequential(*layers, nn.GroupNorm(channels[-1] // GROUP, channels[-1]), nn.ReLU(inplace=True))
        self.num_features, self.default_cfg = channels[-1], {"pool_size": None}  # open_clip asks for them

    def reset_classifier(self, num_classes: int, **options: Any) -> None:
        """There is none: open_clip's projection follows."""

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, H, W) → (n, C)
        """One vector for each image."""
        found: Tensor = self.layers(x).mean((2, 3))
        return found


def register_convolutions(blocks: int) -> str:
    """Makes timm know the tower with so many blocks in a stage, and returns its name."""
    name = f"flickr_convolutions_{blocks}"
    if not timm.is_model(name):

        def make(pretrained: bool = False, **options: Any) -> Convolutions:
            return Convolutions(blocks)

        make.__name__ = name
        make.__module__ = __name__
        register_model(make)
    return name
