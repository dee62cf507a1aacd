"""The loss of SimCLR: two views of each sample find each other among all views of all samples."""

from torch import Tensor

from megabatch.losses.formulas import cross_entropy, reduced
from megabatch.primitives import (
    APART,
    Backend,
    Group,
    Reduction,
    exact_softplus,
    is_small,
    logsumexp,
    number,
    pairs,
    small_nt_xent_loss,
    symmetric_logsumexp,
)


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: float | Tensor = 10.0,
    *,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # () or (N,)
    """The normalized-temperature cross-entropy of SimCLR, without the 2N×2N matrix of logits, each product formed once.

    Same value and gradients as

        z = torch.cat((z1, z2))
        logits = (scale * z @ z.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z1)))

    Never negative, differentiable once, float32 (float64 for float64 inputs). See `pairwise_logsumexp` for the precision.

    Example:
        loss = mb.nt_xent_loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), scale=10.0)

    Args:
        z1: (N, D) embeddings of one view, usually of unit length.
        z2: (N, D) embeddings of the other view; row i is of the same sample as row i of `z1`.
        scale: the inverse temperature: a float, or a tensor of one element.
        reduction: "mean", "sum", or "none" for one value per sample, (N,), the mean of its two views. "sum" is N times the
            mean. See `clip_loss`.
        group: see `clip_loss`.
        backend: see `clip_loss`.
    """
    # Negatives are views of other samples: of the other kind, from one pass over z1·z2ᵀ, and of the same kind.
    run = pairs(z1, z2, ("z1", "z2"), reduction=reduction, group=group, backend=backend)
    small = is_small(z1, run, reduction, views=True, tiled=True)
    factor = number(scale, "scale", z1, shared=not small)
    if small:
        return small_nt_xent_loss(z1, z2, factor, run, reduction=reduction)
    across1, across2, match, share = logsumexp(z1, z2, factor, run, diagonal=APART, columns=True)
    within1, within2 = (symmetric_logsumexp(z, factor, run) for z in (z1, z2))
    losses = [_cross_entropy(across1, within1, match), _cross_entropy(across2, within2, match)]
    return reduced(losses, share, reduction)


def _cross_entropy(first: Tensor, second: Tensor, match: Tensor) -> Tensor:
    """log(1 + exp(first − match) + exp(second − match)), as two terms that are never negative; −inf counts as nothing."""
    before = cross_entropy(first, match)
    return before + exact_softplus(second - match - before)
