"""The pairwise operations as PyTorch operators, with a forward and a backward function and the shapes for torch.compile.

An operator describes a block, runs one pass of an engine over its tiles, and converts the sums of the pass to results.
Its arguments are tensors, strings and booleans, which the caller has checked. `apply` calls operators with a derivative.
"""

from megabatch.operators.autograd import apply
from megabatch.operators.ranking import rank, topk
from megabatch.operators.rowwise import matching, positives, total
from megabatch.operators.two_pass import logsumexp, soft_cross_entropy, softplus, symmetric_logsumexp

__all__ = [
    "apply",
    "logsumexp",
    "matching",
    "positives",
    "rank",
    "soft_cross_entropy",
    "softplus",
    "symmetric_logsumexp",
    "topk",
    "total",
]
