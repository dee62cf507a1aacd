"""Semantic textual similarity (STS): how well the similarities of a model are in the order of people's scores."""

from typing import Any

import torch
from torch import Tensor

from megabatch.data.dataset import Dataset
from megabatch.evaluation.embedding import device_of, embed
from megabatch.towers.tower import Pair
from megabatch.world import World


def spearman(x: Tensor, y: Tensor) -> float:  # (n,), (n,)
    """Spearman's rank correlation: the correlation of the ranks, where ties have the mean of their ranks."""
    if len(x) < 2:
        raise ValueError(f"a correlation needs at least two scored pairs, got {len(x)}")
    a, b = (_ranks(values) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def sts(
    pair: Pair, dataset: Dataset, scores: Tensor, *, chunk_size: int = 256, workers: Any = 0, group: Any = None
) -> dict[str, float]:
    """The correlation of cosine similarities with scores, (samples,). Samples without a score or unreadable are skipped."""
    world = World.of(group, device_of(pair.second.module))
    ours = list(range(world.rank, len(dataset), world.size))
    sides = [embed(pair.towers[side], dataset, side, ours, chunk_size=chunk_size, workers=workers) for side in (0, 1)]
    good = (dataset.usable(ours) & ~scores[ours].isnan()).to(sides[0].device)
    found = torch.cosine_similarity(sides[0], sides[1])[good].double()
    similarities, wanted = world.gather_rows(found), world.gather_rows(scores[ours].to(found.device)[good])
    failed = len(dataset) - len(similarities)
    return {"sts_spearman": spearman(similarities, wanted), "num_samples": len(similarities), "num_failed": failed}


def _ranks(values: Tensor) -> Tensor:  # (n,) -> (n,) float64
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    ranks: Tensor = (ends - (count.double() - 1) / 2)[group]
    return ranks
