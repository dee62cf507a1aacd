"""Flickr8k in memory: for `flickr8k.py` decoded and tokenised on the device, for `image_study.py` a dataset to train on.

The data are a pair of files, `NAME.bin` with encoded images one after another and `NAME.json` with `captions`, five for each
image, and `offsets`: image i is `bin[offsets[i]:offsets[i + 1]]`. They are not part of the project.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.data.dataset import IMAGE, TEXT, Dataset
from megabatch.data.images import Encoded, decode

HELD_OUT = 1000  # images, never trained on
TRAIN, TEST = "train", "test"  # all images but those held out, and these
FIT, VALIDATION = "fit", "validation"  # the training images again, of which as many are held out to choose settings by
WORKERS = 16


@dataclass(frozen=True)
class Pictures:
    """Images, and the captions of each."""

    pixels: Tensor  # (images, 3, H, W) uint8
    captions: list[list[str]]


def read(folder: Path, limit: int | None = None) -> Pictures:
    """The pair of files in a folder, or the first `limit` images of it."""
    found = sorted(folder.glob("*.json"))
    if not found:
        raise FileNotFoundError(f"--data must be a folder with a .json and a .bin file, got {folder}")
    about, data = json.loads(found[0].read_text()), found[0].with_suffix(".bin").read_bytes()
    count, offsets = limit or len(about["captions"]), about["offsets"]
    with ThreadPoolExecutor(WORKERS) as pool:
        images = pool.map(lambda i: decode(Encoded(data[offsets[i] : offsets[i + 1]], f"image {i}")), range(count))
        return Pictures(torch.stack(list(images)), about["captions"][:count])


def invented(count: int) -> Pictures:
    """Noise, and words that belong to it, for a run without the data."""
    pixels = torch.randint(0, 256, (count, 3, 128, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Pictures(pixels, [[f"picture {i} in words, way {way}" for way in range(5)] for i in range(count)])


class Captioned(Dataset):
    """A pair for each caption; the captions of one image are not each other's negatives.

    Args:
        pictures: the whole data.
        held_out: number of images, drawn with a fixed seed, that are not trained on.
        part: TRAIN, TEST, FIT or VALIDATION.
    """

    sides = (IMAGE, TEXT)
    credits = ("Photographs: Flickr8k (Hodosh, Young and Hockenmaier, 2013), research use",)

    def __init__(self, pictures: Pictures, held_out: int, part: str) -> None:
        super().__init__()
        order = torch.randperm(len(pictures.captions), generator=torch.Generator().manual_seed(0)).tolist()
        train, test = order[:-held_out], order[-held_out:]
        chosen = {TRAIN: train, TEST: test, FIT: train[:-held_out], VALIDATION: train[-held_out:]}[part]
        self._pixels = pictures.pixels
        self._texts = [text for i in chosen for text in pictures.captions[i]]
        self._images = torch.tensor([i for i in chosen for _ in pictures.captions[i]])

    def __len__(self) -> int:
        """Captions."""
        return len(self._texts)

    def read(self, index: int, side: int) -> Any:
        """The image, or the caption."""
        return self._texts[index] if side else self._pixels[self._images[index]]

    def name(self, index: int) -> str:
        """The caption, for contact sheets."""
        return self._texts[index]

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """The image."""
        return self._images[torch.as_tensor(indices)]

    def items(self) -> Tensor:  # (captions,) int64
        """The image."""
        return self._images


@dataclass(frozen=True)
class Data:
    """All pairs on the device, those to train on first."""

    pixels: Tensor  # (images, 3, H, W) uint8
    tokens: Tensor  # (pairs, context) int64
    owners: Tensor  # (pairs,) int64, the image of each caption
    trained: int  # pairs, from the first on

    @staticmethod
    def of(pictures: Pictures, tokenize: Callable[[list[str]], Tensor], device: str, held_out: int) -> "Data":
        """Images in an order that follows from a seed, of which the last are held out."""
        order = torch.randperm(len(pictures.captions), generator=torch.Generator().manual_seed(0))
        captions = [pictures.captions[i] for i in order.tolist()]
        owners = torch.tensor([i for i, texts in enumerate(captions) for _ in texts])
        tokens = tokenize([text for texts in captions for text in texts])
        trained = int((owners < len(captions) - held_out).sum())
        return Data(pictures.pixels[order].to(device), tokens.to(device), owners.to(device), trained)


class Images(mb.Source):
    """Images by number, brought to the size that a tower takes on the device; not augmented."""

    def __init__(self, data: Data, images: Tensor, size: int, mean: Tensor, deviation: Tensor) -> None:
        self.data, self.images, self.size, self.mean, self.deviation = data, images, size, mean, deviation

    def __len__(self) -> int:
        """Images, repeated ones too."""
        return len(self.images)

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[dict[str, Tensor]]:
        """(n, 3, size, size)."""
        for start, stop in spans:
            x = self.data.pixels[self.images[start:stop]].float() / 255
            if x.shape[-1] != self.size:
                x = F.interpolate(x, (self.size, self.size), mode="bicubic", align_corners=False).clamp_(0, 1)
            yield {"image": (x - self.mean) / self.deviation}
