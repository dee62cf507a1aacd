"""The passes in PyTorch operations: every device, every dtype, no kernels of our own.

Their tiles are formed by `in_memory`. Nothing there or here reads a value back to the host, so on CUDA a pass can be captured
in a graph.

The passes, over the same tiles:
- `logsumexp_statistics`  row sums of exp(s), and column sums from the same pass if they are wanted
- `softplus_sums`         row sums of softplus(s)
- `soft_statistics`       cross-entropies of rows and columns under a companion's softmax
- `*_gradients`           strips of dx as they are finished, dy added to as we go
- `rank_counts`           how many entries of a row or column come before the matching one
- `topk`                  the k largest entries of each row

What is done row by row, `matching_products` and `finish_rows`, is in `matching`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, ColumnGradients, Needs, Pairs, RowGradients
from megabatch.tiles.in_memory import Tiles, gradient_tiles, tile_gradients
from megabatch.tiles.logsum import LogSum, weighted_softmax
from megabatch.tiles.matching import finish_rows, matching_products, pairs_on_the_diagonal, rank_noise
from megabatch.tiles.precision import SOFTPLUS_IS_IDENTITY
from megabatch.tiles.softsum import SoftSum
from megabatch.tiles.topk import Best, best_columns

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
    """Row sums (N,) and column sums (M,) of exp(s), from one pass over the tiles.

    Without `columns` the column sums are empty, (0,), and half of the exponentials are saved.
    """
    tiles = Tiles(block)
    spare = tiles.buffer() if columns else None
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    col = LogSum.empty(block.M if columns else 0, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for window in tiles.columns:
            s = tiles.similarities(rows, window, x, tiles.y(window))
            row.part(rows).add_exponentials_(s, dim=1, out=s if spare is None else spare(*s.shape))
            if columns:
                col.part(window).add_exponentials_(s, dim=0, out=s)
    return row, col


def soft_statistics(block: Block) -> tuple[SoftSum, SoftSum]:
    """Sums for the cross-entropies of rows (N,) and columns (M,) under the companion's softmax, from one pass."""
    tiles = Tiles(block)
    buffers = tiles.buffer(), tiles.buffer()
    row, col = (SoftSum.empty(size, dtype=block.dtype, device=block.x.device) for size in (block.N, block.M))
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            t = tiles.teacher(rows, columns)
            spare, other = (buffer(*s.shape) for buffer in buffers)
            row.part(rows).add_tile_(s, t, 1, spare, other)
            col.part(columns).add_tile_(s, t, 0, spare, other)
    return row, col


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Row sums of softplus(s) = log(1 + exp(s))."""
    tiles = Tiles(block)
    total = block.zeros(block.N)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            total[rows] += _softplus(s, out=s).sum(1)
    return total


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,) the whole sums, of which the block may be a part
    col: LogSum | None,  # (M,) None where dcol is
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
    tiles = gradient_tiles(block)
    by_row = None if drow is None else row.softmax_factors(drow)
    by_column = None if dcol is None or col is None else col.softmax_factors(dcol)

    spare = None if by_column is None else tiles.buffer()

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        g = s if spare is None else spare(*s.shape)
        if by_row is None:
            g.zero_()
        else:
            weighted_softmax(s, *(factor[rows, None] for factor in by_row), out=g)
        if by_column is not None:
            g.add_(weighted_softmax(s, *(factor[columns] for factor in by_column), out=s))
        return g

    return tile_gradients(tiles, weigh, sums, needs)


def soft_gradients(
    block: Block,
    row: SoftSum,  # (N,) the whole sums, of which the block may be a part
    col: SoftSum,  # (M,)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of the cross-entropies: g_ij = drow_i·(softmax(s) − softmax(t))_ij + dcol_j·(the same over columns)_ij."""
    tiles = gradient_tiles(block)
    buffers = tiles.buffer(), tiles.buffer()
    parts = [
        (by_row.softmax_factors(drow), by_column.softmax_factors(dcol))
        for by_row, by_column in ((row.student, col.student), (row.teacher, col.teacher))
    ]

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        g, spare = (buffer(*s.shape) for buffer in buffers)
        g.zero_()
        for values, (by_row, by_column), sign in zip((s, tiles.teacher(rows, columns)), parts, (1, -1), strict=True):
            g.add_(weighted_softmax(values, *(factor[rows, None] for factor in by_row), out=spare), alpha=sign)
            g.add_(weighted_softmax(values, *(factor[columns] for factor in by_column), out=spare), alpha=sign)
        return g

    return tile_gradients(tiles, weigh, sums, needs)


def softplus_gradients(
    block: Block,
    dtotal: Tensor | None,  # (N,), or 1
    sums: ColumnGradients,
    needs: Needs,
    *,
    total: Tensor | None = None,  # (N,)
) -> Iterator[RowGradients]:
    """Gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij). Adds the row sums to `total` if given.

    Where equal ids are positives, s_ij is −s_ij and so is g_ij.
    """
    tiles = gradient_tiles(block)
    spare = tiles.buffer() if total is not None else None

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        if total is not None and spare is not None:
            total[rows] += _softplus(s, out=spare(*s.shape)).sum(1)
        g = s.sigmoid_() if dtotal is None else s.sigmoid_().mul_(dtotal[rows, None])
        signs = tiles.signs(rows, columns)
        return g if signs is None else g.mul_(signs)

    return tile_gradients(tiles, weigh, sums, needs)


def rank_counts(block: Block, pairs: Pairs | None = None) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """How many entries of row i, and of column i, come before s_ii; or before the pairs given, which may be elsewhere.

    Larger comes first. Entries that rounding cannot tell from s_ii count as equal to it, and of equal ones the smaller index
    comes first: the same product, formed in two places, need not have the same last bit. What NaN touches ranks last.
    """
    tiles = Tiles(block)
    row_match, col_match, row_index, col_index = (
        pairs_on_the_diagonal(block, matching_products(block)) if pairs is None else pairs
    )
    row_noise, col_noise = rank_noise(block)
    row_rank = torch.zeros(block.N, dtype=torch.int64, device=block.x.device)
    col_rank = torch.zeros(block.M, dtype=torch.int64, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            i, j = row_index[rows, None], col_index[columns]
            near = row_noise[rows, None] * col_noise[columns]
            for rank, own, later, dim in (
                (row_rank[rows], row_match[rows, None], j > i, 1),
                (col_rank[columns], col_match[columns], i > j, 0),
            ):
                before = ~((s < own - near) | ((s <= own + near) & later)) & (i != j)
                rank += before.sum(dim)
    return row_rank, col_rank


def topk(block: Block, k: int) -> Best:  # (N, k)
    """The k largest similarities of each row and their columns; of equal ones the smaller column comes first."""
    tiles = Tiles(block, size=plan.topk_tile(block.x.device, block.dtype, k))
    found = Best.none(block.N, k, block.zeros(0))
    for rows in tiles.rows:
        x, kept = tiles.x(rows), Best(*(part[rows] for part in found))
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            kept = best_columns(s, columns.start, k, kept)
        found.values[rows], found.indices[rows] = kept
    return found


def _softplus(s: Tensor, out: Tensor) -> Tensor:
    return F.softplus(s, 1.0, SOFTPLUS_IS_IDENTITY, out=out)  # type: ignore[call-arg]
