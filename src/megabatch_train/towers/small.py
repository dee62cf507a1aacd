"""The towers of the model "small", which trains in minutes on a CPU: a convolutional network, and a bag of hashed n-grams.

They use no batch statistics, so the chunk size changes embeddings only through the random numbers of dropout. The section
"Emoji" of docs/log.md has the measurements behind the sizes.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch_train import settings
from megabatch_train.data.media.images import Augmentation, fit_to_square, leave_unchanged
from megabatch_train.towers.tower import Tower

_WORD = re.compile(r"\w+|[^\w\s]")
_BEGIN, _END = "<", ">"  # mark the ends of a word, so that "cat" and the middle of "education" differ

INITIAL_SCALE = 10.0  # training is faster than with CLIP's 1 / 0.07, and much faster than with 30


@dataclass(frozen=True)
class SmallConfig:
    """TokenSizes of both towers."""

    width: int = 256  # embedding dimension
    image_size: int = 32  # side length in pixels
    patch: int = 4  # side length of a patch of the first layer in pixels
    channels: tuple[int, ...] = (64, 128, 256)  # channels of each stage; each stage after the first halves the image
    kernel: int = 3  # side length of a block's depthwise convolution in pixels; must be odd
    expansion: int = 2  # hidden channels of a block, relative to its channels
    blocks: int = 2  # number of blocks in each stage
    buckets: int = 1 << 15  # size of the hash table of n-grams
    grams: tuple[int, ...] = (3, 4, 5)  # lengths of n-grams in characters; whole words are always included
    dropout: float = 0.1  # fraction of n-grams that are dropped in training
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        """Checks the sizes. An even kernel would change the image size, and the residual connection would fail."""
        for name in ("width", "patch", "expansion", "buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"model_options.{name} must be at least 1, got {getattr(self, name)}")
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"model_options.channels must be numbers of at least 1, got {list(self.channels)}")
        least = self.patch << (len(self.channels) - 1)
        if self.image_size < least:
            raise ValueError(
                f"model_options.image_size must be at least {least} for this patch and these channels, got {self.image_size}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model_options.dropout must be at least 0 and less than 1, got {self.dropout}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"model_options.kernel must be an odd number of pixels, got {self.kernel}")


def build_config(options: Mapping[str, Any]) -> SmallConfig:
    """Builds the config from options. In options from a file, tuples are lists and the augmentation is a table."""
    plain = {key: asdict(value) if isinstance(value, Augmentation) else value for key, value in options.items()}
    return settings.build(SmallConfig, plain, "model_options")


def image_tower(config: SmallConfig) -> Tower:
    """Builds the tower for drawings and small photographs."""
    images = _SmallImages(config.image_size, config.augmentation)
    return Tower(SmallImageTower(config), "image", images.prepare, images.collate)


def text_tower(config: SmallConfig) -> Tower:
    """Builds the tower for names and short sentences."""
    texts = _SmallTexts(config.buckets, config.grams)
    return Tower(SmallTextTower(config), "text", texts.prepare, texts.collate)


class SmallImageTower(nn.Module):
    """Patches of four pixels, then stages of residual blocks, then the mean over positions."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Conv2d(3, config.channels[0], config.patch + 2, stride=config.patch, padding=1)]
        before = config.channels[0]
        for stage, channels in enumerate(config.channels):
            if stage:
                layers += [_norm(before), _Conv2d(before, channels, 2, stride=2)]
            layers += [_Block(channels, config.kernel, config.expansion * channels) for _ in range(config.blocks)]
            before = channels
        self.features = nn.Sequential(*layers, _norm(before))
        self.head = nn.Linear(before, config.width)

    def forward(self, images: Tensor) -> Tensor:  # (n, 3, S, S) -> (n, width)
        """Returns embeddings of unit length."""
        features = self.features(images.contiguous(memory_format=torch.channels_last))
        return F.normalize(self.head(F.relu(features).mean((2, 3))), dim=-1)


class _Block(nn.Module):
    """A residual block: a depthwise convolution, then a hidden layer for each position."""

    def __init__(self, channels: int, kernel: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels),
            _norm(channels),
            _Conv2d(channels, hidden, 1),
            nn.ReLU(),
            _Conv2d(hidden, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class _Conv2d(nn.Conv2d):
    """A convolution whose weight gets a gradient with the strides of the weight.

    For channels-last images, the gradient of a weight is in channels-last order. If the two orders differ only in dimensions of
    length 1, as in depthwise and 1×1 kernels, PyTorch treats them as equal, but DDP does not, and prints a warning. The flat
    view of the weight has only one order, so its gradient has the expected strides.
    """

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(x, self.weight.flatten().view_as(self.weight), self.bias)
        return out


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(1, channels)


class SmallTextTower(nn.Module):
    """The mean of the embeddings of a text's n-grams, then one hidden layer."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.grams = nn.EmbeddingBag(config.buckets, config.width, mode="sum")
        nn.init.normal_(self.grams.weight, std=config.width**-0.5)
        self.dropout = config.dropout
        self.hidden = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 2 * config.width),
            nn.GELU(),
            nn.Linear(2 * config.width, config.width),
        )

    def forward(self, grams: Tensor, mask: Tensor) -> Tensor:  # (n, longest) int64, (n, longest) float -> (n, width)
        """Returns embeddings of unit length, even for a text without n-grams."""
        if self.training and self.dropout:
            mask = mask * (torch.rand_like(mask) >= self.dropout)
        weights = mask / mask.sum(1, keepdim=True).clamp_min(1).sqrt()
        bag = self.grams(grams, per_sample_weights=weights.to(self.grams.weight.dtype))
        return F.normalize(bag + self.hidden(bag), dim=-1)


@dataclass(frozen=True)
class _SmallImages:
    """Resizes images, and augments a chunk at a time."""

    size: int
    augmentation: Augmentation

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        image = fit_to_square(image, self.size)
        return (image,) if generator is None else (image, self.augmentation.draw(generator))

    def collate(self, samples: list[tuple[Tensor, ...]]) -> Tensor:  # (n, 3, S, S)
        images, *numbers = (torch.stack(column) for column in zip(*samples, strict=True))
        changed = self.augmentation.apply(images, *numbers) if numbers else leave_unchanged(images)
        return (changed - 0.5) * 3


@dataclass(frozen=True)
class _SmallTexts:
    """Converts texts to indices of n-grams, padded to the longest text of a chunk."""

    buckets: int
    grams: tuple[int, ...]

    def prepare(self, text: str, generator: torch.Generator | None) -> Tensor:  # (k,)
        return n_grams(text, self.buckets, self.grams)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        grams, mask = pad(samples)
        return {"grams": grams, "mask": mask.float()}


def pad(samples: list[Tensor]) -> tuple[Tensor, Tensor]:  # n of (k,) int64 -> (n, longest) int64 each
    """Pads samples to the longest, or to length 1 if all are empty. Returns padded samples, and a mask with 1 for entries."""
    lengths = torch.tensor([len(sample) for sample in samples])
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    if not padded.shape[1]:
        padded = padded.new_zeros(len(samples), 1)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


@lru_cache(maxsize=1 << 16)
def n_grams(text: str, buckets: int, lengths: tuple[int, ...]) -> Tensor:  # (k,) int64
    """Returns hash buckets of a text's words and their character n-grams. Unlike with `hash`, all processes get equal ones."""
    grams: list[str] = []
    for word in _WORD.findall(text.lower()):
        marked = _BEGIN + word + _END
        grams.append(marked)
        for length in lengths:
            if length < len(marked):
                grams += [marked[i : i + length] for i in range(len(marked) - length + 1)]
    return torch.tensor([_bucket(gram, buckets) for gram in grams], dtype=torch.int64)


def _bucket(gram: str, buckets: int) -> int:
    return int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "little") % buckets
