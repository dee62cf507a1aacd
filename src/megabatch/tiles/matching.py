"""The matching pairs (i, i) of a block, which no walk has to look for: O(N·D), in PyTorch operations on every device."""

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, windows
from megabatch.tiles.precision import rounded


def matching_products(block: Block) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩, from the same rounded inputs as the tiles."""
    out = block.zeros(block.N)
    for rows in windows(block.N, plan.rows_at_once(block.x.device, block.D)):
        x = rounded(block.x[rows], block.precision).to(block.dtype)
        y = rounded(block.y[rows], block.precision).to(block.dtype)
        torch.sum(x * y, dim=1, out=out[rows])
    return out


def matching_similarities(block: Block) -> Tensor:  # (N,)
    """s_ii."""
    out = matching_products(block).mul_(block.scale)
    if block.row_bias is not None:
        out.add_(block.row_bias)
    if block.col_bias is not None:
        out.add_(block.col_bias)
    return out


def rank_noise(block: Block) -> tuple[Tensor, Tensor]:  # (N,), (M,)
    """Two vectors whose outer product is what rounding may do to s: 4·√D roundings of ‖x_i‖·‖y_j‖."""
    row, col = (torch.linalg.vector_norm(side, dim=1, dtype=block.dtype) for side in (block.x, block.y))
    return row.mul_(4 * block.D**0.5 * torch.finfo(block.dtype).eps * block.scale.abs()), col
