"""The walks in PyTorch operations: every device, every dtype, no kernels of our own.

A tile of similarities is formed in a buffer that is allocated once and reused, worked on in place, and gone with the next tile.
Nothing here reads a value back to the host, so on CUDA the walk can be captured in a graph.

The walks, over the same tiles:
- `logsumexp_statistics`  row and column sums of exp(s), both from one pass
- `row_statistics`        row sums alone, for half the exponentials
- `softplus_sums`         row sums of softplus(s)
- `soft_statistics`       cross-entropies of rows and columns under a companion's softmax
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
from megabatch.tiles.softsum import SoftSum

__all__ = [
    "finish_rows",
    "logsumexp_gradients",
    "logsumexp_statistics",
    "matching_products",
    "rank_counts",
    "row_statistics",
    "soft_gradients",
    "soft_statistics",
    "softplus_gradients",
    "softplus_sums",
]


class Tiles:
    """The tiles of one block, formed one after another in the same buffers."""

    def __init__(self, block: Block, *, keep_products: bool = False) -> None:
        size = plan.eager_tile(block.x.device, block.dtype)
        if block.companion is not None or block.ids_are_positives:
            size = plan.TileSize(max(1, size.rows // 2), size.columns)  # one more tile has to fit in the same workspace
        size = size.fitted(block.N, block.M)
        self.block = block
        self.rows = list(windows(block.N, size.rows))
        self.columns = list(windows(block.M, size.columns))
        self._elements = size.rows * size.columns
        self.room = self.buffer()  # where similarities are formed
        self.products = self.buffer() if keep_products else self.room
        self._above: Callable[[int, int], Tensor] | None = None  # made when it is asked for: kernels have no use for it
        self._signs = self.buffer() if block.ids_are_positives else None
        self.companion = None if block.companion is None else _Companion(block.companion, self)

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

    def form_products(self, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """⟨x_i, y_j⟩ of some rows and columns. Overwrites the previous ones."""
        products = self.products(len(x), len(y))
        multiply_into(products, x, y.T)
        return products

    def similarities(self, rows: slice, columns: slice, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """The tile at (rows, columns); −inf where the pair is left out. Overwrites the previous one."""
        block = self.block
        products, s = self.form_products(x, y), self.room(len(x), len(y))
        above = self._above_limit(products, rows, columns)
        torch.mul(products, block.scale, out=s)
        if block.row_bias is not None:
            s.add_(block.row_bias[rows, None])
        if block.col_bias is not None:
            s.add_(block.col_bias[columns])
        signs = self.signs(rows, columns)
        if signs is not None:
            s.mul_(signs)
        elif block.row_ids is not None and block.col_ids is not None:
            compare = torch.ne if block.only_equal_ids else torch.eq
            s.masked_fill_(compare(block.row_ids[rows, None], block.col_ids[columns]), -torch.inf)
        if block.skip_diagonal:
            diagonal_of(s, rows, columns).fill_(-torch.inf)
        return s if above is None else s.masked_fill_(above, -torch.inf)

    def signs(self, rows: slice, columns: slice) -> Tensor | None:  # (n, m)
        """−1 where equal ids are positives, 1 elsewhere; None if they are not."""
        row_ids, col_ids = self.block.row_ids, self.block.col_ids
        if self._signs is None or row_ids is None or col_ids is None:
            return None
        same = row_ids[rows, None] == col_ids[columns]
        return self._signs(*same.shape).fill_(1.0).masked_fill_(same, -1.0)

    def teacher(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """The companion's tile at (rows, columns), in the type of the block's own."""
        assert self.companion is not None
        return self.companion.similarities(rows, columns).to(self.block.dtype)

    def _above_limit(self, products: Tensor, rows: slice, columns: slice) -> Tensor | None:  # (n, m) bool
        limit = self.block.limit
        if limit is None:
            return None
        self._above = self._above or self.buffer(torch.bool)
        compared = products if self.companion is None else self.companion.similarities(rows, columns)
        return torch.gt(compared, limit[rows, None], out=self._above(*products.shape))


class _Companion:
    """The tiles of a block's companion, cut as the block's own."""

    def __init__(self, block: Block, tiles: Tiles) -> None:
        self.block = block
        self._buffer = tiles.buffer(block.dtype)

    def products(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """Those at (rows, columns), in the companion's own type. Overwrites the previous ones."""
        block = self.block
        x, y = rounded(block.x[rows], block.precision), rounded(block.y[columns], block.precision)
        out = self._buffer(len(x), len(y))
        multiply_into(out, x, y.T)
        return out

    def similarities(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """The same times the companion's scale."""
        return self.products(rows, columns).mul_(self.block.scale)


def diagonal_of(tile: Tensor, rows: slice, columns: slice) -> Tensor:
    """A view of the entries of `tile` that lie on the block's main diagonal; often there are none."""
    offset = rows.start - columns.start
    if -tile.shape[0] < offset < tile.shape[1]:
        return tile.diagonal(offset)
    return tile.new_empty(0)


def logsumexp_statistics(block: Block) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s), from one pass over the tiles."""
    tiles = Tiles(block)
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


def row_statistics(block: Block) -> LogSum:
    """Row sums (N,) of exp(s)."""
    tiles = Tiles(block)
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.similarities(rows, columns, x, tiles.y(columns))
            row.part(rows).add_exponentials_(s, dim=1, out=s)
    return row


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
    by_row = None if drow is None else (finite_or_zero(row.shift), row.per_unit(drow))
    by_column = None if dcol is None or col is None else (finite_or_zero(col.shift), col.per_unit(dcol))

    spare = None if by_column is None else tiles.buffer()

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        g = s if spare is None else spare(*s.shape)
        if by_row is None:
            g.zero_()
        else:
            shift, weight = by_row
            _weighted(s, shift[rows, None], weight[rows, None], out=g)
        if by_column is not None:
            shift, weight = by_column
            g.add_(_weighted(s, shift[columns], weight[columns], out=s))
        return g

    return tile_gradients(tiles, weigh, sums, needs)


def _weighted(s: Tensor, shift: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.sub(s, shift, out=out).exp_().mul_(weight)


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
        (finite_or_zero(by_row.shift), by_row.per_unit(drow), finite_or_zero(by_column.shift), by_column.per_unit(dcol))
        for by_row, by_column in ((row.student, col.student), (row.teacher, col.teacher))
    ]

    def weigh(s: Tensor, rows: slice, columns: slice) -> Tensor:
        g, spare = (buffer(*s.shape) for buffer in buffers)
        g.zero_()
        for values, part, sign in zip((s, tiles.teacher(rows, columns)), parts, (1, -1), strict=True):
            row_shift, row_weight, col_shift, col_weight = part
            g.add_(_weighted(values, row_shift[rows, None], row_weight[rows, None], out=spare), alpha=sign)
            g.add_(_weighted(values, col_shift[columns], col_weight[columns], out=spare), alpha=sign)
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


def gradient_tiles(block: Block) -> Tiles:
    """For `tile_gradients`."""
    return Tiles(block, keep_products=rounds_gradients(block))


def rounds_gradients(block: Block) -> bool:
    """Whether a gradient tile is rounded to the inputs' type before it is multiplied with them."""
    return block.x.device.type == "cuda" and block.precision in (TF32, BFLOAT16, FLOAT16)


def tile_gradients(
    tiles: Tiles,
    weigh: Callable[[Tensor, slice, slice], Tensor],  # turns a tile of s into a tile of g, in place
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Weighs tile after tile, and multiplies with both sides."""
    as_factor = product_factor(tiles)

    def gradient_tile(
        rows: slice, columns: slice, x: Tensor, y: Tensor, dscale: Tensor | None, drow_bias: Tensor | None
    ) -> Tensor:
        g = weigh(tiles.similarities(rows, columns, x, y), rows, columns)
        if drow_bias is not None:
            drow_bias += g.sum(1)
        if sums.dcol_bias is not None:
            sums.dcol_bias[columns] += g.sum(0)
        if dscale is not None:
            dscale += tiles.products(*g.shape).mul_(g).sum(1)
        return as_factor(g)

    # The gradient of the scale is small against its terms. Σ_i ⟨x_i, dx_i⟩ is good enough while g is exact; once it is
    # rounded, the roundings do not cancel as the terms do, and the sum is taken over g and the products themselves.
    return multiplied(tiles, gradient_tile, sums, needs, scale_from_dx=not rounds_gradients(tiles.block))


def multiplied(
    tiles: Tiles,
    gradient_tile: Callable[[slice, slice, Tensor, Tensor, Tensor | None, Tensor | None], Tensor],
    sums: ColumnGradients,
    needs: Needs,
    *,
    scale_from_dx: bool = False,
) -> Iterator[RowGradients]:
    """Multiplies gradient tiles with both sides.

    Args:
        tiles: which there are.
        gradient_tile: given rows, columns, x and y of them, makes the tile of g as products take it; and adds its row sums to
            the gradients of scale (times products) and row offsets where it is given these, and to column offsets itself.
        sums: over rows, added to.
        needs: which gradients are asked for.
        scale_from_dx: whether the gradient of the scale is Σ_i ⟨x_i, dx_i⟩; it is then not asked of `gradient_tile`.
    """
    block = tiles.block
    for rows in tiles.rows:
        x = tiles.x(rows)
        dx = block.zeros(len(x), block.D) if needs.dx or (needs.dscale and scale_from_dx) else None
        dscale = block.zeros(len(x)) if needs.dscale and not scale_from_dx else None
        drow_bias = block.zeros(len(x)) if needs.drow_bias else None
        for columns in tiles.columns:
            y = tiles.y(columns)
            g = gradient_tile(rows, columns, x, y, dscale, drow_bias)
            if dx is not None:
                add_product(dx, g, y)
            if sums.dy is not None:
                add_product(sums.dy[columns], g.T, x)
        if needs.dscale and scale_from_dx and dx is not None:
            dscale = (dx * x).sum(1)
        yield RowGradients(rows, dx, dscale, drow_bias)


def product_factor(tiles: Tiles) -> Callable[[Tensor], Tensor]:
    """How a gradient tile enters a product with rounded inputs: itself, or rounded to their type."""
    block = tiles.block
    if not rounds_gradients(block):
        return lambda g: g
    if block.precision == TF32:
        return lambda g: round_to_tf32_(g, tiles.products(*g.shape))
    half = half_buffer(tiles)
    return lambda g: half(*g.shape).copy_(g)


def half_buffer(tiles: Tiles) -> Callable[[int, int], Tensor]:
    """Room for a gradient tile in the type of the inputs."""
    return tiles.buffer(product_dtype(tiles.block.precision, tiles.block.x.device.type))


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


def _softplus(s: Tensor, out: Tensor) -> Tensor:
    return F.softplus(s, 1.0, SOFTPLUS_IS_IDENTITY, out=out)  # type: ignore[call-arg]
