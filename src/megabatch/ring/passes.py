"""The passes over all ranks. They have the methods of an engine's passes, but x and y are this rank's shards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megabatch.ring.lap import Lap, Merge, Tensors, Work
from megabatch.ring.ranks import Ranks
from megabatch.ring.routes import Route
from megabatch.tiles import plan
from megabatch.tiles.block import (
    HALF_DTYPE,
    Block,
    ColumnGradients,
    Needs,
    Passes,
    RankTargets,
    RowGradients,
    RowWork,
    matching_logits,
    windows,
)
from megabatch.tiles.sums import Best, LogSum, SoftSum
from megabatch.tiles.symmetric import Rectangle, Triangle, TriangleSide, part_of

# ----------------------------------------------------------------------------------------------------------------------
# The passes over all ranks. Each method wraps the method of an engine with the same name.
#
# Rows stay on their rank, and the columns of all ranks visit it. One visit serves both directions: row sums stay, and column
# sums are forwarded with the columns. The results cover the whole batch: a sum of a local row is over all columns, and a sum
# of a local column is over all rows. They equal the results of one process with the whole batch.


@dataclass(frozen=True)
class RingPasses:
    """The passes of an engine over the blocks of all ranks."""

    ranks: Ranks
    route: Route
    inner: Callable[[Block], Passes]  # returns the engine that serves a block
    local: RowWork  # the work on rows, which needs no other rank
    sums_dtype: torch.dtype

    def logsumexp_statistics(self, block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:
        """Returns row sums (N,) and column sums (M,) of exp(s) over the whole batch.

        Without `columns`, the column sums are empty, (0,).
        """
        block = self._prepare(block)
        row = LogSum.empty(block.N, dtype=self.sums_dtype, device=block.x.device)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited = self._visit_block(block, blocks, here)
            sums = self.inner(visited).logsumexp_statistics(visited, columns=columns)
            by_row, by_column = (self._cast(part) for part in sums)
            row.add_(by_row)
            return by_column if columns else ()

        home = self._lap(self._columns(block), work, LogSum.merge if columns else add)
        return row, LogSum(*home) if columns else LogSum.empty(0, dtype=self.sums_dtype, device=block.x.device)

    def _cast(self, sums: LogSum) -> LogSum:
        return LogSum(*(part.to(self.sums_dtype) for part in sums))

    def logsumexp_gradients(
        self,
        block: Block,
        row: LogSum,
        col: LogSum | None,
        drow: Tensor | None,
        dcol: Tensor | None,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]:
        """Yields gradients of rows. The gradients of columns are in `sums` before the first rows are yielded."""
        weights = [] if dcol is None or col is None else [col.shift, col.total, dcol]

        def gradients(visited: Block, extra: Tensors, partial: ColumnGradients) -> Iterator[RowGradients]:
            whole, dcol_here = (LogSum(*extra[:2]), extra[2]) if extra else (None, None)
            return self.inner(visited).logsumexp_gradients(visited, row, whole, drow, dcol_here, partial, needs)

        return self._gradients(block, weights, gradients, sums, needs)

    def soft_statistics(self, block: Block) -> tuple[SoftSum, SoftSum]:
        """Returns sums for the cross-entropies of local rows and columns over the whole batch."""
        block = self._prepare(block)
        row = SoftSum.empty(block.N, dtype=block.dtype, device=block.x.device)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited = self._visit_block(block, blocks, here)
            by_row, by_column = self.inner(visited).soft_statistics(visited)
            row.add_(by_row)
            return [by_column.pack()]

        (home,) = self._lap(self._columns(block), work, SoftSum.merge)
        return row, SoftSum.unpack(home)

    def soft_gradients(
        self,
        block: Block,
        row: SoftSum,
        col: SoftSum,
        drow: Tensor,
        dcol: Tensor,
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]:
        """Yields gradients, in the order of `logsumexp_gradients`."""

        def gradients(visited: Block, extra: Tensors, partial: ColumnGradients) -> Iterator[RowGradients]:
            packed, dcol_here = extra
            whole = SoftSum.unpack(packed)
            return self.inner(visited).soft_gradients(visited, row, whole, drow, dcol_here, partial, needs)

        return self._gradients(block, [col.pack(), dcol], gradients, sums, needs)

    def softplus_sums(self, block: Block) -> Tensor:
        """Returns row sums of softplus(s) over the whole batch."""
        block = self._prepare(block)
        total = block.zeros(block.N)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited = self._visit_block(block, blocks, here)
            total.add_(self.inner(visited).softplus_sums(visited))
            return ()

        self._lap(self._columns(block), work, add)
        return total

    def softplus_gradients(
        self, block: Block, dtotal: Tensor | None, sums: ColumnGradients, needs: Needs, *, total: Tensor | None = None
    ) -> Iterator[RowGradients]:
        """Yields gradients, in the order of `logsumexp_gradients`."""

        def gradients(visited: Block, extra: Tensors, partial: ColumnGradients) -> Iterator[RowGradients]:
            return self.inner(visited).softplus_gradients(visited, dtotal, partial, needs, total=total)

        return self._gradients(block, [], gradients, sums, needs)

    def rank_counts(self, block: Block, targets: RankTargets | None = None) -> tuple[Tensor, Tensor]:
        """Counts the entries of the whole batch that come before the target of each local row and of each local column.

        Without `targets`, the targets are the local pairs (i, i).
        """
        row_index, col_index = (
            torch.arange(sum(counts[: self.ranks.rank]), sum(counts[: self.ranks.rank + 1]), device=block.x.device)
            for counts in (self.ranks.rows, self.ranks.columns)
        )
        if targets is None:
            match = matching_logits(block, self.local.matching_products(block))
            targets = RankTargets(match, match, col_index, row_index, row_index, col_index)
        else:
            targets = targets._replace(row_index=row_index, col_index=col_index)
        block = self._prepare(block)
        row_rank = torch.zeros_like(row_index)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            columns, (col_match, col_target, col_index) = here[:-3], here[-3:]
            visited = self._visit_block(block, blocks, columns)
            theirs = targets._replace(col_match=col_match, col_target=col_target, col_index=col_index)
            by_row, by_column = self.inner(visited).rank_counts(visited, theirs)
            row_rank.add_(by_row)
            return (by_column,)

        own = [*self._columns(block), targets.col_match, targets.col_target, targets.col_index]
        (col_rank,) = self._lap(own, work, add)
        return row_rank, col_rank

    def topk(self, block: Block, k: int) -> Best:  # (N, k)
        """Returns the k largest logits of each local row. Column numbers count the columns of all ranks."""
        block = self._prepare(block)
        best = Best.none(block.N, k, block.zeros(0))
        first = sum(self.ranks.columns[: self.ranks.rank])

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            nonlocal best
            visited, index = self._visit_block(block, blocks, here[:-1]), here[-1]
            if not visited.is_empty:
                values, columns = self.inner(visited).topk(visited, k)
                numbered = torch.where(columns < 0, columns, index[columns.clamp_min(0)])
                best = best.merge(Best(values, numbered))
            return ()

        self._lap([*self._columns(block), torch.arange(first, first + block.M, device=block.x.device)], work, add)
        return best

    def visit(self, own: list[Tensor], visit_block: Callable[[Tensors, bool], None]) -> None:
        """Calls `visit_block` with the tensors of the own block, then with the tensors of all other ranks. Returns no sums."""

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visit_block(here, blocks == (self.ranks.rank,))
            return ()

        self._lap(own, work, add)

    def _gradients(
        self,
        block: Block,
        weights: list[Tensor],  # tensors of the columns that the gradients need; they are sent with the columns
        gradients: Callable[[Block, Tensors, ColumnGradients], Iterator[RowGradients]],
        sums: ColumnGradients,
        needs: Needs,
    ) -> Iterator[RowGradients]:
        block = self._prepare(block)
        rows, columns = _RowSums(block, needs), self._columns(block)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited = self._visit_block(block, blocks, here[: len(columns)])
            own = blocks == (self.ranks.rank,)
            partial = sums if own else sums.zeros(visited.M)
            if not visited.is_empty:
                for strip in gradients(visited, here[len(columns) :], partial):
                    rows.add(strip)
            return partial.tensors()

        self._lap([*columns, *weights], work, add)
        return rows.strips()

    def _lap(self, own: list[Tensor], work: Work, merge: Merge) -> Tensors:
        return Lap(self.route, self.ranks).run(own, work, merge)

    def _prepare(self, block: Block) -> Block:
        """Returns the block that is sent to other ranks. A skipped diagonal is the diagonal of the whole batch.

        If every rank has as many rows as columns, the diagonal lies in each rank's own block. Otherwise ids mark its pairs.
        """
        block = prepare_for_travel(block)
        if block.skip_diagonal and self.ranks.rows != self.ranks.columns:
            assert block.row_ids is None, "ids and a diagonal at once come from losses, whose rows and columns are pairs"
            rank, device = self.ranks.rank, block.x.device
            row, col = sum(self.ranks.rows[:rank]), sum(self.ranks.columns[:rank])
            row_ids, col_ids = (
                torch.arange(start, start + size, device=device) for start, size in ((row, block.N), (col, block.M))
            )
            block = replace(block, row_ids=row_ids, col_ids=col_ids, skip_diagonal=False)
        return block

    def _columns(self, block: Block) -> list[Tensor]:
        """Returns the tensors of the columns that every visit needs."""
        second_y = None if block.second_model is None else block.second_model.y
        return [tensor for tensor in (block.y, block.col_bias, block.col_ids, second_y) if tensor is not None]

    def _visit_block(self, block: Block, blocks: tuple[int, ...], columns: Tensors) -> Block:
        """Returns the block of the local rows and the visiting columns."""
        y, *rest = columns
        given = iter(rest)
        return replace(
            block,
            y=y,
            col_bias=None if block.col_bias is None else next(given),
            col_ids=None if block.col_ids is None else next(given),
            second_model=None if block.second_model is None else replace(block.second_model, y=next(given)),
            skip_diagonal=block.skip_diagonal and blocks == (self.ranks.rank,),
        )


def prepare_for_travel(block: Block) -> Block:
    """Rounds inputs of half-precision matmuls to half precision once, and converts ids to int64, as on the other ranks."""
    half = HALF_DTYPE.get(block.precision)
    if half is not None:
        x = block.x.to(half)
        block = replace(block, x=x, y=x if block.y is block.x else block.y.to(half))
    if block.second_model is not None:
        block = replace(block, second_model=prepare_for_travel(block.second_model))
    if block.row_ids is not None and block.col_ids is not None:
        block = replace(block, row_ids=block.row_ids.long(), col_ids=block.col_ids.long())
    return block


class _RowSums:
    """The gradients of the local rows, summed over all visits."""

    def __init__(self, block: Block, needs: Needs) -> None:
        self.block = block
        self.dx = block.zeros(block.N, block.D) if needs.dx else None
        self.dscale: Tensor | None = None  # None if the engine does not compute it; it is then computed from dx
        self.drow_bias = block.zeros(block.N) if needs.drow_bias else None

    def add(self, strip: RowGradients) -> None:
        rows, *parts = strip
        if strip.dx is not None and self.dx is None:
            self.dx = self.block.zeros(self.block.N, self.block.D)
        if strip.dscale is not None and self.dscale is None:
            self.dscale = self.block.zeros(self.block.N)
        for whole, part in zip((self.dx, self.dscale, self.drow_bias), parts, strict=True):
            if whole is not None and part is not None:
                whole[rows] += part

    def strips(self) -> Iterator[RowGradients]:
        wholes = (self.dx, self.dscale, self.drow_bias)
        for rows in windows(self.block.N, plan.rows_at_once(self.block.x.device, self.block.D)):
            dx, dscale, drow_bias = (None if whole is None else whole[rows] for whole in wholes)
            yield RowGradients(rows, dx, dscale, drow_bias)


def add(sums: Tensors, others: Tensors) -> None:
    """Adds gradients, or counts, to `sums`."""
    for part, other in zip(sums, others, strict=True):
        part.add_(other)


# ----------------------------------------------------------------------------------------------------------------------
# Logits of all rows with all rows, which are symmetric: every two ranks share the work on the logits between their blocks.
#
# In a lap, rank r visits block b, and rank b visits block r, which is the transposed block of logits. Let r < b, and let H be
# the first half of the rows of r. Rank r computes H against all rows of b. Rank b computes all of its rows against the second
# half of r's rows. So every logit is computed once, all ranks have equal work on every route, and one visit serves both
# sides. The blocks still make the whole lap, so there are half as many matmuls as in `RingPasses`, but the same messages.


_Visit = Callable[[Block, list[Rectangle], Tensors], Tensors]


@dataclass(frozen=True)
class RingTriangle:
    """`Triangle` over all ranks. A block contains this rank's rows, and its sums are over the rows of all ranks."""

    triangle: Triangle
    ring: RingPasses

    def statistics(self, block: Block) -> LogSum:
        """Returns the sum of exp(s) over each local row, (N,)."""
        block = prepare_for_travel(block)
        row = LogSum.empty(block.N, dtype=self.ring.sums_dtype, device=block.x.device)

        def own() -> Tensors:
            row.add_(self.triangle.statistics(block))
            return row

        def visit(visited: Block, shares: list[Rectangle], extra: Tensors) -> Tensors:
            col = LogSum.empty(visited.M, dtype=row.shift.dtype, device=visited.x.device)
            for rows, columns in shares:
                part = part_of(visited, rows, columns)
                self.triangle.add_statistics(part, row.part(rows), col.part(columns))
            return col

        self._lap(block, [], own, visit, LogSum.merge)
        return row

    def gradients(self, block: Block, side: TriangleSide, dscale: Tensor | None) -> None:
        """Adds the gradient with respect to the local rows of ⟨dsums, log sums⟩, which is summed over ranks."""
        block = prepare_for_travel(block)

        def own() -> Tensors:
            self.triangle.gradients(block, side, dscale)
            return [side.dz]

        def visit(visited: Block, shares: list[Rectangle], extra: Tensors) -> Tensors:
            shift, total, dsums = extra
            others = TriangleSide(LogSum(shift, total), dsums, visited.zeros(visited.M, visited.D))
            for rows, columns in shares:
                part = part_of(visited, rows, columns)
                self.triangle.add_gradients(part, side.part(rows), others.part(columns), dscale)
            return [others.dz]

        self._lap(block, [*side.sums, side.dsums], own, visit, add)

    def _lap(self, block: Block, extra: list[Tensor], own: Callable[[], Tensors], visit: _Visit, merge: Merge) -> None:
        """Calls `own` for the own block while the first blocks are in transit, then `visit` for the other blocks.

        `visit` takes the rectangles of a block that are this rank's share. The sums that other ranks return are added to the
        result of `own`.
        """
        columns = [tensor for tensor in (block.y, block.col_ids) if tensor is not None]

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            if blocks == (self.ring.ranks.rank,):
                return own()
            y, *rest = here
            col_ids = None if block.col_ids is None else rest.pop(0)
            visited = replace(block, y=y, col_ids=col_ids, skip_diagonal=False)
            return visit(visited, list(self._shares(visited, blocks)), rest)

        Lap(self.ring.route, self.ring.ranks).run([*columns, *extra], work, merge)

    def _shares(self, visited: Block, blocks: tuple[int, ...]) -> Iterator[Rectangle]:
        """Yields the rectangles of the concatenated visiting blocks that this rank has to compute."""
        start = 0
        for other in blocks:
            size = self.ring.ranks.columns[other]
            lower = self.ring.ranks.rank < other
            rows = slice(0, visited.N // 2 if lower else visited.N)
            columns = slice(start if lower else start + size // 2, start + size)
            if rows.stop and columns.start < columns.stop:
                yield from self.triangle.bands(visited, rows, columns)
            start += size
