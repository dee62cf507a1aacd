"""The matching pairs of a sigmoid loss, in one launch: their losses and weights. Strips then add all other pairs.

PyTorch operations over vectors would take the host longer than all products take the GPU, up to 32k pairs on an H200.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block
from megabatch.tiles.precision import FLOAT16
from megabatch.tiles.triton_device import load_embeddings, softplus_and_sigmoid
from megabatch.tiles.triton_launcher import launch
from megabatch.tiles.triton_operands import Operands
from megabatch.tiles.triton_pair_gradients import HALF_UNIT, Matches

_BLOCK_N, _BLOCK_D = 16, 256


@triton.jit
def _sigmoid_matches_kernel(
    x,  # (N, D)
    y,  # (N, D)
    scale,  # ()
    bias,  # ()
    vectors,  # (7, stride), `SigmoidVectors`
    N,
    D,
    x_stride,
    y_stride,
    stride,
    unit,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    product = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = mask_n[:, None] & (offs_d < D)[None, :]
        a = load_embeddings(x, offs_n, offs_d, x_stride, 1, mask, 0)
        b = load_embeddings(y, offs_n, offs_d, y_stride, 1, mask, 0)
        product += tl.sum(a * b, 1)
    k, offset = tl.load(scale).to(tl.float32), tl.load(bias).to(tl.float32)
    loss, weight = softplus_and_sigmoid(-(product * k + offset))
    to, ones = vectors + offs_n, tl.full((BLOCK_N,), 1.0, tl.float32)
    tl.store(to, ones * offset, mask_n)
    tl.store(to + stride, ones * unit, mask_n)
    tl.store(to + 2 * stride, loss, mask_n)
    tl.store(to + 3 * stride, -unit * weight, mask_n)
    tl.store(to + 4 * stride, -unit * weight, mask_n)
    tl.store(to + 5 * stride, product, mask_n)
    if tl.program_id(0) == 0:
        offs = tl.arange(0, 4)
        tl.store(vectors + 6 * stride + offs, tl.where(offs == 0, k, 0.0))


class SigmoidVectors(NamedTuple):
    """All vectors of the pairs, in one allocation; weights and gradients are in units."""

    room: Tensor  # (7, stride): the vectors below
    offset: Tensor  # (N,) the bias
    weight: Tensor  # (N,) the weight of a loss: the unit
    losses: Tensor  # (N,) softplus(−s_ii); strips add the softplus of the row's other pairs
    dbias: Tensor  # (N,) the gradient of the offset from s_ii; strips add the rest
    constants: Tensor  # (stride,) of which the first four are `Operands.exponent_scale`
    matches: Matches

    @classmethod
    def empty(cls, x: Tensor, precision: str) -> "SigmoidVectors":
        """Uninitialised vectors for the rows of x."""
        N = len(x)
        room = torch.empty((7, plan.tiles(N, 64) * 64), dtype=torch.float32, device=x.device)  # so each vector is aligned
        offset, weight, losses, dbias, dmatch, products = room[:6, :N].unbind(0)
        matches = Matches(products, dmatch, HALF_UNIT if precision == FLOAT16 else 1.0)
        return cls(room, offset, weight, losses, dbias, room[6], matches)


def write_matches(operands: Operands, block: Block, bias: Tensor, vectors: SigmoidVectors) -> None:
    """Writes all vectors."""
    launch(
        _sigmoid_matches_kernel,
        (plan.tiles(block.N, _BLOCK_N),),
        (operands.x, operands.y, block.scale, bias, vectors.room),
        (block.N, block.D, operands.x.stride(0), operands.y.stride(0), vectors.room.shape[1], vectors.matches.unit),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
