"""The pairwise operations as PyTorch operators: forward, backward, and the shapes that torch.compile needs.

An operator describes a block, runs a backend's pass over its tiles, and turns the sums of the pass into results
(`gradients.py`). Arguments are tensors, strings and booleans, and were checked before. Operators with a derivative are
called by `apply`.
"""

from megabatch.operators.late import maxsim_logsumexp, maxsim_pairs
from megabatch.operators.logsumexp import logsumexp
from megabatch.operators.matching import matching
from megabatch.operators.positives import positives
from megabatch.operators.rank import rank
from megabatch.operators.sigmoid import sigmoid_loss
from megabatch.operators.small import (
    is_small,
    small_cross_entropy,
    small_nt_xent_loss,
    small_sigmoid_loss,
    small_sup_con_loss,
)
from megabatch.operators.soft_cross_entropy import soft_cross_entropy
from megabatch.operators.softplus import softplus
from megabatch.operators.symmetric_logsumexp import symmetric_logsumexp
from megabatch.operators.topk import topk
from megabatch.operators.total import total
from megabatch.operators.transforms import apply, transforms_are_active

__all__ = [
    "apply",
    "is_small",
    "logsumexp",
    "matching",
    "maxsim_logsumexp",
    "maxsim_pairs",
    "positives",
    "rank",
    "sigmoid_loss",
    "small_cross_entropy",
    "small_nt_xent_loss",
    "small_sigmoid_loss",
    "small_sup_con_loss",
    "soft_cross_entropy",
    "softplus",
    "symmetric_logsumexp",
    "topk",
    "total",
    "transforms_are_active",
]
