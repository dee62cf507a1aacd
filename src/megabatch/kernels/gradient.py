"""The kernel of the gradients: it computes strips of gradient weights, which cuBLAS matmuls multiply into dx and dy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels import two_models
from megabatch.kernels.device import equal_ids, exponents, log1p, offsets, product_less_one, round_to_tf32
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import (
    LOG2E,
    Operands,
    add_partial_sums,
    descriptor,
    empty_aligned,
    exponent_operands,
    kernel_options,
    logit_operands,
)
from megabatch.tiles import plan
from megabatch.tiles.block import (
    FLOAT32,
    TF32,
    Block,
    ColumnGradients,
    Needs,
    RowGradients,
    add_matmul,
    matmul_into,
    part,
    windows,
)
from megabatch.tiles.sums import LogSum, finite_or_zero

# ----------------------------------------------------------------------------------------------------------------------
# The gradient-strip kernel recomputes tiles of logits and stores a strip of gradient weights g = d loss / d s.
#
# The kernel is a persistent matmul that turns each tile into weights before it stores the tile. A tile is stored in two halves,
# because a store of half a tile needs half as much shared memory, which leaves enough for one more stage of loads.
#
# With the common shift C of `kernels.operands`, both softmax weights share one exponential: g = 2^t · (row weight + column
# weight). A sum that leaves the range of fp32 at the shift C has its own shift. A second launch recomputes the tiles that
# contain such a row or column, with two exponentials per logit. Usually there are none, and the second launch returns at once.

# Kinds of gradient weights. The kernel of SOFTMAX_OWN_SHIFT is the second launch.
SOFTMAX, SOFTMAX_OWN_SHIFT, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _any(flags, count):
    """Returns the largest of flags[:count], which are at least 0."""
    found = tl.zeros((128,), tl.float32)
    for first in range(0, count, 128):
        offs = first + tl.arange(0, 128)
        found = tl.maximum(found, tl.load(flags + offs, offs < count, 0.0))
    return tl.max(found, 0)


@triton.jit
def _gradient_strip_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    g_desc,  # (rows of the strip, columns of the strip), or None
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None
    col_offset,  # (M,) or None
    row_offset_unshifted,  # (N,) or None
    col_offset_unshifted,  # (M,) or None
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    row_weight,  # (N,), or None for 1
    col_weight,  # (M,)
    row_cap,  # (N,) upper limit of the terms of the row: the sum of the row
    col_cap,  # (M,)
    row_shift,  # (N,) the row's own shift, or −inf if the shift is C
    col_shift,  # (M,)
    row_tile_own_shift,  # (tiles of N,) whether any row of the tile has its own shift, 0 or 1
    col_tile_own_shift,  # (tiles of M,)
    softplus_part,  # (2 · tiles of M, rows) row sums of softplus, negated, or None
    row_part,  # (2 · tiles of M, rows) row sums of g, or None
    scale_part,  # (2 · tiles of M, rows) row sums of g·⟨x_i, y_j⟩, or None
    col_part,  # (tiles of N, columns) column sums of g, or None
    first_row,
    last_row,
    first_column,
    last_column,
    N,
    M,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    IDS_ARE_POSITIVES: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_M // 2
    rows, columns = last_row - first_row, last_column - first_column
    tiles_n, tiles_m = tl.cdiv(rows, BLOCK_N), tl.cdiv(columns, BLOCK_M)
    if KIND == SOFTMAX_OWN_SHIFT:
        of_rows = _any(row_tile_own_shift + first_row // BLOCK_N, tiles_n)
        if (of_rows + _any(col_tile_own_shift + first_column // BLOCK_M, tiles_m)) == 0.0:
            return
    HAS_ROW: tl.constexpr = row_offset is not None
    k, k_rest, base = tl.load(exponent_scale), tl.load(exponent_scale + 1), tl.load(exponent_scale + 2)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_m, PROGRAMS, flatten=KIND != SOFTMAX_OWN_SHIFT):
        # The programs process GROUP tiles of rows at a time, so that the operands of concurrent programs stay in the L2 cache.
        group = tile // (GROUP * tiles_m)
        index = tile % (GROUP * tiles_m)
        group_rows = tl.minimum(tiles_n - group * GROUP, GROUP)
        tile_n = group * GROUP + index % group_rows
        tile_m = index // group_rows
        n, m = first_row + tile_n * BLOCK_N, first_column + tile_m * BLOCK_M
        is_needed = True
        if KIND == SOFTMAX_OWN_SHIFT:
            is_needed = (tl.load(row_tile_own_shift + n // BLOCK_N) + tl.load(col_tile_own_shift + m // BLOCK_M)) > 0
        if is_needed:
            s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for d in range(0, D, BLOCK_D):
                s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
            offs_n = n + tl.arange(0, BLOCK_N)
            if row_weight is not None:
                a = tl.load(row_weight + offs_n, mask=offs_n < N, other=0.0)
            left, right = s.reshape(BLOCK_N, 2, HALF).permute(0, 2, 1).split()
            for half in tl.static_range(2):
                part = left if half == 0 else right
                mh = m + half * HALF
                offs_m = mh + tl.arange(0, HALF)
                column, row = offsets(col_offset, base, offs_m, M, 0), offsets(row_offset, 0.0, offs_n, N, 1)
                t = exponents(
                    part, k, k_rest, column, row, row_ids, col_ids, limit, n, mh, N, M,
                    HAS_ROW, EXACT, SKIP_DIAGONAL, IDS_ARE_POSITIVES,
                )  # fmt: skip
                if KIND == SIGMOID:
                    small = tl.exp2(-1.4426950408889634 * tl.abs(t))  # exp(−|t|) cannot overflow
                    g = tl.where(t >= 0, 1.0, small) / (1.0 + small)
                    if row_weight is not None:
                        g = a[:, None] * g
                    if IDS_ARE_POSITIVES:
                        g = tl.where(equal_ids(row_ids, col_ids, offs_n, offs_m, N, M), -g, g)
                else:
                    b = tl.load(col_weight + offs_m, mask=offs_m < M, other=0.0)
                    cap_a = tl.load(row_cap + offs_n, mask=offs_n < N, other=0.0)[:, None]
                    cap_b = tl.load(col_cap + offs_m, mask=offs_m < M, other=0.0)[None, :]
                    if KIND == SOFTMAX:
                        g = tl.minimum(tl.minimum(tl.exp2(t), cap_a), cap_b) * (a[:, None] + b[None, :])
                    else:
                        column = offsets(col_offset_unshifted, 0.0, offs_m, M, 0)
                        row = offsets(row_offset_unshifted, 0.0, offs_n, N, 1)
                        unshifted = exponents(
                            part, k, k_rest, column, row, row_ids, col_ids, limit, n, mh, N, M, HAS_ROW, EXACT, SKIP_DIAGONAL
                        )
                        shift_a, shift_b = offsets(row_shift, 0.0, offs_n, N, 1), offsets(col_shift, 0.0, offs_m, M, 0)
                        none = -float("inf")
                        g = a[:, None] * tl.minimum(tl.exp2(tl.where(shift_a == none, t, unshifted - shift_a)), cap_a)
                        g += b[None, :] * tl.minimum(tl.exp2(tl.where(shift_b == none, t, unshifted - shift_b)), cap_b)
                mask_n, mask_m = offs_n < last_row, offs_m < last_column
                offs_part = (2 * tile_m + half).to(tl.int64) * rows + (offs_n - first_row)
                if softplus_part is not None:
                    tl.static_assert(HALF <= 64, "product_less_one holds 64 terms")
                    above_zero = tl.sum(tl.where(mask_m[None, :], tl.maximum(t, 0.0), 0.0), 1)
                    product = tl.reduce(tl.where(mask_m[None, :], small, 0.0), 1, product_less_one)
                    tl.store(softplus_part + offs_part, -(above_zero + log1p(product)), mask=mask_n)
                if row_part is not None:
                    tl.store(row_part + offs_part, tl.sum(tl.where(mask_m[None, :], g, 0.0), 1), mask=mask_n)
                if scale_part is not None:
                    tl.store(scale_part + offs_part, tl.sum(tl.where(mask_m[None, :], g * part, 0.0), 1), mask=mask_n)
                if col_part is not None:
                    offs_part = tile_n.to(tl.int64) * columns + (offs_m - first_column)
                    tl.store(col_part + offs_part, tl.sum(tl.where(mask_n[:, None], g, 0.0), 0), mask=mask_m)
                if g_desc is not None:
                    if TF32:
                        g = round_to_tf32(g)
                    g_desc.store([n - first_row, mh - first_column], g.to(g_desc.dtype))


class SideWeights(NamedTuple):
    """Softmax weights of the rows or of the columns of a block. Weights and caps are padded by `pad_to_tiles`."""

    weight: Tensor  # (K,) drow_i / row_i at the shift
    cap: Tensor  # (K,) row_i at the shift
    shift: Tensor  # (K,) the sum's own shift, or −inf if the shift is C


class Weights(NamedTuple):
    """The vectors that turn exponents into gradient weights, in the order of the kernel's parameters.

    A sigmoid uses only the row weights.
    """

    row_weight: Tensor | None  # (N,), or None if all weights are 1
    col_weight: Tensor | None = None  # (M,)
    row_cap: Tensor | None = None  # (N,)
    col_cap: Tensor | None = None  # (M,)
    row_shift: Tensor | None = None  # (N,)
    col_shift: Tensor | None = None  # (M,)
    row_tile_own_shift: Tensor | None = None  # (tiles of N,) 0 or 1
    col_tile_own_shift: Tensor | None = None  # (tiles of M,)

    @classmethod
    def of_softmax(cls, row: SideWeights, col: SideWeights, tile: kernel_plan.KernelTile) -> "Weights":
        """Returns the vectors of a softmax, given the weights of its rows and columns and the tile of the kernel."""
        by_row, by_column = find_own_shifts(row.shift, tile.rows), find_own_shifts(col.shift, tile.columns)
        return cls(row.weight, col.weight, row.cap, col.cap, row.shift, col.shift, by_row, by_column)


@dataclass(frozen=True)
class StripTask:
    """The inputs that all strips of one pass share."""

    operands: Operands
    block: Block
    tile: kernel_plan.KernelTile
    kinds: tuple[tl.constexpr, ...]  # the kinds of gradient weights, with one launch for each
    weights: Weights


class RowSums(NamedTuple):
    """Row sums, (n,) each, to which the launch of a strip adds its sums. They are None if they are not needed."""

    softplus: Tensor | None = None
    g: Tensor | None = None
    g_times_product: Tensor | None = None


def form_strip(
    task: StripTask,
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) receives the weights
    row_sums: RowSums,
    col_sum: Tensor | None,  # (m,) column sums of g, to which the sums of the strip are added
) -> None:
    """Writes the strip of gradient weights at (rows, columns), and adds its row and column sums."""
    operands, block, tile, weights = task.operands, task.block, task.tile, task.weights
    kinds, hopper = task.kinds, hopper_tile(block, task.kinds[0])
    n, m = rows.stop - rows.start, columns.stop - columns.start
    tiles_m = 2 * plan.tiles(m, tile.columns) if hopper is None else plan.tiles(m, hopper.columns)
    row_parts = [None if total is None else _partial_sums(block, tiles_m, n) for total in row_sums]
    col_part = None if col_sum is None else _partial_sums(block, plan.tiles(n, tile.rows), m)
    if hopper is not None:
        from megabatch.kernels import hopper as gluon

        if SIGMOID in kinds:
            parts = row_parts[0], row_parts[1]
            gluon.sigmoid_weights(hopper, operands, weights.row_weight, rows, columns, g, parts, block.skip_diagonal)
        else:
            row, col = (weights.row_weight, weights.row_cap), (weights.col_weight, weights.col_cap)
            gluon.softmax_weights(hopper, operands, row, col, rows, columns, g, block.skip_diagonal)
        kinds = kinds[1:]
    programs = kernel_plan.multiprocessors(block.x.device) * tile.per_multiprocessor
    for kind in kinds:
        launch(
            _gradient_strip_kernel,
            (programs,),
            (
                *operands.descriptors(tile),
                None if g is None else descriptor(g, tile.rows, tile.columns // 2),
                operands.exponent_scale,
                operands.row_offset,
                operands.col_offset,
                operands.row_offset_unshifted,
                operands.col_offset_unshifted,
                operands.row_ids,
                operands.col_ids,
                operands.limit,
                *weights,
                *row_parts,
                col_part,
            ),
            (rows.start, rows.stop, columns.start, columns.stop, block.N, block.M),
            KIND=kind.value,
            IDS_ARE_POSITIVES=block.ids_are_positives,
            TF32=block.precision == TF32,
            GROUP=tile.group,
            PROGRAMS=programs,
            **kernel_options(block, tile),
        )
    add_partial_sums(row_parts, row_sums)
    if col_sum is not None and col_part is not None:
        col_sum += col_part.sum(0)


def pad_to_tiles(values: Tensor) -> Tensor:
    """Returns a float32 copy, (K,), whose memory extends to the end of the last tile. The values after the copy are arbitrary.

    The warp-specialized kernel loads full tiles of the copy. Because these loads need neither a clamp nor a mask, one
    instruction loads two neighboring values.
    """
    padded = torch.empty(len(values) + kernel_plan.HOPPER_BLOCK, dtype=torch.float32, device=values.device)
    return padded[: len(values)].copy_(values)


def hopper_tile(block: Block, kind: tl.constexpr) -> kernel_plan.HopperTile | None:
    """Returns the tile of the warp-specialized kernel, or None if that kernel does not serve this block and kind."""
    return kernel_plan.hopper_tile(block, "sigmoid" if kind == SIGMOID else "softmax")


def find_own_shifts(shift: Tensor, tile: int) -> Tensor:  # (tiles,)
    """Returns 1 for each tile in which any row (or column) has its own shift, and 0 for other tiles."""
    padding = -len(shift) % tile
    return torch.nn.functional.pad(shift != -torch.inf, (0, padding)).view(-1, tile).any(1).float()


def _partial_sums(block: Block, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=block.dtype, device=block.x.device)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients by strips: a kernel computes a strip of gradient weights g, and two cuBLAS matmuls multiply it with x and y.
#
# The strips share one workspace of limited size, in the dtype of the inputs. The sum dx = g·y is complete after the last strip
# of its rows. The sum dy += gᵀ·x is accumulated in fp32 over all strips.


# Range of C − log2(sum) in which the weight of a sum is stored at the shift C. Above this range, terms that matter underflow in
# 2^t, as in forward. Below this range, a weight as small as 2⁻²⁶ would underflow.
LARGEST_DELTA, SMALLEST_DELTA = 80.0, -100.0

SOFTMAX_KINDS = SOFTMAX, SOFTMAX_OWN_SHIFT


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,) sums over all columns, which may be more than the columns of the block
    col: LogSum | None,  # (M,), or None if dcol is None
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Yields the gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
    if block.second_model is not None:
        assert dcol is None, "a guide excludes pairs from row sums only"
        return two_models.row_gradients(block, row, drow, sums, needs)
    operands = exponent_operands(block)
    row_weights = side_weights(row, drow, operands.shift, block.N)
    col_weights = side_weights(col, dcol, operands.shift, block.M)
    return gradient_strips(softmax_task(operands, block, row_weights, col_weights), sums, needs)


def softmax_task(operands: Operands, block: Block, row: SideWeights, col: SideWeights) -> StripTask:
    """Returns the task of the gradients of a logsumexp."""
    tile = strip_tile(block)
    return StripTask(operands, block, tile, SOFTMAX_KINDS, Weights.of_softmax(row, col, tile))


def strip_tile(block: Block) -> kernel_plan.KernelTile:
    """Returns the tile of the gradient-strip kernel, for a softmax or a sigmoid."""
    return kernel_plan.gradient_tile(block.precision, block.x.device)


def softplus_gradients(
    block: Block,
    dtotal: Tensor | None,  # (N,), or None if all are 1
    sums: ColumnGradients,
    needs: Needs,
    *,
    total: Tensor | None = None,  # (N,)
) -> Iterator[RowGradients]:
    """Yields the gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij).

    Adds the row sums to `total` if it is given.
    """
    operands = logit_operands(block)
    weights = Weights(None if dtotal is None else dtotal.contiguous())
    task = StripTask(operands, block, strip_tile(block), (SIGMOID,), weights)
    return gradient_strips(task, sums, needs, total)


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Returns the row sums of softplus(s) = log(1 + exp(s))."""
    total = block.zeros(block.N)
    for _ in softplus_gradients(block, None, ColumnGradients(None, None), Needs(False, False, False), total=total):
        pass
    return total


def side_weights(
    sums: LogSum | None,  # (K,) float64
    gradient: Tensor | None,  # (K,)
    shift: Tensor,  # () C
    length: int,
) -> SideWeights:
    """Returns the weights gradient / sum and the caps, at the shift C, or at a sum's own shift if C is too far from the sum.

    Each term of a sum is capped by the sum, so a softmax is at most 1. Backward computes the logits again and may round them
    differently. Without the cap, a softmax would be up to exp(d) if the two rounded logits differ by d.
    """
    if gradient is None or sums is None:
        zeros = torch.zeros(length, device=shift.device)
        return SideWeights(pad_to_tiles(zeros), pad_to_tiles(zeros + torch.inf), zeros - torch.inf)
    exponent = finite_or_zero(sums.shift) * LOG2E
    above = shift - exponent
    # The distance between C and the logarithm of the sum decides. The shift of the sum cannot decide. A sum over several
    # blocks has the largest shift of these blocks, so its shift may be near C although its logarithm is not.
    from_sum = above - sums.total.log2()
    at_block_shift = (sums.total == 0) | ((from_sum <= LARGEST_DELTA) & (from_sum >= SMALLEST_DELTA))
    own = exponent.float()
    difference = torch.where(at_block_shift, above, own - exponent)
    # An empty sum has weight 0. Without this line, a large C would turn the weight into 0·∞.
    difference = torch.where(sums.total == 0, 0.0, difference)
    weight, cap = sums.per_unit(gradient) * difference.exp2(), sums.total * (-difference).exp2()
    return SideWeights(pad_to_tiles(weight), pad_to_tiles(cap), torch.where(at_block_shift, -torch.inf, own))


def gradient_strips(
    task: StripTask,
    sums: ColumnGradients,
    needs: Needs,
    total: Tensor | None = None,  # (N,) the accumulator of the row sums of softplus
    within: tuple[slice, slice] | None = None,
) -> Iterator[RowGradients]:
    """Yields the gradients of the block, some rows at a time.

    `within` restricts the pass to some rows and columns. They must start and end at tile boundaries or at edges of the block.
    """
    operands, block = task.operands, task.block
    all_rows, all_columns = within or (slice(0, block.N), slice(0, block.M))
    height, width = (window.stop - window.start for window in (all_rows, all_columns))
    strip = plan.strip_size(height, width, block.D, operands.x.element_size())
    scale_in_kernel, want_dx = source_of_dscale(block, needs)
    workspace = None
    if want_dx or needs.dy:
        workspace = empty_aligned(operands.x, min(strip.rows, height), min(strip.columns, width))
    for rows in windows(all_rows, strip.rows):
        n = rows.stop - rows.start
        dx = torch.empty(n, block.D, dtype=block.dtype, device=block.x.device) if want_dx else None
        dscale = block.zeros(n) if scale_in_kernel else None
        drow_bias = block.zeros(n) if needs.drow_bias else None
        row_sums = RowSums(None if total is None else total[rows], drow_bias, dscale)
        for columns in windows(all_columns, strip.columns):
            g = None if workspace is None else workspace[:n, : columns.stop - columns.start]
            form_strip(task, rows, columns, g, row_sums, None if sums.dcol_bias is None else sums.dcol_bias[columns])
            if g is not None and dx is not None:
                if columns.start == all_columns.start:
                    matmul_into(dx, g, operands.y[columns])
                else:
                    add_matmul(dx, g, operands.y[columns])
            if g is not None and sums.dy is not None:
                add_matmul(sums.dy[columns], g.T, operands.x[rows])
        yield RowGradients(rows, dx, dscale, drow_bias)


class GradientSums(NamedTuple):
    """Gradients of all rows and columns, in fp32. They are None if they are not needed."""

    dx: Tensor | None  # (N, D), not yet multiplied by the scale
    dy: Tensor | None  # (M, D), not yet multiplied by the scale
    dscale: Tensor | None  # (N,) Σ_j g_ij·⟨x_i, y_j⟩; None if the caller computes it from dx


def sum_gradients(task: StripTask, needs: Needs, row_sums: RowSums | None = None) -> GradientSums:
    """Computes the gradients of the block for a batch so small that dx of all rows fits in memory in fp32.

    Compared with `gradient_strips`, it needs fewer calls, and no sum has to be set to 0 first. A sigmoid adds its row sums to
    `row_sums`, (N,) each.
    """
    operands, block = task.operands, task.block
    strip = plan.pair_strip(block.N, operands.x.element_size())
    scale_in_kernel, want_dx = source_of_dscale(block, needs)
    dx, dy = (
        torch.empty(block.N, block.D, dtype=block.dtype, device=block.x.device) if is_needed else None
        for is_needed in (want_dx, needs.dy)
    )
    dscale = block.zeros(block.N) if scale_in_kernel else None
    all_sums = (row_sums or RowSums())._replace(g_times_product=dscale)
    workspace = None
    if want_dx or needs.dy:
        workspace = empty_aligned(operands.x, min(strip.rows, block.N), min(strip.columns, block.M))
    for rows in windows(block.N, strip.rows):
        sums_of_rows = RowSums(*[None if total is None else part(total, rows) for total in all_sums])
        for columns in windows(block.M, strip.columns):
            g, shape = workspace, (rows.stop - rows.start, columns.stop - columns.start)
            if g is not None and g.shape != shape:
                g = g[: shape[0], : shape[1]]
            form_strip(task, rows, columns, g, sums_of_rows, None)
            if g is not None and dx is not None:
                multiply = matmul_into if columns.start == 0 else add_matmul
                multiply(part(dx, rows), g, part(operands.y, columns))
            if g is not None and dy is not None:
                multiply = matmul_into if rows.start == 0 else add_matmul
                multiply(part(dy, columns), g.T, part(operands.x, rows))
    return GradientSums(dx, dy, dscale)


def source_of_dscale(block: Block, needs: Needs) -> tuple[bool, bool]:
    """Returns whether the kernel sums dscale, and whether dx is computed (for the caller or for dscale).

    Summing dscale in the kernel takes a tenth of the kernel's time. In half precision, dscale is computed from dx instead. Then
    dscale contains the rounding errors of g, which are smaller than the errors of the dense computation. If the sums contain
    positive pairs, the terms of dscale nearly cancel, so the kernel sums dscale even in half precision.
    """
    in_kernel = needs.dscale and (block.positives_within or block.precision in (FLOAT32, TF32))
    return in_kernel, needs.dx or (needs.dscale and not in_kernel)
