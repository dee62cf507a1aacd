"""The two-pass path: sums over the tiles in the forward pass, and each tile again in the backward pass.

The sums are logsumexps of x with y, and of one tensor with itself, cross-entropies under a teacher's softmax, and row sums of
softplus.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.autograd import (
    BlockPasses,
    Gradients,
    choose_grad_scale,
    column_sums,
    define,
    derivative,
    divide_gradient,
    empty_gradients,
    fill_mean_weight,
    finish,
    logit,
    passes_for,
    statistic,
)
from megabatch.ring.passes import RingTriangle
from megabatch.tiles.block import (
    EAGER,
    TRITON,
    Block,
    Needs,
    accumulator_dtype,
    exact_matching_logits,
    matching_logits,
    sums_dtype,
)
from megabatch.tiles.sums import LOG_SUM_PLANES, SOFT_SUM_PLANES, LogSum, SoftSum, exact_dtype
from megabatch.tiles.symmetric import SameLabel, Triangle, TriangleSide

# ----------------------------------------------------------------------------------------------------------------------
# Logsumexps of the rows of the logits, and optionally of the columns, from one pass. Backward is one more pass.

# How the main diagonal is handled.
KEPT = "kept"  # included in the sums
SKIPPED = "skipped"  # excluded
SEPARATE = "apart"  # excluded from the sums and returned as a separate vector


class LogsumexpInputs(NamedTuple):
    """The embeddings, and the pairs that are excluded.

    Pairs with equal ids are excluded. Pairs with a dot product ⟨x_i, y_j⟩ above the limit of row i are excluded as well. If
    there is a guide, the dot product of the guide's embeddings is compared with the limit instead.
    """

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor | None  # (N,)
    col_bias: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None  # (N,), only without `columns`
    guide_x: Tensor | None  # (N, E)
    guide_y: Tensor | None  # (M, E)
    columns: bool
    diagonal: str
    precision: str
    guide_precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """Returns the description of the logits."""
        guide = None
        if self.guide_x is not None and self.guide_y is not None:
            guide = Block.of(self.guide_x, self.guide_y, None, self.guide_precision)
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            col_bias=self.col_bias,
            row_ids=self.row_ids,
            col_ids=self.col_ids,
            skip_diagonal=self.diagonal != KEPT,
            limit=self.limit,
            second_model=guide,
        )

    def terms(self) -> dict[str, Any]:
        """Returns values that must be equal on all ranks."""
        return {"the direction of the sums": "rows and columns" if self.columns else "rows"}


def _logsumexp_shapes(given: LogsumexpInputs) -> tuple[Tensor, ...]:
    N, M = given.x.shape[0], given.y.shape[0] if given.columns else 0
    dtype = sums_dtype(given.backend, accumulator_dtype(given.x.dtype))
    row, col = (given.x.new_empty(LOG_SUM_PLANES, size, dtype=dtype) for size in (N, M))
    match = logit(given.x, N if given.diagonal == SEPARATE else 0)
    return logit(given.x, N), logit(given.x, M), match, fill_mean_weight(given.x, 1.0), row, col


@define(LogsumexpInputs, results=6, fake=_logsumexp_shapes)
def logsumexp(given: LogsumexpInputs) -> tuple[Tensor, ...]:
    """Returns (log Σ_j exp s_ij, log Σ_i exp s_ij, s_ii, mean_weight, row, col). The last two are packed sums for backward.

    Without `columns`, the second and the last result are empty. If the diagonal is not separate, s_ii is empty. The first three
    results have the `exact_dtype`. `mean_weight` turns a sum over local pairs into this rank's part of a mean.
    """
    block, separate = given.block(), given.diagonal == SEPARATE
    passes = passes_for(given.group, given.backend, block, "logsumexp", mean=separate, terms=given.terms())
    row, col = passes.tiles.logsumexp_statistics(block, columns=given.columns)
    match = logit(given.x, 0)
    if separate:
        match = exact_matching_logits(block, passes.local.matching_products(block), by_kernels=given.backend == TRITON)
    dtype = sums_dtype(given.backend, block.dtype)
    mean_weight = fill_mean_weight(given.x, passes.mean_weight)
    return row.value(), col.value(), match, mean_weight, row.pack().to(dtype), col.pack().to(dtype)


def _logsumexp_gradient_shapes(given: LogsumexpInputs, *arguments: Any) -> Gradients:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))


@define(
    LogsumexpInputs,
    "Tensor row, Tensor col, Tensor? drow, Tensor? dcol, Tensor? dmatch, bool[] needs",
    results=5,
    fake=_logsumexp_gradient_shapes,
)
def logsumexp_backward(
    given: LogsumexpInputs,
    row: Tensor,  # (2, N)
    col: Tensor,  # (2, M), or (2, 0) without columns
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> Gradients:
    """Returns (dx, dy, dscale, drow_bias, dcol_bias). The limit has no gradient."""
    block, needed = given.block(), Needs(*needs)
    dcol, dmatch = dcol if given.columns else None, dmatch if given.diagonal == SEPARATE else None
    used = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "empty"
    terms = {**given.terms(), "the set of outputs that have a gradient": used}
    passes = passes_for(given.group, given.backend, block, "logsumexp backward", needs=needed, terms=terms)
    grad_scale = choose_grad_scale(block.scale, block.precision, drow, dcol, matches=dmatch, largest=passes.largest)
    sums = column_sums(block, needed)
    strips = passes.tiles.logsumexp_gradients(
        block,
        LogSum.unpack(row),
        LogSum.unpack(col) if given.columns else None,
        divide_gradient(drow, grad_scale),
        divide_gradient(dcol, grad_scale),
        sums,
        needed,
    )
    return finish(
        passes.local,
        block,
        strips,
        sums,
        needed,
        scale=given.scale,
        grad_scale=grad_scale,
        dmatch=divide_gradient(dmatch, grad_scale),
    )


derivative(logsumexp, logsumexp_backward, LogsumexpInputs, learned=5, results=3, saved=2, materialize=False)


# ----------------------------------------------------------------------------------------------------------------------
# Row logsumexps of the logits of all rows with one another. They are symmetric, so only half of the logits are computed.


# The pairs that are summed.
ALL = "all, less equal ids"  # all pairs, except pairs with equal ids if there are ids
OTHERS = "all but the row itself"
EQUAL_IDS = "equal ids, but not the row itself"


class SymmetricInputs(NamedTuple):
    """The rows, and which of their pairs are summed."""

    z: Tensor  # (N, D)
    scale: Tensor  # ()
    ids: Tensor | None  # (N,)
    pairs: str
    precision: str
    backend: str
    group: str

    def block(self) -> tuple[Block, Tensor | None]:
        """Returns the description of the logits, and the order of the rows.

        If only pairs with equal ids are summed, rows are sorted by their ids. Otherwise the order is None.
        """
        z, ids, order = self.z, self.ids, None
        if self.pairs == EQUAL_IDS:
            assert ids is not None
            ids, order = torch.sort(ids.long(), stable=True)
            z = z[order]
        block = Block.of(
            z,
            z,
            self.scale,
            self.precision,
            row_ids=ids,
            col_ids=ids,
            skip_diagonal=self.pairs != ALL,
            only_equal_ids=order is not None,
            positives_within=ids is not None and order is None,  # with ids given, rows with equal ids are positives
        )
        return block, order

    def passes(self, block: Block, operation: str, needs: Needs | None = None) -> BlockPasses:
        """Returns the passes over the block."""
        terms = {"the set of summed pairs": self.pairs}
        return passes_for(self.group, self.backend, block, operation, needs=needs, terms=terms)

    def triangle(self, passes: BlockPasses) -> Triangle | RingTriangle:
        """Returns the passes over the upper triangle of the block."""
        if self.pairs == EQUAL_IDS:
            return passes.symmetric(SameLabel())
        if self.backend == EAGER:
            return passes.symmetric(Triangle(EAGER))
        from megabatch.kernels.logsumexp import KernelTriangle

        return passes.symmetric(KernelTriangle())


def _symmetric_shapes(given: SymmetricInputs) -> tuple[Tensor, Tensor]:
    N, dtype = given.z.shape[0], sums_dtype(given.backend, accumulator_dtype(given.z.dtype))
    return logit(given.z, N), given.z.new_empty(LOG_SUM_PLANES, N, dtype=dtype)


@define(SymmetricInputs, results=2, fake=_symmetric_shapes)
def symmetric_logsumexp(given: SymmetricInputs) -> tuple[Tensor, Tensor]:
    """Returns log Σ_j exp s_ij in `exact_dtype`, and the packed sums for backward."""
    block, order = given.block()
    row = given.triangle(given.passes(block, "symmetric logsumexp")).statistics(block)
    return _in_order(row.value(), order), row.pack()


def _symmetric_gradient_shapes(given: SymmetricInputs, row: Tensor, drow: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return given.z.new_empty(given.z.shape), torch.empty_like(given.scale)


@define(SymmetricInputs, "Tensor row, Tensor drow, bool[] needs", results=2, fake=_symmetric_gradient_shapes)
def symmetric_logsumexp_backward(
    given: SymmetricInputs,
    row: Tensor,  # (2, N)
    drow: Tensor,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Returns (dz, dscale)."""
    block, order = given.block()
    passes = given.passes(block, "symmetric logsumexp backward", Needs(dx=True, dy=True, dscale=needs[1]))
    drow = drow if order is None else drow[order]
    grad_scale = choose_grad_scale(block.scale, block.precision, drow, largest=passes.largest)
    side = TriangleSide(LogSum.unpack(row), divide_gradient(drow, grad_scale), block.zeros(block.N, block.D))
    dscale = torch.zeros_like(given.scale, dtype=exact_dtype(given.scale.device))  # one number, so float64 takes no extra time
    given.triangle(passes).gradients(block, side, dscale if needs[1] else None)
    dz = block.x.new_empty(block.x.shape)  # contiguous, because kernels need it; `empty_like` would copy the strides of z
    passes.local.finish_rows(
        side.dz, dz, block.scale * grad_scale, own=None, partners=dz, dmatch=None, precision=block.precision
    )
    return _in_order(dz, order), (dscale * grad_scale).to(given.scale.dtype)


def _in_order(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


derivative(symmetric_logsumexp, symmetric_logsumexp_backward, SymmetricInputs, learned=2, results=1, saved=1)


# ----------------------------------------------------------------------------------------------------------------------
# Cross-entropies of rows and of columns under a teacher's softmax. One pass over the tiles of both models computes them.
# Backward is one more pass.


class SoftCrossEntropyInputs(NamedTuple):
    """The student's and the teacher's embeddings."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    teacher_x: Tensor  # (N, E)
    teacher_y: Tensor  # (M, E)
    teacher_scale: Tensor  # ()
    precision: str
    teacher_precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """Returns the description of the student's logits. The teacher is the second model of the block."""
        teacher = Block.of(self.teacher_x, self.teacher_y, self.teacher_scale, self.teacher_precision)
        return Block.of(self.x, self.y, self.scale, self.precision, second_model=teacher)


def _soft_shapes(given: SoftCrossEntropyInputs) -> tuple[Tensor, ...]:
    x, N, M = given.x, given.x.shape[0], given.y.shape[0]
    return (
        statistic(x, N),
        statistic(x, M),
        fill_mean_weight(x, 1.0),
        statistic(x, N, SOFT_SUM_PLANES),
        statistic(x, M, SOFT_SUM_PLANES),
    )


@define(SoftCrossEntropyInputs, results=5, fake=_soft_shapes)
def soft_cross_entropy(given: SoftCrossEntropyInputs) -> tuple[Tensor, ...]:
    """Returns −Σ_j p_ij log softmax_j(s)_ij, −Σ_i q_ij log softmax_i(s)_ij, mean_weight, and two packed sums for backward.

    p and q are the teacher's softmaxes over columns and over rows.
    """
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "soft cross-entropy", mean=True)
    row, col = passes.tiles.soft_statistics(block)
    return row.value(), col.value(), fill_mean_weight(given.x, passes.mean_weight), row.pack(), col.pack()


def _soft_gradient_shapes(given: SoftCrossEntropyInputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:3]


@define(
    SoftCrossEntropyInputs,
    "Tensor row, Tensor col, Tensor drow, Tensor dcol, bool[] needs",
    results=3,
    fake=_soft_gradient_shapes,
)
def soft_cross_entropy_backward(
    given: SoftCrossEntropyInputs,
    row: Tensor,  # (N, 5)
    col: Tensor,  # (M, 5)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Returns (dx, dy, dscale)."""
    block, needed = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "soft cross-entropy backward", needs=needed)
    grad_scale = choose_grad_scale(block.scale, block.precision, drow, dcol, largest=passes.largest)
    sums = column_sums(block, needed)
    strips = passes.tiles.soft_gradients(
        block, SoftSum.unpack(row), SoftSum.unpack(col), drow / grad_scale, dcol / grad_scale, sums, needed
    )
    return finish(passes.local, block, strips, sums, needed, scale=given.scale, grad_scale=grad_scale)[:3]


derivative(soft_cross_entropy, soft_cross_entropy_backward, SoftCrossEntropyInputs, learned=3, results=2, saved=2)


# ----------------------------------------------------------------------------------------------------------------------
# Row sums of softplus over the logits.


class SoftplusInputs(NamedTuple):
    """The embeddings and ids. Pairs with equal ids are excluded, or they are positives and are summed as softplus(−s_ij)."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor  # (N,)
    ids: Tensor | None  # (N,) the ids of both rows and columns
    ids_are_positives: bool
    separate: bool  # whether the pairs (i, i) are excluded from the sums and returned as a separate vector
    precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """Returns the description of the logits."""
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            row_ids=self.ids,
            col_ids=self.ids,
            skip_diagonal=self.separate,
            ids_are_positives=self.ids_are_positives and self.ids is not None,
        )


def _softplus_shapes(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0] if given.separate else 0)


@define(SoftplusInputs, results=2, fake=_softplus_shapes)
def softplus(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    """Returns (Σ_j log(1 + exp s_ij), s_ii). The second result is empty if the diagonal is not separate."""
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "softplus", mean=given.separate)
    match = matching_logits(block, passes.local.matching_products(block)) if given.separate else block.zeros(0)
    return passes.tiles.softplus_sums(block), match


def _gradient_shapes(given: SoftplusInputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:4]


@define(SoftplusInputs, "Tensor dtotal, Tensor dmatch, bool[] needs", results=4, fake=_gradient_shapes)
def softplus_backward(
    given: SoftplusInputs,
    dtotal: Tensor,  # (N,)
    dmatch: Tensor,  # (N,) or (0,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Returns (dx, dy, dscale, drow_bias)."""
    block, needed = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "softplus backward", needs=needed)
    grad_scale = choose_grad_scale(block.scale, block.precision, dtotal, largest=passes.largest)
    sums = column_sums(block, needed)
    strips = passes.tiles.softplus_gradients(block, dtotal / grad_scale, sums, needed)
    own = dmatch / grad_scale if given.separate else None
    return finish(passes.local, block, strips, sums, needed, scale=given.scale, grad_scale=grad_scale, dmatch=own)[:4]


derivative(softplus, softplus_backward, SoftplusInputs, learned=4, results=2)
