"""What the losses are made of: each function runs one operator. Private; the public operations are in `pairwise`.

`execution` checks a call and decides once how it runs: the precision of its products, the backend, the process group.
Similarities are s_ij = scale·⟨x_i, y_j⟩ + offsets. `share` turns a sum over the local pairs into this rank's part of the mean
over the batch: the mean over ranks is the mean over pairs, however many pairs each rank has.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megabatch import checks, operators
from megabatch.operators.logsumexp import APART, KEPT, SKIPPED
from megabatch.operators.symmetric_logsumexp import ALL, EQUAL_IDS, OTHERS
from megabatch.ring import topology
from megabatch.tiles import backends
from megabatch.tiles.logsum import finite_or_zero
from megabatch.tiles.precision import (
    FLOAT32,
    HALF_DTYPE,
    SOFTPLUS_IS_IDENTITY,
    accumulator_dtype,
    autocast_device,
    compute_precision,
)

__all__ = ["APART", "KEPT", "SKIPPED", "accumulator_dtype", "autocast_device", "finite_or_zero"]

Backend = Literal["auto", "eager", "triton"]
Group = ProcessGroup | DeviceMesh | None
Reduction = Literal["mean", "sum", "none"]


class Execution(NamedTuple):
    """How a call runs. Operators take the three strings, in this order."""

    precision: str  # of the products
    backend: str  # "eager" or "triton"
    group: str  # the address of the process group (`ring.topology`); empty for one process

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(topology.rank_at(self.group))


def execution(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    names: tuple[str, str] = ("x", "y"),
    *,
    same_rows: bool = False,
    group: Group = None,
    purpose: str = "",
    backend: Backend = "auto",
) -> Execution:
    """Checks the two sides of a pairwise operation, its group and its backend, and decides how the call runs.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings.
        names: of x and y, for messages.
        same_rows: whether row i of x belongs to row i of y.
        group: process group to share the batch over (default: this process only).
        purpose: of the operation, for messages; all ranks have to agree on it.
        backend: "auto", "eager" or "triton".
    """
    checks.embeddings(x, y, names, same_rows=same_rows)
    precision = compute_precision(x)
    if backend == "auto":
        chosen = backends.EAGER if x.is_cpu else str(backends.default(precision, x.device))
    else:
        checks.backend(backend, precision, x.device)
        chosen = backend
    if group is None:
        return Execution(precision, chosen, "")
    checks.group(group)
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    return Execution(precision, chosen, topology.address(process_group, purpose))


def pairs(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    names: tuple[str, str],
    *,
    ids: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
    group: Group = None,
    purpose: str = "",
    backend: Backend = "auto",
) -> Execution:
    """`execution` of a loss over pairs, row i of x with row i of y."""
    checks.reduction(reduction)
    run = execution(x, y, names, same_rows=True, group=group, purpose=purpose, backend=backend)
    if ids is not None:
        checks.ids(ids, "ids", x, names[0])
    if not run.group:  # over a group one rank may have no rows; the operator finds out together whether all have none
        checks.at_least_one_pair(x, names[0])
    return run


def number(value: float | Tensor, name: str, x: Tensor, *, shared: bool = False) -> Tensor:  # ()
    """A scale or bias as a 0-d tensor, made on the device: a copy from the host would make CUDA wait.

    One that several operators share is float64, and stays it. Their gradients are then added before they are rounded, which
    matters where they nearly cancel.
    """
    dtype = torch.float64 if shared or x.dtype == torch.float64 else torch.float32
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (dtype, torch.float64) and value.device == x.device:
        return value  # the usual case; a conversion to the same type would take 4 µs
    checks.number(value, name, x)
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=x.device)
    value = value.reshape(())
    return value if value.dtype == torch.float64 else value.to(dtype)


def offsets(value: Tensor | None, x: Tensor) -> Tensor | None:
    """One number for each row or column, in the type of similarities, or None."""
    return None if value is None else value.to(accumulator_dtype(x.dtype))


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


def logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    row_bias: Tensor | None = None,  # (N,)
    col_bias: Tensor | None = None,  # (M,)
    ids: tuple[Tensor | None, Tensor | None] = (None, None),  # (N,), (M,)
    diagonal: str = KEPT,
    columns: bool = False,
    ceiling: Ceiling | None = None,
) -> LogSums:
    """Logsumexps of the rows, and with `columns` of the columns; pairs with equal ids are left out."""
    limit, guide_x, guide_y = (None, None, None) if ceiling is None else ceiling
    guide_precision = FLOAT32 if guide_x is None or guide_y is None else execution(guide_x, guide_y).precision
    row, col, match, share, *_ = operators.apply(
        operators.logsumexp,
        *(x, y, scale, offsets(row_bias, x), offsets(col_bias, x), *ids),
        *(limit, guide_x, guide_y),
        columns,
        diagonal,
        *(run.precision, guide_precision, run.backend, run.group),
    )
    return LogSums(row, col, match, share)


def symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    ids: Tensor | None = None,  # (N,)
    diagonal: str = SKIPPED,
) -> Tensor:  # (N,)
    """Logsumexps of the rows of z against all rows of z; pairs with equal ids, the row itself among them, are left out."""
    summed = ALL if ids is not None or diagonal == KEPT else OTHERS
    row: Tensor = operators.apply(operators.symmetric_logsumexp, z, scale, ids, summed, *run)[0]
    return row


def is_small(
    x: Tensor, run: Execution, reduction: Reduction, *, views: bool = False, tiled: bool = False, rows_only: bool = False
) -> bool:
    """Whether the losses of small batches serve the rows of x (`operators.small`).

    With `views` there is a second view of each row. `tiled`, of losses of matching pairs, counts batches whose pairs do not fit
    in memory. `rows_only` is for a cross-entropy of rows, not of columns.
    """
    if reduction == "none":
        return False
    return operators.is_small(x, run.backend, run.group, views=views, tiled=tiled, rows_only=rows_only)


def small_cross_entropy(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    ids: Tensor | None = None,  # (N,)
    columns: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:  # ()
    """The cross-entropies of the pairs (i, i) among rows, or the means of both directions with `columns`; if `is_small`."""
    divisor = (x.shape[0] if reduction == "mean" else 1) * (2 if columns else 1)
    return operators.small_cross_entropy(x, y, scale, ids, run.precision, run.backend, columns=columns, divisor=divisor)


def small_nt_xent_loss(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    scale: Tensor,  # ()
    run: Execution,
    *,
    reduction: Reduction = "mean",
) -> Tensor:  # ()
    """The loss of SimCLR; if `is_small`."""
    divisor = 2 * (len(z1) if reduction == "mean" else 1)
    return operators.small_nt_xent_loss(z1, z2, scale, run.precision, run.backend, divisor=divisor)


def small_sup_con_loss(
    z: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    scale: Tensor,  # ()
    run: Execution,
    *,
    reduction: Reduction = "mean",
) -> Tensor:  # ()
    """The supervised contrastive loss, of form "out"; if `is_small`."""
    return operators.small_sup_con_loss(z, labels, scale, run.precision, run.backend, mean_of_rows=reduction == "mean")


def softplus(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, run: Execution) -> Tensor:  # (N,)
    """Row sums of softplus(s)."""
    total: Tensor = operators.apply(operators.softplus, x, y, scale, bias.expand(x.shape[0]), None, False, False, *run)[0]
    return total


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
    if is_small(x, run, reduction, tiled=True):
        return operators.small_sigmoid_loss(
            *(x, y, scale, bias, ids, run.precision, run.backend),
            ids_are_positives=ids_are_positives,
            divisor=len(x) if reduction == "mean" else 1,
        )
    similarities = x, y, scale, bias.expand(x.shape[0])
    if reduction == "none":
        total, match = operators.apply(operators.softplus, *similarities, ids, ids_are_positives, True, *run)
        losses: Tensor = total + exact_softplus(-match)
        return losses
    unseen = operators.transforms_are_active()  # under a transform, requires_grad does not say who asks for a gradient
    needs = [torch.is_grad_enabled() and (unseen or tensor.requires_grad) for tensor in similarities]
    how = ids, ids_are_positives, True, *run
    loss: Tensor = operators.apply(operators.sigmoid_loss, *similarities, *how, reduction == "mean", needs)[0]
    return loss


def soft_cross_entropy(
    student: tuple[Tensor, Tensor, Tensor],  # (N, D), (N, D), ()
    teacher: tuple[Tensor, Tensor, Tensor],  # (N, E), (N, E), ()
    runs: tuple[Execution, Execution],
) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """(cross-entropies of rows and of columns under the teacher's softmax, share)."""
    run, teacher_run = runs
    backend = backends.TRITON if run.backend == teacher_run.backend == backends.TRITON else backends.EAGER
    how = run.precision, teacher_run.precision, backend, run.group
    row, col, share, *_ = operators.apply(operators.soft_cross_entropy, *student, *teacher, *how)
    return row, col, share


def matching_products(x: Tensor, y: Tensor, run: Execution) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """(⟨x_i, y_i⟩, how far rounding may have moved it, share), from the same rounded inputs as all other products."""
    products, noise, share = operators.apply(operators.matching, x, y, *run)
    return products, noise, share


def rank(x: Tensor, y: Tensor, run: Execution) -> tuple[Tensor, Tensor]:  # (N,), (N,) int64
    """How many entries of its row, and of its column, come before each matching pair. No gradient."""
    by_row, by_column = operators.rank(x, y, *run)
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
    """The k largest products of each row, and their columns; products above the limit are left out. No gradient."""
    values, indices = operators.topk(x, y, *ids, limit, diagonal != KEPT, *run, k)
    return values, indices


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
    scale: Tensor,  # ()
    run: Execution,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (N,), (N,), ()
    """(mean of s_ij over all other rows j of i's label, how many, ids that only sole partners share, share).

    In O(N·D). The mean of none is 0. Excluding `ids` from a sum leaves out the row itself, and its positive where it has just
    one. A sum over the rows here that have a positive, times `share`, is this rank's part of the mean over all such rows.
    """
    mean, ids, share, count = operators.apply(operators.positives, z, scale, labels, run.precision, run.group)
    return mean, count, ids, share


def positives_logsumexp(z: Tensor, labels: Tensor, scale: Tensor, run: Execution) -> Tensor:  # (N,)
    """log Σ exp s_ij over all other rows j of i's label; −inf where there are none.

    Rows are sorted by label, and only tiles near the diagonal are formed: Σ n²·D operations for labels of n rows. In PyTorch
    operations on every device; on CUDA the host waits once to learn where labels begin.
    """
    row: Tensor = operators.apply(
        operators.symmetric_logsumexp, z, scale, labels, EQUAL_IDS, run.precision, backends.EAGER, run.group
    )[0]
    return row


def sum_over_ranks(values: Tensor, run: Execution) -> Tensor:  # (K,)
    """Differentiable."""
    total: Tensor = operators.apply(operators.total, values, run.group)
    return total


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
    with torch.autocast(autocast_device(x), enabled=False):
        sums = torch.stack([keys.sum(0) for keys in columns]).sum(0)
        subtracted = [sums.new_zeros(()) if log_q is None else log_q.sum() for _, log_q in others]
        count = sums.new_full((), sum(map(len, columns)))
        packed = torch.cat((sums, torch.stack((torch.stack(subtracted).sum(), count))))
        whole = sum_over_ranks(packed, run)
        return (rows @ (whole[:-2] * scale) - whole[-2]) / whole[-1]


def _as_multiplied(values: Tensor) -> Tensor:
    """As the products see them, in the type of sums; TF32's rounding, which does not matter to a mean, is left out."""
    half = HALF_DTYPE.get(compute_precision(values))
    return (values if half is None else values.to(half)).to(accumulator_dtype(values.dtype))


def exact_softplus(values: Tensor) -> Tensor:
    """log(1 + exp(values)) to the last digit of float64, where PyTorch's default stops at nine."""
    return F.softplus(values, threshold=SOFTPLUS_IS_IDENTITY)
