"""Late interaction over all ranks: queries stay, and the vectors of all ranks' documents visit them.

The columns of a lap are vectors, not documents. Numbers of a document, such as its id, travel in the place of its first vector.
How many documents a rank has, and their lengths, is told to all ranks before the lap.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megabatch.ring.lap import Lap, Merge, Tensors, Work
from megabatch.ring.passes import add
from megabatch.ring.ranks import Ranks
from megabatch.ring.routes import Route
from megabatch.tiles import late
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.tokens import LateBlock, Tokens


@dataclass(frozen=True)
class Documents:
    """The documents of one rank, without their vectors."""

    count: int
    width: int
    lengths: Tensor | None  # (M,)

    @classmethod
    def of_all_ranks(cls, own: Tokens, ranks: Ranks) -> list["Documents"]:
        """By rank."""
        device = own.values.device
        sizes = torch.tensor([own.count, own.width, own.lengths is not None], device=device)
        known = [tuple(part.tolist()) for part in ranks.all_gather(sizes)]
        if not any(packed for _, _, packed in known):
            return [cls(count, width, None) for count, width, _ in known]
        room = torch.zeros(max(count for count, _, _ in known), dtype=torch.int64, device=device)
        room[: own.count] = own.all_lengths()
        lengths = ranks.all_gather(room)
        return [cls(count, width, part[:count]) for (count, width, _), part in zip(known, lengths, strict=True)]


@dataclass(frozen=True)
class RingLate:
    """The passes of `tiles.late`, taken round the ring."""

    ranks: Ranks  # their columns are vectors
    route: Route
    backend: str
    documents: list[Documents]  # of each rank

    def statistics(self, block: LateBlock, *, columns: bool) -> tuple[LogSum, LogSum]:
        """Row sums (N,) and column sums (M,) of exp(s) over the whole batch; without `columns` these are empty, (0,)."""
        block = self._prepared(block)
        row = LogSum.empty(block.N, dtype=block.dtype, device=block.device)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited, _ = self._visited(block, blocks, here)
            by_row, by_column = late.statistics(visited, self.backend, columns=columns)
            row.add_(by_row)
            return (
                [_spread(part, visited.document, fill) for part, fill in zip(by_column, _EMPTY, strict=False)]
                if columns
                else ()
            )

        home = self._lap(self._columns(block), work, LogSum.merge if columns else add)
        if not columns:
            return row, LogSum.empty(0, dtype=block.dtype, device=block.device)
        starts = block.document.starts()
        return row, LogSum(*(part[starts] for part in home))

    def gradients(
        self,
        block: LateBlock,
        row: LogSum,
        col: LogSum | None,
        drow: Tensor | None,
        dcol: Tensor | None,
        dquery: Tensor,
        ddocument: Tensor,
        dscale: Tensor | None,
    ) -> None:
        """As `late.gradients`; `ddocument` receives what all ranks add."""
        block = self._prepared(block)
        weights: list[Tensor] = []
        if col is not None and dcol is not None:
            weights = [_spread(part, block.document, fill) for part, fill in zip((*col, dcol), (*_EMPTY, 0.0), strict=True)]

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited, rest = self._visited(block, blocks, here)
            starts = visited.document.starts()
            shift, total, dcol_here = (part[starts] for part in rest) if rest else (None, None, None)
            whole = None if shift is None or total is None else LogSum(shift, total)
            partial = ddocument if blocks == (self.ranks.rank,) else block.zeros(len(visited.document.values), block.query.D)
            late.gradients(visited, self.backend, row, whole, drow, dcol_here, dquery, partial, dscale)
            return [partial]

        self._lap([*self._columns(block), *weights], work, add)

    def _lap(self, own: list[Tensor], work: Work, merge: Merge) -> Tensors:
        return Lap(self.route, self.ranks).run(own, work, merge)

    def _prepared(self, block: LateBlock) -> LateBlock:
        """`block` as it goes round: rounded once, and the main diagonal that of the whole batch."""
        half = HALF_DTYPE.get(block.precision)
        if half is not None:
            query, document = (replace(side, values=side.values.to(half)) for side in (block.query, block.document))
            block = replace(block, query=query, document=document)
        counts = tuple(part.count for part in self.documents)
        if block.skip_diagonal and self.ranks.rows != counts:
            assert block.row_ids is None, "ids and a diagonal at once come from losses, whose queries and documents are pairs"
            rank = self.ranks.rank
            firsts = sum(self.ranks.rows[:rank]), sum(counts[:rank])
            row_ids, col_ids = (
                torch.arange(first, first + size, device=block.device)
                for first, size in zip(firsts, (block.N, block.M), strict=True)
            )
            block = replace(block, row_ids=row_ids, col_ids=col_ids, skip_diagonal=False)
        return block

    def _columns(self, block: LateBlock) -> list[Tensor]:
        tokens = block.document
        ids = None if block.col_ids is None else _spread(block.col_ids.long(), tokens, 0)
        return [part for part in (tokens.values, tokens.valid, ids) if part is not None]

    def _visited(self, block: LateBlock, blocks: tuple[int, ...], here: Tensors) -> tuple[LateBlock, Tensors]:
        """The local queries against the documents that are here, and what else travelled with them."""
        values, *rest = here
        valid = None if block.document.valid is None else rest.pop(0)
        present = [self.documents[rank] for rank in blocks if self.documents[rank].count]
        width = max((part.width for part in present), default=1)
        lengths = None
        if any(part.lengths is not None or part.width != width for part in present):
            each = (
                torch.full((part.count,), part.width, device=values.device) if part.lengths is None else part.lengths
                for part in present
            )
            lengths = torch.cat(list(each))
        tokens = Tokens(values, width, lengths, valid)
        ids = None if block.col_ids is None else rest.pop(0)[tokens.starts()]
        diagonal = block.skip_diagonal and blocks == (self.ranks.rank,)
        return replace(block, document=tokens, col_ids=ids, skip_diagonal=diagonal), rest


_EMPTY = (-torch.inf, 0.0)  # shift and total of an empty sum


def _spread(values: Tensor, tokens: Tokens, fill: float) -> Tensor:  # (M,) → (T,)
    """The number of each document in the place of its first vector."""
    spread = values.new_full((len(tokens.values),), fill)
    spread[tokens.starts()] = values
    return spread
