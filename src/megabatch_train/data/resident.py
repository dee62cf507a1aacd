"""A dataset that is kept on the training device. Random crops are made there."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.cached.replay import sample_seed
from megabatch.cached.sources import Source, Span, TensorSource
from megabatch.cached.streaming import close_at_the_end, map_rows, tensors
from megabatch_train.data.dataset import TEXT, Dataset, Part, Preparation, first_places
from megabatch_train.data.media.images import CROP_NUMBERS, TrainingImages

# ----------------------------------------------------------------------------------------------------------------------
# Random numbers of many samples at once, computed on their device. They are bitwise identical to the results of `sample_seed`.


def uniform(seed: int, indices: Tensor, count: int) -> Tensor:  # (n,) int64 -> (n, count) float32
    """Returns `count` numbers in [0, 1) per sample."""
    return (random_bits(seed, indices, count) >> 39).float() / 2**24  # 24 of 63 bits, which float32 represents exactly


def random_bits(seed: int, indices: Tensor, count: int) -> Tensor:  # (n,) int64 -> (n, count) int64
    """Returns `count` numbers of 63 bits per sample: `sample_seed(sample_seed(seed, index), number)`."""
    seeds = _sample_seeds(torch.full_like(indices, _to_signed(seed)), indices)  # (n,)
    return _sample_seeds(seeds[:, None], torch.arange(count, device=indices.device))


def _sample_seeds(seed: Tensor, position: Tensor) -> Tensor:
    """Computes `sample_seed` on tensors, line by line. int64 wraps around like the 64-bit integers of `sample_seed`."""
    state = seed * _to_signed(0xD1342543DE82EF95) + (position + 1) * _to_signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift_right(state, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _to_signed(0x94D049BB133111EB)
    return _shift_right(state ^ _shift_right(state, 31), 1)


def _shift_right(state: Tensor, count: int) -> Tensor:
    """Shifts unsigned numbers to the right. Shifting an int64 fills the upper bits with the sign, so they are cleared."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _to_signed(number: int) -> int:
    """Returns the int64 with the same 64 bits."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


# ----------------------------------------------------------------------------------------------------------------------
# A dataset in the memory of a device. Images are decoded once and texts are tokenized once.
#
# Without it, data-loader workers decode and crop every image in every epoch, and a small model waits for them. A dataset that
# fits into device memory needs no workers after the first pass.
#
# A stored image is slightly larger than the input of the tower. A crop is sampled bilinearly from a random part of the stored
# image, whereas workers resize this part of the original image. The random numbers of a crop depend only on (seed, epoch,
# sample, side), so they are equal on every rank and in both passes of a step.


MARGIN = 1.125  # side of a stored image divided by the side of a crop, so that crops of 80 % are hardly enlarged
CHUNK = 1024  # images that are read or cropped at once


class Resident(Part):
    """All samples of a dataset, kept on a device for training.

    Args:
        dataset: the dataset, which is read once.
        preparations: preprocessing of both sides, such as two `towers.Tower`.
        device: the device that keeps the samples.
        sides: the sides that are kept. The other sides are read as usual.
        augment: whether images are cropped at random. If so, their preparation must have `training_images`.
        workers: workers of the first reading, as for `ReplaySource`.
        limit: maximum size of the samples in bytes (default: no limit).
    """

    def __init__(
        self,
        dataset: Dataset,
        preparations: Sequence[Preparation],
        device: torch.device,
        *,
        sides: Sequence[int] = (0, 1),
        augment: bool = True,
        workers: int | Executor = 0,
        limit: float = float("inf"),
    ) -> None:
        super().__init__(dataset, range(len(dataset)))
        self.failures = dataset.failures
        self._kept: dict[int, _ResidentImages | _Fixed] = {}
        budget = _DeviceBuffers(limit)
        for side in sides:
            preparation, images = preparations[side], dataset.sides[side] != TEXT
            training: Any = getattr(preparation, "training_images", None)
            if getattr(preparation, "measure", None) is not None:
                raise ValueError("memory.resident must be 0 for a vision-language model, whose samples differ in size")
            if images and augment and training is None:
                raise ValueError(
                    "memory.resident must be 0 for a model whose workers augment samples, or augment be false; images for "
                    "models of open_clip and transformers are cropped on the device"
                )
            first, rows = self._distinct(side)
            prepared = partial(dataset.source, first, side, augment=False, workers=workers)
            if images and augment:
                self._kept[side] = _ResidentImages.read(prepared, rows, training, device, budget)
            else:
                chunk = CHUNK if images else len(first)  # all texts at once, because they are padded to a common length
                self._kept[side] = _Fixed.read(prepared(preparation), rows, preparation, device, budget, chunk)
            self._spread_failures(first, rows)

    def _distinct(self, side: int) -> tuple[list[int], Tensor]:
        """Returns the first sample of each item, and the item of each sample. Captions of one image share its pixels."""
        items = self.whole.items() if side == 0 else None
        if items is None:
            return list(range(len(self.whole))), torch.arange(len(self.whole))
        _, rows = torch.unique(items, return_inverse=True)
        return first_places(rows).tolist(), rows

    def _spread_failures(self, first: list[int], rows: Tensor) -> None:
        """Marks every sample of an unreadable image as failed, for the same reason."""
        if len(first) < len(rows):
            broken = {row: self.failures[index] for row, index in enumerate(first) if index in self.failures}
            for row, reason in broken.items():
                for index in (rows == row).nonzero().flatten().tolist():
                    self.failures.setdefault(index, reason)

    def source(
        self,
        indices: Sequence[int],
        side: int,
        preparation: Preparation,
        *,
        seed: int = 0,
        epoch: int = 0,
        augment: bool = True,
        **options: Any,
    ) -> Source:
        """Returns the kept samples. Evaluation and sides that are not kept use the source of the dataset with `options`."""
        kept = self._kept.get(side)
        if kept is None or (isinstance(kept, _ResidentImages) and not augment):
            return self.whole.source(indices, side, preparation, seed=seed, epoch=epoch, augment=augment, **options)
        return kept.source(torch.as_tensor(indices), sample_seed(sample_seed(seed, epoch), side), preparation)


class _DeviceBuffers:
    """The memory budget of all sides."""

    def __init__(self, limit: float) -> None:
        self._limit, self._used = limit, 0

    def take(self, size: int) -> None:
        self._used += size
        if self._used > self._limit:
            raise ValueError(
                f"memory.resident must allow {self._used / 2**30:.2f} GiB for the samples of the whole dataset, got "
                f"{self._limit / 2**30:.2f} GiB; 0 reads the samples in every epoch instead"
            )


@dataclass(frozen=True)
class _Fixed:
    """Inputs that are equal in every epoch: tokens, and images without augmentation."""

    inputs: Any  # one row for each distinct sample, on the device
    rows: Tensor  # (samples,) int64 on the host
    lengths: Tensor | None  # (distinct samples,) on the host

    @classmethod
    def read(
        cls,
        source: Source,
        rows: Tensor,
        preparation: Any,
        device: torch.device,
        budget: _DeviceBuffers,
        chunk: int,
    ) -> "_Fixed":
        parts = []
        for inputs in _chunks(source, chunk):
            budget.take(sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(inputs, "inputs")))
            count_tokens = getattr(preparation, "lengths", None)
            counts = None if count_tokens is None else count_tokens(inputs)
            parts.append((map_rows(lambda tensor: tensor.to(device), inputs), counts))
        lengths = None if parts[0][1] is None else torch.cat([counts for _, counts in parts if counts is not None])
        return cls(_join([inputs for inputs, _ in parts]), rows, lengths)

    def source(self, indices: Tensor, seed: int, preparation: Preparation) -> Source:
        chosen = self.rows[indices]
        places: dict[torch.device, Tensor] = {}

        def pick(tensor: Tensor) -> Tensor:
            if tensor.device not in places:
                places[tensor.device] = chosen.to(tensor.device)
            return tensor[places[tensor.device]]

        lengths = None if self.lengths is None else self.lengths[chosen]
        return TensorSource(map_rows(pick, self.inputs), lengths=lengths)


@dataclass(frozen=True)
class _ResidentImages:
    """Images that are cropped again in each epoch."""

    pixels: Tensor  # (images, 3, H, W) uint8 on the device, each image stretched to (H, W)
    shapes: Tensor  # (images,) float32 on the device, aspect ratios of the original images
    rows: Tensor  # (samples,) int64 on the device
    training: TrainingImages

    @classmethod
    def read(
        cls,
        prepared: Callable[[Preparation], Source],
        rows: Tensor,
        training: TrainingImages,
        device: torch.device,
        budget: _DeviceBuffers,
    ) -> "_ResidentImages":
        height, width = (round(MARGIN * length) for length in training.crop.size)
        source, begin = prepared(_Stretched((height, width))), 0
        budget.take(len(source) * 3 * height * width)
        pixels = torch.empty(len(source), 3, height, width, dtype=torch.uint8, device=device)
        shapes = torch.empty(len(source), device=device)
        for stretched, ratios in _chunks(source, CHUNK):
            pixels[begin : begin + len(stretched)] = stretched.to(device)
            shapes[begin : begin + len(stretched)] = ratios.to(device)
            begin += len(stretched)
        return cls(pixels, shapes, rows.to(device), training)

    def source(self, indices: Tensor, seed: int, preparation: Preparation) -> "_Crops":
        size = self.training.crop.size if preparation.training_images is None else preparation.training_images.crop.size
        return _Crops(self, indices.to(self.pixels.device), seed, size)

    def crops(self, indices: Tensor, seed: int, size: tuple[int, int]) -> dict[str, Tensor]:  # (n, 3, *size) float32
        """Returns the inputs of the tower. Crops of another size than the stored images are resized with antialiasing."""
        rows = self.rows[indices]
        numbers = uniform(seed, indices, CROP_NUMBERS)
        crop = self.training.crop
        parts = crop.parts(numbers, self.shapes[rows])
        pieces = zip(torch.split(rows, CHUNK), torch.split(parts, CHUNK), strict=True)
        crops = [crop.many(self.pixels[some].float(), part) for some, part in pieces]
        if size != crop.size:
            crops = [F.interpolate(part, size, mode="bilinear", antialias=True) for part in crops]
        return self.training.normalize(torch.cat(crops) if len(crops) > 1 else crops[0])


class _Crops(Source):
    """The crops of a batch. Each chunk is cropped when it is needed."""

    def __init__(self, images: _ResidentImages, indices: Tensor, seed: int, size: tuple[int, int]) -> None:
        self._images, self._indices, self._seed, self._size = images, indices, seed, size

    def __len__(self) -> int:
        return len(self._indices)

    def chunks(self, spans: Sequence[Span], device: torch.device | None) -> Iterator[Any]:
        for start, stop in spans:
            yield self._images.crops(self._indices[start:stop], self._seed, self._size)


@dataclass(frozen=True)
class _Stretched:
    """Preprocessing of stored images: stretches the whole image to `size`, and records its aspect ratio."""

    size: tuple[int, int]
    training_images: None = None

    def prepare(self, image: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        _, height, width = image.shape
        stretched = F.interpolate(image[None], self.size, mode="bicubic", antialias=True)[0]
        return stretched, torch.tensor(width / height)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        stretched, shapes = zip(*samples, strict=True)
        return torch.stack(stretched), torch.stack(shapes)


def _chunks(source: Source, size: int) -> Iterator[Any]:
    spans = [(begin, min(begin + size, len(source))) for begin in range(0, len(source), size)]
    chunks = source.chunks(spans, None)
    with close_at_the_end(chunks):
        yield from chunks


def _join(parts: list[Any]) -> Any:
    """Joins the inputs of several chunks."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {key: _join([part[key] for part in parts]) for key in parts[0]}
    return tuple(_join(list(entries)) for entries in zip(*parts, strict=True))
