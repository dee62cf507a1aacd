"""Images of training: decoded, randomly cropped and normalised.

A reader draws the numbers of a crop from the sample's own generator, so the crop is the same for any number of readers, ranks
and chunks, and in both passes. Readers decode and crop most images. If torchvision decodes JPEGs on the GPU, some ordinary
JPEGs stay encoded (`dataset.DEVICE_SHARE`), and the GPU decodes and crops many of them at once. The tower's device normalises
all crops.

Both crop by the antialiased bicubic filter of `torch.nn.functional.interpolate`. The GPU's kernel (`crop_kernel.py`) rounds
once, the CPU once for each direction.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.data import images
from megabatch.data.dataset import IMAGE, UnreadableSampleError, blank
from megabatch.data.images import Encoded
from megabatch.machine import ran_out_of_memory

NUMBERS = 5  # drawn for each crop
DECODED_AT_ONCE = 512  # JPEGs in a call of the GPU's decoder
PIXELS_AT_ONCE = 1 << 26  # in a call of the GPU's decoder: 192 MiB of bytes
NO_MEMORY = re.compile(r"out of memory|Failed to [\w ]+: 5\b")  # PyTorch's words; nvJPEG's status of a failed allocation


class Box(NamedTuple):
    """The part of an image that becomes the crop."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop, as in the training of CLIP on photographs."""

    size: tuple[int, int]  # height, width
    area: tuple[float, float] = (0.9, 1.0)  # least and most of the image's area
    shape: tuple[float, float] = (3 / 4, 4 / 3)  # least and most width over height
    flip: bool = False  # left to right, half of the images; off, because "left of" in a caption would become wrong

    def draw(self, generator: torch.Generator) -> tuple[float, ...]:
        """The random numbers of one crop, uniform in [0, 1)."""
        return tuple(torch.rand(NUMBERS, generator=generator).tolist())

    def box(self, numbers: Sequence[float], height: int, width: int) -> Box:
        """The crop of an image of this size."""
        area, shape, down, right, mirror = numbers
        wanted = height * width * (self.area[0] + area * (self.area[1] - self.area[0]))
        ratio = math.exp(math.log(self.shape[0]) + shape * (math.log(self.shape[1]) - math.log(self.shape[0])))
        h = min(height, max(1, round((wanted / ratio) ** 0.5)))
        w = min(width, max(1, round((wanted * ratio) ** 0.5)))
        return Box(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w, self.flip and mirror < 0.5)

    def one(self, image: Tensor, box: Box) -> Tensor:  # (3, H, W) uint8 -> (3, *size) uint8
        """The crop of one image on a CPU."""
        part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
        crop = F.interpolate(part, self.size, mode="bicubic", antialias=True)[0]
        return (crop.flip(2) if box.mirrored else crop).contiguous()

    def many(self, pictures: Sequence[Tensor], boxes: Sequence[Box]) -> Tensor:  # (n, 3, *size) uint8
        """The crops of images on one device: on a GPU in one launch, on a CPU one by one."""
        if pictures[0].is_cuda:
            from megabatch.data.crop_kernel import crop_images

            return crop_images(pictures, boxes, self.size)
        return torch.stack([self.one(image, box) for image, box in zip(pictures, boxes, strict=True)])


@dataclass
class Picture:
    """An image between reader and chunk: encoded, with the box of its crop; or the finished crop, without a box."""

    data: Tensor  # of bytes
    name: str = ""
    size: tuple[int, int] = (0, 0)  # height and width, by the header
    box: Box | None = None


@dataclass(frozen=True)
class TrainingImages:
    """From stored images to the inputs of a tower, in training.

    Args:
        crop: of each image.
        mean: of the channels of normalised images, in [0, 1].
        deviation: of the channels.
        key: the name of the tower's argument.
    """

    crop: RandomCrop
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    key: str

    def read(self, image: Encoded | Tensor, generator: torch.Generator, encoded: bool) -> Picture:
        """An image, read by one reader. Runs beside others.

        Args:
            image: as it is stored.
            generator: of the sample.
            encoded: whether an ordinary JPEG stays encoded, for a GPU that decodes it.
        """
        numbers = self.crop.draw(generator)
        if isinstance(image, Encoded):
            size = images.plain_jpeg_size(image.data) if encoded else None
            if size is not None:
                return Picture(_bytes(image.data), image.name, size, self.crop.box(numbers, *size))
            image = images.decode(image)
        crop = self.crop.one(image, self.crop.box(numbers, *image.shape[1:]))
        return Picture(crop.view(-1))

    def decode(
        self, pictures: Sequence[Picture], device: torch.device | None, failed: Callable[[Picture, str], None]
    ) -> Tensor:  # (n, 3, height, width) uint8
        """The crops of images, on `device` (None for the CPU).

        Args:
            pictures: of a chunk. An encoded image that is larger than its crop is replaced by the crop, which then serves the
                second pass.
            device: the tower's.
            failed: called with an image that cannot be decoded, and the reason. A blank takes its place.
        """
        device = device or torch.device("cpu")
        crops = torch.empty(len(pictures), 3, *self.crop.size, dtype=torch.uint8, device=device)
        ready = [i for i, picture in enumerate(pictures) if picture.box is None]
        if ready:
            pixels = _joined([pictures[i].data for i in ready], device)
            crops[torch.tensor(ready, device=device)] = pixels.view(len(ready), *crops.shape[1:])
        for some in _decoded_together(pictures):
            made = self._crops([pictures[i] for i in some], device, failed)
            if len(some) == len(pictures):
                return made
            crops[torch.tensor(some, device=device)] = made
        return crops

    def inputs(self, crops: Tensor) -> dict[str, Tensor]:  # (n, 3, height, width) uint8 -> float32
        """The inputs of the tower: normalised crops."""
        factor, offset = _normalisation(self.mean, self.deviation, crops.device)
        return {self.key: torch.addcmul(offset, crops, factor)}

    @property
    def crop_bytes(self) -> int:
        """Bytes of one crop."""
        return 3 * self.crop.size[0] * self.crop.size[1]

    def _crops(self, pictures: list[Picture], device: torch.device, failed: Callable[[Picture, str], None]) -> Tensor:
        """Crops of encoded images, (n, 3, height, width) uint8."""
        decoded = _decoded(pictures, device, failed)
        boxes = [
            picture.box
            if image.shape[1:] == picture.size and picture.box is not None
            else Box(0, 0, image.shape[1], image.shape[2], False)
            for picture, image in zip(pictures, decoded, strict=True)
        ]
        crops = self.crop.many(decoded, boxes)
        large = [i for i, picture in enumerate(pictures) if len(picture.data) > crops[0].numel()]
        for i, crop in zip(large, crops[large].cpu() if large else (), strict=True):
            # The source holds these objects for the second pass.
            pictures[i].data, pictures[i].box = crop.view(-1).clone(), None
        return crops


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """One tensor on `device`; through pinned memory, which is copied to a GPU ten times as fast."""
    if device.type != "cuda":
        return torch.cat(parts).to(device)
    room = torch.empty(sum(map(len, parts)), dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=room).to(device, non_blocking=True)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@cache
def _normalisation(mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and offset (3, 1, 1) of the pixels. On the device once, because a copy waits for all kernels before it."""
    centre, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, deviation))
    return (1 / (255 * spread)).float().to(device), (-centre / spread).float().to(device)


def decodes_on(device: torch.device) -> bool:
    """Whether torchvision decodes JPEGs on this device and Triton can crop them: torchvision is asked to decode a small one."""
    torchvision = images.torchvision_io()
    if device.type != "cuda" or torchvision is None or importlib.util.find_spec("triton") is None:
        return False
    try:
        sample = torchvision.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        torchvision.decode_jpeg([sample], torchvision.ImageReadMode.RGB, device=device)
    except Exception:  # built without nvJPEG
        return False
    return True


def _decoded_together(pictures: Sequence[Picture]) -> list[list[int]]:
    """Positions of encoded images, in groups for the decoder: bounded in number and pixels, and the same in both passes."""
    groups: list[list[int]] = []
    room = 0
    for i, picture in enumerate(pictures):
        pixels = picture.size[0] * picture.size[1]
        if i % DECODED_AT_ONCE == 0 or pixels > room:
            groups.append([])
            room = PIXELS_AT_ONCE
        room -= pixels
        if picture.box is not None:
            groups[-1].append(i)
    return [group for group in groups if group]


def _decoded(pictures: list[Picture], device: torch.device, failed: Callable[[Picture, str], None]) -> list[Tensor]:
    """Encoded images on `device`, (3, H, W) uint8 each. An image that the device rejects is decoded by the CPU."""
    parts = [picture.data for picture in pictures]
    found = _decode_on(parts, device)
    if found is not None:
        return found
    one_by_one = []
    for picture, part in zip(pictures, parts, strict=True):
        alone = _decode_on([part], device)
        one_by_one.append(_decoded_by_cpu(picture, failed).to(device) if alone is None else alone[0])
    return one_by_one


def _decode_on(parts: list[Tensor], device: torch.device) -> list[Tensor] | None:
    """JPEGs decoded on `device`; None if one of them is damaged."""
    torchvision = images.torchvision_io()
    assert torchvision is not None, "an image stays encoded only where torchvision decodes it"
    if device.type == "cuda":
        # torchvision decodes on a stream of its own, into memory that kernels of this stream may still use.
        torch.cuda.current_stream(device).synchronize()
    try:
        found: list[Tensor] = torchvision.decode_jpeg(parts, torchvision.ImageReadMode.RGB, device=device)
        return found
    except RuntimeError as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the decoder may still write
        if NO_MEMORY.search(str(error)):  # torchvision raises a plain RuntimeError, also for PyTorch's own
            raise torch.OutOfMemoryError(str(error)) from error
        if ran_out_of_memory(error) or "memory" in str(error).lower():
            raise
        return None


def _decoded_by_cpu(picture: Picture, failed: Callable[[Picture, str], None]) -> Tensor:  # (3, H, W) uint8
    try:
        return images.decode(Encoded(picture.data.numpy().tobytes(), picture.name))
    except UnreadableSampleError as error:
        failed(picture, str(error))
        grey: Tensor = blank(IMAGE)
        return grey
