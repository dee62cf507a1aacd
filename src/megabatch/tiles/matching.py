"""O(N·D) work on a block: products of the matching pairs (i, i), the last step of a gradient, and bounds on rounding errors.

In PyTorch operations; `triton_embeddings` has the first two as kernels.
"""

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, Pairs, windows
from megabatch.tiles.precision import rounded


def matching_products(block: Block) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩, from the same rounded inputs as the tiles."""
    out = block.zeros(block.N)
    for rows in windows(block.N, plan.rows_at_once(block.x.device, block.D)):
        x = rounded(block.x[rows], block.precision).to(block.dtype)
        y = rounded(block.y[rows], block.precision).to(block.dtype)
        torch.sum(x * y, dim=1, out=out[rows])
    return out


def matching_similarities(block: Block, products: Tensor) -> Tensor:  # (N,)
    """s_ii, from the products ⟨x_i, y_i⟩."""
    out = products * block.scale
    if block.row_bias is not None:
        out.add_(block.row_bias)
    if block.col_bias is not None:
        out.add_(block.col_bias)
    return out


def pairs_on_the_diagonal(block: Block, products: Tensor) -> Pairs:
    """The matching pairs (i, i), from the products ⟨x_i, y_i⟩."""
    match, index = matching_similarities(block, products), torch.arange(block.N, device=block.x.device)
    return Pairs(match, match, index, index)


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
    """out = (sums + dmatch·partners)·factor. Returns ⟨sums_i + dmatch_i·partners_i, own_i⟩ if `own` is given."""
    row_products = None if own is None else sums.new_empty(len(sums))
    for rows in windows(len(sums), plan.rows_at_once(sums.device, sums.shape[1])):
        values = sums[rows]
        if dmatch is not None:
            values.addcmul_(dmatch[rows, None], rounded(partners[rows], precision).to(sums.dtype))
        if own is not None and row_products is not None:
            torch.sum(values * rounded(own[rows], precision).to(sums.dtype), dim=1, out=row_products[rows])
        if out is not None:
            torch.mul(values, factor, out=values)
            out[rows] = values
    return row_products


def rank_noise(block: Block) -> tuple[Tensor, Tensor]:  # (N,), (M,)
    """Two vectors whose outer product bounds the rounding error of s: 4·√D roundings of scale·‖x_i‖·‖y_j‖."""
    row, col = (_norms(side, block.dtype) for side in (block.x, block.y))
    return row.mul_(4 * block.D**0.5 * torch.finfo(block.dtype).eps * block.scale.abs()), col


def _norms(side: Tensor, dtype: torch.dtype) -> Tensor:  # (K,)
    """Row norms. Rows are divided by their largest entry first, because the square of 10²⁰ is beyond float32."""
    out = torch.empty(len(side), dtype=dtype, device=side.device)
    for rows in windows(len(side), plan.rows_at_once(side.device, side.shape[1])):
        values = side[rows].to(dtype)
        largest = values.abs().amax(1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        torch.mul(torch.linalg.vector_norm(values / largest, dim=1), largest.squeeze(1), out=out[rows])
    return out
