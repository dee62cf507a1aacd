"""The Triton engine: the same functions as `tiles.eager`, and the passes over one tensor against itself."""

from collections.abc import Iterator

from torch import Tensor

from megabatch.kernels import gradient, logsumexp, two_models
from megabatch.kernels.gradient import gradient_strips, side_weights, softmax_task, softplus_gradients, softplus_sums
from megabatch.kernels.logsumexp import OnlineSums, add_sums, complete_sums, log_sum
from megabatch.kernels.operands import exponent_operands, finish_rows, matching_products
from megabatch.kernels.ranking import rank_counts, topk
from megabatch.kernels.two_models import soft_gradients, soft_statistics
from megabatch.tiles.backends import TRITON
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.sums import LogSum
from megabatch.tiles.symmetric import Triangle, TriangleSide

__all__ = [
    "finish_rows",
    "logsumexp_gradients",
    "logsumexp_statistics",
    "matching_products",
    "rank_counts",
    "soft_gradients",
    "soft_statistics",
    "softplus_gradients",
    "softplus_sums",
    "topk",
]

# A teacher or a guide adds a second matmul for each pair. Two tiles do not fit in a kernel's registers, so cuBLAS matmuls form
# both in memory, and `kernels.two_models` reads them.


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s); without `columns`, as with a guide, the column sums are empty, (0,)."""
    if block.second_model is None:
        return logsumexp.logsumexp_statistics(block, columns=columns)
    assert not columns
    row = two_models.row_statistics(block)
    return row, LogSum.empty(0, dtype=row.shift.dtype, device=block.x.device)


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,)
    col: LogSum | None,  # (M,)
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩; with a guide, of rows alone."""
    if block.second_model is not None:
        assert dcol is None
        return two_models.row_gradients(block, row, drow, sums, needs)
    return gradient.logsumexp_gradients(block, row, col, drow, dcol, sums, needs)


# ----------------------------------------------------------------------------------------------------------------------
# The upper half of a symmetric block by the Triton kernels; operands are prepared once and not for every rectangle.
#
# The sums of all rectangles share the block's shift C. So row sums and column sums are simply added, and become logarithms
# at the end. Row weights and column weights of the gradient are the same vector.


class KernelTriangle(Triangle):
    """`Triangle` of a block by the Triton backend."""

    def __init__(self) -> None:
        super().__init__(TRITON)

    def statistics(self, block: Block) -> LogSum:  # (N,)
        """Row sums of exp(s)."""
        if block.is_empty:
            return super().statistics(block)
        operands = exponent_operands(block)
        total, shift = block.zeros(2, block.N)
        for rows, columns in self.upper_triangle(block):
            add_sums(operands, block, rows, columns, total, None if rows == columns else total)
        complete_sums(operands, block, total[None], sums := OnlineSums(total, shift))
        return log_sum(sums, operands)

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        if block.is_empty:
            return
        operands = exponent_operands(block)
        weights = side_weights(side.sums, side.dsums, operands.shift, block.N)
        task = softmax_task(operands, block, weights, weights)
        for rows, columns in self.upper_triangle(block):
            needs = Needs(dx=True, dy=rows != columns, dscale=dscale is not None)
            sums = ColumnGradients(side.dz if needs.dy else None, None)
            strips = gradient_strips(task, sums, needs, within=(rows, columns))
            self.take(strips, block, side.dz, dscale, share=1.0 if needs.dy else 0.5)
