"""Gradients by strips: a kernel forms a strip of weights g, and two library products use it.

The strip lives in one bounded workspace, in the type of the inputs. dx = g·y is finished strip by strip; dy += gᵀ·x
accumulates in fp32. `triton_gradient` has the kernel.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan, plan, tuning
from megabatch.tiles.block import Block, ColumnGradients, Needs, RowGradients, part, windows
from megabatch.tiles.logsum import LogSum, finite_or_zero
from megabatch.tiles.precision import FLOAT32, TF32, add_product, multiply_into
from megabatch.tiles.triton_gradient import (
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OWN_SHIFT,
    RowSums,
    SideWeights,
    StripTask,
    Weights,
    form_strip,
    hopper_tile,
    whole_tiles,
)
from megabatch.tiles.triton_operands import LOG2E, Operands, aligned_empty, exponent_operands, similarity_operands

# Range of C − log2(sum) in which a sum's weight is kept at the shift C. Above it, terms that matter underflow in 2^t, as in
# forward. Below it, a weight as small as 2⁻²⁶ would underflow itself.
LARGEST_DELTA, SMALLEST_DELTA = 80.0, -100.0

SOFTMAX_KINDS = SOFTMAX, SOFTMAX_OWN_SHIFT


def logsumexp_gradients(
    block: Block,
    row: LogSum,  # (N,) sums over all columns, of which the block may hold a part
    col: LogSum | None,  # (M,) None if dcol is
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    sums: ColumnGradients,
    needs: Needs,
) -> Iterator[RowGradients]:
    """Gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩: g_ij = drow_i·exp(s_ij)/row_i + dcol_j·exp(s_ij)/col_j."""
    operands = exponent_operands(block)
    row_weights = side_weights(row, drow, operands.shift, block.N)
    col_weights = side_weights(col, dcol, operands.shift, block.M)
    return gradient_strips(softmax_task(operands, block, row_weights, col_weights), sums, needs)


def softmax_task(operands: Operands, block: Block, row: SideWeights, col: SideWeights) -> StripTask:
    """The backward pass of a logsumexp."""
    tile = softmax_tile(operands, block)
    return StripTask(operands, block, tile, SOFTMAX_KINDS, Weights.of_softmax(row, col, tile))


def softmax_tile(operands: Operands, block: Block) -> kernel_plan.KernelTile:
    """The tile of its kernel."""
    return _tuned_tile(operands, block, SOFTMAX)


def sigmoid_tile(operands: Operands, block: Block) -> kernel_plan.KernelTile:
    """The tile of the same kernel for a sigmoid."""
    return _tuned_tile(operands, block, SIGMOID)


def softplus_gradients(
    block: Block,
    dtotal: Tensor | None,  # (N,), or None for 1
    sums: ColumnGradients,
    needs: Needs,
    *,
    total: Tensor | None = None,  # (N,)
) -> Iterator[RowGradients]:
    """Gradients of ⟨dtotal, row sums of softplus(s)⟩: g_ij = dtotal_i·sigmoid(s_ij). Adds the row sums to `total` if given."""
    operands = similarity_operands(block)
    weights = Weights(None if dtotal is None else dtotal.contiguous())
    task = StripTask(operands, block, sigmoid_tile(operands, block), (SIGMOID,), weights)
    return gradient_strips(task, sums, needs, total)


def softplus_sums(block: Block) -> Tensor:  # (N,)
    """Row sums of softplus(s) = log(1 + exp(s))."""
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
    """Weights gradient / sum and caps, at the shift C, or at a sum's own shift where C leaves fp32's range.

    The cap is the sum: no term is larger. Backward forms similarities again and may round them differently. Without the cap a
    softmax weight could be larger than 1, by a factor of e for every nat between the two roundings.
    """
    if gradient is None or sums is None:
        zeros = torch.zeros(length, device=shift.device)
        return SideWeights(whole_tiles(zeros), whole_tiles(zeros + torch.inf), zeros - torch.inf)
    exponent = finite_or_zero(sums.shift) * LOG2E
    above = shift - exponent
    # The distance between C and the sum itself decides. The sum's shift may be near C although the sum is far from it: a sum
    # over several blocks has the largest of their shifts.
    from_sum = above - sums.total.log2()
    at_block_shift = (sums.total == 0) | ((from_sum <= LARGEST_DELTA) & (from_sum >= SMALLEST_DELTA))
    own = exponent.float()
    difference = torch.where(at_block_shift, above, own - exponent)
    # An empty sum has weight 0; a large C would turn it into 0 times infinity.
    difference = torch.where(sums.total == 0, 0.0, difference)
    weight, cap = sums.per_unit(gradient) * difference.exp2(), sums.total * (-difference).exp2()
    return SideWeights(whole_tiles(weight), whole_tiles(cap), torch.where(at_block_shift, -torch.inf, own))


def gradient_strips(
    task: StripTask,
    sums: ColumnGradients,
    needs: Needs,
    total: Tensor | None = None,  # (N,) row sums of softplus, added to
    within: tuple[slice, slice] | None = None,
) -> Iterator[RowGradients]:
    """Gradients of the block, some rows at a time.

    `within` restricts the pass to rows and columns that start and end at tile boundaries or at the edges of the block.
    """
    operands, block = task.operands, task.block
    all_rows, all_columns = within or (slice(0, block.N), slice(0, block.M))
    height, width = (window.stop - window.start for window in (all_rows, all_columns))
    strip = plan.strip_size(height, width, block.D, operands.x.element_size())
    scale_in_kernel, want_dx = _source_of_dscale(block, needs)
    workspace = None
    if want_dx or needs.dy:
        workspace = aligned_empty(operands.x, min(strip.rows, height), min(strip.columns, width))
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
                    multiply_into(dx, g, operands.y[columns])
                else:
                    add_product(dx, g, operands.y[columns])
            if g is not None and sums.dy is not None:
                add_product(sums.dy[columns], g.T, operands.x[rows])
        yield RowGradients(rows, dx, dscale, drow_bias)


class WholeGradients(NamedTuple):
    """Gradients of all rows and columns, in fp32; None where not needed."""

    dx: Tensor | None  # (N, D), not yet multiplied by the scale
    dy: Tensor | None  # (M, D)
    dscale: Tensor | None  # (N,) Σ_j g_ij·⟨x_i, y_j⟩; None if it is to be taken from dx


def whole_gradients(task: StripTask, needs: Needs, row_sums: RowSums | None = None) -> WholeGradients:
    """`gradient_strips` for a batch so small that the sums of all rows of dx may be held: fewer calls, and nothing to zero.

    A sigmoid adds its row sums to `row_sums`, (N,) each.
    """
    operands, block = task.operands, task.block
    strip = plan.pair_strip(block.N, operands.x.element_size())
    scale_in_kernel, want_dx = _source_of_dscale(block, needs)
    dx, dy = (
        torch.empty(block.N, block.D, dtype=block.dtype, device=block.x.device) if wanted else None
        for wanted in (want_dx, needs.dy)
    )
    dscale = block.zeros(block.N) if scale_in_kernel else None
    added = (row_sums or RowSums())._replace(g_times_product=dscale)
    workspace = None
    if want_dx or needs.dy:
        workspace = aligned_empty(operands.x, min(strip.rows, block.N), min(strip.columns, block.M))
    for rows in windows(block.N, strip.rows):
        of_rows = RowSums(*[None if whole is None else part(whole, rows) for whole in added])
        for columns in windows(block.M, strip.columns):
            g, shape = workspace, (rows.stop - rows.start, columns.stop - columns.start)
            if g is not None and g.shape != shape:
                g = g[: shape[0], : shape[1]]
            form_strip(task, rows, columns, g, of_rows, None)
            if g is not None and dx is not None:
                into = multiply_into if columns.start == 0 else add_product
                into(part(dx, rows), g, part(operands.y, columns))
            if g is not None and dy is not None:
                into = multiply_into if rows.start == 0 else add_product
                into(part(dy, columns), g.T, part(operands.x, rows))
    return WholeGradients(dx, dy, dscale)


def _source_of_dscale(block: Block, needs: Needs) -> tuple[bool, bool]:
    """(whether the kernel sums dscale, whether dx is computed, for itself or for dscale).

    Summing dscale in the kernel costs a tenth of the kernel's time. Half precision takes it from dx instead: the rounding
    errors of g enter, but the dense computation has larger ones. That does not hold if positives are in the sums, where dscale
    nearly cancels.
    """
    in_kernel = needs.dscale and (block.positives_within or block.precision in (FLOAT32, TF32))
    return in_kernel, needs.dx or (needs.dscale and not in_kernel)


def _tuned_tile(operands: Operands, block: Block, kind: tl.constexpr) -> kernel_plan.KernelTile:
    """The kernel's tile: the default of `kernel_plan`, or a measured one if autotuning is on."""
    default = kernel_plan.gradient_tile(block.precision, block.x.device)
    if hopper_tile(block, kind) is not None:
        return default
    rows, columns = slice(0, min(block.N, 8192)), slice(0, min(block.M, 8192))

    def trial(tile: kernel_plan.KernelTile) -> None:
        row, col = block.zeros(block.N), block.zeros(block.M)
        form_strip(StripTask(operands, block, tile, (kind,), Weights(row, col, row, col)), rows, columns, g, RowSums(), None)

    g = aligned_empty(operands.x, rows.stop, columns.stop) if tuning.ENABLED else None
    widest = 128 if kind == SIGMOID else 256  # half a tile is 64 columns, the most that `product_less_one` holds
    return tuning.tile(f"gradient {kind.value}", block, default, trial, widest)
