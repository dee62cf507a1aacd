"""Work on the embeddings themselves, O(N·D), in one launch each where PyTorch operations would read them several times."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.block import Block
from megabatch.tiles.precision import BFLOAT16, FLOAT16, TF32
from megabatch.tiles.triton_softplus import decoded

_BLOCK_N, _BLOCK_D = 16, 256
_ROUNDING = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}


@triton.jit
def _load(values, offs_n, offs_d, row_stride, stride, mask, ROUNDING: tl.constexpr):
    """Rows of embeddings, rounded as the products see them."""
    rows = tl.load(values + offs_n.to(tl.int64)[:, None] * row_stride + offs_d.to(tl.int64)[None, :] * stride, mask, 0.0)
    if ROUNDING == 1:
        nearest = (rows.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        rows = tl.where(rows == rows, nearest.to(tl.float32, bitcast=True), rows)
    elif ROUNDING == 2:
        rows = rows.to(tl.bfloat16)
    elif ROUNDING == 3:
        rows = rows.to(tl.float16)
    return rows.to(tl.float32)


@triton.jit
def _largest_norms(x, largest, N, D, row_stride, stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest finite squared norm of some rows; 0 if there is none."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        rows = _load(x, offs_n, offs_d, row_stride, stride, (offs_n < N)[:, None] & (offs_d < D)[None, :], 0)
        squares += tl.sum(rows * rows, 1)
    finite = tl.where(squares < float("inf"), squares, 0.0)  # NaN is not below anything
    tl.store(largest + tl.program_id(0), tl.max(finite, 0))


@triton.jit
def _exponent_scale(
    x_largest,
    y_largest,
    scale,
    exponent_scale,  # (3,) float32
    shift,  # () float64
    x_count,
    y_count,
    HEADROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k in two parts and the whole number that exponents are shifted by."""
    offs = tl.arange(0, BLOCK)
    x, y = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, x_count, BLOCK):
        x = tl.maximum(x, tl.load(x_largest + start + offs, start + offs < x_count, 0.0))
    for start in range(0, y_count, BLOCK):
        y = tl.maximum(y, tl.load(y_largest + start + offs, start + offs < y_count, 0.0))
    k = tl.load(scale).to(tl.float64)
    k = k * 1.44269502162933349609375 + k * 1.925963033500011e-8  # log2 e, in two floats
    high = k.to(tl.float32)
    bound = tl.abs(high) * tl.sqrt(tl.max(x, 0)) * tl.sqrt(tl.max(y, 0))
    whole = tl.where(bound < float("inf"), tl.maximum(tl.ceil(bound) - HEADROOM, 0.0), 0.0)
    tl.store(exponent_scale, high)
    tl.store(exponent_scale + 1, (k - high.to(tl.float64)).to(tl.float32))
    tl.store(exponent_scale + 2, -whole)
    tl.store(shift, whole.to(tl.float64))


@triton.jit
def _dots(
    x,
    y,
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
        a = _load(x, offs_n, offs_d, x_row_stride, x_stride, mask, ROUNDING)
        b = _load(y, offs_n, offs_d, y_row_stride, y_stride, mask, ROUNDING)
        sums += tl.sum(a * b, 1)
    tl.store(out + offs_n, sums, offs_n < N)


@triton.jit
def _finish(
    sums,  # (n, D) float32, contiguous
    out,  # (n, D) contiguous, or None
    own,  # (n, D) or None
    dots,  # (n,) or None
    partners,  # (n, D) or None
    dmatch,  # (n,) or None
    factor,  # ()
    n,
    D,
    own_row_stride,
    own_stride,
    partners_row_stride,
    partners_stride,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_dots = tl.zeros((BLOCK_N,), tl.float32)
    scale = tl.load(factor)
    if dmatch is not None:
        weight = tl.load(dmatch + offs_n, offs_n < n, 0.0)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = (offs_n < n)[:, None] & (offs_d < D)[None, :]
        place = offs_n.to(tl.int64)[:, None] * D + offs_d[None, :]
        values = tl.load(sums + place, mask, 0.0)
        if dmatch is not None:
            values += weight[:, None] * _load(partners, offs_n, offs_d, partners_row_stride, partners_stride, mask, ROUNDING)
        if own is not None:
            row_dots += tl.sum(values * _load(own, offs_n, offs_d, own_row_stride, own_stride, mask, ROUNDING), 1)
        if out is not None:
            tl.store(out + place, (values * scale).to(out.dtype.element_ty), mask)
    if own is not None:
        tl.store(dots + offs_n, row_dots, offs_n < n)


@triton.jit
def _part_sums(part, offs_n, parts, rows, SOFTPLUS: tl.constexpr, BLOCK_P: tl.constexpr):
    sums = tl.zeros(offs_n.shape, tl.float32)
    for first in range(0, parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        place = offs_p.to(tl.int64)[:, None] * rows + offs_n[None, :]
        values = tl.load(part + place, (offs_p < parts)[:, None] & (offs_n < rows)[None, :], 0.0)
        sums += tl.sum(decoded(values) if SOFTPLUS else values, 0)
    return sums


@triton.jit
def _add_parts(
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
    mask = offs_n < rows
    if softplus is not None:
        sums = _part_sums(softplus_part, offs_n, parts, rows, True, BLOCK_P)
        tl.store(softplus + offs_n, tl.load(softplus + offs_n, mask) + sums, mask)
    if row is not None:
        tl.store(row + offs_n, tl.load(row + offs_n, mask) + _part_sums(row_part, offs_n, parts, rows, False, BLOCK_P), mask)
    if scale is not None:
        sums = _part_sums(scale_part, offs_n, parts, rows, False, BLOCK_P)
        tl.store(scale + offs_n, tl.load(scale + offs_n, mask) + sums, mask)


def add_parts(parts: Sequence[Tensor | None], wholes: Sequence[Tensor | None]) -> None:
    """Adds partial row sums, (parts, n) each, to whole ones, (n,) each: of softplus, of g, and of g times product."""
    given = [part for part in parts if part is not None]
    if given:
        rows = given[0].shape[1]
        _add_parts[(triton.cdiv(rows, 32),)](*parts, *wholes, *given[0].shape, BLOCK_P=64, BLOCK_N=32)


def exponent_scale(x: Tensor, y: Tensor, scale: Tensor, headroom: float) -> tuple[Tensor, Tensor]:  # (3,), () float64
    """k = scale·log₂e in two parts, −C, and C: a whole number that leaves exponents no larger than `headroom`, or 0.

    |⟨x_i, y_j⟩| ≤ ‖x_i‖·‖y_j‖. Norms that are not finite are passed over: their rows are found by their sums.
    """
    largest: list[Tensor] = []
    for side in (x,) if y is x else (x, y):
        part = torch.empty(triton.cdiv(len(side), _BLOCK_N), dtype=torch.float32, device=x.device)
        _largest_norms[(len(part),)](side, part, *side.shape, *side.stride(), BLOCK_N=_BLOCK_N, BLOCK_D=_BLOCK_D)
        largest.append(part)
    constants = torch.empty(3, dtype=torch.float32, device=x.device)
    shift = torch.empty((), dtype=torch.float64, device=x.device)
    of_x, of_y = largest[0], largest[-1]
    _exponent_scale[(1,)](of_x, of_y, scale, constants, shift, len(of_x), len(of_y), HEADROOM=headroom, BLOCK=1024)
    return constants, shift


def matching_products(block: Block) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩, from the same rounded inputs as the tiles."""
    x, y = block.x, block.y
    out = torch.empty(block.N, dtype=torch.float32, device=x.device)
    _dots[(triton.cdiv(len(x), _BLOCK_N),)](
        x,
        y,
        out,
        *x.shape,
        *x.stride(),
        *y.stride(),
        ROUNDING=_ROUNDING.get(block.precision, 0),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
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
    """out = (sums + dmatch·partners)·factor; returns row products of the parenthesis with `own`, where it is given."""
    row_dots = None if own is None else torch.empty(len(sums), dtype=torch.float32, device=sums.device)
    _finish[(triton.cdiv(len(sums), _BLOCK_N),)](
        sums,
        out,
        own,
        row_dots,
        partners,
        dmatch,
        factor,
        *sums.shape,
        *((0, 0) if own is None else own.stride()),
        *partners.stride(),
        ROUNDING=_ROUNDING.get(precision, 0),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=_BLOCK_D,
    )
    return row_dots
