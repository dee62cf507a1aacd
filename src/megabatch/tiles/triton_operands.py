"""Inputs of the Triton kernels: embeddings that the copy engine can read, and exponents in units of log 2.

The softmax kernels compute t_ij = k·⟨x_i, y_j⟩ + row_offset_i + col_offset_j, where k = scale · log2 e. The offsets hold the
biases and minus one shift C for the whole block. C is the least shift that keeps t below `HEADROOM` for every product and bias
that the norms and the largest biases allow. So 2^t stays in fp32's range from 2⁶⁰ down, and one exponential per element serves
rows and columns. A row far below the bound of the largest norm or bias loses digits; its exponents are formed again without C
(`triton_online_logsumexp`).

An error that all rows share does not average out. So C is kept in float64, the part of it that the kernels subtract is a whole
number, and sums become logarithms and weights in float64.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.tiles.block import Block
from megabatch.tiles.kernel_plan import KernelTile
from megabatch.tiles.precision import FLOAT32, HALF_DTYPE, TF32, round_to_tf32
from megabatch.tiles.triton_exponent_scale import exponent_scale

LOG2E = 1 / math.log(2)
HEADROOM = 60.0


@dataclass(frozen=True)
class Operands:
    """A block as the kernels read it."""

    x: Tensor  # (N, D) rounded; each row starts at a multiple of 16 bytes
    y: Tensor  # (M, D)
    exponent_scale: Tensor  # (4,) or longer: k, its rounding error, the column offset if there is none, 1 if weights need caps
    shift: Tensor  # () C, float64; if t is the similarity, there is no C, and nothing reads this
    row_offset: Tensor | None  # (N,) of exponents relative to C
    col_offset: Tensor | None  # (M,)
    row_offset_unshifted: Tensor | None  # (N,) of exponents without C
    col_offset_unshifted: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None = None  # (N,) pairs with a larger product are excluded

    def descriptors(self, tile: KernelTile) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Descriptors of x and y for a kernel's tile."""
        return descriptor(self.x, tile.rows, tile.width), descriptor(self.y, tile.columns, tile.width)


def exponent_operands(block: Block, products: Tensor | None = None) -> Operands:
    """Operands of the softmax kernels: exponents of 2, relative to C. Writes ⟨x_i, y_i⟩ to `products`, (N,), if given."""
    x = operand(block.x, block.precision)
    y = x if block.y is block.x else operand(block.y, block.precision)
    constants, shift = exponent_scale(x, y, block.scale, HEADROOM, products)
    row = col = row_offset = col_offset = None
    if block.row_bias is not None:
        row = block.row_bias.double() * LOG2E
        shift = shift + _largest(row)
        row_offset = (row - _largest(row)).float()
    if block.col_bias is not None:
        col = block.col_bias.double() * LOG2E
        col_offset = (col - _largest(col) + constants[2]).float()
        shift = shift + _largest(col)
    return Operands(
        x=x,
        y=y,
        exponent_scale=constants,
        shift=shift,
        row_offset=row_offset,
        col_offset=col_offset,
        row_offset_unshifted=None if row is None else row.float(),
        col_offset_unshifted=None if col is None else col.float(),
        row_ids=packed(block.row_ids),
        col_ids=packed(block.col_ids),
        limit=None if block.limit is None else block.limit.contiguous(),
    )


def similarity_operands(block: Block, constants: Tensor | None = None) -> Operands:
    """Operands of the other kernels: t is the similarity itself, k the scale and C = 0.

    A kernel may write the constants later: the scale, 0, 0, 0, to `constants`, (4,) or longer.
    """
    x, y = operand(block.x, block.precision), operand(block.y, block.precision)
    if constants is None:
        zero = torch.zeros_like(block.scale)
        constants = torch.stack((block.scale, zero, zero, zero))
    return Operands(
        x=x,
        y=y,
        exponent_scale=constants,
        shift=constants,
        row_offset=None if block.row_bias is None else block.row_bias.contiguous(),
        col_offset=None if block.col_bias is None else block.col_bias.contiguous(),
        row_offset_unshifted=None,
        col_offset_unshifted=None,
        row_ids=packed(block.row_ids),
        col_ids=packed(block.col_ids),
    )


def kernel_options(block: Block, tile: KernelTile) -> dict[str, Any]:
    """Compile-time arguments of every kernel that computes exponents.

    EXACT: whether exponents use all digits of k. Products of half-precision inputs are rougher than the rounding of k.
    """
    exact = block.precision in (FLOAT32, TF32)
    constants = {"D": block.D, "SKIP_DIAGONAL": block.skip_diagonal, "PRECISION": dot_precision(block), "EXACT": exact}
    return constants | tile.options


def dot_precision(block: Block) -> str:
    """`input_precision` of `tl.dot`. TF32 inputs are rounded already, so the bits that it truncates are zero."""
    return "ieee" if block.precision == FLOAT32 else "tf32"


def descriptor(values: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor for tiles of rows × columns. Elements beyond the edge read as 0 and are not written."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, columns])


def aligned_empty(like: Tensor, rows: int, columns: int) -> Tensor:  # (rows, columns)
    """An uninitialised matrix that the copy engine can write: each row starts at a multiple of 16 bytes."""
    step = 16 // like.element_size()
    room = like.new_empty(rows, -(-columns // step) * step)
    return room if columns % step == 0 else room[:, :columns]


def packed(ids: Tensor | None) -> Tensor | None:
    """Ids as contiguous int64: a kernel would compare int8 with uint8 bit by bit."""
    return None if ids is None else ids.long().contiguous()


def operand(values: Tensor, precision: str) -> Tensor:
    """`values` rounded to `precision`, copied if the copy engine cannot read them where they are."""
    if precision == TF32:
        values = round_to_tf32(values)
    elif precision in HALF_DTYPE and values.dtype != HALF_DTYPE[precision]:
        values = values.to(HALF_DTYPE[precision])
    step = 16 // values.element_size()
    if (
        values.stride(1) == 1
        and values.stride(0) % step == 0
        and values.stride(0) >= values.shape[1]
        and values.data_ptr() % 16 == 0
    ):
        return values
    return aligned_empty(values, *values.shape).copy_(values)


def _largest(values: Tensor) -> Tensor:
    """The largest finite value; 0 if there is none."""
    return torch.where(values.isfinite(), values, -torch.inf).amax().nan_to_num(neginf=0.0)
