"""The three pairwise operations: check the arguments, settle the precision, hand over to an operator.

s_ij = scale·⟨x_i, y_j⟩ + row_bias_i + col_bias_j is never held; memory grows with N + M, not with N·M.

Precision, the same for all of them: half-precision inputs are used as they are; float32 inputs follow
`torch.get_float32_matmul_precision()`; under autocast, float32 inputs are multiplied in the autocast type, as in any matrix
product there. Sums, exponentials and statistics are float32 (float64 for float64 inputs) in every case, autocast or not.
The products ⟨x_i, y_j⟩ themselves have to be within float32's range, before the scale; everything else may be any size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import operators, validation
from megabatch.arguments import number, offsets
from megabatch.operators.logsumexp import APART, KEPT, SKIPPED
from megabatch.tiles.precision import SOFTPLUS_IS_IDENTITY


def pairwise_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    row_bias: Tensor | None = None,  # (N,)
    col_bias: Tensor | None = None,  # (M,)
    *,
    exclude: str | Sequence[Tensor] | None = None,
    group: Any = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # (N,), (M,)
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
        group: the processes that share the batch, a process group or a mesh of one dimension; None for this one alone. x and
            y are this rank's rows and columns; sums are over those of all ranks, which all have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    precision = validation.embeddings(x, y)
    validation.exclude(exclude, x, y)
    for name, value, like, side in (("row_bias", row_bias, x, "x"), ("col_bias", col_bias, y, "y")):
        validation.offsets(value, name, like, side)
    route = validation.group(group)
    backend = validation.backend(backend, precision, x.device)
    row_ids, col_ids = (None, None) if exclude is None or isinstance(exclude, str) else exclude
    row, col, *_ = operators.apply(
        operators.logsumexp,
        x,
        y,
        number(scale, "scale", x),
        offsets(row_bias, x),
        offsets(col_bias, x),
        row_ids,
        col_ids,
        SKIPPED if exclude == "diagonal" else KEPT,
        precision,
        backend,
        route,
    )
    return row, col


def pairwise_softplus(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    *,
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # (N,)
    """Row sums of the softplus of all pairwise similarities.

    Same as, without the matrix: `F.softplus(scale * x @ y.T + bias).sum(1)`. Differentiable once, in all four.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings, of the same dtype.
        scale: a float, or a tensor of one element.
        bias: a float, or a tensor of one element.
        group: the processes that share the batch, a process group or a mesh of one dimension; None for this one alone. x and
            y are this rank's rows and columns; sums are over those of all ranks, which all have to run backward.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    precision = validation.embeddings(x, y)
    route = validation.group(group)
    backend = validation.backend(backend, precision, x.device)
    row_bias = number(bias, "bias", x).expand(x.shape[0])
    total: Tensor = operators.apply(operators.softplus, x, y, number(scale, "scale", x), row_bias, precision, backend, route)
    return total


@torch.no_grad()
def pairwise_rank(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    *,
    group: Any = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # (N,), (N,) int64
    """The rank of each matching pair (x_i, y_i) in its row and in its column of similarities; 0 is best. No gradient.

    Same as, without the matrix: the position of i in `(x @ y.T)[i]`, sorted from large to small, and in column i. Of
    similarities that are equal up to rounding the one with the smaller index comes first, so that embeddings which are all
    alike rank by chance, not perfectly; NaN ranks last. Recall@k is `(rank < k).float().mean()`.

    Args:
        x: (N, D) embeddings.
        y: (N, D) embeddings, of the same dtype; row i belongs to row i of x.
        group: the processes that share the batch, a process group or a mesh of one dimension; None for this one alone. x and
            y are this rank's pairs, ranked among those of all ranks.
        backend: "auto", "eager" or "triton". Changes the speed, never the result.
    """
    precision = validation.embeddings(x, y, same_rows=True)
    route = validation.group(group)
    backend = validation.backend(backend, precision, x.device)
    row_rank, col_rank = operators.rank(x, y, precision, backend, route)
    return row_rank, col_rank


def matched_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: float | Tensor,
    *,
    names: tuple[str, str, str],
    ids: Tensor | None = None,  # (N,)
    group: Any = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (N,), (N,), ()
    """For losses: (log Σ_{j≠i} exp s_ij, log Σ_{j≠i} exp s_ji, s_ii, share); equal ids are left out of the sums as well.

    With the matching pair apart, a cross-entropy is softplus(row − match): it cannot be negative, and neither it nor its
    gradient loses digits when the pair is almost certain. A sum over the pairs here, times `share`, is this rank's part of the
    mean over the batch: the mean over ranks is the mean over pairs, however many of them each rank has.
    """
    precision, backend, route = matched(x, y, ids, names, group, backend)
    row, col, match, share, *_ = operators.apply(
        operators.logsumexp, x, y, number(scale, names[2], x), None, None, ids, ids, APART, precision, backend, route
    )
    return row, col, match, share


def matched_sigmoid(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    names: tuple[str, str, str, str],
    ids: Tensor | None = None,  # (N,)
    ids_are_positives: bool = False,
    group: Any = None,
    backend: str = "auto",
) -> Tensor:  # ()
    """For losses: Σ_i [softplus(−s_ii) + Σ_{j≠i} softplus(s_ij)] / N; pairs with equal ids are left out of the inner sum.

    If equal ids are positives, they are in it instead, with −s_ij in place of s_ij. With a group, this rank's part of it,
    scaled so that the mean over ranks is the whole.
    """
    precision, backend, route = matched(x, y, ids, names[:3], group, backend)
    scale, row_bias = number(scale, names[2], x), number(bias, names[3], x).expand(x.shape[0])
    unseen = operators.transforms_are_active()  # under a transform, who will ask for a gradient cannot be seen
    needs = [torch.is_grad_enabled() and (unseen or tensor.requires_grad) for tensor in (x, y, scale, row_bias)]
    loss: Tensor = operators.apply(
        operators.sigmoid_mean, x, y, scale, row_bias, ids, ids_are_positives, precision, backend, route, needs
    )[0]
    return loss


def cross_entropy(negatives: Tensor, match: Tensor) -> Tensor:
    """For losses: log(1 + exp(negatives − match)), −log of the match's probability; never negative.

    NaN where the match is +inf, as in a dense cross-entropy. The difference alone would call such a pair certain, and a run
    whose products overflow would look perfect.
    """
    overflow = match.detach().clamp_min(0.0) * 0.0  # NaN where the match is +inf, elsewhere 0
    return exact_softplus(negatives - match + overflow)


def part_of_mean(losses: Tensor, share: Tensor) -> Tensor:  # (...), () → ()
    """For losses: Σ losses · share, this rank's part of the mean; added up in float64 and rounded once."""
    return (losses.sum(dtype=torch.float64) * share).to(losses.dtype)


def exact_softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)) to the last digit of float64, where PyTorch's default stops at nine."""
    return F.softplus(values, threshold=SOFTPLUS_IS_IDENTITY)


def matched(
    x: Tensor, y: Tensor, ids: Tensor | None, names: tuple[str, str, str], group: Any, backend: str
) -> tuple[str, str, str]:
    """(precision, backend, group) of an operation on pairs, its arguments checked."""
    precision = validation.embeddings(x, y, names[:2], same_rows=True)
    validation.ids(ids, "ids", x, names[0])
    route = validation.group(group)
    if not route:  # over a group one rank may have none; that all have none is found out together
        validation.at_least_one_pair(x, names[0])
    return precision, validation.backend(backend, precision, x.device), route
