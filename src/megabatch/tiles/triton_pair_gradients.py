"""The last step of a loss of pairs, in one launch: dx and dy from their sums, the loss, and d scale in parts.

`triton_embeddings` has the last step of other losses: one launch for some rows of one side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.triton_backward import WholeGradients
from megabatch.tiles.triton_device import finish_tile, sum_all_parts
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_operands import Operands
from megabatch.tiles.triton_pair_statistics import PairVectors

_BLOCK_N, _BLOCK_D = 16, 256
_BLOCK = 1024  # partial sums that are added at once


@triton.jit
def _finish_pairs_kernel(
    x,  # (N, D)
    y,  # (N, D)
    dx_sums,  # (N, D) or None
    dy_sums,  # (N, D) or None
    dx,  # (N, D) or None; may be `dx_sums`
    dy,  # (N, D) or None; may be `dy_sums`
    row_dscale,  # (N,) without the matching pairs, or None if d scale is taken from dx
    products,  # (N,) of the matching pairs
    dmatch,  # (N,)
    losses,  # (losses_count,) float64
    scale,  # ()
    loss,  # ()
    dscale,  # (row_tiles,) float64, or None
    N,
    D,
    x_stride,
    y_stride,
    row_tiles,  # programs of dx and d scale; those of dy come after them
    losses_count,
    divisor,
    unit,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    factor = (tl.load(scale).to(tl.float64) / divisor / unit).to(tl.float32)
    if program < row_tiles:
        if dx_sums is not None:
            terms = finish_tile(
                program, dx_sums, dx, x, y, dmatch, factor, N, D, x_stride, 1, y_stride, 1, 0, BLOCK_N, BLOCK_D
            ).to(tl.float64)
        if row_dscale is not None:
            offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            of_match = tl.load(dmatch + offs_n, mask_n, 0.0).to(tl.float64) * tl.load(products + offs_n, mask_n, 0.0)
            terms = tl.load(row_dscale + offs_n, mask_n, 0.0) + of_match
        if dscale is not None:
            tl.store(dscale + program, tl.sum(terms, 0) / divisor / unit)
    elif dy_sums is not None:
        finish_tile(program - row_tiles, dy_sums, dy, None, x, dmatch, factor, N, D, 0, 0, x_stride, 1, 0, BLOCK_N, BLOCK_D)
    if program == 0:
        tl.store(loss, (sum_all_parts(losses, losses_count, BLOCK) / divisor).to(tl.float32))


def finish_pairs(
    operands: Operands,
    block: Block,
    sums: WholeGradients,
    needs: Needs,
    pairs: PairVectors,
    losses: Tensor,  # (programs,) of `pair_statistics`
    divisor: int,
    dtypes: tuple[torch.dtype, torch.dtype],  # of dx and dy
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # (), (N, D), (N, D), (parts,) float64
    """(loss, dx, dy, parts of d scale), divided by `divisor`; None where not needed. May overwrite `sums`."""
    (N, D), device = operands.x.shape, operands.x.device
    dx, dy = (
        None if total is None or not need else total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, need, dtype in zip(sums[:2], needs[:2], dtypes, strict=True)
    )
    loss = torch.empty((), dtype=torch.float32, device=device)
    tiles = plan.tiles(N, _BLOCK_N)
    dscale = torch.empty(tiles, dtype=torch.float64, device=device) if needs.dscale else None
    row_tiles = 0 if sums.dx is None and sums.dscale is None else tiles
    launch(
        _finish_pairs_kernel,
        (max(1, row_tiles + (0 if sums.dy is None else tiles)),),
        (
            operands.x,
            operands.y,
            *sums[:2],
            dx,
            dy,
            sums.dscale,
            pairs.products,
            pairs.dmatch,
            losses,
            block.scale,
            loss,
            dscale,
        ),
        (N, D, operands.x.stride(0), operands.y.stride(0), row_tiles, len(losses), float(divisor), pairs.unit),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
        BLOCK=_BLOCK,
    )
    return loss, dx, dy, dscale
