"""Images as they are stored, a dataset of them, and their crops by definition."""

import io

import torch
import torch.nn.functional as F

from megabatch_train.data.dataset import Dataset
from megabatch_train.data.media import images
from megabatch_train.data.media.images import EncodedImage


def picture(seed, height, width):
    """A smooth image, which JPEG keeps."""
    coarse = torch.rand(1, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0] * 255).round().to(torch.uint8)


def stored(image, kind="JPEG", **options):
    data = io.BytesIO()
    images.to_pillow(image).save(data, kind, **options)
    return data.getvalue()


def resized(image, box, size):
    """The crop of an image by definition: float64, not rounded."""
    top, left, height, width, mirrored = box
    part = image[None, :, top : top + height, left : left + width].double()
    crop = F.interpolate(part, size, mode="bicubic", antialias=True)[0].clamp(0, 255)
    return crop.flip(2) if mirrored else crop


class Files(Dataset):
    """Images as they are stored."""

    def __init__(self, files):
        super().__init__()
        self.files = files

    def __len__(self):
        return len(self.files)

    def read(self, index, side):
        return images.decode(self.read_stored(index, side))

    def read_stored(self, index, side):
        return EncodedImage(self.files[index], f"{index}.jpg")

    def name(self, index):
        return f"{index}.jpg"
