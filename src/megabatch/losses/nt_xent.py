"""The loss of SimCLR: two views of each sample find each other among all views of all samples."""

from torch import Tensor

from megabatch.arguments import Backend, Group, number
from megabatch.losses.sums import APART, Reduction, cross_entropy, exact_softplus, logsumexp, pairs, reduced
from megabatch.pairwise import pairwise_symmetric_logsumexp


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

    Args:
        z1: (N, D) embeddings of one view, usually of unit length.
        z2: (N, D) embeddings of the other; row i is of the same sample as row i of `z1`.
        scale: the inverse temperature: a float, or a tensor of one element.
        reduction: "mean", "sum" or "none"; see `clip_loss`.
        group: process group to share the batch over, as in `clip_loss`.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    # Views of other samples: those of the other kind, from one pass over z1·z2ᵀ, and those of the own kind.
    run = pairs(z1, z2, ("z1", "z2"), group=group, reduction=reduction, backend=backend)
    factor = number(scale, "scale", z1, shared=True)
    across1, across2, match, share = logsumexp(z1, z2, factor, run, diagonal=APART, columns=True)
    within1, within2 = (pairwise_symmetric_logsumexp(z, factor, group=group, backend=backend) for z in (z1, z2))
    losses = [_cross_entropy(across1, within1, match), _cross_entropy(across2, within2, match)]
    return reduced(losses, share, reduction)


def _cross_entropy(first: Tensor, second: Tensor, match: Tensor) -> Tensor:
    """log(1 + exp(first − match) + exp(second − match)), of two terms that are never negative; −inf counts as nothing."""
    before = cross_entropy(first, match)
    return before + exact_softplus(second - match - before)
