"""The PyTorch engine: every pass over the tiles of a block, for any device and dtype."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import (
    BFLOAT16,
    FLOAT16,
    TF32,
    Block,
    ColumnGradients,
    Needs,
    RankTargets,
    RowGradients,
    add_matmul,
    equal_ids,
    matmul_dtype,
    matmul_into,
    round_to_precision,
    round_to_tf32_,
    targets_on_the_diagonal,
    windows,
)
from megabatch.tiles.sums import SOFTPLUS_IS_IDENTITY, Best, LogSum, SoftSum, best_columns, weighted_softmax

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

# ----------------------------------------------------------------------------------------------------------------------
# O(N·D) work on a block: dot products of the matching pairs (i, i), the last step of a gradient, and bounds on rounding errors.
#
# `kernels.operands` contains the first two as kernels.


def matching_products(block: Block) -> Tensor:  # (N,)
    """Returns the dot products ⟨x_i, y_i⟩ of the same rounded inputs as in the tiles."""
    out = block.zeros(block.N)
    for rows in windows(block.N, plan.rows_at_once(block.x.device, block.D)):
        x = round_to_precision(block.x[rows], block.precision).to(block.dtype)
        y = round_to_precision(block.y[rows], block.precision).to(block.dtype)
        torch.sum(x * y, dim=1, out=out[rows])
    return out


def finish_rows(
    sums: Tensor,  # (n, D), overwritten
    out: Tensor | None,  # (n, D)
    factor: Tensor,  # ()
    *,
    own: Tensor | None,  # (n, D)
    partners: Tensor,  # (n, D)
    dmatch: Tensor | None,  # (n,)
    precision: str,
) -> Tensor | None:  # (n,)
    """Computes out = (sums + dmatch·partners)·factor. Returns ⟨sums_i + dmatch_i·partners_i, own_i⟩ if `own` is given."""
    row_products = None if own is None else sums.new_empty(len(sums))
    for rows in windows(len(sums), plan.rows_at_once(sums.device, sums.shape[1])):
        values = sums[rows]
        if dmatch is not None:
            values.addcmul_(dmatch[rows, None], round_to_precision(partners[rows], precision).to(sums.dtype))
        if own is not None and row_products is not None:
            torch.sum(values * round_to_precision(own[rows], precision).to(sums.dtype), dim=1, out=row_products[rows])
        if out is not None:
            torch.mul(values, factor, out=values)
            out[rows] = values
    return row_products


def rank_noise(block: Block) -> tuple[Tensor, Tensor]:  # (N,), (M,)
    """Returns two vectors whose outer product bounds the rounding error of s by 4·√D roundings of scale·‖x_i‖·‖y_j‖."""
    row, col = (_norms(side, block.dtype) for side in (block.x, block.y))
    return row.mul_(4 * block.D**0.5 * torch.finfo(block.dtype).eps * block.scale.abs()), col


def _norms(side: Tensor, dtype: torch.dtype) -> Tensor:  # (K,)
    """Returns row norms. Rows are divided by their largest entry first, because the square of 10²⁰ overflows float32."""
    out = torch.empty(len(side), dtype=dtype, device=side.device)
    for rows in windows(len(side), plan.rows_at_once(side.device, side.shape[1])):
        values = side[rows].to(dtype)
        largest = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        torch.mul(torch.linalg.vector_norm(values / largest, dim=1), largest.squeeze(1), out=out[rows])
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Tiles of logits that matmuls of PyTorch form in memory, and the matmuls of gradient tiles with x and y.
#
# The PyTorch engine turns such tiles into sums or gradients. The kernels that need two matmuls for each pair also use such
# tiles, because the tiles of both matmuls would not fit in registers (`kernels.two_models`). A tile is formed in a reused
# buffer and modified in place. The next tile overwrites it.


class Tiles:
    """The tiles of one block, formed one after another in the same buffers."""

    def __init__(self, block: Block, *, keep_products: bool = False, size: plan.TileSize | None = None) -> None:
        size = size or plan.eager_tile(block.x.device, block.dtype)
        if block.second_model is not None or block.ids_are_positives:
            size = plan.TileSize(max(1, size.rows // 2), size.columns)  # the workspace contains one more tile
        size = size.fit_to(block.N, block.M)
        self.block = block
        self.rows = list(windows(block.N, size.rows))
        self.columns = list(windows(block.M, size.columns))
        self._elements = size.rows * size.columns
        self.logits_buffer = self.buffer()
        self.products = self.buffer() if keep_products else self.logits_buffer
        # With a scale of 1, as in top-k, dot products are logits. A scale on the CPU can be read without waiting for a device.
        self._unscaled = not keep_products and block.scale.is_cpu and block.scale.item() == 1.0
        self._above: Callable[[int, int], Tensor] | None = None  # allocated on first use, because kernels never use it
        self._signs = self.buffer() if block.ids_are_positives else None
        self.second_model = None if block.second_model is None else _SecondModel(block.second_model, self)

    def buffer(self, dtype: torch.dtype | None = None) -> Callable[[int, int], Tensor]:
        """Returns a function (n, m) → uninitialized tensor (n, m). Its results share the same memory."""
        memory = torch.empty(self._elements, dtype=dtype or self.block.dtype, device=self.block.x.device)
        return lambda n, m: memory[: n * m].view(n, m)

    def x(self, rows: slice) -> Tensor:  # (n, D)
        """Returns rows of x, rounded to the block's precision."""
        return round_to_precision(self.block.x[rows], self.block.precision)

    def y(self, columns: slice) -> Tensor:  # (m, D)
        """Returns rows of y, rounded to the block's precision."""
        return round_to_precision(self.block.y[columns], self.block.precision)

    def form_products(self, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """Returns the dot products ⟨x_i, y_j⟩ of rounded rows x and y. Overwrites the previous tile."""
        products = self.products(len(x), len(y))
        matmul_into(products, x, y.T)
        return products

    def logits(self, rows: slice, columns: slice, x: Tensor, y: Tensor) -> Tensor:  # (n, m)
        """Returns the tile of logits at (rows, columns), with −inf for excluded pairs. Overwrites the previous tile."""
        block = self.block
        products, s = self.form_products(x, y), self.logits_buffer(len(x), len(y))
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
            same = equal_ids(block.row_ids[rows], block.col_ids[columns])
            s.masked_fill_(~same if block.only_equal_ids else same, -torch.inf)
        if block.skip_diagonal:
            diagonal_of(s, rows, columns).fill_(-torch.inf)
        return s if above is None else s.masked_fill_(above, -torch.inf)

    def signs(self, rows: slice, columns: slice) -> Tensor | None:  # (n, m)
        """Returns −1 for pairs of equal ids and 1 for other pairs. Returns None if the block's ids are not positives."""
        row_ids, col_ids = self.block.row_ids, self.block.col_ids
        if self._signs is None or row_ids is None or col_ids is None:
            return None
        same = equal_ids(row_ids[rows], col_ids[columns])
        return self._signs(*same.shape).fill_(1.0).masked_fill_(same, -1.0)

    def teacher(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """Returns the second model's tile at (rows, columns), in the block's dtype."""
        assert self.second_model is not None
        return self.second_model.logits(rows, columns).to(self.block.dtype)

    def _above_limit(self, products: Tensor, rows: slice, columns: slice) -> Tensor | None:  # (n, m) bool
        """Returns a mask of the pairs that the limit excludes."""
        limit = self.block.limit
        if limit is None:
            return None
        self._above = self._above or self.buffer(torch.bool)
        compared = products if self.second_model is None else self.second_model.logits(rows, columns)
        return torch.gt(compared, limit[rows, None], out=self._above(*products.shape))


class _SecondModel:
    """The tiles of a block's second model, at the same rows and columns as the tiles of the block."""

    def __init__(self, block: Block, tiles: Tiles) -> None:
        self.block = block
        self._buffer = tiles.buffer(block.dtype)

    def products(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """Returns the dot products at (rows, columns), in the second model's dtype. Overwrites the previous tile."""
        block = self.block
        x, y = round_to_precision(block.x[rows], block.precision), round_to_precision(block.y[columns], block.precision)
        out = self._buffer(len(x), len(y))
        matmul_into(out, x, y.T)
        return out

    def logits(self, rows: slice, columns: slice) -> Tensor:  # (n, m)
        """Returns the dot products, multiplied by the second model's scale."""
        return self.products(rows, columns).mul_(self.block.scale)


def diagonal_of(tile: Tensor, rows: slice, columns: slice) -> Tensor:
    """Returns a view of the entries of `tile` on the block's main diagonal. It is empty if the diagonal misses the tile."""
    offset = rows.start - columns.start
    if -tile.shape[0] < offset < tile.shape[1]:
        return tile.diagonal(offset)
    return tile.new_empty(0)


def gradient_tiles(block: Block) -> Tiles:
    """Returns the tiles for `tile_gradients`."""
    return Tiles(block, keep_products=rounds_gradients(block))


def rounds_gradients(block: Block) -> bool:
    """Returns whether gradient tiles are rounded to the precision of the inputs before they are multiplied with the inputs."""
    return block.x.device.type == "cuda" and block.precision in (TF32, BFLOAT16, FLOAT16)


def tile_gradients(
    tiles: Tiles,
    weigh: Callable[[Tensor, slice, slice], Tensor],  # turns a tile of s into a tile of g, in place
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Turns each tile of logits into a gradient tile and multiplies it with x and y."""
    round_gradient = gradient_rounding(tiles)

    def gradient_tile(
        rows: slice, columns: slice, x: Tensor, y: Tensor, dscale: Tensor | None, drow_bias: Tensor | None
    ) -> Tensor:
        g = weigh(tiles.logits(rows, columns, x, y), rows, columns)
        if drow_bias is not None:
            drow_bias += g.sum(1)
        if sums.dcol_bias is not None:
            sums.dcol_bias[columns] += g.sum(0)
        if dscale is not None:
            dscale += tiles.products(*g.shape).mul_(g).sum(1)
        return round_gradient(g)

    # dscale is much smaller than its terms, which nearly cancel. Σ_i ⟨x_i, dx_i⟩ is accurate if g is not rounded. If g is
    # rounded, its rounding errors would not cancel, so dscale is computed as Σ_ij g_ij·⟨x_i, y_j⟩ with unrounded g.
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
        gradient_tile: (rows, columns, x, y, dscale, drow_bias) → tile of g in the dtype of the matmuls. It adds the row sums of
            g_ij·⟨x_i, y_j⟩ to `dscale`, the row sums of g to `drow_bias`, and the column sums of g to dcol_bias, unless they
            are None.
        sums: accumulators of the column gradients.
        needs: the gradients to compute.
        scale_from_dx: compute dscale as Σ_i ⟨x_i, dx_i⟩. `gradient_tile` then gets None instead of `dscale`.
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
                add_matmul(dx, g, y)
            if sums.dy is not None:
                add_matmul(sums.dy[columns], g.T, x)
        if needs.dscale and scale_from_dx and dx is not None:
            dscale = (dx * x).sum(1)
        yield RowGradients(rows, dx, dscale, drow_bias)


def gradient_rounding(tiles: Tiles) -> Callable[[Tensor], Tensor]:
    """Returns a function that rounds a gradient tile to the precision of the inputs, if the matmuls need that."""
    block = tiles.block
    if not rounds_gradients(block):
        return lambda g: g
    if block.precision == TF32:
        return lambda g: round_to_tf32_(g, tiles.products(*g.shape))
    half = half_buffer(tiles)
    return lambda g: half(*g.shape).copy_(g)


def half_buffer(tiles: Tiles) -> Callable[[int, int], Tensor]:
    """Returns a buffer for a gradient tile in the dtype of the matmuls."""
    return tiles.buffer(matmul_dtype(tiles.block.precision, tiles.block.x.device.type))


# ----------------------------------------------------------------------------------------------------------------------
# The passes in PyTorch operations, for every device and dtype.
#
# No pass reads a value back to the host, so a CUDA graph can capture it. The passes over the same tiles are:
#
# - `logsumexp_statistics`  row sums of exp(s), and column sums from the same pass if requested
# - `softplus_sums`         row sums of softplus(s)
# - `soft_statistics`       cross-entropies of rows and columns under the softmax of a second model
# - `*_gradients`           yield finished strips of dx, and accumulate dy
# - `rank_counts`           how many entries of a row or column come before the matching one
# - `topk`                  the k largest entries of each row


def logsumexp_statistics(block: Block, *, columns: bool = True) -> tuple[LogSum, LogSum]:
    """Returns row sums (N,) and column sums (M,) of exp(s), from one pass over the tiles.

    Without `columns`, the column sums are empty, (0,), and only half of the exponentials are computed.
    """
    tiles = Tiles(block)
    spare = tiles.buffer() if columns else None
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    col = LogSum.empty(block.M if columns else 0, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for window in tiles.columns:
            s = tiles.logits(rows, window, x, tiles.y(window))
            row.part(rows).add_exponentials_(s, dim=1, out=s if spare is None else spare(*s.shape))
            if columns:
                col.part(window).add_exponentials_(s, dim=0, out=s)
    return row, col


def soft_statistics(block: Block) -> tuple[SoftSum, SoftSum]:
    """Returns sums for the cross-entropies of rows (N,) and columns (M,) under the second model's softmax, from one pass."""
    tiles = Tiles(block)
    buffers = tiles.buffer(), tiles.buffer()
    row, col = (SoftSum.empty(size, dtype=block.dtype, device=block.x.device) for size in (block.N, block.M))
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.logits(rows, columns, x, tiles.y(columns))
            t = tiles.teacher(rows, columns)
            spare, other = (buffer(*s.shape) for buffer in buffers)
            row.part(rows).add_tile_(s, t, 1, spare, other)
            col.part(columns).add_tile_(s, t, 0, spare, other)
    return row, col


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Returns row sums of softplus(s) = log(1 + exp(s))."""
    tiles = Tiles(block)
    total = block.zeros(block.N)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.logits(rows, columns, x, tiles.y(columns))
            total[rows] += _softplus(s, out=s).sum(1)
    return total


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,) sums over all columns, which may be more than the columns of the block
    col: LogSum | None,  # (M,) sums over all rows; None if dcol is None
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Yields gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
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
    row: SoftSum,  # (N,) sums over all columns, which may be more than the columns of the block
    col: SoftSum,  # (M,) sums over all rows
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Yields gradients of the cross-entropies.

    g_ij is the sum of drow_i·(softmax(s) − softmax(t))_ij, where the softmaxes of a row add up to 1, and
    dcol_j·(softmax(s) − softmax(t))_ij, where the softmaxes of a column add up to 1.
    """
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
    """Yields gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij).

    Adds the row sums to `total` if it is given. If equal ids are positives, g_ij of these pairs is −dtotal_i·sigmoid(−s_ij).
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


def rank_counts(block: Block, targets: RankTargets | None = None) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """Counts how many entries of row i, and of column i, come before s_ii, or before the entries in `targets`.

    Larger entries come first. Entries that differ from the target by at most the rounding error count as equal to it, because
    the same dot product, computed in two places, may differ in the last bit. Among equal entries, the smaller index comes
    first. An entry that is NaN comes before every target, and a target that is NaN comes after all other entries.
    """
    tiles = Tiles(block)
    if targets is None:
        targets = targets_on_the_diagonal(block, matching_products(block))
    row_noise, col_noise = rank_noise(block)
    row_rank = torch.zeros(block.N, dtype=torch.int64, device=block.x.device)
    col_rank = torch.zeros(block.M, dtype=torch.int64, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            s = tiles.logits(rows, columns, x, tiles.y(columns))
            near = row_noise[rows, None] * col_noise[columns]
            for rank, match, target, index, dim in (
                (row_rank[rows], targets.row_match[rows, None], targets.row_target[rows, None], targets.col_index[columns], 1),
                (col_rank[columns], targets.col_match[columns], targets.col_target[columns], targets.row_index[rows, None], 0),
            ):
                before = ~((s < match - near) | ((s <= match + near) & (index > target))) & (index != target)
                rank += before.sum(dim)
    return row_rank, col_rank


def topk(block: Block, k: int) -> Best:  # (N, k)
    """Returns the k largest logits of each row and their columns. Among equal logits, the smaller column comes first."""
    tiles = Tiles(block, size=plan.topk_tile(block.x.device, block.dtype, k))
    best = Best.none(block.N, k, block.zeros(0))
    for rows in tiles.rows:
        x, best_of_rows = tiles.x(rows), Best(*(part[rows] for part in best))
        for columns in tiles.columns:
            s = tiles.logits(rows, columns, x, tiles.y(columns))
            best_of_rows = best_columns(s, columns.start, k, best_of_rows)
        best.values[rows], best.indices[rows] = best_of_rows
    return best


def _softplus(s: Tensor, out: Tensor) -> Tensor:
    return F.softplus(s, 1.0, SOFTPLUS_IS_IDENTITY, out=out)  # type: ignore[call-arg]
