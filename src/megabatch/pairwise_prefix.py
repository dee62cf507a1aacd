"""Similarities at several widths of the embeddings.

As in `pairwise`, which says how precise everything is: check the arguments, settle the precision, hand over to an operator.
"""

from typing import Any

from torch import Tensor

from megabatch import operators
from megabatch.arguments import number
from megabatch.pairwise import matched


def matched_prefix_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: float | Tensor,
    widths: list[int],
    *,
    names: tuple[str, str, str],
    ids: Tensor | None = None,  # (N,)
    group: Any = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N, W), (N, W), (N, W), ()
    """For losses: what `matched_logsumexp` returns, of cosines between the first columns of x and y, at several widths.

    Args:
        x: (N, D) embeddings.
        y: (N, D) embeddings; row i belongs to row i of x.
        scale: a float, or a tensor of one element.
        widths: ascending.
        names: of x, y and scale, for messages.
        ids: pairs with equal ids are left out of the sums.
        group: the processes that share the batch.
        backend: "auto", "eager" or "triton".
    """
    precision, backend, route = matched(x, y, ids, names, group, backend)
    row, col, match, share, *_ = operators.apply(
        operators.prefix_logsumexp, x, y, number(scale, names[2], x), ids, widths, precision, backend, route
    )
    return row, col, match, share
