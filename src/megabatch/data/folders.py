"""Folders of images: one for each class, whose name is the caption, with spaces for underscores; or one of images alone."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch.data import images
from megabatch.data.dataset import Dataset, UnreadableSampleError
from megabatch.names import TABLES

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
CAPTIONS = (".txt", ".json")  # endings of a caption beside an image; upper case counts too


class Folders(Dataset):
    """Images in folders, one for each class.

    Args:
        path: of the folder that has the classes' folders.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._files = [file for folder in class_folders(self.path) for file in sorted(folder.rglob("*")) if is_image(file)]
        self._classes = [file.relative_to(self.path).parts[0].replace("_", " ") for file in self._files]
        if not self._files:
            raise ValueError(f"{path} must have folders with images ({', '.join(ENDINGS)}), got none")
        numbers: dict[str, int] = {}
        self._ids = torch.tensor([numbers.setdefault(name, len(numbers)) for name in self._classes], dtype=torch.int64)

    def __len__(self) -> int:
        """The number of images."""
        return len(self._files)

    def read(self, index: int, side: int) -> Any:
        """The image, or the name of its class."""
        found = self.stored(index, side)
        return images.decode(found) if side == 0 else found

    def stored(self, index: int, side: int) -> Any:
        """The file of the image, or the name of its class."""
        place = self._files[self.check(index)]
        if side == 1:
            return self._classes[index]
        try:
            return images.Encoded(place.read_bytes(), str(place))
        except OSError as error:
            raise UnreadableSampleError(f"{place} cannot be read: {error.strerror}") from error

    def name(self, index: int) -> str:
        """The image's path in the folder."""
        return str(self._files[self.check(index)].relative_to(self.path))

    def place(self, index: int) -> str:
        """The image's path."""
        return str(self._files[self.check(index)])

    def ids(self, indices: Any) -> Tensor:  # (n,) int64
        """Images of one class are not each other's negatives."""
        return self._ids[torch.as_tensor(indices, dtype=torch.int64)]

    def classes(self) -> Tensor:  # (samples,) int64
        """Images of one class have the same text."""
        return self._ids


class Images(Folders):
    """Images without captions, to search or embed. In place of a caption is the name of the file.

    Args:
        path: of the folder; images of folders in it belong to it too.
    """

    def __init__(self, path: str | Path) -> None:
        Dataset.__init__(self)
        self.path = Path(path)
        self._files = sorted(file for file in self.path.rglob("*") if is_image(file))
        self._classes = [str(file.relative_to(self.path)) for file in self._files]
        self._ids = torch.arange(len(self._files))


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
