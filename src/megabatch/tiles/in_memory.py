"""Tiles of similarities that library products form in memory, and the products of gradient tiles with x and y.

The eager backend turns such tiles into sums or gradients with PyTorch operations. So do the kernels that need two products of
each pair, because the tiles of both would not fit in registers (`triton_distillation`, `triton_guided_logsumexp`). A tile is
formed in a reused buffer and modified in place; the next tile overwrites it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients, windows
from megabatch.tiles.precision import (
    BFLOAT16,
    FLOAT16,
    TF32,
    add_product,
    multiply_into,
    product_dtype,
    round_to_tf32_,
    rounded,
)


class Tiles:
    """The tiles of one block, formed one after another in the same buffers."""

    def __init__(self, block: Block, *, keep_products: bool = False, size: plan.TileSize | None = None) -> None:
        size = size or plan.eager_tile(block.x.device, block.dtype)
        if block.companion is not None or block.ids_are_positives:
            size = plan.TileSize(max(1, size.rows // 2), size.columns)  # the workspace has to hold one more tile
        size = size.fitted(block.N, block.M)
        self.block = block
        self.rows = list(windows(block.N, size.rows))
        self.columns = list(windows(block.M, size.columns))
        self._elements = size.rows * size.columns
        self.room = self.buffer()  # the buffer of the similarities
        self.products = self.buffer() if keep_products else self.room
        # Products alone, as of top-k, are similarities already. On a CPU the scale can be read without waiting.
        self._unscaled = not keep_products and block.scale.is_cpu and block.scale.item() == 1.0
        self._above: Callable[[int, int], Tensor] | None = None  # allocated on first use: kernels never use it
        self._signs = self.buffer() if block.ids_are_positives else None
        self.companion = None if block.companion is None else _Companion(block.companion, self)

    def buffer(self, dtype: torch.dtype | None = None) -> Callable[[int, int], Tensor]:
        """A function (n, m) → uninitialised tensor (n, m), always in the same memory."""
        room = torch.empty(self._elements, dtype=dtype or self.block.dtype, device=self.block.x.device)
        return lambda n, m: room[: n * m].view(n, m)

    def x(self, rows: slice) -> Tensor:  # (n, D)
        """Rows of x, rounded to the block's precision."""
        return rounded(self.block.x[rows], self.block.precision)

    def y(self, columns: slice) -> Tensor:  # (m, D)
        """Rows of y, rounded to the block's precision."""
        return rounded(self.block.y[columns], self.block.precision)

    def form_products(self, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """⟨x_i, y_j⟩ of rounded rows x and y. Overwrites the previous tile."""
        products = self.products(len(x), len(y))
        multiply_into(products, x, y.T)
        return products

    def similarities(self, rows: slice, columns: slice, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """The tile of similarities at (rows, columns); −inf for excluded pairs. Overwrites the previous tile."""
        block = self.block
        products, s = self.form_products(x, y), self.room(len(x), len(y))
        above = self._above_limit(products, rows, columns)
        if not self._unscaled:
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
        """−1 for pairs of equal ids, 1 elsewhere; None unless the block's ids are positives."""
        row_ids, col_ids = self.block.row_ids, self.block.col_ids
        if self._signs is None or row_ids is None or col_ids is None:
            return None
        same = row_ids[rows, None] == col_ids[columns]
        return self._signs(*same.shape).fill_(1.0).masked_fill_(same, -1.0)

    def teacher(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """The companion's tile at (rows, columns), in the block's dtype."""
        assert self.companion is not None
        return self.companion.similarities(rows, columns).to(self.block.dtype)

    def _above_limit(self, products: Tensor, rows: slice, columns: slice) -> Tensor | None:  # (n, m) bool
        """Mask of the pairs that the limit excludes."""
        limit = self.block.limit
        if limit is None:
            return None
        self._above = self._above or self.buffer(torch.bool)
        compared = products if self.companion is None else self.companion.similarities(rows, columns)
        return torch.gt(compared, limit[rows, None], out=self._above(*products.shape))


class _Companion:
    """The tiles of a block's companion, at the same rows and columns as the block's."""

    def __init__(self, block: Block, tiles: Tiles) -> None:
        self.block = block
        self._buffer = tiles.buffer(block.dtype)

    def products(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """The products at (rows, columns), in the companion's dtype. Overwrites the previous tile."""
        block = self.block
        x, y = rounded(block.x[rows], block.precision), rounded(block.y[columns], block.precision)
        out = self._buffer(len(x), len(y))
        multiply_into(out, x, y.T)
        return out

    def similarities(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """The products times the companion's scale."""
        return self.products(rows, columns).mul_(self.block.scale)


def diagonal_of(tile: Tensor, rows: slice, columns: slice) -> Tensor:
    """A view of the entries of `tile` on the block's main diagonal; empty if it does not cross the tile."""
    offset = rows.start - columns.start
    if -tile.shape[0] < offset < tile.shape[1]:
        return tile.diagonal(offset)
    return tile.new_empty(0)


def gradient_tiles(block: Block) -> Tiles:
    """The tiles that `tile_gradients` takes."""
    return Tiles(block, keep_products=rounds_gradients(block))


def rounds_gradients(block: Block) -> bool:
    """Whether gradient tiles are rounded to the precision of the inputs before the products with them."""
    return block.x.device.type == "cuda" and block.precision in (TF32, BFLOAT16, FLOAT16)


def tile_gradients(
    tiles: Tiles,
    weigh: Callable[[Tensor, slice, slice], Tensor],  # turns a tile of s into a tile of g, in place
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Turns each tile of similarities into a gradient tile and multiplies it with x and y."""
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

    # dscale is small against its terms, which nearly cancel. Σ_i ⟨x_i, dx_i⟩ is accurate as long as g is not rounded. Rounding
    # errors of g would not cancel, so dscale is then Σ_ij g_ij·⟨x_i, y_j⟩ with unrounded g.
    return multiply_tiles(tiles, gradient_tile, sums, needs, scale_from_dx=not rounds_gradients(tiles.block))


def multiply_tiles(
    tiles: Tiles,
    gradient_tile: Callable[[slice, slice, Tensor, Tensor, Tensor | None, Tensor | None], Tensor],
    sums: ColumnGradients,
    needs: Needs,
    *,
    scale_from_dx: bool = False,
) -> Iterator[RowGradients]:
    """Multiplies gradient tiles with x and y.

    Args:
        tiles: the tiles to loop over.
        gradient_tile: (rows, columns, x, y, dscale, drow_bias) → tile of g in the type in which it is multiplied. It adds the
            row sums of g·product to `dscale` and of g to `drow_bias` unless they are None, and column sums to dcol_bias.
        sums: column gradients, added to.
        needs: the gradients to compute.
        scale_from_dx: compute dscale as Σ_i ⟨x_i, dx_i⟩; `gradient_tile` then gets None for it.
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
    """A function that prepares a gradient tile for its products: rounds it to the inputs' precision if that is needed."""
    block = tiles.block
    if not rounds_gradients(block):
        return lambda g: g
    if block.precision == TF32:
        return lambda g: round_to_tf32_(g, tiles.products(*g.shape))
    half = half_buffer(tiles)
    return lambda g: half(*g.shape).copy_(g)


def half_buffer(tiles: Tiles) -> Callable[[int, int], Tensor]:
    """A buffer for a gradient tile in the inputs' dtype."""
    return tiles.buffer(product_dtype(tiles.block.precision, tiles.block.x.device.type))
