"""The sums that losses are made of: each is one operator, with what only losses need of it.

With the matching pair kept apart, a cross-entropy is softplus(row − match). It cannot be negative, and neither it nor its
gradient loses digits when the pair is almost certain. `share` turns a sum over local pairs into this rank's part of a mean over
the batch: the mean over ranks is the mean over pairs, however many pairs each rank has.
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import operators, validation
from megabatch.arguments import Backend, Execution, Group, execution, number, offsets
from megabatch.operators.logsumexp import APART, KEPT, SKIPPED
from megabatch.operators.symmetric_logsumexp import EQUAL_IDS
from megabatch.tiles.backends import EAGER, TRITON
from megabatch.tiles.logsum import finite_or_zero
from megabatch.tiles.precision import FLOAT32, HALF_DTYPE, SOFTPLUS_IS_IDENTITY, accumulator_dtype, compute_precision

__all__ = ["APART", "KEPT", "SKIPPED"]

Reduction = Literal["mean", "sum", "none"]


class LogSums(NamedTuple):
    """What `logsumexp` returns."""

    row: Tensor  # (N,) log Σ_j exp s_ij
    col: Tensor  # (M,) log Σ_i exp s_ij, or (0,)
    match: Tensor  # (N,) s_ii where the diagonal is APART, or (0,)
    share: Tensor  # ()


class Ceiling(NamedTuple):
    """Pairs above it are left out: by their product, or by the product of a guide, another model's embeddings."""

    limit: Tensor  # (N,)
    guide_x: Tensor | None = None  # (N, E)
    guide_y: Tensor | None = None  # (M, E)


def pairs(
    x: Tensor,
    y: Tensor,
    names: tuple[str, str],
    *,
    ids: Tensor | None = None,
    group: Group = None,
    purpose: str = "",
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Execution:
    """Checks embeddings whose rows are pairs, and decides how the call runs."""
    validation.reduction(reduction)
    run = execution(x, y, names, same_rows=True, group=group, purpose=purpose, backend=backend)
    validation.ids(ids, "ids", x, names[0])
    if not run.group:  # over a group one rank may have no rows; the operator finds out together whether all have none
        validation.at_least_one_pair(x, names[0])
    return run


def logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    col_bias: Tensor | None = None,  # (M,)
    ids: tuple[Tensor | None, Tensor | None] = (None, None),  # (N,), (M,)
    diagonal: str = KEPT,
    columns: bool = False,
    ceiling: Ceiling | None = None,
) -> LogSums:
    """Logsumexps of the rows, and with `columns` of the columns; pairs with equal ids are left out."""
    limit = guide_x = guide_y = None
    guide_precision = FLOAT32
    if ceiling is not None:
        limit, guide_x, guide_y = ceiling
        if guide_x is not None and guide_y is not None:
            guide_precision = execution(guide_x, guide_y).precision
    row, col, match, share, *_ = operators.apply(
        operators.logsumexp,
        *(x, y, scale, None, offsets(col_bias, x), *ids),
        *(limit, guide_x, guide_y),
        columns,
        diagonal,
        *(run.precision, guide_precision, run.backend, run.group),
    )
    return LogSums(row, col, match, share)


def sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    run: Execution,
    *,
    ids: Tensor | None = None,  # (N,)
    ids_are_positives: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:  # () or (N,)
    """softplus(−s_ii) + Σ_{j≠i} softplus(s_ij) of each row; pairs with equal ids are left out of the inner sum.

    If equal ids are positives, they stay in it with −s_ij in place of s_ij.
    """
    row_bias = bias.expand(x.shape[0])
    if reduction == "none":
        total, match = operators.apply(operators.softplus, x, y, scale, row_bias, ids, ids_are_positives, True, *run)
        losses: Tensor = total + exact_softplus(-match)
        return losses
    unseen = operators.transforms_are_active()  # under a transform, requires_grad does not say who asks for a gradient
    needs = [torch.is_grad_enabled() and (unseen or tensor.requires_grad) for tensor in (x, y, scale, row_bias)]
    mean = reduction == "mean"
    loss: Tensor = operators.apply(operators.sigmoid_loss, x, y, scale, row_bias, ids, ids_are_positives, mean, *run, needs)[0]
    return loss


def soft_cross_entropy(
    student: tuple[Tensor, Tensor, Tensor],  # (N, D), (N, D), ()
    teacher: tuple[Tensor, Tensor, Tensor],  # (N, E), (N, E), ()
    runs: tuple[Execution, Execution],
) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """(cross-entropies of rows and of columns under the teacher's softmax, share)."""
    run, teacher_run = runs
    backend = TRITON if run.backend == teacher_run.backend == TRITON else EAGER
    how = run.precision, teacher_run.precision, backend, run.group
    row, col, share, *_ = operators.apply(operators.soft_cross_entropy, *student, *teacher, *how)
    return row, col, share


def matching_products(x: Tensor, y: Tensor, run: Execution) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """(⟨x_i, y_i⟩, how far rounding may have moved it, share), from the same rounded inputs as all other products."""
    products, noise, share = operators.apply(operators.matching, x, y, *run)
    return products, noise, share


@torch.no_grad()
def ceiling_above(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    margin: float | Tensor,  # or (N,)
    backend: Backend = "auto",
) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩ + margin, and what rounding may add: a key that occurs twice is not above itself."""
    products, noise, _ = matching_products(x, y, execution(x, y, same_rows=True, backend=backend))
    return products + margin + noise


def positive_similarities(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor,
    *,
    group: Group = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (N,), (N,), ()
    """(mean of s_ij over all other rows j of i's label, how many, ids that only sole partners share, share).

    In O(N·D). The mean of none is 0. Excluding `ids` from a sum leaves out the row itself, and its positive where it has just
    one. A sum over the rows here that have a positive, times `share`, is this rank's part of the mean over all such rows.
    """
    run = execution(z, z, ("z", "z"), group=group)
    mean, count, ids, share = operators.apply(
        operators.positives, z, number(scale, "scale", z), labels, run.precision, run.group
    )
    return mean, count, ids, share


def positives_logsumexp(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor,
    *,
    group: Group = None,
) -> Tensor:  # (N,)
    """log Σ exp s_ij over all other rows j of i's label; −inf where there are none.

    Rows are sorted by label, and only tiles near the diagonal are formed: Σ n²·D operations for labels of n rows. In PyTorch
    operations on every device; on CUDA the host waits once to learn where labels begin.
    """
    run = execution(z, z, ("z", "z"), group=group, backend=EAGER)
    row: Tensor = operators.apply(operators.symmetric_logsumexp, z, number(scale, "scale", z), labels, EQUAL_IDS, *run)[0]
    return row


def sum_over_ranks(values: Tensor, run: Execution) -> Tensor:  # (K,)
    """Differentiable."""
    total: Tensor = operators.apply(operators.total, values, run.group)
    return total


def cross_entropy(negatives: Tensor, match: Tensor) -> Tensor:
    """log(1 + exp(negatives − match)), −log of the match's probability; never negative.

    NaN where the match is +inf, as in a dense cross-entropy. The difference alone would call such a pair certain, and a run
    whose products overflow would look perfect.
    """
    overflow = match.detach().clamp_min(0.0) * 0.0  # NaN where the match is +inf, elsewhere 0
    return exact_softplus(negatives - match + overflow)


def reduced(directions: Sequence[Tensor], share: Tensor, reduction: Reduction) -> Tensor:  # (N,) each, () → () or (N,)
    """The mean of the directions; over the rows, this rank's part of the mean, the sum, or nothing.

    A number is added up in float64 and rounded once.
    """
    losses = torch.stack(tuple(directions))
    if reduction == "none":
        return losses.mean(0)
    total = losses.sum(dtype=torch.float64) / len(losses)
    return (total * share if reduction == "mean" else total).to(losses.dtype)


def exact_softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)) to the last digit of float64, where PyTorch's default stops at nine."""
    return F.softplus(values, threshold=SOFTPLUS_IS_IDENTITY)


def log_add(terms: Sequence[Tensor], like: Tensor) -> Tensor:  # (N,)
    """log Σ exp of some vectors; −inf, with gradient 0, where all of them are, or there are none."""
    if not terms:
        return torch.full_like(like, -torch.inf)
    if len(terms) == 1:
        return terms[0]
    stacked = torch.stack(tuple(terms))
    base = finite_or_zero(stacked.detach().amax(0))
    return _logarithm((stacked - base).exp().sum(0), base)


def segment_logsumexp(s: Tensor, owner: Tensor, size: int) -> Tensor:  # (M,), (M,) → (size,)
    """log Σ exp(s) over the entries of each owner."""
    peak = s.new_full((size,), -torch.inf).scatter_reduce(0, owner, s.detach(), "amax")
    base = finite_or_zero(peak)
    total = s.new_zeros(size).index_put((owner,), (s - base[owner]).exp(), accumulate=True)  # in a fixed order, on CUDA too
    return _logarithm(total, base)


def _logarithm(total: Tensor, base: Tensor) -> Tensor:
    nothing = total == 0
    return torch.where(nothing, -torch.inf, base + torch.where(nothing, 1.0, total).log())


def check_smoothing(value: Any, **unsupported: Any) -> float:
    """A number from 0 to 1, which is returned; and where it is not 0, nothing that leaves pairs out."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"label_smoothing must be a number from 0 to 1, got {value!r}")
    for name, other in unsupported.items():
        if float(value) > 0 and other is not None:
            raise ValueError(f"{name} must be None with label smoothing, whose mean is taken over all keys of the batch")
    return float(value)


def mean_similarity(
    x: Tensor,  # (N, D)
    others: Sequence[tuple[Tensor, Tensor | None]],  # keys (M, D), and what is subtracted from their similarities (M,)
    scale: Tensor,  # ()
    run: Execution,
) -> Tensor:  # (N,)
    """The mean of each row's similarities to all of the others, on all ranks: its similarity to their mean, in O(N·D).

    With the part ε of the target spread evenly, a cross-entropy becomes itself plus ε·(s_ii − mean_j s_ij).
    """
    rows, columns = _as_multiplied(x), [_as_multiplied(keys) for keys, _ in others]
    with torch.autocast(validation.autocast_device(x), enabled=False):
        sums = torch.stack([keys.sum(0) for keys in columns]).sum(0)
        subtracted = [sums.new_zeros(()) if log_q is None else log_q.sum() for _, log_q in others]
        count = sums.new_full((), sum(map(len, columns)))
        packed = torch.cat((sums, torch.stack((torch.stack(subtracted).sum(), count))))
        whole = sum_over_ranks(packed, run)
        return (rows @ (whole[:-2] * scale) - whole[-2]) / whole[-1]


def _as_multiplied(values: Tensor) -> Tensor:
    """As the products see them, in the type of sums; TF32's rounding, which does not matter to a mean, is left out."""
    half = HALF_DTYPE.get(compute_precision(values.dtype, validation.autocast_device(values)))
    return (values if half is None else values.to(half)).to(accumulator_dtype(values.dtype))
