"""What kernels read: rounded operands, the scale and common shift of the exponents, and kernels that take O(N·D)."""

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
# The scale of the exponents and their common shift C, from the largest norms of the embeddings: O(N·D), two kernels.
#
# The first reads all embeddings. So it can also give the products of the matching pairs, which a loss of pairs needs.

_BLOCK_N, _BLOCK_D = 16, 256
_CONSTANTS = 4  # before the largest norms, in the same tensor

# Exponents up to which weights need no cap. Two roundings of a product differ by about √D · 2⁻²⁴ of the norms, so a weight of
# the warp-specialised kernel is at most 1.001 without one at D = 1024: less than half a unit in the last place of bf16.
CAPPED_ABOVE = 512.0


@triton.jit
def _largest_finite(squares):
    return tl.max(tl.where(squares < float("inf"), squares, 0.0), 0)  # false for NaN too


@triton.jit
def _largest_norms_kernel(
    x,  # (N, D)
    y,  # (M, D), or None if it is x
    work,  # constants, then the results: (1 or 2, programs)
    products,  # (N,) of the pairs (i, i), or None
    N,
    M,
    D,
    x_stride,
    y_stride,
    CONSTANTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The largest finite squared norm of each BLOCK_N rows of x and of y; 0 if there is none."""
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
    """The largest of values[:count] ≥ 0."""
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        largest = tl.maximum(largest, tl.load(values + start + offs, start + offs < count, 0.0))
    return tl.max(largest, 0)


@triton.jit
def _exponent_scale_kernel(
    work,  # constants, written, then the largest norms: (1 or 2, count)
    scale,  # ()
    shift,  # () float64
    count,
    TWO_SIDES: tl.constexpr,
    HEADROOM: tl.constexpr,
    CAPPED_ABOVE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k in two parts, the whole number that exponents are shifted by, and whether weights need caps. One program."""
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
    tl.store(work + 3, tl.where(bound <= CAPPED_ABOVE, 0.0, 1.0))  # NaN needs them too
    tl.store(shift, whole.to(tl.float64))


def exponent_scale(
    x: Tensor,  # (N, D), each row contiguous
    y: Tensor,  # (M, D), each row contiguous
    scale: Tensor,  # ()
    headroom: float,
    products: Tensor | None = None,  # (N,) of the pairs (i, i), written; then N = M
) -> tuple[Tensor, Tensor]:  # (4,) or longer, () float64
    """(k, its rounding error, −C, 1 if weights need caps, …) with k = scale·log2 e, and C in float64.

    C is the least whole number ≥ 0 that keeps exponents ≤ `headroom`. The bound is |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are
    not finite are ignored: their rows are found later, by their sums.
    """
    other = None if y is x and products is None else y
    programs = plan.tiles(max(len(x), len(y)), _BLOCK_N)
    work = torch.empty(_CONSTANTS + (1 if other is None else 2) * programs, dtype=torch.float32, device=x.device)
    shift = torch.empty((), dtype=torch.float64, device=x.device)
    launch(
        _largest_norms_kernel,
        (programs,),
        (x, other, work, products),
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
        TWO_SIDES=other is not None,
        HEADROOM=headroom,
        CAPPED_ABOVE=CAPPED_ABOVE,
        CONSTANTS=_CONSTANTS,
        BLOCK=1024,
    )
    return work, shift


# ----------------------------------------------------------------------------------------------------------------------
# Inputs of the Triton kernels: embeddings that the copy engine can read, and exponents in units of log 2.
#
# The softmax kernels compute t_ij = k·⟨x_i, y_j⟩ + row_offset_i + col_offset_j, where k = scale · log2 e. The offsets hold
# the biases and minus one shift C for the whole block. C is the least shift that keeps t below `HEADROOM` for every product
# and bias that the norms and the largest biases allow. So 2^t stays in fp32's range from 2⁶⁰ down, and one exponential per
# element serves rows and columns. A row far below the bound of the largest norm or bias loses digits; its exponents are
# formed again without C (`kernels.logsumexp`).
#
# An error that all rows share does not average out. So C is kept in float64, the part of it that the kernels subtract is a
# whole number, and sums become logarithms and weights in float64.


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
    row_ids: Tensor | None  # (N,) or (N, 2), as `pack_ids` returns them
    col_ids: Tensor | None  # (M,) or (M, 2)
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
        row_ids=pack_ids(block.row_ids),
        col_ids=pack_ids(block.col_ids),
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


def empty_aligned(like: Tensor, rows: int, columns: int) -> Tensor:  # (rows, columns)
    """An uninitialised matrix that the copy engine can write: each row starts at a multiple of 16 bytes."""
    step = 16 // like.element_size()
    room = like.new_empty(rows, -(-columns // step) * step)
    return room if columns % step == 0 else room[:, :columns]


def pack_ids(ids: Tensor | None) -> Tensor | None:
    """Ids as contiguous int64, because a kernel would compare int8 with uint8 bit by bit.

    Ids in two columns become uint64. Their dtype tells a kernel how many columns there are.
    """
    if ids is None:
        return None
    values = ids.long().contiguous()
    return values if values.dim() == 1 else values.view(torch.uint64)


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
    return empty_aligned(values, *values.shape).copy_(values)


def _largest_magnitude(values: Tensor) -> Tensor:
    """The largest finite value; 0 if there is none."""
    return torch.where(values.isfinite(), values, -torch.inf).amax().nan_to_num(neginf=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# O(N·D) work on embeddings and their gradients, one launch each; PyTorch operations would read them several times.
#
# The same functions as in `tiles.eager`: products of the matching pairs, and the last step of a gradient.

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
    assert all(part.is_contiguous() for part in (sums, out) if part is not None), "the kernel takes no strides of these"
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
# Adds the partial row sums that the programs of a launch stored, in a fixed order: one launch for up to three vectors.


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
    """Adds partial row sums, (parts, n) each, to row sums, (n,) each: of softplus, of g, and of g times product."""
    present = [part for part in parts if part is not None]
    if present:
        count, rows = present[0].shape
        grid = (-(-rows // 32),)
        launch(_add_partial_sums_kernel, grid, (*parts, *sums), (count, rows), BLOCK_P=64, BLOCK_N=32)


# ----------------------------------------------------------------------------------------------------------------------
# Backward of a loss whose gradients were computed in forward: one launch multiplies all of them by the loss's gradient.

_ELEMENTS = 4096  # of a gradient that a program multiplies
_PARTS = 2048  # parts of d scale that are added at once


@triton.jit
def _multiply_kernel(
    dx,  # or None
    dy,  # or None
    sums,  # d scale in scale_parts parts, d bias, …
    dloss,  # ()
    dx_out,  # x_count numbers, or None
    dy_out,  # y_count numbers, or None
    dscale_out,  # () or None
    dbias_out,  # () or None
    x_count,
    y_count,
    y_first,  # of dy
    scale_parts,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """All gradients times the gradient of the loss."""
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
    """Multiplies all gradients by the gradient of the loss; counts are 0 where there is none. Adds up the parts of d scale.

    `given` decides how the kernel is compiled: the device, and the kinds of all tensors.
    """
    programs = max(1, -(-x_count // _ELEMENTS) + -(-y_count // _ELEMENTS))
    numbers = x_count, y_count, y_first, scale_parts
    return Launcher(_multiply_kernel, (programs,), numbers, BLOCK=_ELEMENTS, BLOCK_P=_PARTS, num_warps=8)
