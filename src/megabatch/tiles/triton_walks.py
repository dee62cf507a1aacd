"""The Triton backend: the same functions as `eager`.

No kernel forms two tiles of similarities at once. Of a student's and a teacher's, and of those that a guide looks at too,
`triton_soft` and `triton_guided` take what libraries formed.
"""

from collections.abc import Iterator

from torch import Tensor

from megabatch.tiles import triton_backward, triton_forward, triton_guided
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.triton_backward import softplus_gradients, softplus_sums
from megabatch.tiles.triton_rank import rank_counts
from megabatch.tiles.triton_rows import finish_rows, matching_products
from megabatch.tiles.triton_soft import soft_gradients, soft_statistics

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
]


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s); without `columns` the column sums are empty, (0,)."""
    if columns:
        assert block.limit is None, "a limit belongs to rows"
        return triton_forward.logsumexp_statistics(block)
    row = triton_forward.row_statistics(block) if block.companion is None else triton_guided.row_statistics(block)
    return row, LogSum.empty(0, dtype=row.shift.dtype, device=block.x.device)


def logsumexp_gradients(
    block: Block,
    row: LogSum,
    col: LogSum | None,
    drow: Tensor | None,
    dcol: Tensor | None,
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """As in `triton_backward`; a guide knows rows alone."""
    if block.companion is not None:
        assert dcol is None
        return triton_guided.row_gradients(block, row, drow, sums, needs)
    return triton_backward.logsumexp_gradients(block, row, col, drow, dcol, sums, needs)
