"""Rows from which a guide leaves out pairs: what a tile of products and the guide's tile become, in one pass over both.

As in `triton_soft`, libraries form both products in memory. A program has some rows and marches along their columns, so that
sums over them need no second pass; a gradient tile is written in the type in which it is multiplied.
"""

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.in_memory import Tiles, gradient_tiles, half_buffer, multiplied, product_factor, rounds_gradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.triton_operands import packed

_ROWS, _COLUMNS = 4, 1024  # that a program has at once


@triton.jit
def _tile(
    products,
    guide,
    limit,
    scale,
    row_bias,
    col_bias,
    row_ids,
    col_ids,
    offs_n,
    offs_m,
    rows,
    columns,
    diagonal,  # the column of the tile's row 0
    HAS_ROW_BIAS: tl.constexpr,
    HAS_COL_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
):
    """Products and similarities, −inf where the pair is left out."""
    mask_n, mask_m = offs_n < rows, offs_m < columns
    mask = mask_n[:, None] & mask_m[None, :]
    place = offs_n.to(tl.int64)[:, None] * columns + offs_m[None, :]
    p, seen = tl.load(products + place, mask, 0.0), tl.load(guide + place, mask, 0.0)
    s = p * tl.load(scale)
    if HAS_ROW_BIAS:
        s += tl.load(row_bias + offs_n, mask_n, 0.0)[:, None]
    if HAS_COL_BIAS:
        s += tl.load(col_bias + offs_m, mask_m, 0.0)[None, :]
    left_out = (seen > tl.load(limit + offs_n, mask_n, 0.0)[:, None]) | (mask == 0)
    if HAS_IDS:
        left_out |= tl.load(row_ids + offs_n, mask_n, 0)[:, None] == tl.load(col_ids + offs_m, mask_m, 0)[None, :]
    if SKIP_DIAGONAL:
        left_out |= (offs_n + diagonal)[:, None] == offs_m[None, :]
    return p, tl.where(left_out, -float("inf"), s), place, mask


@triton.jit(do_not_specialize=["diagonal"])
def _sums(
    products,
    guide,
    limit,
    scale,
    row_bias,
    col_bias,
    row_ids,
    col_ids,
    rows,
    columns,
    diagonal,
    shift,  # (rows,) added to, as is the next
    total,
    HAS_ROW_BIAS: tl.constexpr,
    HAS_COL_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`LogSum.add_exponentials_` for rows."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    high, summed = tl.load(shift + offs_n, mask_n, 0.0), tl.load(total + offs_n, mask_n, 0.0)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        _, s, _, _ = _tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            HAS_ROW_BIAS, HAS_COL_BIAS, HAS_IDS, SKIP_DIAGONAL,
        )  # fmt: skip
        higher = tl.maximum(high, tl.max(s, 1))
        top = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        summed = summed * tl.exp(high - top) + tl.sum(tl.exp(s - top[:, None]), 1)
        high = higher
    tl.store(shift + offs_n, high, mask_n)
    tl.store(total + offs_n, summed, mask_n)


@triton.jit(do_not_specialize=["diagonal"])
def _weights(
    products,
    guide,
    limit,
    scale,
    row_bias,
    col_bias,
    row_ids,
    col_ids,
    rows,
    columns,
    diagonal,
    shift,  # (rows,) `LogSum.softmax_factors`, as are the next two
    total,
    per_unit,
    out,  # (rows, columns) weighted softmaxes; may be where the products are
    of_products,  # (rows,) Σ_j g_ij·⟨x_i, y_j⟩ is added to it
    of_weights,  # (rows,) Σ_j g_ij is added to it
    HAS_ROW_BIAS: tl.constexpr,
    HAS_COL_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    WANT_PRODUCTS: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    base, factor = tl.load(shift + offs_n, mask_n, 0.0), tl.load(per_unit + offs_n, mask_n, 0.0)
    most = tl.load(total + offs_n, mask_n, 0.0)
    by_products, by_weights = tl.zeros_like(base), tl.zeros_like(base)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        p, s, place, mask = _tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            HAS_ROW_BIAS, HAS_COL_BIAS, HAS_IDS, SKIP_DIAGONAL,
        )  # fmt: skip
        g = tl.minimum(tl.exp(s - base[:, None]), most[:, None]) * factor[:, None]
        if WANT_PRODUCTS:
            by_products += tl.sum(g * p, 1)
        if WANT_WEIGHTS:
            by_weights += tl.sum(g, 1)
        tl.store(out + place, g.to(out.dtype.element_ty), mask)
    if WANT_PRODUCTS:
        tl.store(of_products + offs_n, tl.load(of_products + offs_n, mask_n, 0.0) + by_products, mask_n)
    if WANT_WEIGHTS:
        tl.store(of_weights + offs_n, tl.load(of_weights + offs_n, mask_n, 0.0) + by_weights, mask_n)


def row_statistics(block: Block) -> LogSum:
    """Row sums (N,) of exp(s)."""
    block = _packed(block)
    tiles = Tiles(block)
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            operands, features = _operands(tiles, rows, columns, x, tiles.y(columns))
            _sums[_grid(x)](*operands, *row.part(rows), **features, BLOCK_N=_ROWS, BLOCK_M=_COLUMNS)
    return row


def row_gradients(
    block: Block,
    row: LogSum,  # (N,) the whole sums, of which the block may be a part
    drow: Tensor | None,  # (N,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩: g_ij = drow_i·exp(s_ij)/row_i."""
    block = _packed(block)
    half = rounds_gradients(block) and block.precision in HALF_DTYPE and sums.dcol_bias is None  # which wants them unrounded
    tiles = Tiles(block) if half else gradient_tiles(block)
    room = half_buffer(tiles) if half else tiles.room
    as_factor = None if half else product_factor(tiles)
    drow = block.zeros(block.N) if drow is None else drow
    factors = [factor.to(block.dtype) for factor in row.softmax_factors(drow)]

    def gradient_tile(
        rows: slice, columns: slice, x: Tensor, y: Tensor, dscale: Tensor | None, drow_bias: Tensor | None
    ) -> Tensor:
        operands, features = _operands(tiles, rows, columns, x, y)
        g = room(len(x), len(y))
        _weights[_grid(x)](
            *operands,
            *(factor[rows] for factor in factors),
            g,
            dscale,
            drow_bias,
            **features,
            WANT_PRODUCTS=dscale is not None,
            WANT_WEIGHTS=drow_bias is not None,
            BLOCK_N=_ROWS,
            BLOCK_M=_COLUMNS,
        )
        if sums.dcol_bias is not None:
            sums.dcol_bias[columns] += g.sum(0)
        return g if as_factor is None else as_factor(g)

    return multiplied(tiles, gradient_tile, sums, needs)


def _packed(block: Block) -> Block:
    """With vectors of rows and columns that a kernel can read: one entry after another, ids of one type."""
    vectors = {name: getattr(block, name) for name in ("limit", "row_bias", "col_bias")}
    vectors = {name: None if vector is None else vector.contiguous() for name, vector in vectors.items()}
    return replace(block, **vectors, row_ids=packed(block.row_ids), col_ids=packed(block.col_ids))


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _ROWS),)


def _operands(
    tiles: Tiles, rows: slice, columns: slice, x: Tensor, y: Tensor
) -> tuple[list[Tensor | int | None], dict[str, bool]]:
    """What both kernels take first, and which of it is there."""
    block = tiles.block
    assert tiles.companion is not None
    assert block.limit is not None
    by_row, by_column = (block.limit, block.row_bias, block.row_ids), (block.col_bias, block.col_ids)
    limit, row_bias, row_ids = (None if part is None else part[rows] for part in by_row)
    col_bias, col_ids = (None if part is None else part[columns] for part in by_column)
    operands: list[Tensor | int | None] = [tiles.form_products(x, y), tiles.companion.products(rows, columns)]
    operands += [limit, block.scale, row_bias, col_bias, row_ids, col_ids]
    features = {
        "HAS_ROW_BIAS": row_bias is not None,
        "HAS_COL_BIAS": col_bias is not None,
        "HAS_IDS": row_ids is not None,
        "SKIP_DIAGONAL": block.skip_diagonal,
    }
    return [*operands, len(x), len(y), rows.start - columns.start], features
