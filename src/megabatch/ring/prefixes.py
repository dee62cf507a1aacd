"""Several widths at once, over all ranks: rows stay, columns come by with their factors, and their sums go home."""

from dataclasses import replace

from torch import Tensor

from megabatch.ring.lap import Lap, Tensors
from megabatch.ring.walks import RingWalks
from megabatch.tiles import prefixes
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.prefixes import Prefixes, PrefixSums


def statistics(ring: RingWalks, given: Prefixes) -> tuple[LogSum, LogSum]:  # (N, W), (N, W)
    """Row sums and column sums of exp(s) over the whole batch, at every width."""
    given = _as_it_travels(given)
    empty = given.block.zeros(given.block.N, len(given.widths))
    row = LogSum(empty - float("inf"), empty)

    def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
        by_row, by_column = prefixes.statistics(_visited(ring, given, blocks, here))
        row.add_(by_row)
        return by_column

    lap = Lap(ring.schedule, ring.exchange, ring.census.columns)
    home = lap.run(_columns(given), work, lambda sums, others: LogSum(*sums).add_(LogSum(*others)))
    return row, LogSum(*home)


def gradients(
    ring: RingWalks,
    given: Prefixes,
    row: LogSum,
    col: LogSum,
    drow: Tensor,
    dcol: Tensor,
    by_row: PrefixSums,
    by_column: PrefixSums,
) -> None:
    """Adds the gradients with respect to local rows and columns of what all ranks have."""
    given = _as_it_travels(given)
    columns = _columns(given)

    def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
        visited = _visited(ring, given, blocks, here)
        shift, total, dcol_here = here[len(columns) :]
        own = blocks == (ring.exchange.members.rank,)
        sums = by_column if own else PrefixSums.zeros(visited.block, visited.block.M, len(given.widths))
        prefixes.gradients(visited, row, LogSum(shift, total), drow, dcol_here, by_row, sums)
        return sums

    def merge(sums: Tensors, others: Tensors) -> None:
        for part, other in zip(sums, others, strict=True):
            part.add_(other)

    Lap(ring.schedule, ring.exchange, ring.census.columns).run([*columns, *col, dcol], work, merge)


def _as_it_travels(given: Prefixes) -> Prefixes:
    """Rounded to half precision once where products see no more, ids as wide as others'."""
    block = given.block
    half = HALF_DTYPE.get(block.precision)
    if half is not None:
        block = replace(block, x=block.x.to(half), y=block.y.to(half))
    if block.row_ids is not None and block.col_ids is not None:
        block = replace(block, row_ids=block.row_ids.long(), col_ids=block.col_ids.long())
    return replace(given, block=block)


def _columns(given: Prefixes) -> list[Tensor]:
    return [tensor for tensor in (given.block.y, given.col_factor, given.block.col_ids) if tensor is not None]


def _visited(ring: RingWalks, given: Prefixes, blocks: tuple[int, ...], here: Tensors) -> Prefixes:
    """The local rows against the columns that are here."""
    block, own = given.block, blocks == (ring.exchange.members.rank,)
    col_ids = None if block.col_ids is None else here[2]
    visited = replace(block, y=here[0], col_ids=col_ids, skip_diagonal=block.skip_diagonal and own)
    return replace(given, block=visited, col_factor=here[1])
