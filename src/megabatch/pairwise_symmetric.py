"""Rows against themselves: the pairwise operation whose matrix is symmetric, so that each of its products is formed once.

As in `pairwise`, which says how precise everything is: check the arguments, settle the precision, hand over to an operator.
"""

from typing import Any

from torch import Tensor

from megabatch import operators, validation
from megabatch.arguments import number
from megabatch.operators.symmetric_logsumexp import ALL, EQUAL_IDS, OTHERS
from megabatch.tiles.backends import EAGER


def pairwise_symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: float | Tensor = 1.0,
    *,
    exclude: str | Tensor | None = "diagonal",
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # (N,)
    """Row logsumexps of the similarities of all rows with one another, each product formed once for both of its rows.

    Same as, without the matrix:

        s = scale * z @ z.T
        return s.fill_diagonal_(-torch.inf).logsumexp(1)

    and half the work of `pairwise_logsumexp(z, z, scale, exclude="diagonal")[0]`. Differentiable once, in z and scale. A row
    with nothing left in it is −inf, with gradient 0.

    Args:
        z: (N, D) embeddings.
        scale: a float, or a tensor of one element.
        exclude: "diagonal", to leave out every row's similarity with itself; a vector of integers (N,), to leave out all pairs
            whose integers are equal, itself among them; or None.
        group: the processes that share the batch, a process group or a mesh of one dimension; None for this one alone. z are
            this rank's rows; sums are over those of all ranks, which all have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    precision = validation.embeddings(z, z, ("z", "z"))
    validation.exclude_from_symmetric(exclude, z)
    route = validation.group(group)
    backend = validation.backend(backend, precision, z.device)
    ids = exclude if isinstance(exclude, Tensor) else None
    pairs = ALL if exclude is None or ids is not None else OTHERS
    row: Tensor = operators.apply(
        operators.symmetric_logsumexp, z, number(scale, "scale", z), ids, pairs, precision, backend, route
    )[0]
    return row


def positive_similarities(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor,
    *,
    group: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (N,), (N,), ()
    """For losses: (mean of s_ij over all other rows j of i's label, how many, ids that only sole partners share, share).

    In O(N·D). The mean of none is 0. Excluding `ids` from a sum leaves out the row itself, and its positive where it has just
    one. A sum over the rows here that have a positive, times `share`, is this rank's part of the mean over all such rows.
    """
    precision = validation.embeddings(z, z, ("z", "z"))
    route = validation.group(group)
    mean, count, ids, share = operators.apply(operators.positives, z, number(scale, "scale", z), labels, precision, route)
    return mean, count, ids, share


def positives_logsumexp(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor,
    *,
    group: Any = None,
) -> Tensor:  # (N,)
    """For losses: log Σ exp s_ij over all other rows j of i's label; −inf where there are none.

    Rows are sorted by label, and only tiles near the diagonal are formed: Σ n²·D operations for labels of n rows. In PyTorch
    operations on every device; on CUDA the host waits once to learn where labels begin.
    """
    precision = validation.embeddings(z, z, ("z", "z"))
    route = validation.group(group)
    row: Tensor = operators.apply(
        operators.symmetric_logsumexp, z, number(scale, "scale", z), labels, EQUAL_IDS, precision, EAGER, route
    )[0]
    return row
