"""Ranks of the matching pairs: how many entries of each row and each column come before the matching one, in one pass.

Counts are integers: atomics give the same result in any order, so there are no partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan
from megabatch.tiles.block import Block, Pairs
from megabatch.tiles.matching import pairs_on_the_diagonal, rank_noise
from megabatch.tiles.triton_embeddings import matching_products
from megabatch.tiles.triton_operands import dot_precision, similarity_operands


@triton.jit
def _rank_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    scale,  # ()
    row_match,  # (N,)
    col_match,  # (M,)
    row_index,  # (N,) int64
    col_index,  # (M,) int64
    row_noise,  # (N,)
    col_noise,  # (M,)
    row_rank,  # (N,) int64
    col_rank,  # (M,) int64
    N,
    M,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n, m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, D, BLOCK_D):
        s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
    s = s * tl.load(scale)
    offs_n, offs_m = n + tl.arange(0, BLOCK_N), m + tl.arange(0, BLOCK_M)
    mask_n, mask_m = offs_n < N, offs_m < M
    i = tl.load(row_index + offs_n, mask_n, 0)[:, None]
    j = tl.load(col_index + offs_m, mask_m, 0)[None, :]
    near = tl.load(row_noise + offs_n, mask_n, 0.0)[:, None] * tl.load(col_noise + offs_m, mask_m, 0.0)[None, :]
    others = mask_n[:, None] & mask_m[None, :] & (i != j)
    own = tl.load(row_match + offs_n, mask_n, 0.0)[:, None]
    before = ~((s < own - near) | ((s <= own + near) & (j > i))) & others
    tl.atomic_add(row_rank + offs_n, tl.sum(before.to(tl.int64), 1), mask=mask_n)
    own = tl.load(col_match + offs_m, mask_m, 0.0)[None, :]
    before = ~((s < own - near) | ((s <= own + near) & (i > j))) & others
    tl.atomic_add(col_rank + offs_m, tl.sum(before.to(tl.int64), 0), mask=mask_m)


def rank_counts(block: Block, pairs: Pairs | None = None) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """How many entries of row i, and of column i, come before s_ii, or before the matching pairs in `pairs`.

    Ties are decided as in `eager.rank_counts`.
    """
    pairs = pairs_on_the_diagonal(block, matching_products(block)) if pairs is None else pairs
    row_rank, col_rank = (torch.zeros(size, dtype=torch.int64, device=block.x.device) for size in (block.N, block.M))
    tile = kernel_plan.gradient_tile(block.precision, block.x.device)
    _rank_kernel[(triton.cdiv(block.N, tile.rows), triton.cdiv(block.M, tile.columns))](
        *similarity_operands(block).descriptors(tile),
        block.scale,
        *(part.contiguous() for part in pairs),
        *rank_noise(block),
        row_rank,
        col_rank,
        block.N,
        block.M,
        D=block.D,
        PRECISION=dot_precision(block),
        **tile.options,
    )
    return row_rank, col_rank
