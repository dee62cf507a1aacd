"""Retrieval metrics of a model on a dataset: embeds this rank's shard, skips unreadable samples, and counts ranks."""

from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from megabatch.data.dataset import Dataset
from megabatch.evaluation.embedding import device_of, embed
from megabatch.evaluation.retrieval import retrieval
from megabatch.losses import clip_loss
from megabatch.towers.tower import Pair
from megabatch.world import World


@torch.no_grad()
def evaluate(
    pair: Pair,
    dataset: Dataset,
    *,
    scale: float | None = None,
    chunk_size: int = 256,
    workers: int | Executor = 0,
    group: Any = None,
) -> dict[str, float]:
    """Retrieval in both directions over all pairs of a dataset; `retrieval` describes the metrics.

    Samples with the same first side (`dataset.items`) are one image with several captions. `num_failed` is the number of
    unreadable samples on all ranks. `clip_val_loss` is CLIP's loss over all pairs at `scale` (default: the model's).
    """
    world = World.of(group, device_of(pair.second.module))
    indices, first, owners = _share(dataset, world.rank, world.size)
    texts = embed(pair.second, dataset, 1, indices, chunk_size=chunk_size, workers=workers)
    images = embed(pair.first, dataset, 0, [indices[i] for i in first], chunk_size=chunk_size, workers=workers)
    good = dataset.usable(indices).to(texts.device)
    failed = int(world.sum([int((~good).sum())])[0])
    if failed:  # an unreadable image is skipped with its captions, and an image without readable captions too
        readable = dataset.usable([indices[i] for i in first]).to(texts.device)
        good &= readable[owners.to(texts.device)]
        images, owners, texts = _without(images, owners.to(texts.device), texts, good)
    if failed and not world.sum([len(texts)])[0]:
        reason = next(found for found in world.gather_objects(next(iter(dataset.failures.values()), None)) if found)
        raise ValueError(f"none of {len(dataset):,} samples could be read, the first because {reason}")
    several = bool(world.max([len(texts) != len(images)])[0])
    names = ("image", "text") if dataset.sides[0] != dataset.sides[1] else ("query", "text")
    result = retrieval(images, texts, owners.to(texts.device) if several else None, names=names, group=group)
    offset = world.row_offset(len(images))
    paired, ids = (images[owners.to(texts.device)], owners + offset) if several else (images, None)
    share = clip_loss(
        paired,
        texts,
        pair.logit_scale if scale is None else scale,
        ids=None if ids is None else ids.to(texts.device),
        group=group,
    )
    return {**result, "clip_val_loss": world.sum([share.item()])[0] / world.size, "num_failed": failed}


def _share(dataset: Dataset, rank: int, size: int) -> tuple[list[int], list[int], Tensor]:
    """This rank's samples, the positions of the first sample of each item, and the item of each sample."""
    items = dataset.items()
    if items is None:
        items = torch.arange(len(dataset))
    known, of_item = torch.unique(items, return_inverse=True)
    if len(known) < size:  # raised on all ranks, since the others would wait
        raise ValueError(f"dataset must have at least one item for each of {size} ranks, got {len(known)}")
    begin, end = rank * len(known) // size, (rank + 1) * len(known) // size
    ours = ((of_item >= begin) & (of_item < end)).nonzero().flatten()
    ours = ours[of_item[ours].argsort(stable=True)]
    owners = of_item[ours] - begin
    starts = torch.cat([torch.ones(1, dtype=torch.bool), owners[1:] != owners[:-1]]).nonzero().flatten()
    return ours.tolist(), starts.tolist(), owners


def _without(images: Tensor, owners: Tensor, texts: Tensor, good: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kept, owners = torch.unique(owners[good], return_inverse=True)
    return images[kept], owners, texts[good]
