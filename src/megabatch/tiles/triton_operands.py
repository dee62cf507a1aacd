"""What the Triton walks are given: inputs that the copy engine can read, and exponents in units of log 2.

The softmax kernels compute t_ij = k·⟨x_i, y_j⟩ + row_offset_i + col_offset_j, where k = scale · log2 e and the offsets hold the
biases and minus one shift C for the whole block. C is the least that keeps the largest exponent that norms and biases allow
below `HEADROOM`, so that 2^t stays in fp32's range from 2⁶⁰ down: one exponential per element serves rows and columns alike.
Where that loses digits, because a row is far below what the largest norm or bias allows, the exponents are formed again
without C.

What every row shares must not be rounded: such an error does not average out. C is kept in float64, and the part of it that the
kernels subtract is a whole number; sums become logarithms, and weights, in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.tiles.block import Block
from megabatch.tiles.precision import HALF_DTYPE, TF32, round_to_tf32
from megabatch.tiles.triton_rows import exponent_scale

LOG2E = 1 / math.log(2)
HEADROOM = 60.0


@dataclass(frozen=True)
class Operands:
    """A block as the kernels see it."""

    x: Tensor  # (N, D) rounded, rows of whole 16 bytes
    y: Tensor  # (M, D)
    exponent_scale: Tensor  # (3,) k, what rounding took from it, and the offset of columns where there is no vector
    shift: Tensor  # () C, float64
    row_offset: Tensor | None  # (N,) for exponents relative to C
    col_offset: Tensor | None  # (M,)
    row_plain: Tensor | None  # (N,) for exponents as they are
    col_plain: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None = None  # (N,) products above are left out


def exponent_operands(block: Block) -> Operands:
    """For softmax: exponents of 2, relative to C."""
    x = _operand(block.x, block.precision)
    y = x if block.y is block.x else _operand(block.y, block.precision)
    constants, shift = exponent_scale(x, y, block.scale, HEADROOM)
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
        row_plain=None if row is None else row.float(),
        col_plain=None if col is None else col.float(),
        row_ids=packed(block.row_ids),
        col_ids=packed(block.col_ids),
        limit=None if block.limit is None else block.limit.contiguous(),
    )


def similarity_operands(block: Block) -> Operands:
    """For everything else: the similarities themselves, C = 0 and k the scale."""
    x, y = _operand(block.x, block.precision), _operand(block.y, block.precision)
    nothing = torch.zeros_like(block.scale)
    return Operands(
        x=x,
        y=y,
        exponent_scale=torch.stack((block.scale, nothing, nothing)),
        shift=nothing.double(),
        row_offset=None if block.row_bias is None else block.row_bias.contiguous(),
        col_offset=None if block.col_bias is None else block.col_bias.contiguous(),
        row_plain=None,
        col_plain=None,
        row_ids=packed(block.row_ids),
        col_ids=packed(block.col_ids),
    )


def descriptor(values: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For blocks of rows × columns; what lies beyond the edge reads as 0 and is not written."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, columns])


def whole_rows(like: Tensor, rows: int, columns: int) -> Tensor:  # (rows, columns)
    """An uninitialised matrix that the copy engine can write: its rows start at multiples of 16 bytes."""
    step = 16 // like.element_size()
    return like.new_empty(rows, -(-columns // step) * step)[:, :columns]


def packed(ids: Tensor | None) -> Tensor | None:
    """As wide as any: kernels would compare int8 with uint8 by their bits."""
    return None if ids is None else ids.long().contiguous()


def _operand(values: Tensor, precision: str) -> Tensor:
    if precision == TF32:
        values = round_to_tf32(values)
    elif precision in HALF_DTYPE:
        values = values.to(HALF_DTYPE[precision])
    step = 16 // values.element_size()
    if (
        values.stride(1) == 1
        and values.stride(0) % step == 0
        and values.stride(0) >= values.shape[1]
        and values.data_ptr() % 16 == 0
    ):
        return values
    return whole_rows(values, *values.shape).copy_(values)


def _largest(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, -torch.inf).amax().nan_to_num(neginf=0.0)
