"""Formulas that several losses share, as PyTorch operations on vectors of N rows.

Logsumexps exclude the matching pair, so the cross-entropy is softplus(logsumexp − match). It cannot be negative. Neither the
loss nor its gradient loses digits if the probability of the pair is close to 1.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megabatch.dispatch import Reduction
from megabatch.primitives import accumulator_dtype, exact_softplus, finite_or_zero


def cross_entropy(negatives: Tensor, match: Tensor, like: Tensor) -> Tensor:  # (N,), (N,)
    """Computes log(1 + exp(negatives − match)), which is −log of the probability of the match. It is never negative.

    Negatives and match are float64. Their difference is rounded to the loss dtype of the embeddings `like`, so that backward
    needs less memory.

    The result is NaN where the match is +inf, as in a dense cross-entropy. Without this, the loss of such a pair would be 0, so
    a run whose matmuls overflow would seem to have a perfect loss.
    """
    overflow = match.detach().clamp_min(0.0) * 0.0  # NaN where the match is +inf, elsewhere 0
    return exact_softplus((negatives - match + overflow).to(accumulator_dtype(like.dtype)))


def reduce_losses(
    directions: Sequence[Tensor],  # (N,) each
    mean_weight: Tensor,  # ()
    reduction: Reduction,
    like: Tensor,
) -> Tensor:  # () or (N,)
    """Takes the mean of the directions, then reduces the rows: to this rank's part of the mean, to the sum, or not at all.

    The sums are computed in float64 and rounded once to the loss dtype of the embeddings `like`.
    """
    losses, dtype = torch.stack(tuple(directions)), accumulator_dtype(like.dtype)
    if reduction == "none":
        return losses.mean(0).to(dtype)
    total = losses.sum(dtype=torch.float64) / len(losses)
    return (total * mean_weight if reduction == "mean" else total).to(dtype)


def log_add(terms: Sequence[Tensor], like: Tensor) -> Tensor:  # (N,)
    """Computes log Σ exp over vectors. It is −inf with gradient 0 where all of them are −inf, or if there are no vectors."""
    if not terms:
        return torch.full_like(like, -torch.inf)
    if len(terms) == 1:
        return terms[0]
    stacked = torch.stack(tuple(terms))
    base = finite_or_zero(stacked.detach().amax(0))
    return _logarithm((stacked - base).exp().sum(0), base)


def segment_logsumexp(s: Tensor, owner: Tensor, size: int) -> Tensor:  # (M,), (M,) → (size,)
    """Computes log Σ exp(s) over the entries of each owner."""
    peak = s.new_full((size,), -torch.inf).scatter_reduce(0, owner, s.detach(), "amax")
    base = finite_or_zero(peak)
    total = s.new_zeros(size).index_put((owner,), (s - base[owner]).exp(), accumulate=True)  # deterministic, even on CUDA
    return _logarithm(total, base)


def _logarithm(total: Tensor, base: Tensor) -> Tensor:
    nothing = total == 0
    return torch.where(nothing, -torch.inf, base + torch.where(nothing, 1.0, total).log())


def number_in_range(name: str, value: Any, expected: str, *, below: float = math.inf, at_most: float = math.inf) -> float:
    """Checks a number of at least 0, less than `below` and at most `at_most`. `expected` names this range in the message."""
    number = float(value) if isinstance(value, (float, Real)) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= at_most or number >= below:
        raise ValueError(f"{name} must be a number {expected}, got {value!r}")
    return number


def check_smoothing(value: Any, **excluding: Any) -> float:
    """Checks `label_smoothing` and returns it as a float.

    If it is above 0, the arguments in `excluding` must be None. They would exclude pairs, but smoothing averages over all keys.
    """
    if type(value) is float and value == 0.0:
        return value  # the default; the checks below would take 3 µs, which matters in a small step
    smoothing = number_in_range("label_smoothing", value, "from 0 to 1", at_most=1)
    for name, given in excluding.items():
        if smoothing > 0 and given is not None:
            raise ValueError(
                f"{name} must be None with label smoothing, whose mean is taken over all keys of the batch, got "
                f"{type(given).__name__}"
            )
    return smoothing
