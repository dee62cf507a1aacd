"""The Triton backend: the same functions as `eager`.

No kernel forms two tiles of similarities at once. Those of a guide are eager's, and whoever asks for them with
`backend="triton"` is told before it comes to that; of a student's and a teacher's, `triton_soft` takes what libraries formed.
"""

from megabatch.tiles.triton_backward import logsumexp_gradients, softplus_gradients, softplus_sums
from megabatch.tiles.triton_forward import logsumexp_statistics, row_statistics
from megabatch.tiles.triton_rank import rank_counts
from megabatch.tiles.triton_rows import finish_rows, matching_products
from megabatch.tiles.triton_soft import soft_gradients, soft_statistics

__all__ = [
    "finish_rows",
    "logsumexp_gradients",
    "logsumexp_statistics",
    "matching_products",
    "rank_counts",
    "row_statistics",
    "soft_gradients",
    "soft_statistics",
    "softplus_gradients",
    "softplus_sums",
]
