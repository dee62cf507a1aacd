"""Row sums of exp(s) without the pairs that a guide model excludes, and their gradients: one pass over a tile of each model.

As in `triton_distillation`, library products form both tiles in memory. A program owns BLOCK_N rows and loops over their
columns, so that row sums need no second pass. A gradient tile is written in the type in which it is multiplied.
"""

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients
from megabatch.tiles.in_memory import Tiles, gradient_tiles, half_buffer, multiply_tiles, product_factor, rounds_gradients
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.triton_device import finite_or_zero
from megabatch.tiles.triton_operands import packed

_BLOCK_N, _BLOCK_M = 4, 1024


@triton.jit
def _guided_tile(
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
    diagonal,  # the column of the diagonal in row 0 of the tile
    SKIP_DIAGONAL: tl.constexpr,
):
    """Products, similarities (−inf for excluded pairs), offsets and mask of a part of the tile."""
    mask_n, mask_m = offs_n < rows, offs_m < columns
    mask = mask_n[:, None] & mask_m[None, :]
    offs = offs_n.to(tl.int64)[:, None] * columns + offs_m[None, :]
    p, guided = tl.load(products + offs, mask, 0.0), tl.load(guide + offs, mask, 0.0)
    s = p * tl.load(scale)
    if row_bias is not None:
        s += tl.load(row_bias + offs_n, mask_n, 0.0)[:, None]
    if col_bias is not None:
        s += tl.load(col_bias + offs_m, mask_m, 0.0)[None, :]
    excluded = (guided > tl.load(limit + offs_n, mask_n, 0.0)[:, None]) | (mask == 0)
    if row_ids is not None:
        excluded |= tl.load(row_ids + offs_n, mask_n, 0)[:, None] == tl.load(col_ids + offs_m, mask_m, 0)[None, :]
    if SKIP_DIAGONAL:
        excluded |= (offs_n + diagonal)[:, None] == offs_m[None, :]
    return p, tl.where(excluded, -float("inf"), s), offs, mask


@triton.jit(do_not_specialize=["diagonal"])
def _guided_logsumexp_kernel(
    products,  # (rows, columns) ⟨x_i, y_j⟩
    guide,  # (rows, columns) the guide's products
    limit,  # (rows,) pairs whose guide product is larger are excluded
    scale,  # ()
    row_bias,  # (rows,) or None
    col_bias,  # (columns,) or None
    row_ids,  # (rows,) or None
    col_ids,  # (columns,) or None
    rows,
    columns,
    diagonal,
    shift,  # (rows,) updated
    total,  # (rows,) updated
    SKIP_DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`LogSum.add_exponentials_` for rows: online softmax."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    peak, sums = tl.load(shift + offs_n, mask_n, 0.0), tl.load(total + offs_n, mask_n, 0.0)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        _, s, _, _ = _guided_tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            SKIP_DIAGONAL,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(s, 1))
        base = finite_or_zero(new_peak)
        sums = sums * tl.exp(peak - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        peak = new_peak
    tl.store(shift + offs_n, peak, mask_n)
    tl.store(total + offs_n, sums, mask_n)


@triton.jit(do_not_specialize=["diagonal"])
def _guided_gradient_kernel(
    products,  # as above, to `diagonal`
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
    out,  # (rows, columns) weights g; may be the memory of `products`
    scale_sums,  # (rows,) or None: Σ_j g_ij·⟨x_i, y_j⟩ is added
    row_sums,  # (rows,) or None: Σ_j g_ij is added
    SKIP_DIAGONAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """g_ij = drow_i · softmax(s)_ij."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    base, factor = tl.load(shift + offs_n, mask_n, 0.0), tl.load(per_unit + offs_n, mask_n, 0.0)
    cap = tl.load(total + offs_n, mask_n, 0.0)
    g_products, g_sums = tl.zeros_like(base), tl.zeros_like(base)
    for m in range(0, columns, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        p, s, offs, mask = _guided_tile(
            products, guide, limit, scale, row_bias, col_bias, row_ids, col_ids, offs_n, offs_m, rows, columns, diagonal,
            SKIP_DIAGONAL,
        )  # fmt: skip
        g = tl.minimum(tl.exp(s - base[:, None]), cap[:, None]) * factor[:, None]
        if scale_sums is not None:
            g_products += tl.sum(g * p, 1)
        if row_sums is not None:
            g_sums += tl.sum(g, 1)
        tl.store(out + offs, g.to(out.dtype.element_ty), mask)
    if scale_sums is not None:
        tl.store(scale_sums + offs_n, tl.load(scale_sums + offs_n, mask_n, 0.0) + g_products, mask_n)
    if row_sums is not None:
        tl.store(row_sums + offs_n, tl.load(row_sums + offs_n, mask_n, 0.0) + g_sums, mask_n)


def row_statistics(block: Block) -> LogSum:  # (N,)
    """Row sums of exp(s)."""
    block = _packed(block)
    tiles = Tiles(block)
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.x.device)
    for rows in tiles.rows:
        x = tiles.x(rows)
        for columns in tiles.columns:
            arguments, options = _arguments(tiles, rows, columns, x, tiles.y(columns))
            _guided_logsumexp_kernel[_grid(x)](*arguments, *row.part(rows), **options)
    return row


def row_gradients(
    block: Block,
    row: LogSum,  # (N,) sums over all columns, of which the block may hold a part
    drow: Tensor | None,  # (N,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩: g_ij = drow_i·exp(s_ij)/row_i."""
    block = _packed(block)
    # The kernel writes half precision directly, unless dcol_bias sums unrounded gradients.
    half = rounds_gradients(block) and block.precision in HALF_DTYPE and sums.dcol_bias is None
    tiles = Tiles(block) if half else gradient_tiles(block)
    buffer = half_buffer(tiles) if half else tiles.room
    as_factor = None if half else product_factor(tiles)
    drow = block.zeros(block.N) if drow is None else drow
    factors = [factor.to(block.dtype) for factor in row.softmax_factors(drow)]

    def gradient_tile(
        rows: slice, columns: slice, x: Tensor, y: Tensor, dscale: Tensor | None, drow_bias: Tensor | None
    ) -> Tensor:
        arguments, options = _arguments(tiles, rows, columns, x, y)
        g = buffer(len(x), len(y))
        _guided_gradient_kernel[_grid(x)](
            *arguments,
            *(factor[rows] for factor in factors),
            g,
            dscale,
            drow_bias,
            **options,
        )
        if sums.dcol_bias is not None:
            sums.dcol_bias[columns] += g.sum(0)
        return g if as_factor is None else as_factor(g)

    return multiply_tiles(tiles, gradient_tile, sums, needs)


def _packed(block: Block) -> Block:
    """The block with contiguous vectors and ids of one type, as the kernels read them."""
    vectors = {name: getattr(block, name) for name in ("limit", "row_bias", "col_bias")}
    vectors = {name: None if vector is None else vector.contiguous() for name, vector in vectors.items()}
    return replace(block, **vectors, row_ids=packed(block.row_ids), col_ids=packed(block.col_ids))


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(len(x), _BLOCK_N),)


def _arguments(
    tiles: Tiles, rows: slice, columns: slice, x: Tensor, y: Tensor
) -> tuple[list[Tensor | int | None], dict[str, int]]:
    """Arguments that both kernels take: the first eleven, and the compile-time ones."""
    block = tiles.block
    assert tiles.companion is not None
    assert block.limit is not None
    limit, row_bias, row_ids = (None if part is None else part[rows] for part in (block.limit, block.row_bias, block.row_ids))
    col_bias, col_ids = (None if part is None else part[columns] for part in (block.col_bias, block.col_ids))
    products, guide = tiles.form_products(x, y), tiles.companion.products(rows, columns)
    options = {"SKIP_DIAGONAL": block.skip_diagonal, "BLOCK_N": _BLOCK_N, "BLOCK_M": _BLOCK_M}
    vectors = (limit, block.scale, row_bias, col_bias, row_ids, col_ids)
    return [products, guide, *vectors, len(x), len(y), rows.start - columns.start], options
