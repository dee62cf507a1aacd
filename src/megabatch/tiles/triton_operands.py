"""What the Triton walks are given: inputs that the copy engine can read, and exponents in units of log 2.

The softmax kernels compute t_ij = k·⟨x_i, y_j⟩ + row_offset_i + col_offset_j, where k = scale · log2 e and the offsets hold the
biases and minus one shift C for the whole block. C is `HEADROOM` below the largest exponent that the norms allow, so that 2^t
stays in fp32's range from 2⁶⁰ down: one exponential per element serves rows and columns alike. C is a whole number, and exact;
what turns sums at that shift into logarithms, and back into weights, works in float64, because a rounding of C · log 2 would
be the same for every row and not average out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.tiles.block import Block
from megabatch.tiles.precision import BFLOAT16, FLOAT16, TF32, round_to_tf32

LOG2E = 1 / math.log(2)
HEADROOM = 60.0

_DTYPE = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


@dataclass(frozen=True)
class Operands:
    """A block as the kernels see it."""

    x: Tensor  # (N, D) rounded, rows of whole 16 bytes
    y: Tensor  # (M, D)
    exponent_scale: Tensor  # (2,) k, and what rounding took from it
    shift: Tensor  # () C
    row_offset: Tensor | None  # (N,)
    col_offset: Tensor  # (M,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)


def exponent_operands(block: Block) -> Operands:
    """For softmax: exponents of 2, relative to C."""
    x, y = _operand(block.x, block.precision), _operand(block.y, block.precision)
    k = block.scale.double() * LOG2E
    high = k.float()
    C = _shift(x, y, high, block)
    col_offset = (-C).expand(block.M) if block.col_bias is None else block.col_bias.mul(LOG2E).sub_(C)
    return Operands(
        x=x,
        y=y,
        exponent_scale=torch.stack((high, (k - high).float())),
        shift=C,
        row_offset=None if block.row_bias is None else block.row_bias * LOG2E,
        col_offset=col_offset.contiguous(),
        row_ids=_packed(block.row_ids),
        col_ids=_packed(block.col_ids),
    )


def similarity_operands(block: Block) -> Operands:
    """For everything else: the similarities themselves, C = 0 and k the scale."""
    x, y = _operand(block.x, block.precision), _operand(block.y, block.precision)
    nothing = torch.zeros_like(block.scale)
    return Operands(
        x=x,
        y=y,
        exponent_scale=torch.stack((block.scale, nothing)),
        shift=nothing,
        row_offset=None if block.row_bias is None else block.row_bias.contiguous(),
        col_offset=block.zeros(block.M) if block.col_bias is None else block.col_bias.contiguous(),
        row_ids=_packed(block.row_ids),
        col_ids=_packed(block.col_ids),
    )


def descriptor(values: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For blocks of rows × columns; what lies beyond the edge reads as 0 and is not written."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, columns])


def whole_rows(like: Tensor, rows: int, columns: int) -> Tensor:  # (rows, columns)
    """An uninitialised matrix that the copy engine can write: its rows start at multiples of 16 bytes."""
    step = 16 // like.element_size()
    return like.new_empty(rows, -(-columns // step) * step)[:, :columns]


def _packed(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.contiguous()


def _operand(values: Tensor, precision: str) -> Tensor:
    if precision == TF32:
        values = round_to_tf32(values)
    elif precision in _DTYPE:
        values = values.to(_DTYPE[precision])
    step = 16 // values.element_size()
    if (
        values.stride(1) == 1
        and values.stride(0) % step == 0
        and values.stride(0) >= values.shape[1]
        and values.data_ptr() % 16 == 0
    ):
        return values
    return whole_rows(values, *values.shape).copy_(values)


def _shift(x: Tensor, y: Tensor, exponent_scale: Tensor, block: Block) -> Tensor:  # ()
    """C, from |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are not finite are passed over: their rows are found by their sums."""
    bound = exponent_scale.abs() * _largest(_norms(x)) * _largest(_norms(y))
    for bias in (block.row_bias, block.col_bias):
        if bias is not None:
            bound = bound + _largest(bias) * LOG2E
    return torch.nan_to_num(bound.ceil() - HEADROOM, posinf=0.0, neginf=0.0)


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32)
    return norms


def _largest(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, -torch.inf).amax().nan_to_num(neginf=0.0)
