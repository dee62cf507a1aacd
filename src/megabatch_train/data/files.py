"""Folders of images: one for each class, whose name is the caption, with spaces for underscores; or one of images alone."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch_train.data import images
from megabatch_train.data.dataset import Dataset, UnreadableSampleError, number_values
from megabatch_train.data.paths import read_file
from megabatch_train.names import TABLES

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
CAPTIONS = (".txt", ".json")  # endings of a caption beside an image; upper case counts too


class _ImageFiles(Dataset):
    """Image files, each with a text that follows from its path.

    Args:
        path: of the folder that all files are in.
        files: the images.
        texts: of each file.
    """

    def __init__(self, path: Path, files: list[Path], texts: list[str]) -> None:
        super().__init__()
        self.path, self._files, self._texts = path, files, texts
        self._ids = number_values(texts)

    def __len__(self) -> int:
        """The number of images."""
        return len(self._files)

    def read(self, index: int, side: int) -> Any:
        """The image, or its text."""
        found = self.read_stored(index, side)
        return images.decode(found) if side == 0 else found

    def read_stored(self, index: int, side: int) -> Any:
        """The encoded image, or its text."""
        place = self._files[self.check(index)]
        if side == 1:
            return self._texts[index]
        try:
            return images.EncodedImage(read_file(place), str(place))
        except OSError as error:
            raise UnreadableSampleError(f"{place} cannot be read: {error.strerror}") from error

    def name(self, index: int) -> str:
        """The image's path in the folder."""
        return str(self._files[self.check(index)].relative_to(self.path))

    def place(self, index: int) -> str:
        """The image's path."""
        return str(self._files[self.check(index)])

    def ids(self, indices: Any) -> Tensor:  # (n,) int64
        """Images with one text are not each other's negatives."""
        return self._ids[torch.as_tensor(indices, dtype=torch.int64)]

    def documents(self) -> Tensor:  # (samples,) int64
        """Images with one text are of one class."""
        return self._ids


class Folders(_ImageFiles):
    """Images in folders, one for each class. The text of an image is the name of its class, with spaces for underscores.

    Args:
        path: of the folder that has the classes' folders.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = [file for folder in class_folders(path) for file in sorted(folder.rglob("*")) if is_image(file)]
        if not files:
            raise ValueError(f"{path} must have folders with images ({', '.join(ENDINGS)}), got none")
        super().__init__(path, files, [file.relative_to(path).parts[0].replace("_", " ") for file in files])


class ImageFolder(_ImageFiles):
    """Images without captions, to search or embed. The text of an image is its path in the folder.

    Args:
        path: of the folder; images in its subfolders belong to it too.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(file for file in path.rglob("*") if is_image(file))
        super().__init__(path, files, [str(file.relative_to(path)) for file in files])


def is_plain(path: Path) -> bool:
    """Whether a folder has images, and beside them no captions of them, tables or shards."""
    if not os.path.isdir(path):  # a Path refuses long names
        return False
    files = [entry for entry in path.iterdir() if entry.is_file()]
    captions = {file.stem for file in files if file.suffix.lower() in CAPTIONS}
    stems = {file.stem for file in files if is_image(file)}
    return bool(stems) and not stems & captions and not any(file.suffix in (".tar", *TABLES) for file in files)


def class_folders(path: Path) -> list[Path]:
    """The folders in a folder that have images."""
    found = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [folder for folder in found if any(is_image(file) for file in folder.rglob("*"))]


def is_image(path: Path) -> bool:
    """Whether the name is an image's."""
    return path.suffix.lower() in ENDINGS
