"""The upper half of a symmetric block by the kernels: what is done around a launch is done once, and not for every rectangle.

Sums of all rectangles are at the one shift of the block, so that they are simply added, those of rows and of columns alike, and
become logarithms at the end; weights of rows are those of columns.
"""

from torch import Tensor

from megabatch.tiles.backends import TRITON
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.symmetric import Half, Side
from megabatch.tiles.triton_backward import ODD_SOFTMAX, SOFTMAX, Weights, any_in_tile, relative, strip_tile, walk
from megabatch.tiles.triton_forward import add_totals, log_sum, recompute_lost
from megabatch.tiles.triton_operands import exponent_operands


class KernelHalf(Half):
    """`Half` for a block of this backend's own rows."""

    def __init__(self) -> None:
        super().__init__(TRITON)

    def statistics(self, block: Block) -> LogSum:
        """Sums of exp(s) over each row, (N,)."""
        if block.is_empty:
            return super().statistics(block)
        given = exponent_operands(block)
        total = block.zeros(block.N)
        for rows, columns in self.upper_half(block):
            add_totals(given, block, rows, columns, total, None if rows == columns else total)
        return log_sum(total, recompute_lost(given, block, total, transposed=False))

    def gradients(self, block: Block, side: Side, dscale: Tensor | None) -> None:
        """Adds the gradients of ⟨dsums, log sums⟩."""
        if block.is_empty:
            return
        given = exponent_operands(block)
        size = strip_tile(given, block, SOFTMAX)
        weight, cap, shift = relative(side.sums, side.dsums, given.shift, block.N)
        row_odd, col_odd = any_in_tile(shift, size.rows), any_in_tile(shift, size.columns)
        odd = row_odd.amax() + col_odd.amax()
        weights = Weights(weight, weight, cap, cap, shift, shift, odd, row_odd, col_odd)
        for rows, columns in self.upper_half(block):
            needs = Needs(dx=True, dy=rows != columns, dscale=dscale is not None)
            sums = ColumnGradients(side.dz if needs.dy else None, None)
            strips = walk(given, block, size, (SOFTMAX, ODD_SOFTMAX), weights, sums, needs, within=(rows, columns))
            self.take(strips, block, side.dz, dscale, share=1.0 if needs.dy else 0.5)
