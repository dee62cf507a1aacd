"""Rows of all ranks against themselves: every two ranks share the work on the similarities between their blocks.

In a lap, rank r meets block b, and rank b meets block r: the same similarities, transposed. The lower rank computes the first
half of its own rows against all rows of the other; the higher rank computes all of its own rows against the second half of the
other's. So every product is computed once, all ranks have equal work on every route, and one visit serves both sides. The
blocks still make the whole lap: half the products of `RingPasses`, and all of its messages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from megabatch.ring.lap import Lap, Merge, Tensors
from megabatch.ring.passes import RingPasses, add, prepared_for_travel
from megabatch.tiles.block import Block
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.symmetric import Half, Rectangle, Side, part_of

_Visit = Callable[[Block, list[Rectangle], Tensors], Tensors]


@dataclass(frozen=True)
class RingHalf:
    """`Half`, taken round the ring: blocks are this rank's rows, sums are over those of all ranks."""

    half: Half
    ring: RingPasses

    def statistics(self, block: Block) -> LogSum:
        """Sums of exp(s) over each local row, (N,)."""
        block = prepared_for_travel(block)
        row = LogSum.empty(block.N, dtype=self.ring.sums_dtype, device=block.x.device)

        def own() -> Tensors:
            row.add_(self.half.statistics(block))
            return row

        def visit(visited: Block, shares: list[Rectangle], extra: Tensors) -> Tensors:
            col = LogSum.empty(visited.M, dtype=row.shift.dtype, device=visited.x.device)
            for rows, columns in shares:
                part = part_of(visited, rows, columns)
                self.half.add_statistics(part, row.part(rows), col.part(columns))
            return col

        self._lap(block, [], own, visit, LogSum.merge)
        return row

    def gradients(self, block: Block, side: Side, dscale: Tensor | None) -> None:
        """Adds the gradients of all ranks' ⟨dsums, log sums⟩ with respect to the local rows."""
        block = prepared_for_travel(block)

        def own() -> Tensors:
            self.half.gradients(block, side, dscale)
            return [side.dz]

        def visit(visited: Block, shares: list[Rectangle], extra: Tensors) -> Tensors:
            shift, total, dsums = extra
            others = Side(LogSum(shift, total), dsums, visited.zeros(visited.M, visited.D))
            for rows, columns in shares:
                part = part_of(visited, rows, columns)
                self.half.add_gradients(part, side.part(rows), others.part(columns), dscale)
            return [others.dz]

        self._lap(block, [*side.sums, side.dsums], own, visit, add)

    def _lap(self, block: Block, extra: list[Tensor], own: Callable[[], Tensors], visit: _Visit, merge: Merge) -> None:
        """`own` works on the own block while the first blocks are in transit; sums that come home are added to its result.

        `visit` works on the rectangles of a visiting block that are this rank's share.
        """
        travels = [tensor for tensor in (block.y, block.col_ids) if tensor is not None]

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            if blocks == (self.ring.ranks.rank,):
                return own()
            y, *rest = here
            col_ids = None if block.col_ids is None else rest.pop(0)
            visited = replace(block, y=y, col_ids=col_ids, skip_diagonal=False)
            return visit(visited, list(self._shares(visited, blocks)), rest)

        Lap(self.ring.route, self.ring.ranks).run([*travels, *extra], work, merge)

    def _shares(self, visited: Block, blocks: tuple[int, ...]) -> Iterator[Rectangle]:
        """Which rows and columns of the blocks that are here, one after another, are this rank's to do."""
        start = 0
        for other in blocks:
            size = self.ring.ranks.columns[other]
            lower = self.ring.ranks.rank < other
            rows = slice(0, visited.N // 2 if lower else visited.N)
            columns = slice(start if lower else start + size // 2, start + size)
            if rows.stop and columns.start < columns.stop:
                yield from self.half.bands(visited, rows, columns)
            start += size
