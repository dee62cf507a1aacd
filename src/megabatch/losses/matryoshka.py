"""CLIP's loss at several widths of the embeddings at once, so that their first columns are good embeddings by themselves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch import validation
from megabatch.pairwise import cross_entropy, part_of_mean
from megabatch.pairwise_prefix import matched_prefix_logsumexp


def matryoshka_clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    *,
    widths: Sequence[int],
    weights: Sequence[float] | None = None,
    both: bool = True,
    ids: Tensor | None = None,  # (N,)
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # ()
    """The weighted sum of CLIP's losses at several widths.

    Same value and gradients as

        def prefix(x, width):
            return F.normalize(x[:, :width], dim=1)

        losses = [clip_loss(prefix(image, width), prefix(text, width), logit_scale) for width in widths]
        return sum(weight * loss for weight, loss in zip(weights, losses))

    Never negative (if the weights are not), differentiable once, float32 (float64 for float64 inputs).

    PyTorch operations ("eager") find all widths in one pass, for the matrix products of the largest. Kernels ("triton", which
    "auto" is on GPUs they run on) walk once for each width: more products, Σ widths over the largest, and far less time,
    because they finish a tile where they form it.

    Prefixes are brought to unit length in float32. What the products see of half precision, inputs or autocast, is the inputs
    as they are in PyTorch operations, and unit prefixes rounded once in kernels.

    Args:
        image: (N, D) embeddings, of any length: every prefix is brought to unit length.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        widths: how many columns, from the first on, each loss sees; all different, none more than D.
        weights: one number for each width; all 1 if None.
        both: the mean of both directions, as in `clip_loss`; False for images that find their texts alone, as in `info_nce`.
        ids: one integer for each pair; pairs with the same id are not each other's negatives.
        group: the processes that share the batch, as in `clip_loss`.
        backend: "auto", "eager" or "triton".
    """
    validation.embeddings(image, text, ("image", "text"))
    weighted = validation.widths(widths, weights, image)
    row, col, match, share = matched_prefix_logsumexp(
        image,
        text,
        logit_scale,
        list(weighted),
        names=("image", "text", "logit_scale"),
        ids=ids,
        group=group,
        backend=backend,
    )
    directions = (row, col) if both else (row,)
    losses = torch.stack([cross_entropy(sums, match) for sums in directions]).sum((0, 1), dtype=torch.float64)  # (W,)
    terms = [loss * weight for loss, weight in zip(losses.unbind(), weighted.values(), strict=True)]
    return part_of_mean(torch.stack(terms), share / len(directions)).to(match.dtype)
