"""The Triton backend: the same functions as `eager`.

A teacher or a guide adds a second product for each pair. Two tiles do not fit in a kernel's registers, so library products form
both in memory, and `triton_distillation` and `triton_guided_logsumexp` read them.
"""

from collections.abc import Iterator

from torch import Tensor

from megabatch.tiles import triton_backward, triton_guided_logsumexp, triton_logsumexp
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.triton_backward import softplus_gradients, softplus_sums
from megabatch.tiles.triton_distillation import soft_gradients, soft_statistics
from megabatch.tiles.triton_embeddings import finish_rows, matching_products
from megabatch.tiles.triton_rank import rank_counts
from megabatch.tiles.triton_topk import topk

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


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s); without `columns`, as with a guide, the column sums are empty, (0,)."""
    if block.companion is None:
        return triton_logsumexp.logsumexp_statistics(block, columns=columns)
    assert not columns
    row = triton_guided_logsumexp.row_statistics(block)
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
    if block.companion is not None:
        assert dcol is None
        return triton_guided_logsumexp.row_gradients(block, row, drow, sums, needs)
    return triton_backward.logsumexp_gradients(block, row, col, drow, dcol, sums, needs)
