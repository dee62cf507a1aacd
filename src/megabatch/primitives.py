"""The operations that the losses consist of. Each function runs one operator. `pairwise` has the public operations.

`execution` checks a call and determines its precision, engine and process group. `dispatch` chooses the engine and the path.
Logits are s_ij = scale·⟨x_i, y_j⟩ + offsets. A sum over the local pairs, multiplied by `mean_weight`, is this rank's part of
the mean over the batch. The mean of these parts over ranks is the mean over pairs, even if the numbers of pairs differ.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch import checks, dispatch, operators
from megabatch.dispatch import BOTH, LABELS, ROWS, SIGMOID, VIEWS, Backend, Execution, Group, Reduction
from megabatch.operators import dense, fused, one_gpu
from megabatch.operators.two_pass import ALL, EQUAL_IDS, KEPT, OTHERS, SEPARATE, SKIPPED
from megabatch.ring import ranks
from megabatch.tiles.block import (
    EAGER,
    FLOAT32,
    HALF_DTYPE,
    TRITON,
    accumulator_dtype,
    autocast_device,
    compute_precision,
    round_logits,
    widen_float16,
)
from megabatch.tiles.sums import exact_dtype, exact_softplus, finite_or_zero, less_match, to_exact

__all__ = ["KEPT", "SEPARATE", "SKIPPED", "accumulator_dtype", "autocast_device", "exact_dtype", "to_exact", "widen_float16"]


def execution(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    names: tuple[str, str] = ("x", "y"),
    *,
    same_rows: bool = False,
    group: Group = None,
    purpose: str = "",
    loss: str = "",
    backend: Backend = "auto",
) -> Execution:
    """Checks the two sides of a pairwise operation, its group and its backend. Returns how the call runs.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings.
        names: the names of x and y for error messages.
        same_rows: whether row i of x belongs to row i of y.
        group: the process group whose ranks share the batch (default: this process only).
        purpose: the purpose of the operation for error messages. It must be equal on all ranks.
        loss: the name and settings of the loss for error messages. They must be equal on all ranks.
        backend: "auto", "eager" or "triton".
    """
    checks.embeddings(x, y, names, same_rows=same_rows)
    precision = compute_precision(x)
    if backend == "auto":
        engine = EAGER if x.is_cpu else str(dispatch.default_engine(precision, x.device))
    else:
        checks.backend(backend, precision, x.device)
        engine = backend
    if group is None:
        return Execution(precision, engine, "")
    checks.group(group)
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    return Execution(precision, engine, ranks.address(process_group, purpose, loss))


def rank_in(run: Execution) -> int:
    """Returns the rank of this process in the group of a call."""
    return int(ranks.rank_at(run.group))


def describe_loss(group: Group, name: str, **settings: Any) -> str:
    """Returns the name of a loss and its settings, except settings that are 0, None or "mean".

    Ranks compare this text, because ranks with different settings would compute different losses. Without a group, the text is
    empty.
    """
    if group is None:
        return ""
    texts = [f"{key}={value}" for key, value in settings.items() if not (value in (None, 0) or value == "mean")]
    return f"{name}({', '.join(texts)})" if texts else name


def pairs(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    names: tuple[str, str],
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    reduction: Reduction = "mean",
    group: Group = None,
    purpose: str = "",
    loss: str = "",
    backend: Backend = "auto",
) -> Execution:
    """Checks a loss over pairs, in which row i of x belongs to row i of y, and returns its `execution`."""
    checks.reduction(reduction)
    run = execution(x, y, names, same_rows=True, group=group, purpose=purpose, loss=loss, backend=backend)
    if ids is not None:
        checks.ids(ids, "ids", x, names[0], two_columns=True)
    if not run.group:  # in a group, a rank may have no rows, but the operator raises an error if no rank has rows
        checks.at_least_one_pair(x, names[0])
    return run


def number(value: float | Tensor, name: str, x: Tensor, *, shared: bool = False) -> Tensor:  # ()
    """Returns a scale or bias as a 0-d tensor.

    A float becomes a tensor that is created on the device, because a copy from the CPU would synchronize with the GPU. A
    `shared` number of several operators has the `exact_dtype`. The gradients of the operators are then added before they are
    rounded, which matters if they nearly cancel.
    """
    dtype = exact_dtype(x.device) if shared else accumulator_dtype(x.dtype)
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (dtype, torch.float64) and value.device == x.device:
        return value  # the usual case; a conversion to the same dtype would take 4 µs
    checks.number(value, name, x)
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=x.device)
    value = value.reshape(())
    return value if value.dtype == torch.float64 else value.to(dtype)


def offsets(value: Tensor | None, x: Tensor) -> Tensor | None:
    """Casts one number for each row or column to the dtype of the logits. None stays None."""
    return None if value is None else value.to(accumulator_dtype(x.dtype))


class LogSums(NamedTuple):
    """The results of `logsumexp`. The first three have the `exact_dtype`, because losses subtract them from one another."""

    row: Tensor  # (N,) log Σ_j exp s_ij
    col: Tensor  # (M,) log Σ_i exp s_ij, or (0,)
    match: Tensor  # (N,) s_ii where the diagonal is SEPARATE, or (0,)
    mean_weight: Tensor  # ()


class Ceiling(NamedTuple):
    """An upper limit on the dot product of a pair. Pairs above it are excluded.

    A guide is another model. If there is one, the dot product of the guide's embeddings is compared.
    """

    limit: Tensor  # (N,)
    guide_x: Tensor | None = None  # (N, E)
    guide_y: Tensor | None = None  # (M, E)


def logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    row_bias: Tensor | None = None,  # (N,)
    col_bias: Tensor | None = None,  # (M,)
    ids: tuple[Tensor | None, Tensor | None] = (None, None),  # (N,), (M,) or (N, 2), (M, 2)
    diagonal: str = KEPT,
    columns: bool = False,
    ceiling: Ceiling | None = None,
) -> LogSums:
    """Computes the logsumexps of the rows, and with `columns` also of the columns. Pairs with equal ids are excluded."""
    limit, guide_x, guide_y = (None, None, None) if ceiling is None else ceiling
    guide_precision = FLOAT32 if guide_x is None or guide_y is None else execution(guide_x, guide_y).precision
    row, col, match, mean_weight, *_ = operators.apply(
        operators.logsumexp,
        *(x, y, scale, offsets(row_bias, x), offsets(col_bias, x), *ids),
        *(limit, guide_x, guide_y),
        columns,
        diagonal,
        *(run.precision, guide_precision, run.backend, run.group),
    )
    return LogSums(row, col, match, mean_weight)


def symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    ids: Tensor | None = None,  # (N,)
    diagonal: str = SKIPPED,
) -> Tensor:  # (N,)
    """Computes the logsumexps of the rows of z against all rows of z, in `exact_dtype`.

    With ids, pairs with equal ids are excluded, which includes the pair of a row with itself.
    """
    columns = ALL if ids is not None or diagonal == KEPT else OTHERS
    row: Tensor = operators.apply(operators.symmetric_logsumexp, z, scale, ids, columns, *run)[0]
    return row


# ----------------------------------------------------------------------------------------------------------------------
# Losses that compute their gradients in the forward pass, if `dispatch` chooses a module for the call. Each module has a
# function with the name of the function here.

_MODULES: dict[str, ModuleType] = {"dense": dense, "one_gpu": one_gpu, "fused": fused}


def cross_entropy_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: float | Tensor,
    run: Execution,
    *,
    columns: bool,
    name: str,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    reduction: Reduction = "mean",
    standard: bool = True,
) -> Tensor | None:  # ()
    """Computes the cross-entropy of the pairs (i, i) over the rows, or with `columns` the mean of both directions.

    Returns None if the call takes two passes (`dispatch.choose_module`).
    """
    kind = BOTH if columns else ROWS
    module = dispatch.choose_module(kind, x, run.backend, run.group, reduction, standard=standard)
    if not module:
        return None
    mean = reduction == "mean"
    loss: Tensor = _MODULES[module].cross_entropy_loss(x, y, number(scale, name, x), ids, run, columns=columns, mean=mean)
    return loss


def nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: float | Tensor,
    run: Execution,
    *,
    reduction: Reduction = "mean",
) -> Tensor | None:  # ()
    """Computes the loss of SimCLR. Returns None if the call takes two passes."""
    module = dispatch.choose_module(VIEWS, z1, run.backend, run.group, reduction)
    if not module:
        return None
    loss: Tensor = _MODULES[module].nt_xent_loss(z1, z2, number(scale, "scale", z1), run, mean=reduction == "mean")
    return loss


def sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: float | Tensor,
    run: Execution,
    *,
    reduction: Reduction = "mean",
) -> Tensor | None:  # ()
    """Computes the supervised contrastive loss of form "out". Returns None if the call takes two passes."""
    module = dispatch.choose_module(LABELS, z, run.backend, run.group, reduction)
    if not module:
        return None
    loss: Tensor = _MODULES[module].sup_con_loss(z, labels, number(scale, "scale", z), run, mean=reduction == "mean")
    return loss


def softplus(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, run: Execution) -> Tensor:  # (N,)
    """Computes the row sums of softplus(s)."""
    total: Tensor = operators.apply(operators.softplus, x, y, scale, bias.expand(x.shape[0]), None, False, False, *run)[0]
    return total


def sigmoid_loss(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    bias: Tensor,  # ()
    run: Execution,
    *,
    ids: Tensor | None = None,  # (N,) or (N, 2)
    ids_are_positives: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:  # () or (N,)
    """Computes softplus(−s_ii) + Σ_{j≠i} softplus(s_ij) of each row.

    Pairs with equal ids are excluded from the sum over j. With `ids_are_positives`, these pairs stay in the sum with −s_ij in
    place of s_ij.
    """
    module = dispatch.choose_module(SIGMOID, x, run.backend, run.group, reduction)
    if module:
        mean = reduction == "mean"
        loss: Tensor = _MODULES[module].sigmoid_loss(
            x, y, scale, bias, ids, run, ids_are_positives=ids_are_positives, mean=mean
        )
        return loss
    inputs = x, y, scale, bias.expand(x.shape[0])
    total, match = operators.apply(operators.softplus, *inputs, ids, ids_are_positives, True, *run)
    losses: Tensor = total + exact_softplus(-match)
    return losses if reduction == "none" else losses.sum(dtype=exact_dtype(losses.device)).to(losses.dtype)


def soft_cross_entropy(
    student: tuple[Tensor, Tensor, Tensor],  # (N, D), (N, D), ()
    teacher: tuple[Tensor, Tensor, Tensor],  # (N, E), (N, E), ()
    runs: tuple[Execution, Execution],
) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """Returns the cross-entropies of the rows and of the columns under the teacher's softmax, and `mean_weight`."""
    run, teacher_run = runs
    backend = TRITON if run.backend == teacher_run.backend == TRITON else EAGER
    options = run.precision, teacher_run.precision, backend, run.group
    row, col, mean_weight, *_ = operators.apply(operators.soft_cross_entropy, *student, *teacher, *options)
    return row, col, mean_weight


def matching_products(x: Tensor, y: Tensor, run: Execution) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """Returns ⟨x_i, y_i⟩, a bound of its rounding error, and `mean_weight`. The inputs are rounded as for the matmuls."""
    products, noise, mean_weight = operators.apply(operators.matching, x, y, *run)
    return products, noise, mean_weight


def logits_of(products: Tensor, scale: Tensor, run: Execution) -> Tensor:  # (K,), () in `exact_dtype`
    """Returns the logits of dot products in `exact_dtype`, rounded like the logits of the tiles.

    So the terms of the gradient of the scale are summed without further rounding.
    """
    exact = to_exact(products) * scale
    with torch.no_grad():
        rounding = round_logits(products, scale, run.precision, by_kernels=run.backend == TRITON) - exact
    return exact + torch.where(exact.isfinite(), rounding, 0.0)


class RankedEntries(NamedTuple):
    """One entry of each row and of each column of the matrix of dot products. A row whose entry is NaN ranks last."""

    row_match: Tensor  # (N,) the dot product of each row's entry, as `matching_products` returns it
    col_match: Tensor  # (M,)
    row_target: Tensor  # (N,) int64, the column of each row's entry; columns are numbered over all ranks
    col_target: Tensor  # (M,) int64, the row of each column's entry


def rank(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    run: Execution,
    entries: RankedEntries | None = None,
) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """Counts how many entries of its row, and of its column, come before each matching pair. There is no gradient.

    `entries` are ranked instead of the matching pairs if they are given. x and y may then have different numbers of rows.
    """
    by_row, by_column = operators.rank(x, y, *(entries or (None, None, None, None)), *run)
    return by_row, by_column


def topk(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    k: int,
    run: Execution,
    *,
    ids: tuple[Tensor | None, Tensor | None] = (None, None),  # (N,), (M,)
    limit: Tensor | None = None,  # (N,)
    diagonal: str = KEPT,
) -> tuple[Tensor, Tensor]:  # (N, k), (N, k) int64
    """Finds the k largest dot products of each row that are not above the limit, and their columns. There is no gradient."""
    values, indices = operators.topk(x, y, *ids, limit, diagonal != KEPT, *run, k)
    return values, indices


@torch.no_grad()
def ceiling_above(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    margin: float | Tensor,  # or (N,)
    backend: Backend = "auto",
) -> Tensor:  # (N,)
    """Returns ⟨x_i, y_i⟩ + margin plus the bound of the rounding error, so that a copy of a key is not above the key itself."""
    products, noise, _ = matching_products(x, y, execution(x, y, same_rows=True, backend=backend))
    return products + margin + noise


def mean_positive_logits(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    run: Execution,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (N,), (N,), ()
    """Computes the mean of s_ij over the positives of each row i, in O(N·D).

    The positives are the other rows j with the label of row i.

    Returns:
        Four tensors: the means in `exact_dtype`, which are 0 for rows without a positive; the numbers of positives; ids; and
        `mean_weight`. A row shares its id only with itself, and with its positive if it has exactly one, so a sum can exclude
        both by ids. A sum over the local rows with a positive, multiplied by `mean_weight`, is this rank's part of the mean
        over all such rows.
    """
    mean, ids, mean_weight, count = operators.apply(operators.positives, z, scale, labels, *run)
    return mean, count, ids, mean_weight


def positives_logsumexp(z: Tensor, labels: Tensor, scale: Tensor, run: Execution) -> Tensor:  # (N,)
    """Computes log Σ exp s_ij over all other rows j with the label of row i, in `exact_dtype`. It is −inf without such rows.

    Rows are sorted by label, and only tiles near the diagonal are computed, which takes Σ n²·D operations for labels of n rows.
    PyTorch operations compute the tiles on every device. On CUDA, the CPU synchronizes once to read where each label begins.
    """
    row: Tensor = operators.apply(operators.symmetric_logsumexp, z, scale, labels, EQUAL_IDS, run.precision, EAGER, run.group)[
        0
    ]
    return row


def sum_over_ranks(values: Tensor, run: Execution) -> Tensor:  # (K,)
    """Sums each value over the ranks. The sum is differentiable."""
    total: Tensor = operators.apply(operators.total, values, run.group)
    return total


def mean_logit(
    x: Tensor,  # (N, D)
    others: Sequence[tuple[Tensor, Tensor | None]],  # keys (M, D), and log_q (M,), which is subtracted from their logits
    scale: Tensor,  # ()
    run: Execution,
) -> Tensor:  # (N,)
    """Computes the mean of each row's logits over all keys of all ranks, in `exact_dtype`.

    It equals the logit of the row with the mean key, which takes O(N·D). If label smoothing spreads the part ε of the target
    evenly, ε·(s_ii − mean_j s_ij) is added to the cross-entropy.
    """
    rows, columns = _round_as_in_matmuls(x), [_round_as_in_matmuls(keys) for keys, _ in others]
    with torch.autocast(autocast_device(x), enabled=False):
        sums = torch.stack([keys.sum(0) for keys in columns]).sum(0)
        log_q_sums = [sums.new_zeros(()) if log_q is None else log_q.sum() for _, log_q in others]
        count = sums.new_full((), sum(map(len, columns)))
        terms = torch.cat((sums, torch.stack((torch.stack(log_q_sums).sum(), count))))
        mean = (total := sum_over_ranks(terms, run))[:-1] / total[-1]
        return logits_of(rows @ mean[:-1], scale, run) - mean[-1]


def _round_as_in_matmuls(values: Tensor) -> Tensor:
    """Casts to the matmul precision, then to the accumulator dtype.

    TF32 rounding is skipped because it is negligible in a mean.
    """
    half = HALF_DTYPE.get(compute_precision(values))
    return (values if half is None else values.to(half)).to(accumulator_dtype(values.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Formulas that several losses share, as PyTorch operations on vectors of N rows.
#
# Logsumexps exclude the matching pair, so the cross-entropy is softplus(logsumexp − match). It cannot be negative. Neither the
# loss nor its gradient loses digits if the probability of the pair is close to 1.


def cross_entropy(negatives: Tensor, match: Tensor, like: Tensor) -> Tensor:  # (N,), (N,)
    """Computes log(1 + exp(negatives − match)), which is −log of the probability of the match. It is never negative.

    Negatives and match have the `exact_dtype`. Their difference is rounded to the loss dtype of the embeddings `like`, so
    that backward needs less memory.

    The result is NaN where the match is +inf, as in a dense cross-entropy. Without this, the loss of such a pair would be 0, so
    a run whose matmuls overflow would seem to have a perfect loss.
    """
    return exact_softplus(less_match(negatives, match, accumulator_dtype(like.dtype)))


def reduce_losses(
    directions: Sequence[Tensor],  # (N,) each
    mean_weight: Tensor,  # ()
    reduction: Reduction,
    like: Tensor,
) -> Tensor:  # () or (N,)
    """Takes the mean of the directions, then reduces the rows: to this rank's part of the mean, to the sum, or not at all.

    The sums are computed in `exact_dtype` and rounded once to the loss dtype of the embeddings `like`.
    """
    losses, dtype = torch.stack(tuple(directions)), accumulator_dtype(like.dtype)
    if reduction == "none":
        return losses.mean(0).to(dtype)
    total = losses.sum(dtype=exact_dtype(losses.device)) / len(losses)
    return (total * mean_weight if reduction == "mean" else total).to(dtype)


def log_add(terms: Sequence[Tensor], like: Tensor) -> Tensor:  # (N,)
    """Computes log Σ exp over vectors. It is −inf with gradient 0 where all of them are −inf, or if there are no vectors."""
    if not terms:
        return torch.full_like(like, -torch.inf)
    if len(terms) == 1:
        return terms[0]
    stacked = torch.stack(tuple(terms))
    base = finite_or_zero(stacked.detach().amax(0))
    return _logarithm((stacked - base).exp().sum(0), base)


def segment_logsumexp(s: Tensor, owner: Tensor, size: int) -> Tensor:  # (M,), (M,) → (size,)
    """Computes log Σ exp(s) over the entries of each owner."""
    peak = s.new_full((size,), -torch.inf).scatter_reduce(0, owner, s.detach(), "amax")
    base = finite_or_zero(peak)
    total = s.new_zeros(size).index_put((owner,), (s - base[owner]).exp(), accumulate=True)  # deterministic, even on CUDA
    return _logarithm(total, base)


def _logarithm(total: Tensor, base: Tensor) -> Tensor:
    nothing = total == 0
    return torch.where(nothing, -torch.inf, base + torch.where(nothing, 1.0, total).log())
