"""Embeddings of samples for evaluation and search: chunk by chunk, without gradients and augmentation."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.cached.tower_io import call, map_rows
from megabatch.data.dataset import Dataset, UnreadableSampleError
from megabatch.data.progress import Progress
from megabatch.tiles.block import windows
from megabatch.towers.tower import Tower


def embed(
    tower: Tower,
    dataset: Dataset,
    side: int,
    indices: Sequence[int] | None = None,
    *,
    chunk_size: int = 256,
    workers: int | Executor = 0,
) -> Tensor:  # (n, D)
    """Embeddings of one side of samples. Unreadable samples get the embedding of a blank; `dataset.usable` masks them."""
    found = list(embedded(tower, dataset, side, indices, chunk_size=chunk_size, workers=workers))
    if not found:
        raise ValueError("indices must name at least one sample, got none")
    return torch.cat(found)


@torch.no_grad()
def embedded(
    tower: Tower,
    dataset: Dataset,
    side: int,
    indices: Sequence[int] | None = None,
    *,
    chunk_size: int = 256,
    workers: int | Executor = 0,
) -> Iterator[Tensor]:  # (n, D) each
    """The same, one chunk at a time, for data whose embeddings need not all be in memory. Logs the progress of long work."""
    if tower.kind != dataset.sides[side]:
        raise ValueError(f"tower must encode side {side} of the dataset, {dataset.sides[side]}, got a tower for {tower.kind}")
    chosen = range(len(dataset)) if indices is None else indices
    source = dataset.source(chosen, side, tower, augment=False, workers=workers)
    spans = [(part.start, part.stop) for part in windows(len(chosen), chunk_size)]
    progress = Progress(f"{tower.kind}s embedded", len(chosen))
    for (_, done), inputs in zip(spans, source.chunks(spans, device_of(tower.module)), strict=True):
        with evaluating(tower.module):
            found = call(tower.module, inputs)
        yield found  # outside of `evaluating`: the caller may train between chunks
        progress.tell(done)


def readable(
    tower: Tower, dataset: Dataset, side: int, indices: range, *, chunk_size: int, workers: int | Executor
) -> Iterator[Tensor]:  # (n, D) each
    """The same with NaN for unreadable samples, which find nothing and are never found."""
    position = 0
    for chunk in embedded(tower, dataset, side, indices, chunk_size=chunk_size, workers=workers):
        usable = dataset.usable(indices[position : position + len(chunk)]).to(chunk.device)
        position += len(chunk)
        yield chunk.masked_fill(~usable[:, None], math.nan)


@torch.no_grad()
def encode(tower: Tower, samples: Sequence[Any]) -> Tensor:  # (n, D)
    """Embeddings of texts or images outside of a dataset, such as queries and class names."""
    inputs = tower.collate([tower.prepare(sample, None) for sample in samples])
    device = device_of(tower.module)
    with evaluating(tower.module):
        found: Tensor = call(tower.module, map_rows(lambda tensor: tensor.to(device), inputs))
        return found


def read_or_none(dataset: Dataset, index: int, side: int) -> Any:
    """One side of a sample; None if it cannot be read."""
    try:
        return dataset.read(index, side)
    except UnreadableSampleError:
        return None


def stored_or_none(dataset: Dataset, index: int, side: int) -> Any:
    """One side of a sample, an image still encoded; None if it cannot be read."""
    try:
        return dataset.stored(index, side)
    except UnreadableSampleError:
        return None


def device_of(module: nn.Module) -> torch.device | None:
    """The device of its first parameter; None without parameters."""
    first = next(module.parameters(), None)
    return None if first is None else first.device


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part has its mode again."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
