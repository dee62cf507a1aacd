"""The pairwise operations as PyTorch operators: forward, backward, and the shapes that torch.compile needs.

An operator describes a block, lets a backend walk its tiles, and finishes what the walk leaves (`gradients.py`). Arguments
are tensors, strings and booleans that were checked before they come here.
"""

from megabatch.operators.logsumexp import logsumexp
from megabatch.operators.matching import matching
from megabatch.operators.rank import rank
from megabatch.operators.row_logsumexp import row_logsumexp
from megabatch.operators.sigmoid import sigmoid_mean
from megabatch.operators.soft_cross_entropy import soft_cross_entropy
from megabatch.operators.softplus import softplus
from megabatch.operators.total import total

__all__ = ["logsumexp", "matching", "rank", "row_logsumexp", "sigmoid_mean", "soft_cross_entropy", "softplus", "total"]
