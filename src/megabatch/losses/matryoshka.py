"""CLIP's loss at several widths of the embeddings, so that their first columns are good embeddings by themselves."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group, Reduction
from megabatch.losses.clip import clip_loss
from megabatch.losses.info_nce import info_nce_loss
from megabatch.primitives import autocast_device, describe_loss, execution, number, sum_over_ranks


def matryoshka_clip_loss(
    image: Tensor,  # (N, D)
    text: Tensor,  # (N, D)
    logit_scale: float | Tensor,
    *,
    widths: Sequence[int],
    weights: Sequence[float] | None = None,
    symmetric: bool = True,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """The weighted sum of CLIP's losses at several widths.

    Same value and gradients as

        def prefix(x, width):
            return F.normalize(x[:, :width], dim=1)

        losses = [clip_loss(prefix(image, width), prefix(text, width), logit_scale) for width in widths]
        return sum(weight * loss for weight, loss in zip(weights, losses))

    Never negative (if the weights are not), differentiable once, float32 (float64 for float64 inputs).

    Prefixes are normalised in float32. With half-precision inputs, or under autocast, each normalised prefix is rounded once
    before it is multiplied, and gradients are float32 until the gradients of all widths are added.

    Columns beyond the largest width get no gradient. So include D, the full width, unless embeddings are always cut.

    Example:
        widths = [64, 128, image.shape[1]]
        loss = mb.matryoshka_clip_loss(image, text, logit_scale, widths=widths, weights=[0.25, 0.5, 1.0])

    Args:
        image: (N, D) embeddings; they need no unit length, because every prefix is normalised.
        text: (N, D) embeddings; row i belongs to row i of `image`.
        logit_scale: the inverse temperature, already exponentiated: a float, or a tensor of one element.
        widths: widths of the prefixes; all different, none more than D, which should be one of them.
        weights: one number for each width (default: all 1).
        symmetric: the mean of both directions, as in `clip_loss`; False for image to text alone, as in `info_nce_loss`.
        ids: see `clip_loss`.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    checks.embeddings(image, text, ("image", "text"), same_rows=True)
    checks.number(logit_scale, "logit_scale", image)
    weighted = _weights_by_width(widths, weights, image)
    options: dict[str, Any] = {"ids": ids, "reduction": reduction, "group": group, "backend": backend}
    scale = number(logit_scale, "logit_scale", image, shared=True)
    # Converted once, so that the gradients of all widths are added in float32.
    images, texts = (side.to(torch.promote_types(side.dtype, torch.float32)) for side in (image, text))
    nothing = _agree_on_weights(list(weighted.values()), image, text, group)
    losses = []
    with _products_in(image):
        for width, weight in weighted.items():
            x, y = (F.normalize(side[:, :width], dim=1) for side in (images, texts))
            loss = clip_loss(x, y, scale, **options) if symmetric else info_nce_loss(x, y, scale=scale, **options)
            losses.append(weight * loss.double())
    return (torch.stack(losses).sum(0) + nothing).to(loss.dtype)


def _agree_on_weights(weights: list[float], image: Tensor, text: Tensor, group: Group) -> Tensor:  # ()
    """0, once all ranks have the same weights. The losses of the widths compare everything else."""
    nothing = torch.zeros((), dtype=torch.float64, device=image.device)
    if group is None:
        return nothing
    loss = describe_loss(group, "matryoshka_clip_loss", weights=weights)
    return sum_over_ranks(nothing.reshape(1), execution(image, text, group=group, loss=loss))[0]


def _products_in(image: Tensor) -> Any:
    """Float32 prefixes of half-precision embeddings are multiplied in the dtype of the embeddings."""
    if image.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(autocast_device(image), image.dtype)
    return nullcontext()


def _weights_by_width(widths: Any, weights: Any, x: Tensor) -> dict[int, float]:
    """The weight of each width, from the least width to the largest, checked."""
    if not _is_list_of(Integral, widths):
        raise TypeError(f"widths must be a sequence of integers, got {widths!r}")
    D, sizes = x.shape[1], [int(width) for width in widths]
    if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1 or max(sizes) > D:
        raise ValueError(f"widths must be different integers from 1 to {D}, the width of the embeddings, got {sizes}")
    if weights is None:
        return dict.fromkeys(sorted(sizes), 1.0)
    if not _is_list_of(Real, weights):
        raise TypeError(f"weights must be None or a sequence of numbers, got {weights!r}")
    if len(weights) != len(sizes):
        raise ValueError(f"weights must be {len(sizes)} numbers, one for each width, got {len(weights)}")
    return dict(sorted(zip(sizes, map(float, weights), strict=True)))


def _is_list_of(kind: type, value: Any) -> bool:
    """Whether the value is a list, tuple or array of such numbers, NumPy's included. Booleans are no numbers."""
    if isinstance(value, (str, Tensor)) or not isinstance(value, Collection):
        return False
    return all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)
