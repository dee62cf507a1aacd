"""Flickr8k in memory, as a dataset for training.

The data are two files, which are not part of the project. `NAME.bin` contains the encoded images, one after another.
`NAME.json` contains `captions`, five for each image, and `offsets`. Image i is `bin[offsets[i]:offsets[i + 1]]`.
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
from megabatch_train.data.media.images import EncodedImage, decode

HELD_OUT = 1000  # number of images for the test
TRAIN, TEST = "train", "test"  # parts: the images that are not held out, and the held-out images
WORKERS = 16


@dataclass(frozen=True)
class Pictures:
    """Images with their captions."""

    pixels: Tensor  # (images, 3, H, W) uint8
    captions: list[list[str]]


def read(folder: Path, limit: int | None = None) -> Pictures:
    """Reads the files in a folder, or their first `limit` images."""
    json_files = sorted(folder.glob("*.json"))
    if not json_files:
        raise FileNotFoundError(f"--data must be a folder with a .json and a .bin file, got {folder}")
    about, data = json.loads(json_files[0].read_text()), json_files[0].with_suffix(".bin").read_bytes()
    count, offsets = limit or len(about["captions"]), about["offsets"]
    with ThreadPoolExecutor(WORKERS) as pool:
        images = pool.map(lambda i: decode(EncodedImage(data[offsets[i] : offsets[i + 1]], f"image {i}")), range(count))
        return Pictures(torch.stack(list(images)), about["captions"][:count])


def make_noise(count: int) -> Pictures:
    """Returns images of noise with captions, for a run without the data."""
    pixels = torch.randint(0, 256, (count, 3, 128, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Pictures(pixels, [[f"picture {i} in words, way {way}" for way in range(5)] for i in range(count)])


class Captioned(Dataset):
    """A dataset with a pair for each caption. Captions of the same image are not negatives of each other.

    Args:
        pictures: all images and captions.
        held_out: number of images for the test. They are drawn with a fixed seed.
        part: TRAIN or TEST.
    """

    sides = (IMAGE, TEXT)
    credits = ("Photographs: Flickr8k (Hodosh, Young and Hockenmaier, 2013), research use",)

    def __init__(self, pictures: Pictures, held_out: int, part: str) -> None:
        super().__init__()
        order = torch.randperm(len(pictures.captions), generator=torch.Generator().manual_seed(0)).tolist()
        indices = {TRAIN: order[:-held_out], TEST: order[-held_out:]}[part]
        self._pixels = pictures.pixels
        self._texts = [text for i in indices for text in pictures.captions[i]]
        self._images = torch.tensor([i for i in indices for _ in pictures.captions[i]])

    def __len__(self) -> int:
        """Returns the number of captions."""
        return len(self._texts)

    def read(self, index: int, side: int) -> Any:
        """Returns the image or the caption."""
        return self._texts[index] if side else self._pixels[self._images[index]]

    def name(self, index: int) -> str:
        """Returns the caption, for contact sheets."""
        return self._texts[index]

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) int64
        """Returns the indices of the images."""
        return self._images[torch.as_tensor(indices, dtype=torch.int64)]

    def items(self) -> Tensor:  # (captions,) int64
        """Returns the indices of the images."""
        return self._images
