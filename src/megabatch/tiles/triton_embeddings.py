"""O(N·D) work on embeddings and their gradients, one launch each; PyTorch operations would read them several times.

The same functions as in `matching`: products of the matching pairs, and the last step of a gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block
from megabatch.tiles.precision import BFLOAT16, FLOAT16, TF32
from megabatch.tiles.triton_device import finish_tile, load_embeddings
from megabatch.tiles.triton_launcher import launch

_BLOCK_N, _BLOCK_D = 16, 256
_ROUNDING = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}  # of `load_embeddings`


@triton.jit
def _matching_products_kernel(
    x,  # (N, D)
    y,  # (N, D)
    out,  # (N,)
    N,
    D,
    x_row_stride,
    x_stride,
    y_row_stride,
    y_stride,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = (offs_n < N)[:, None] & (offs_d < D)[None, :]
        a = load_embeddings(x, offs_n, offs_d, x_row_stride, x_stride, mask, ROUNDING)
        b = load_embeddings(y, offs_n, offs_d, y_row_stride, y_stride, mask, ROUNDING)
        sums += tl.sum(a * b, 1)
    tl.store(out + offs_n, sums, offs_n < N)


@triton.jit
def _finish_gradient_kernel(
    sums,  # (N, D) float32, contiguous
    out,  # (N, D) contiguous, or None
    own,  # (N, D) or None
    products,  # (N,) or None
    partners,  # (N, D) or None
    dmatch,  # (N,) or None
    factor,  # ()
    N,
    D,
    own_row_stride,
    own_stride,
    partners_row_stride,
    partners_stride,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_products = finish_tile(
        tl.program_id(0), sums, out, own, partners, dmatch, tl.load(factor), N, D,
        own_row_stride, own_stride, partners_row_stride, partners_stride, ROUNDING, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if own is not None:
        offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(products + offs_n, row_products, offs_n < N)


def matching_products(block: Block) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩, from the same rounded inputs as the tiles."""
    x, y = block.x, block.y
    out = torch.empty(block.N, dtype=torch.float32, device=x.device)
    numbers = *x.shape, *x.stride(), *y.stride()
    launch(_matching_products_kernel, _grid(x), (x, y, out), numbers, **_options(block.precision))
    return out


def finish_rows(
    sums: Tensor,  # (n, D)
    out: Tensor | None,  # (n, D)
    factor: Tensor,  # ()
    *,
    own: Tensor | None,  # (n, D)
    partners: Tensor,  # (n, D)
    dmatch: Tensor | None,  # (n,)
    precision: str,
) -> Tensor | None:  # (n,)
    """out = (sums + dmatch·partners)·factor. Returns ⟨sums_i + dmatch_i·partners_i, own_i⟩ if `own` is given."""
    products = None if own is None else torch.empty(len(sums), dtype=torch.float32, device=sums.device)
    own_strides = (0, 0) if own is None else own.stride()
    tensors = (sums, out, own, products, partners, dmatch, factor)
    numbers = *sums.shape, *own_strides, *partners.stride()
    launch(_finish_gradient_kernel, _grid(sums), tensors, numbers, **_options(precision))
    return products


def _grid(rows: Tensor) -> tuple[int]:
    return (plan.tiles(len(rows), _BLOCK_N),)


def _options(precision: str) -> dict[str, int]:
    return {"ROUNDING": _ROUNDING.get(precision, 0), "BLOCK_N": _BLOCK_N, "BLOCK_D": _BLOCK_D}
