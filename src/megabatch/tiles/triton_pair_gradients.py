"""The last step of a loss of pairs, in one launch: dx and dy from their sums, the loss, d scale in parts, and d bias.

`triton_embeddings` has the last step of other losses: one launch for some rows of one side.
"""

from typing import NamedTuple

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

HALF_UNIT = 2.0**14  # of weights in float16: a softmax over a million columns stays within its range

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
    losses,  # (losses_count,)
    row_dbias,  # (N,) with the matching pairs, or None
    scale,  # ()
    loss,  # ()
    numbers,  # (tiles of N + 1,) float64: d scale in parts, d bias; None if neither is needed
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
        terms = tl.zeros((BLOCK_N,), tl.float64)
        if dx_sums is not None:
            terms = finish_tile(
                program, dx_sums, dx, x, y, dmatch, factor, N, D, x_stride, 1, y_stride, 1, 0, BLOCK_N, BLOCK_D
            ).to(tl.float64)
        if row_dscale is not None:
            offs_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            of_match = tl.load(dmatch + offs_n, mask_n, 0.0).to(tl.float64) * tl.load(products + offs_n, mask_n, 0.0)
            terms = tl.load(row_dscale + offs_n, mask_n, 0.0) + of_match
        if numbers is not None:
            tl.store(numbers + program, tl.sum(terms, 0) / divisor / unit)
    elif dy_sums is not None:
        finish_tile(program - row_tiles, dy_sums, dy, None, x, dmatch, factor, N, D, 0, 0, x_stride, 1, 0, BLOCK_N, BLOCK_D)
    if program == 0:
        tl.store(loss, (sum_all_parts(losses, losses_count, BLOCK) / divisor).to(tl.float32))
        if row_dbias is not None:
            tl.store(numbers + tl.cdiv(N, BLOCK_N), sum_all_parts(row_dbias, N, BLOCK) / divisor / unit)


class Matches(NamedTuple):
    """What is known of the matching pairs."""

    products: Tensor  # (N,) or longer: ⟨x_i, y_i⟩
    dmatch: Tensor  # (N,) or longer: the gradient of s_ii, in units
    unit: float


def finish_pairs(
    operands: Operands,
    block: Block,
    sums: WholeGradients,
    needs: Needs,
    matches: Matches,
    losses: Tensor,  # (any number,) whose sum is the loss
    divisor: int,
    *,
    row_dbias: Tensor | None = None,  # (N,) in units
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # (), (N, D), (N, D), (parts + 1,) float64
    """(loss, dx, dy, d scale in parts and d bias), divided by `divisor`; None where not needed. May overwrite `sums`.

    Gradients are in the type of the inputs. Those of float16 are in float32: backward multiplies them, and before that they may
    be out of its range.
    """
    (N, D), device = operands.x.shape, operands.x.device
    given = block.x.dtype, block.y.dtype
    dtypes = (torch.float32, torch.float32) if torch.float16 in given else given
    dx, dy = (
        None if total is None or not need else total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
        for total, need, dtype in zip(sums[:2], needs[:2], dtypes, strict=True)
    )
    loss = torch.empty((), dtype=torch.float32, device=device)
    tiles = plan.tiles(N, _BLOCK_N)
    has_numbers = needs.dscale or row_dbias is not None
    numbers = torch.empty(tiles + 1, dtype=torch.float64, device=device) if has_numbers else None
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
            matches.products,
            matches.dmatch,
            losses,
            row_dbias,
            block.scale,
            loss,
            numbers,
        ),
        (N, D, operands.x.stride(0), operands.y.stride(0), row_tiles, len(losses), float(divisor), matches.unit),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
        BLOCK=_BLOCK,
    )
    return loss, dx, dy, numbers
