"""The public operations on all pairwise logits. Each function checks its arguments and calls a primitive.

The logits are s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j. They are never stored as a matrix, so memory grows with N + M
instead of N·M.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Group
from megabatch.primitives import (
    KEPT,
    SKIPPED,
    accumulator_dtype,
    execution,
    logsumexp,
    number,
    rank,
    softplus,
    symmetric_logsumexp,
    topk,
)


class LogSumExp(NamedTuple):
    """The logsumexps of the rows, (N,), and of the columns, (M,)."""

    row: Tensor
    col: Tensor


class PairRanks(NamedTuple):
    """The retrieval ranks of the matching pairs in their rows and in their columns, (N,) int64 each. Rank 0 is best."""

    row: Tensor
    col: Tensor


class TopK(NamedTuple):
    """The largest dot products of each row, (N, k), and their columns, (N, k) int64. Column j is row j of y."""

    values: Tensor
    indices: Tensor


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
    """Computes the row and column logsumexps of all pairwise logits in one pass.

    Equivalent PyTorch code, which stores the matrix:

        s = scale * x @ y.T + row_bias[:, None] + col_bias
        return s.logsumexp(1), s.logsumexp(0)

    The result can be differentiated once with respect to x, y, scale and the biases. The logsumexp of a row or column without
    pairs is −inf, and its gradient is 0.

    All operations and losses have the same precision. Matmuls use half-precision inputs as they are. float32 inputs follow
    `torch.get_float32_matmul_precision()`. Under autocast they are cast to the autocast dtype, as in any matmul. Sums and
    exponentials are always float32, or float64 for float64 inputs. The dot products ⟨x_i, y_j⟩ before the scale must be within
    the range of float32.

    Examples:
        ```python
        row, col = mb.pairwise_logsumexp(x, y, 20.0, exclude="diagonal")
        ```

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        scale: a float, or a tensor of one element.
        row_bias: (N,) added to every logit of a row.
        col_bias: (M,) added to every logit of a column.
        exclude: None; "diagonal" to exclude the pairs (i, i); or (row ids, column ids), integers of shapes (N,) and (M,), to
            exclude pairs with equal ids.
        group: see `clip_loss`. x and y are this rank's rows and columns. Sums are over the rows and columns of all ranks.
        backend: see `clip_loss`.
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
    dtype = accumulator_dtype(x.dtype)
    return LogSumExp(sums.row.to(dtype), sums.col.to(dtype))


def pairwise_symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: float | Tensor = 1.0,
    *,
    exclude: str | Tensor | None = "diagonal",
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # (N,)
    """Computes the row logsumexps of the logits of all rows against one another.

    Each dot product is computed once and used for both of its rows. Equivalent PyTorch code, which stores the matrix:

        s = scale * z @ z.T
        return s.fill_diagonal_(-torch.inf).logsumexp(1)

    This takes half the work of `pairwise_logsumexp(z, z, scale, exclude="diagonal").row`. The result can be differentiated once
    with respect to z and scale. The logsumexp of a row without pairs is −inf, and its gradient is 0.

    Examples:
        ```python
        row = mb.pairwise_symmetric_logsumexp(z, 10.0, exclude=labels)
        ```

    Args:
        z: (N, D) embeddings.
        scale: a float, or a tensor of one element.
        exclude: "diagonal" to exclude the pairs (i, i); integers of shape (N,) to exclude all pairs with equal integers, which
            include the pairs (i, i); or None.
        group: see `clip_loss`. z has this rank's rows. Sums are over the rows of all ranks.
        backend: see `clip_loss`.
    """
    run = execution(z, z, ("z", "z"), group=group, backend=backend)
    checks.exclude_from_symmetric(exclude, z)
    ids = exclude if isinstance(exclude, Tensor) else None
    row = symmetric_logsumexp(z, number(scale, "scale", z), run, ids=ids, diagonal=KEPT if exclude is None else SKIPPED)
    return row.to(accumulator_dtype(z.dtype))


def pairwise_softplus(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    *,
    group: Group = None,
    backend: Backend = "auto",
) -> Tensor:  # (N,)
    """Computes the row sums of the softplus of all pairwise logits.

    Equivalent PyTorch code, which stores the matrix:

        return F.softplus(scale * x @ y.T + bias).sum(1)

    The result can be differentiated once with respect to x, y, scale and bias.

    Examples:
        ```python
        total = mb.pairwise_softplus(x, y, 10.0, -10.0)
        ```

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        scale: a float, or a tensor of one element.
        bias: a float, or a tensor of one element.
        group: see `clip_loss`. x and y are this rank's rows and columns. Sums are over the columns of all ranks.
        backend: see `clip_loss`.
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
    """Computes the retrieval rank of each matching pair (x_i, y_i) in its row and in its column.

    Rank 0 is best. There is no gradient. Equivalent PyTorch code, which stores the matrix:

        s = x @ y.T
        row = s.argsort(1, descending=True, stable=True).argsort(1).diagonal()
        col = s.argsort(0, descending=True, stable=True).argsort(0).diagonal()

    Dot products that are equal up to rounding are ordered by their index. So a model that maps all inputs to one embedding does
    not get perfect ranks. NaN ranks last.

    Examples:
        ```python
        recall_at_5 = (mb.pairwise_rank(image, text).row < 5).float().mean()
        ```

    Args:
        x: (N, D) embeddings.
        y: (N, D) embeddings, of the same dtype. Row i belongs to row i of x.
        group: see `clip_loss`. x and y are this rank's pairs. They are ranked among the pairs of all ranks.
        backend: see `clip_loss`.
    """
    return PairRanks(*rank(x, y, execution(x, y, same_rows=True, group=group, backend=backend)))


@torch.no_grad()
def pairwise_topk(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    k: int,
    *,
    exclude: str | Sequence[Tensor] | None = None,
    above: float | Tensor | None = None,  # or (N,)
    below: float | Tensor | None = None,  # or (N,)
    group: Group = None,
    backend: Backend = "auto",
) -> TopK:  # (N, k), (N, k) int64
    """Finds the k largest dot products ⟨x_i, y_j⟩ of each row, sorted, and their columns j.

    Ties go to the smaller j. There is no gradient. Equivalent PyTorch code, which stores the matrix:

        return (x @ y.T).sort(dim=1, descending=True, stable=True)[:, :k]

    If a row has fewer than k candidates, its last entries have the value −inf and the index −1. A dot product that is NaN is
    never chosen, and a row whose bound is NaN gets no columns. Values are float32, or float64 for float64 inputs. On a GPU, the
    kernels serve k up to M / 1024. For larger k, cuBLAS matmuls compute tiles in memory.

    Examples:
        ```python
        hard = mb.pairwise_topk(query, document, 8, exclude=(query_ids, document_ids), below=positive - 0.1).indices
        ```

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        k: the number of columns to find for each row, at most 1,024.
        exclude: None, "diagonal" or (row ids, column ids); see `pairwise_logsumexp`.
        above: a number, or one number for each row, (N,). Only dot products larger than this are chosen.
        below: a number, or one number for each row, (N,). Only dot products smaller than this are chosen.
        group: see `clip_loss`. x and y are this rank's rows and columns. The columns of all ranks are candidates. They are
            numbered in the order of ranks.
        backend: see `clip_loss`.
    """
    run = execution(x, y, group=group, backend=backend)
    checks.best(k)
    checks.exclude(exclude, x, y)
    for name, bound in (("above", above), ("below", below)):
        checks.bound(bound, name, x)
    values, indices = topk(
        x,
        y,
        k,
        run,
        ids=(None, None) if exclude is None or isinstance(exclude, str) else (exclude[0], exclude[1]),
        limit=None if below is None else largest_below(each_row(below, x)),
        diagonal=SKIPPED if exclude == "diagonal" else KEPT,
    )
    if above is not None:
        low = ~(values > each_row(above, x)[:, None])
        values, indices = values.masked_fill(low, -torch.inf), indices.masked_fill(low, -1)
    return TopK(values, indices)


def largest_below(bound: Tensor) -> Tensor:  # (N,)
    """Returns the largest number that is smaller than the bound, or −inf where the bound is NaN."""
    lowest = bound.new_full((), -torch.inf)
    return bound.nextafter(lowest).where(~bound.isnan(), lowest)


def each_row(bound: float | Tensor, x: Tensor) -> Tensor:  # (N,)
    """Returns a bound for each row, in the dtype of the dot products."""
    return torch.as_tensor(bound, device=x.device).to(accumulator_dtype(x.dtype)).reshape(-1).expand(len(x))
