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

    Samples with the same first side (`dataset.items`) are one image with several captions. Samples with the same second side
    (`dataset.classes`) are one text with several images; each of them is right. `num_failed` is the number of unreadable
    samples on all ranks. `clip_val_loss` is CLIP's loss over all pairs at `scale` (default: the model's). Under autocast the
    towers encode in half precision, but embeddings are compared as they are.
    """
    classes = dataset.classes()
    owner_side, owned_side = (0, 1) if classes is None else (1, 0)  # each row of the second belongs to one row of the first
    world = World.of(group, device_of(pair.second.module))
    if classes is not None and len(torch.unique(classes)) < world.size:
        group, world = None, World.of(None, world.device)  # a class is on one rank; with so few of them, all are on each rank
    indices, first, owners = _share(dataset.items() if classes is None else classes, len(dataset), world.rank, world.size)
    owned = embed(pair.towers[owned_side], dataset, owned_side, indices, chunk_size=chunk_size, workers=workers)
    starts = [indices[i] for i in first]
    owning = embed(pair.towers[owner_side], dataset, owner_side, starts, chunk_size=chunk_size, workers=workers)
    owners, good = owners.to(owned.device), dataset.usable(indices).to(owned.device)
    failed = int(world.sum([int((~good).sum())])[0])
    if failed:  # an unreadable image is skipped with its captions, and an image without readable captions too
        if classes is None:
            good &= dataset.usable(starts).to(owned.device)[owners]
        kept, owners = torch.unique(owners[good], return_inverse=True)
        owning, owned = owning[kept], owned[good]
    if failed and not world.sum([len(owned)])[0]:
        reason = next(found for found in world.gather_objects(next(iter(dataset.failures.values()), None)) if found)
        raise ValueError(f"none of {len(dataset):,} samples could be read, the first because {reason}")
    several = bool(world.max([len(owned) != len(owning)])[0])
    names = ("image", "text") if dataset.sides[0] != dataset.sides[1] else ("query", "text")
    names = names if classes is None else names[::-1]
    paired, ids = (owning[owners], owners + world.row_offset(len(owning))) if several else (owning, None)
    with torch.autocast(world.device.type, enabled=False):
        result = retrieval(owning, owned, owners if several else None, names=names, group=group)
        share = clip_loss(paired, owned, pair.logit_scale if scale is None else scale, ids=ids, group=group)
    if classes is not None and several:  # samples are images
        result |= {"num_samples": result.pop("num_images"), "num_texts": result["num_samples"]}
    return {**result, "clip_val_loss": world.sum([share.item()])[0] / world.size, "num_failed": failed}


def _share(items: Tensor | None, count: int, rank: int, size: int) -> tuple[list[int], list[int], Tensor]:
    """This rank's samples, the positions of the first sample of each item, and the item of each sample."""
    known, of_item = torch.unique(torch.arange(count) if items is None else items, return_inverse=True)
    if len(known) < size:  # raised on all ranks, since the others would wait
        raise ValueError(f"dataset must have at least one item for each of {size} ranks, got {len(known)}")
    begin, end = rank * len(known) // size, (rank + 1) * len(known) // size
    ours = ((of_item >= begin) & (of_item < end)).nonzero().flatten()
    ours = ours[of_item[ours].argsort(stable=True)]
    owners = of_item[ours] - begin
    starts = torch.cat([torch.ones(1, dtype=torch.bool), owners[1:] != owners[:-1]]).nonzero().flatten()
    return ours.tolist(), starts.tolist(), owners
