"""The upper half of a symmetric block by the Triton kernels; operands are prepared once and not for every rectangle.

The sums of all rectangles share the block's shift C. So row sums and column sums are simply added, and become logarithms at the
end. Row weights and column weights of the gradient are the same vector.
"""

from torch import Tensor

from megabatch.tiles.backends import TRITON
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.symmetric import Half, Side
from megabatch.tiles.triton_backward import gradient_strips, side_weights, softmax_task
from megabatch.tiles.triton_logsumexp import add_sums, log_sum
from megabatch.tiles.triton_online_logsumexp import Sums, complete_sums
from megabatch.tiles.triton_operands import exponent_operands


class KernelHalf(Half):
    """`Half` of a block by the Triton backend."""

    def __init__(self) -> None:
        super().__init__(TRITON)

    def statistics(self, block: Block) -> LogSum:  # (N,)
        """Row sums of exp(s)."""
        if block.is_empty:
            return super().statistics(block)
        operands = exponent_operands(block)
        total, shift = block.zeros(2, block.N)
        for rows, columns in self.upper_half(block):
            add_sums(operands, block, rows, columns, total, None if rows == columns else total)
        complete_sums(operands, block, total[None], sums := Sums(total, shift))
        return log_sum(sums, operands)

    def gradients(self, block: Block, side: Side, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        if block.is_empty:
            return
        operands = exponent_operands(block)
        weights = side_weights(side.sums, side.dsums, operands.shift, block.N)
        task = softmax_task(operands, block, weights, weights)
        for rows, columns in self.upper_half(block):
            needs = Needs(dx=True, dy=rows != columns, dscale=dscale is not None)
            sums = ColumnGradients(side.dz if needs.dy else None, None)
            strips = gradient_strips(task, sums, needs, within=(rows, columns))
            self.take(strips, block, side.dz, dscale, share=1.0 if needs.dy else 0.5)
