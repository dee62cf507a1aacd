"""The inputs of the kernels: rounded embeddings, and the scale and common shift of the exponents.

The module also contains the kernels for O(N·D) work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.kernels.device import finish_tile, load_embeddings, sum_all_parts, sum_parts
from megabatch.kernels.launch import Launcher, launch
from megabatch.kernels.plan import KernelTile
from megabatch.tiles import plan
from megabatch.tiles.block import BFLOAT16, FLOAT16, FLOAT32, HALF_DTYPE, TF32, Block, round_to_tf32

# ----------------------------------------------------------------------------------------------------------------------
# The scale of the exponents and their common shift C. Two kernels compute them from the largest norms of the embeddings, in
# O(N·D).
#
# The first kernel reads all embeddings. So it also computes the dot products of the matching pairs if a loss needs them.

_BLOCK_N, _BLOCK_D = 16, 256
_CONSTANTS = 4  # numbers before the largest norms, in the same tensor

# Exponents up to which weights need no cap. Two roundings of a dot product differ by about √D · 2⁻²⁴, relative to the
# product of the norms. So at D = 1024, an uncapped weight of the warp-specialized kernel is at most 1.001. The excess is less
# than half a unit in the last place of bf16.
CAPPED_ABOVE = 512.0


@triton.jit
def _largest_finite(squares):
    return tl.max(tl.where(squares < float("inf"), squares, 0.0), 0)  # the comparison is also false for NaN


@triton.jit
def _largest_norms_kernel(
    x,  # (N, D)
    y,  # (M, D), or None if it is x
    work,  # the constants, then the results: (1 or 2, programs)
    products,  # (N,) ⟨x_i, y_i⟩, or None
    N,
    M,
    D,
    x_stride,
    y_stride,
    CONSTANTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores the largest finite squared norm in every group of BLOCK_N rows of x and of y, or 0 if no norm is finite."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_squares = tl.zeros((BLOCK_N,), tl.float32)
    y_squares, sums = x_squares, x_squares
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask_d = (offs_d < D)[None, :]
        a = load_embeddings(x, offs_n, offs_d, x_stride, 1, (offs_n < N)[:, None] & mask_d, 0)
        x_squares += tl.sum(a * a, 1)
        if y is not None:
            b = load_embeddings(y, offs_n, offs_d, y_stride, 1, (offs_n < M)[:, None] & mask_d, 0)
            y_squares += tl.sum(b * b, 1)
            if products is not None:
                sums += tl.sum(a * b, 1)
    to = work + CONSTANTS + tl.program_id(0)
    tl.store(to, _largest_finite(x_squares))
    if y is not None:
        tl.store(to + tl.num_programs(0), _largest_finite(y_squares))
    if products is not None:
        tl.store(products + offs_n, sums, offs_n < N)


@triton.jit
def _largest(values, count, BLOCK: tl.constexpr):
    """Returns the largest of values[:count], which are at least 0."""
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        largest = tl.maximum(largest, tl.load(values + start + offs, start + offs < count, 0.0))
    return tl.max(largest, 0)


@triton.jit
def _exponent_scale_kernel(
    work,  # the constants, which are written, then the largest norms: (1 or 2, count)
    scale,  # ()
    shift,  # () float64
    count,
    TWO_SIDES: tl.constexpr,
    HEADROOM: tl.constexpr,
    CAPPED_ABOVE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores k in two parts, −C (a whole number), and whether weights need caps. There is one program."""
    x = _largest(work + CONSTANTS, count, BLOCK)
    y = x
    if TWO_SIDES:
        y = _largest(work + CONSTANTS + count, count, BLOCK)
    k = tl.load(scale).to(tl.float64)
    k = k * 1.44269502162933349609375 + k * 1.925963033500011e-8  # log2 e, in two floats
    high = k.to(tl.float32)
    bound = tl.abs(high) * tl.sqrt(x) * tl.sqrt(y)
    whole = tl.where(bound < float("inf"), tl.maximum(tl.ceil(bound) - HEADROOM, 0.0), 0.0)
    tl.store(work, high)
    tl.store(work + 1, (k - high.to(tl.float64)).to(tl.float32))
    tl.store(work + 2, -whole)
    tl.store(work + 3, tl.where(bound <= CAPPED_ABOVE, 0.0, 1.0))  # if the bound is NaN, weights need caps
    tl.store(shift, whole.to(tl.float64))


def exponent_scale(
    x: Tensor,  # (N, D), each row contiguous
    y: Tensor,  # (M, D), each row contiguous
    scale: Tensor,  # ()
    headroom: float,
    products: Tensor | None = None,  # (N,) receives ⟨x_i, y_i⟩; then N = M
) -> tuple[Tensor, Tensor]:  # (4,) or longer, () float64
    """Returns (k, the rounding error of k, −C, 1 if weights need caps, …) with k = scale·log2 e. Also returns C in float64.

    C is the smallest whole number, at least 0, that keeps all exponents at or below `headroom`. It is computed from the bound
    |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are not finite are ignored, because `kernels.logsumexp` recomputes the sums of their
    rows.
    """
    second = None if y is x and products is None else y
    programs = plan.tiles(max(len(x), len(y)), _BLOCK_N)
    work = torch.empty(_CONSTANTS + (1 if second is None else 2) * programs, dtype=torch.float32, device=x.device)
    shift = torch.empty((), dtype=torch.float64, device=x.device)
    launch(
        _largest_norms_kernel,
        (programs,),
        (x, second, work, products),
        (len(x), len(y), x.shape[1], x.stride(0), y.stride(0)),
        CONSTANTS=_CONSTANTS,
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
    launch(
        _exponent_scale_kernel,
        (1,),
        (work, scale, shift),
        (programs,),
        TWO_SIDES=second is not None,
        HEADROOM=headroom,
        CAPPED_ABOVE=CAPPED_ABOVE,
        CONSTANTS=_CONSTANTS,
        BLOCK=1024,
    )
    return work, shift


# ----------------------------------------------------------------------------------------------------------------------
# Inputs of the Triton kernels: embeddings that the copy engine (TMA) can read, and exponents of 2.
#
# The softmax kernels compute t_ij = k·⟨x_i, y_j⟩ + row_offset_i + col_offset_j, where k = scale · log2 e. The offsets contain
# the biases, minus one shift C that is common to all pairs of the block. C is the smallest shift that keeps t at or below
# `HEADROOM` for all dot products and biases that the norms and the largest biases allow. So 2^t is at most 2⁶⁰, which is in the
# range of fp32, and one exponential per logit serves its row and its column. The exponents of a row may be far below the bound
# of the largest norm or bias. Such a row loses digits, and its exponents are recomputed without C (`kernels.logsumexp`).
#
# An error that all rows share does not average out. So C is stored in float64, the part of C that the kernels subtract is a
# whole number, and logarithms and weights are computed from the sums in float64.


LOG2E = 1 / math.log(2)
HEADROOM = 60.0


@dataclass(frozen=True)
class Operands:
    """The inputs of the kernels for one block."""

    x: Tensor  # (N, D) rounded; each row starts at a multiple of 16 bytes
    y: Tensor  # (M, D)
    # (4,) or longer: k, the rounding error of k, the offset of all columns where `col_offset` is None, 1 if weights need caps
    exponent_scale: Tensor
    shift: Tensor  # () C in float64; unused if t is the logit, because there is no C
    row_offset: Tensor | None  # (N,) offsets of exponents from which C is subtracted
    col_offset: Tensor | None  # (M,)
    row_offset_unshifted: Tensor | None  # (N,) offsets of exponents without C
    col_offset_unshifted: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,) or (N, 2), in the format of `pack_ids`
    col_ids: Tensor | None  # (M,) or (M, 2)
    limit: Tensor | None = None  # (N,) pairs with a larger dot product are excluded

    def descriptors(self, tile: KernelTile) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Returns descriptors of x and y for the tile of a kernel."""
        return descriptor(self.x, tile.rows, tile.dims), descriptor(self.y, tile.columns, tile.dims)


def exponent_operands(block: Block, products: Tensor | None = None) -> Operands:
    """Returns the operands of the softmax kernels, which compute exponents of 2 and subtract C.

    If `products`, (N,), is given, ⟨x_i, y_i⟩ is written to it.
    """
    x = operand(block.x, block.precision)
    y = x if block.y is block.x else operand(block.y, block.precision)
    constants, shift = exponent_scale(x, y, block.scale, HEADROOM, products)
    row = col = row_offset = col_offset = None
    if block.row_bias is not None:
        row = block.row_bias.double() * LOG2E
        shift = shift + _largest_magnitude(row)
        row_offset = (row - _largest_magnitude(row)).float()
    if block.col_bias is not None:
        col = block.col_bias.double() * LOG2E
        col_offset = (col - _largest_magnitude(col) + constants[2]).float()
        shift = shift + _largest_magnitude(col)
    return Operands(
        x=x,
        y=y,
        exponent_scale=constants,
        shift=shift,
        row_offset=row_offset,
        col_offset=col_offset,
        row_offset_unshifted=None if row is None else row.float(),
        col_offset_unshifted=None if col is None else col.float(),
        row_ids=pack_ids(block.row_ids),
        col_ids=pack_ids(block.col_ids),
        limit=None if block.limit is None else block.limit.contiguous(),
    )


def logit_operands(block: Block, constants: Tensor | None = None) -> Operands:
    """Returns the operands of all other kernels, for which t is the logit, k is the scale, and C is 0.

    If `constants`, (4,) or longer, is given, the caller lets a kernel write (scale, 0, 0, 0) to it.
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
        row_ids=pack_ids(block.row_ids),
        col_ids=pack_ids(block.col_ids),
    )


def kernel_options(block: Block, tile: KernelTile) -> dict[str, Any]:
    """Returns the compile-time arguments of every kernel that computes exponents.

    With EXACT, the exponents also use the rounding error of k. It is not set for half precision, because the inputs are rounded
    more coarsely than k.
    """
    exact = block.precision in (FLOAT32, TF32)
    constants = {"D": block.D, "SKIP_DIAGONAL": block.skip_diagonal, "PRECISION": dot_precision(block), "EXACT": exact}
    return constants | tile.options


def dot_precision(block: Block) -> str:
    """Returns the `input_precision` of `tl.dot`. The bits that TF32 truncates are 0, because the inputs are already rounded."""
    return "ieee" if block.precision == FLOAT32 else "tf32"


def descriptor(values: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor for tiles of rows × columns. Elements beyond the edge are read as 0 and are not written."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, columns])


def empty_aligned(like: Tensor, rows: int, columns: int) -> Tensor:  # (rows, columns)
    """Returns an uninitialized matrix that the copy engine can write. Each row starts at a multiple of 16 bytes."""
    step = 16 // like.element_size()
    padded = like.new_empty(rows, -(-columns // step) * step)
    return padded if columns % step == 0 else padded[:, :columns]


def pack_ids(ids: Tensor | None) -> Tensor | None:
    """Returns contiguous int64 ids, because a kernel would compare int8 with uint8 bit by bit.

    Ids in two columns become uint64, so that a kernel knows the number of columns from the dtype.
    """
    if ids is None:
        return None
    values = ids.long().contiguous()
    return values if values.dim() == 1 else values.view(torch.uint64)


def is_readable(values: Tensor) -> bool:
    """Returns whether the copy engine can read the matrix in its layout."""
    step = 16 // values.element_size()
    return (
        values.stride(1) == 1
        and values.stride(0) % step == 0
        and values.stride(0) >= values.shape[1]
        and values.data_ptr() % 16 == 0
    )


def operand(values: Tensor, precision: str) -> Tensor:
    """Rounds `values` to `precision`. Returns a copy if the copy engine cannot read them in their layout."""
    if precision == TF32:
        values = round_to_tf32(values)
    elif precision in HALF_DTYPE and values.dtype != HALF_DTYPE[precision]:
        values = values.to(HALF_DTYPE[precision])
    if is_readable(values):
        return values
    return empty_aligned(values, *values.shape).copy_(values)


def _largest_magnitude(values: Tensor) -> Tensor:
    """Returns the largest finite value, or 0 if there is none."""
    return torch.where(values.isfinite(), values, -torch.inf).amax().nan_to_num(neginf=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# O(N·D) work on embeddings and their gradients. Each function takes one launch. PyTorch operations would read the embeddings
# several times.
#
# The functions are the same as in `tiles.eager`: the dot products of the matching pairs, and the last step of a gradient.

_ROUNDING = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}  # the values of ROUNDING in `load_embeddings`


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
    """Returns the dot products ⟨x_i, y_i⟩ of the same rounded inputs as in the tiles."""
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
    """Computes out = (sums + dmatch·partners)·factor. Returns ⟨sums_i + dmatch_i·partners_i, own_i⟩ if `own` is given."""
    assert all(part.is_contiguous() for part in (sums, out) if part is not None), "the kernel takes no strides of sums and out"
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


# ----------------------------------------------------------------------------------------------------------------------
# Partial row sums that the programs of a launch have stored are added in a fixed order. One launch computes the sums of one,
# two or three vectors.


@triton.jit
def _add_partial_sums_kernel(
    softplus_part,  # (parts, rows) or None
    row_part,  # (parts, rows) or None
    scale_part,  # (parts, rows) or None
    softplus,  # (rows,) or None
    row,  # (rows,) or None
    scale,  # (rows,) or None
    parts,
    rows,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < rows
    if softplus is not None:
        sums = sum_parts(softplus_part, offs_n, parts, rows, True, BLOCK_P)
        tl.store(softplus + offs_n, tl.load(softplus + offs_n, mask_n) + sums, mask_n)
    if row is not None:
        sums = sum_parts(row_part, offs_n, parts, rows, False, BLOCK_P)
        tl.store(row + offs_n, tl.load(row + offs_n, mask_n) + sums, mask_n)
    if scale is not None:
        sums = sum_parts(scale_part, offs_n, parts, rows, False, BLOCK_P)
        tl.store(scale + offs_n, tl.load(scale + offs_n, mask_n) + sums, mask_n)


def add_partial_sums(parts: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
    """Adds partial row sums, (parts, n) each, to row sums, (n,) each. They are sums of softplus, of g, and of g·⟨x_i, y_j⟩."""
    required = [part for part in parts if part is not None]
    if required:
        count, rows = required[0].shape
        grid = (-(-rows // 32),)
        launch(_add_partial_sums_kernel, grid, (*parts, *sums), (count, rows), BLOCK_P=64, BLOCK_N=32)


# ----------------------------------------------------------------------------------------------------------------------
# Backward of a loss whose gradients were computed in forward. One launch multiplies all of them by the gradient of the loss.

_ELEMENTS = 4096  # elements of a gradient that one program multiplies
_PARTS = 2048  # parts of dscale that are added at once


@triton.jit
def _multiply_kernel(
    dx,  # x_count elements, or None
    dy,  # the gradient of y starts at element y_first; or None
    sums,  # dscale in scale_parts parts, then dbias, …
    dloss,  # ()
    dx_out,  # x_count elements, or None
    dy_out,  # y_count elements, or None
    dscale_out,  # () or None
    dbias_out,  # () or None
    x_count,
    y_count,
    y_first,
    scale_parts,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Multiplies all gradients by the gradient of the loss, and stores the products."""
    program, factor = tl.program_id(0), tl.load(dloss)
    blocks = 0
    if dx_out is not None:
        blocks = tl.cdiv(x_count, BLOCK)
        if program < blocks:
            offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(dx + offs, offs < x_count, 0.0).to(tl.float32) * factor
            tl.store(dx_out + offs, values.to(dx_out.dtype.element_ty), offs < x_count)
    if dy_out is not None:
        if program >= blocks:
            offs = (program - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(dy + y_first + offs, offs < y_count, 0.0).to(tl.float32) * factor
            tl.store(dy_out + offs, values.to(dy_out.dtype.element_ty), offs < y_count)
    if program == 0:
        if dscale_out is not None:
            tl.store(dscale_out, (sum_all_parts(sums, scale_parts, BLOCK_P) * factor).to(dscale_out.dtype.element_ty))
        if dbias_out is not None:
            tl.store(dbias_out, (tl.load(sums + scale_parts) * factor).to(dbias_out.dtype.element_ty))


@lru_cache(maxsize=256)
def multiply(x_count: int, y_count: int, y_first: int, scale_parts: int, given: tuple[Any, ...]) -> Launcher:
    """Returns the launcher that multiplies all gradients by the gradient of the loss, and sums the parts of dscale.

    Args:
        x_count: number of elements of dx, or 0 if it is not needed.
        y_count: number of elements of dy, or 0 if it is not needed.
        y_first: the first element of the gradient of y in dy.
        scale_parts: number of parts of dscale.
        given: the device and the kinds of all tensors, which decide how the kernel is compiled. Only the cache uses them.
    """
    programs = max(1, -(-x_count // _ELEMENTS) + -(-y_count // _ELEMENTS))
    numbers = x_count, y_count, y_first, scale_parts
    return Launcher(_multiply_kernel, (programs,), numbers, BLOCK=_ELEMENTS, BLOCK_P=_PARTS, num_warps=8)
