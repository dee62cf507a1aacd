"""The pairwise operations: check the arguments, decide how the call runs, hand over to an operator.

s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j is never held; memory grows with N + M, not with N·M.

Precision, the same for all of them: half-precision inputs are used as they are; float32 inputs follow
`torch.get_float32_matmul_precision()`; under autocast, float32 inputs are multiplied in the autocast type, as in any matrix
product there. Sums, exponentials and statistics are float32 (float64 for float64 inputs) in every case, autocast or not.
The products ⟨x_i, y_j⟩ themselves have to be within float32's range, before the scale; everything else may be any size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch import checks
from megabatch.primitives import (
    KEPT,
    SKIPPED,
    Backend,
    Group,
    execution,
    logsumexp,
    number,
    rank,
    softplus,
    symmetric_logsumexp,
)


class LogSumExp(NamedTuple):
    """Logsumexps of the rows, (N,), and of the columns, (M,)."""

    row: Tensor
    col: Tensor


class PairRanks(NamedTuple):
    """Ranks of the matching pairs in their rows and in their columns, (N,) int64 each; 0 is best."""

    row: Tensor
    col: Tensor


def pairwise_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    row_bias: Tensor | None = None,  # (N,)
    col_bias: Tensor | None = None,  # (M,)
    *,
    exclude: str | Sequence[Tensor] | None = None,
    group: Group = None,
    backend: Backend = "auto",
) -> LogSumExp:  # (N,), (M,)
    """Row and column logsumexps of all pairwise similarities, both from one pass over them.

    Same as, without the matrix:

        s = scale * x @ y.T + row_bias[:, None] + col_bias
        return s.logsumexp(1), s.logsumexp(0)

    Differentiable once, in x, y, scale and the offsets. A row or column with nothing left in it is −inf, with gradient 0.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        scale: a float, or a tensor of one element.
        row_bias: (N,) added to every similarity of a row.
        col_bias: (M,) added to every similarity of a column.
        exclude: None; "diagonal", to leave out the pairs (i, i); or a pair of integer vectors, ids of the rows (N,) and of
            the columns (M,), to leave out the pairs whose ids are equal.
        group: process group, or mesh of one dimension, to share the batch over (default: this process only). x and y are this
            rank's rows and columns. Sums are over the rows and columns of all ranks, and all ranks have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    run = execution(x, y, group=group, backend=backend)
    checks.exclude(exclude, x, y)
    for name, value, like, side in (("row_bias", row_bias, x, "x"), ("col_bias", col_bias, y, "y")):
        checks.offsets(value, name, like, side)
    sums = logsumexp(
        x,
        y,
        number(scale, "scale", x),
        run,
        row_bias=row_bias,
        col_bias=col_bias,
        ids=(None, None) if exclude is None or isinstance(exclude, str) else (exclude[0], exclude[1]),
        diagonal=SKIPPED if exclude == "diagonal" else KEPT,
        columns=True,
    )
    return LogSumExp(sums.row, sums.col)


def pairwise_symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: float | Tensor = 1.0,
    *,
    exclude: str | Tensor | None = "diagonal",
    group: Group = None,
    backend: Backend = "auto",
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
        group: process group, or mesh of one dimension, to share the batch over (default: this process only). z are this
            rank's rows. Sums are over the rows of all ranks, and all ranks have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    run = execution(z, z, ("z", "z"), group=group, backend=backend)
    checks.exclude_from_symmetric(exclude, z)
    ids = exclude if isinstance(exclude, Tensor) else None
    return symmetric_logsumexp(z, number(scale, "scale", z), run, ids=ids, diagonal=KEPT if exclude is None else SKIPPED)


def pairwise_softplus(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    *,
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # (N,)
    """Row sums of the softplus of all pairwise similarities.

    Same as, without the matrix: `F.softplus(scale * x @ y.T + bias).sum(1)`. Differentiable once, in all four.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        scale: a float, or a tensor of one element.
        bias: a float, or a tensor of one element.
        group: process group, or mesh of one dimension, to share the batch over (default: this process only). x and y are this
            rank's rows and columns. Sums are over the rows and columns of all ranks, and all ranks have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    run = execution(x, y, group=group, backend=backend)
    return softplus(x, y, number(scale, "scale", x), number(bias, "bias", x), run)


@torch.no_grad()
def pairwise_rank(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    *,
    group: Group = None,
    backend: Backend = "auto",
) -> PairRanks:  # (N,), (N,) int64
    """The rank of each matching pair (x_i, y_i) in its row and in its column of similarities; 0 is best. No gradient.

    Same as, without the matrix: the position of i in `(x @ y.T)[i]`, sorted from large to small, and in column i. Of
    similarities that are equal up to rounding the one with the smaller index comes first, so that embeddings which are all
    alike rank by chance, not perfectly; NaN ranks last. Recall@k is `(rank < k).float().mean()`.

    Args:
        x: (N, D) embeddings.
        y: (N, D) embeddings, of the same dtype; row i belongs to row i of x.
        group: process group, or mesh of one dimension, to share the batch over (default: this process only). x and y are this
            rank's pairs; ranks are among the pairs of all ranks.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    return PairRanks(*rank(x, y, execution(x, y, same_rows=True, group=group, backend=backend)))
