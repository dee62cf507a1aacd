"""The Triton backend: the same functions as `eager`."""

from megabatch.tiles.triton_backward import logsumexp_gradients, softplus_gradients, softplus_sums
from megabatch.tiles.triton_forward import logsumexp_statistics
from megabatch.tiles.triton_rank import rank_counts

__all__ = ["logsumexp_gradients", "logsumexp_statistics", "rank_counts", "softplus_gradients", "softplus_sums"]
