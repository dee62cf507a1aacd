"""Images as they are stored, and a dataset of them."""

import io

import torch
import torch.nn.functional as F

from megabatch.data import images
from megabatch.data.dataset import Dataset
from megabatch.data.images import Encoded


def picture(seed, height, width):
    """A smooth image, which JPEG keeps."""
    coarse = torch.rand(1, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0] * 255).round().to(torch.uint8)


def stored(image, kind="JPEG", **options):
    data = io.BytesIO()
    images.to_pillow(image).save(data, kind, **options)
    return data.getvalue()


class Files(Dataset):
    """Images as they are stored."""

    def __init__(self, files):
        super().__init__()
        self.files = files

    def __len__(self):
        return len(self.files)

    def read(self, index, side):
        return images.decode(self.stored(index, side))

    def stored(self, index, side):
        return Encoded(self.files[index], f"{index}.jpg")

    def name(self, index):
        return f"{index}.jpg"
