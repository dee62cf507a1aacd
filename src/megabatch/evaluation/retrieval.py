"""Recall and ranks in both directions, with open_clip's names, without the similarity matrix."""

import math
from typing import Any

import torch
from torch import Tensor

import megabatch.pairwise
from megabatch.evaluation.ranks import ranks_of_best
from megabatch.primitives import Backend
from megabatch.world import World

RECALLS = (1, 5, 10)
HEADLINES = ("text_to_image_R@1", "query_to_text_R@1")  # recall@1 of a search by text


def retrieval(
    image: Tensor,  # (N, D)
    text: Tensor,  # (M, D)
    owners: Tensor | None = None,  # (M,) int64
    *,
    names: tuple[str, str] = ("image", "text"),
    group: Any = None,
    backend: Backend = "auto",
) -> dict[str, float]:
    """Recall@1, 5 and 10, mean reciprocal rank, nDCG@10, mean and median rank in both directions; ranks count from 1.

    `num_samples` is N; `num_texts` is M, if it differs.

    Args:
        image: (N, D) embeddings of the first side.
        text: (M, D) embeddings of the second.
        owners: (M,) the row of `image` that each text belongs to, if images have several texts; the best text counts. None if
            row i belongs to row i.
        names: of the two sides, as in "image_to_text_R@1".
        group: process group the data is sharded over (default: no sharding); an image and its texts are on one rank. All
            ranks get the same result.
        backend: for `pairwise_rank`.
    """
    if owners is None:
        there, back = megabatch.pairwise.pairwise_rank(image, text, group=group, backend=backend)
    else:
        texts = torch.arange(len(text), device=text.device)
        there = ranks_of_best(image, text, owners, texts, group=group)
        back = ranks_of_best(text, image, texts, owners, group=group)
    world = World.of(group, image.device)
    there, back = world.gather_rows(there), world.gather_rows(back)
    if not len(there) or not len(back):
        raise ValueError(f"image and text must have at least one row, got {len(there)} and {len(back)}")
    first, second = names
    counts = {"num_samples": len(there)} | ({f"num_{second}s": len(back)} if len(back) != len(there) else {})
    return {**_summary(f"{first}_to_{second}", there), **_summary(f"{second}_to_{first}", back), **counts}


def _summary(name: str, ranks: Tensor) -> dict[str, float]:
    values = ranks.double()
    middle = values.quantile(0.5, interpolation="midpoint") if len(values) < 2**24 else values.median()  # quantile's limit
    result = {f"{name}_mean_rank": values.mean().item() + 1, f"{name}_median_rank": math.floor(middle.item()) + 1.0}
    found = ranks.double()
    result |= {f"{name}_MRR": (1 / (found + 1)).mean().item()}
    result |= {f"{name}_nDCG@10": torch.where(ranks < 10, 1 / (found + 2).log2(), 0.0).mean().item()}  # one match counts
    return result | {f"{name}_R@{k}": (ranks < k).double().mean().item() for k in RECALLS}
