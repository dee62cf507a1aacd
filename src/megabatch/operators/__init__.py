"""The pairwise operations as PyTorch operators: forward, backward, and the shapes that torch.compile needs.

An operator describes a block, runs a backend's pass over its tiles, and turns the sums of the pass into results
(`gradients.py`). Arguments are tensors, strings and booleans, and were checked before. Operators with a derivative are
called by `apply`.
"""

from megabatch.operators.autograd import apply
from megabatch.operators.logsumexp import logsumexp, soft_cross_entropy, symmetric_logsumexp
from megabatch.operators.ranking import rank, topk
from megabatch.operators.rowwise import matching, positives, total
from megabatch.operators.softplus import sigmoid_loss, softplus

__all__ = [
    "apply",
    "logsumexp",
    "matching",
    "positives",
    "rank",
    "sigmoid_loss",
    "soft_cross_entropy",
    "softplus",
    "symmetric_logsumexp",
    "topk",
    "total",
]
