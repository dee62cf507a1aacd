"""The walks in PyTorch operations: every device, every dtype, no kernels of our own.

A tile of similarities is formed in a buffer that is allocated once and reused, worked on in place, and gone with the next tile.
Nothing here reads a value back to the host, so on CUDA the walk can be captured in a graph.

Four walks over the same tiles:
- `logsumexp_statistics`  row and column sums of exp(s), both from one pass
- `softplus_sums`         row sums of softplus(s)
- `*_gradients`           strips of dx as they are finished, dy added to as we go
- `rank_counts`           how many entries of a row or column come before the matching one

What is done row by row, `matching_products` and `finish_rows`, is in `matching`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, ColumnGradients, Needs, Pairs, RowGradients, windows
from megabatch.tiles.logsum import LogSum, finite_or_zero
from megabatch.tiles.matching import finish_rows, matching_products, pairs_on_the_diagonal, rank_noise
from megabatch.tiles.precision import (
    BFLOAT16,
    FLOAT16,
    SOFTPLUS_IS_IDENTITY,
    TF32,
    add_product,
    multiply_into,
    product_dtype,
    round_to_tf32_,
    rounded,
)

__all__ = [
    "finish_rows",
    "logsumexp_gradients",
    "logsumexp_statistics",
    "matching_products",
    "rank_counts",
    "softplus_gradients",
    "softplus_sums",
]


class _Tiles:
    """The tiles of one block, formed one after another in the same buffers."""

    def __init__(self, block: Block, *, keep_products: bool = False) -> None:
        size = plan.eager_tile(block.x.device, block.dtype).fitted(block.N, block.M)
        self.block = block
        self.rows = list(windows(block.N, size.rows))
        self.columns = list(windows(block.M, size.columns))
        self._elements = size.rows * size.columns
        self._similarities = self.buffer()
        self.products = self.buffer() if keep_products else self._similarities

    def buffer(self, dtype: torch.dtype | None = None) -> Callable[[int, int], Tensor]:
        """Room for one tile: called with its shape, gives a tensor to write to."""
        room = torch.empty(self._elements, dtype=dtype or self.block.dtype, device=self.block.x.device)
        return lambda n, m: room[: n * m].view(n, m)

    def x(self, rows: slice) -> Tensor:  # (n, D)
        """Some rows of x, as the products see them."""
        return rounded(self.block.x[rows], self.block.precision)

    def y(self, columns: slice) -> Tensor:  # (m, D)
        """Some rows of y, as the products see them."""
        return rounded(self.block.y[columns], self.block.precision)

    def similarities(self, rows: slice, columns: slice, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """The tile at (rows, columns); −inf where the pair is left out. Overwrites the previous one."""
        block = self.block
        products, s = self.products(len(x), len(y)), self._similarities(len(x), len(y))
        multiply_into(products, x, y.T)
        torch.mul(products, block.scale, out=s)
        if block.row_bias is not None:
            s.add_(block.row_bias[rows, None])
        if block.col_bias is not None:
            s.add_(block.col_bias[columns])
        if block.row_ids is not None and block.col_ids is not None:
            compare = torch.ne if block.only_equal_ids else torch.eq
            s.masked_fill_(compare(block.row_ids[rows, None], block.col_ids[columns]), -torch.inf)
        if block.skip_diagonal:
            diagonal_of(s, rows, columns).fill_(-torch.inf)
        return s


def diagonal_of(tile: Tensor, rows: slice, columns: slice) -> Tensor:
    """A view of the entries of `tile` that lie on the block's main diagonal; often there are none."""
    offset = rows.start - columns.start
    if -tile.shape[0] < offset < tile.shape[1]:
        return tile.diagonal(offset)
    return tile.new_empty(0)


def logsumexp_statistics(block: Block) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s), from one pass over the tiles."""
    tiles = _Tiles(block)
    spare = tiles.buffer()
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    col = LogSum.empty(block.M, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            row.part(rows).add_exponentials_(s, dim=1, out=spare(*s.shape))
            col.part(columns).add_exponentials_(s, dim=0, out=s)
    return row, col


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Row sums of softplus(s) = log(1 + exp(s))."""
    tiles = _Tiles(block)
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
    col: LogSum,  # (M,)
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
    tiles = _gradient_tiles(block)
    spare = tiles.buffer()
    row_shift, col_shift = finite_or_zero(row.shift), finite_or_zero(col.shift)
    row_weight = None if drow is None else row.per_unit(drow)
    col_weight = None if dcol is None else col.per_unit(dcol)

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        g = spare(*s.shape)
        if row_weight is None:
            g.zero_()
        else:
            _weighted(s, row_shift[rows, None], row_weight[rows, None], out=g)
        return g if col_weight is None else g.add_(_weighted(s, col_shift[columns], col_weight[columns], out=s))

    return _gradients(tiles, weigh, sums, needs)


def _weighted(s: Tensor, shift: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.sub(s, shift, out=out).exp_().mul_(weight)


def softplus_gradients(
    block: Block,
    dtotal: Tensor,  # (N,)
    sums: ColumnGradients,
    needs: Needs,
    *,
    total: Tensor | None = None,  # (N,)
) -> Iterator[RowGradients]:
    """Gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij). Adds the row sums to `total` if given."""
    tiles = _gradient_tiles(block)
    spare = tiles.buffer() if total is not None else None

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        if total is not None and spare is not None:
            total[rows] += _softplus(s, out=spare(*s.shape)).sum(1)
        return s.sigmoid_().mul_(dtotal[rows, None])

    return _gradients(tiles, weigh, sums, needs)


def _gradient_tiles(block: Block) -> _Tiles:
    return _Tiles(block, keep_products=_rounds_gradients(block))


def _rounds_gradients(block: Block) -> bool:
    """Whether a gradient tile is rounded to the inputs' type before it is multiplied with them."""
    return block.x.device.type == "cuda" and block.precision in (TF32, BFLOAT16, FLOAT16)


def _gradients(
    tiles: _Tiles,
    weigh: Callable[[Tensor, slice, slice], Tensor],  # turns a tile of s into a tile of g, in place
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    # The gradient of the scale is small against its terms. Σ_i ⟨x_i, dx_i⟩ is good enough while g is exact; once it is
    # rounded, the roundings do not cancel as the terms do, and the sum is taken over g and the products themselves.
    block, rounds = tiles.block, _rounds_gradients(tiles.block)
    as_factor = _product_factor(tiles)
    for rows in tiles.rows:
        x = tiles.x(rows)
        dx = block.zeros(len(x), block.D) if needs.dx or (needs.dscale and not rounds) else None
        dscale = block.zeros(len(x)) if needs.dscale else None
        drow_bias = block.zeros(len(x)) if needs.drow_bias else None
        for columns in tiles.columns:
            y = tiles.y(columns)
            g = weigh(tiles.similarities(rows, columns, x, y), rows, columns)
            if drow_bias is not None:
                drow_bias += g.sum(1)
            if sums.dcol_bias is not None:
                sums.dcol_bias[columns] += g.sum(0)
            if dscale is not None and rounds:
                dscale += tiles.products(*g.shape).mul_(g).sum(1)
            g = as_factor(g)
            if dx is not None:
                add_product(dx, g, y)
            if sums.dy is not None:
                add_product(sums.dy[columns], g.T, x)
        if dscale is not None and dx is not None and not rounds:
            dscale += (dx * x).sum(1)
        yield RowGradients(rows, dx, dscale, drow_bias)


def _product_factor(tiles: _Tiles) -> Callable[[Tensor], Tensor]:
    """How a gradient tile enters a product with rounded inputs: itself, or rounded to their type."""
    block = tiles.block
    if not _rounds_gradients(block):
        return lambda g: g
    if block.precision == TF32:
        return lambda g: round_to_tf32_(g, tiles.products(*g.shape))
    half = tiles.buffer(product_dtype(block.precision, block.x.device.type))
    return lambda g: half(*g.shape).copy_(g)


def rank_counts(block: Block, pairs: Pairs | None = None) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """How many entries of row i, and of column i, come before s_ii; or before the pairs given, which may be elsewhere.

    Larger comes first. Entries that rounding cannot tell from s_ii count as equal to it, and of equal ones the smaller index
    comes first: the same product, formed in two places, need not have the same last bit. What NaN touches ranks last.
    """
    tiles = _Tiles(block)
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


def _softplus(s: Tensor, out: Tensor) -> Tensor:
    return F.softplus(s, 1.0, SOFTPLUS_IS_IDENTITY, out=out)  # type: ignore[call-arg]
