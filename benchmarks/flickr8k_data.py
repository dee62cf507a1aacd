"""Flickr8k in memory, as a dataset to train on.

The data are a pair of files, `NAME.bin` with encoded images one after another and `NAME.json` with `captions`, five for each
image, and `offsets`: image i is `bin[offsets[i]:offsets[i + 1]]`. They are not part of the project.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch_train.data.dataset import IMAGE, TEXT, Dataset
from megabatch_train.data.images import EncodedImage, decode

HELD_OUT = 1000  # images, never trained on
TRAIN, TEST = "train", "test"  # all images but those held out, and these
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
        images = pool.map(lambda i: decode(EncodedImage(data[offsets[i] : offsets[i + 1]], f"image {i}")), range(count))
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
        part: TRAIN or TEST.
    """

    sides = (IMAGE, TEXT)
    credits = ("Photographs: Flickr8k (Hodosh, Young and Hockenmaier, 2013), research use",)

    def __init__(self, pictures: Pictures, held_out: int, part: str) -> None:
        super().__init__()
        order = torch.randperm(len(pictures.captions), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = {TRAIN: order[:-held_out], TEST: order[-held_out:]}[part]
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
