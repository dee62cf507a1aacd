"""Logsumexps of the rows of the similarities, and of their columns if wanted, from one pass; backward is one pass again."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import (
    Gradients,
    asked_for,
    column_sums,
    empty_gradients,
    finish,
    gradient_unit,
    in_units,
    on_its_device,
    refuse_second_derivative,
    share_of_mean,
    statistic,
)
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.tiles.backends import sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting

# What becomes of the main diagonal.
KEPT = "kept"  # part of the sums
SKIPPED = "skipped"  # left out
APART = "apart"  # left out of the sums and returned as a vector of its own


@torch.library.custom_op("megabatch::logsumexp", mutates_args=())
def logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: Tensor,  # ()
    row_bias: Tensor | None,  # (N,)
    col_bias: Tensor | None,  # (M,)
    row_ids: Tensor | None,  # (N,)
    col_ids: Tensor | None,  # (M,)
    limit: Tensor | None,  # (N,)
    guide_x: Tensor | None,  # (N, E)
    guide_y: Tensor | None,  # (M, E)
    columns: bool,
    diagonal: str,
    precision: str,
    guide_precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log Σ_j exp s_ij, log Σ_i exp s_ij, s_ii, share, and for backward the two sums themselves, packed).

    Without `columns` the second and the last have no entries. s_ii is empty unless the diagonal is kept apart. `share` turns
    a sum over local pairs into this rank's part of a mean. A pair is left out where its product ⟨x_i, y_j⟩ is above the limit
    of row i; with a guide, where the guide's product is. A limit is for rows alone.
    """
    block = _block(
        x, y, scale, row_bias, col_bias, row_ids, col_ids, limit, guide_x, guide_y, diagonal, precision, guide_precision
    )
    with on_its_device(x):
        terms = {"what is summed": _summed(columns)}
        team = assemble(group, backend, block, "logsumexp", mean=diagonal == APART, terms=terms)
        row, col = team.passes.logsumexp_statistics(block, columns=columns)
        packed = sums_dtype(backend, block.dtype)
        match = block.zeros(0)
        if diagonal == APART:
            match = matching_similarities(block, team.local.matching_products(block))
        share = share_of_mean(x, team.share)
        values = row.value().to(block.dtype), col.value().to(block.dtype)
        return *values, match, share, row.pack().to(packed), col.pack().to(packed)


@logsumexp.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, columns, diagonal, _precision, _guide_precision, backend, _group = options
    N, M = x.shape[0], y.shape[0] if columns else 0
    match = statistic(x, N if diagonal == APART else 0)
    sums = [x.new_empty(2, size, dtype=sums_dtype(backend, accumulator_dtype(x.dtype))) for size in (N, M)]
    return statistic(x, N), statistic(x, M), match, share_of_mean(x, 1.0), sums[0], sums[1]


@torch.library.custom_op("megabatch::logsumexp_backward", mutates_args=())
def logsumexp_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_bias: Tensor | None,
    col_bias: Tensor | None,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    limit: Tensor | None,
    guide_x: Tensor | None,
    guide_y: Tensor | None,
    columns: bool,
    diagonal: str,
    precision: str,
    guide_precision: str,
    backend: str,
    group: str,
    row: Tensor,  # (2, N)
    col: Tensor,  # (2, M), or (2, 0) without columns
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dy, dscale, drow_bias, dcol_bias). The choice of the pairs that a limit leaves out has no gradient."""
    block = _block(
        x, y, scale, row_bias, col_bias, row_ids, col_ids, limit, guide_x, guide_y, diagonal, precision, guide_precision
    )
    wanted = Needs(*needs)
    with on_its_device(x):
        dcol = dcol if columns else None
        given = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "nothing"
        terms = {"what is summed": _summed(columns), "what has a gradient": given}
        team = assemble(group, backend, block, "logsumexp backward", needs=wanted, terms=terms)
        unit = gradient_unit(block, drow, dcol, largest=team.largest)
        sums = column_sums(block, wanted)
        strips = team.passes.logsumexp_gradients(
            block,
            LogSum.unpack(row),
            LogSum.unpack(col) if columns else None,
            in_units(drow, unit),
            in_units(dcol, unit),
            sums,
            wanted,
        )
        return finish(team.local, block, strips, sums, wanted, scale=scale, unit=unit, dmatch=in_units(dmatch, unit))


@logsumexp_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> Gradients:
    return empty_gradients(x, y, scale, Needs(*options[-1]))


def _summed(columns: bool) -> str:
    return "rows and columns" if columns else "rows"


def _block(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    row_bias: Tensor | None,
    col_bias: Tensor | None,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    limit: Tensor | None,
    guide_x: Tensor | None,
    guide_y: Tensor | None,
    diagonal: str,
    precision: str,
    guide_precision: str,
) -> Block:
    guide = None
    if guide_x is not None and guide_y is not None:
        one = torch.ones((), dtype=accumulator_dtype(guide_x.dtype), device=guide_x.device)
        guide = Block(guide_x, guide_y, one, by_matmul_setting(guide_precision, guide_x.device.type))
    scale = scale.to(accumulator_dtype(x.dtype))
    return Block(
        x,
        y,
        scale,
        by_matmul_setting(precision, x.device.type),
        row_bias,
        col_bias,
        row_ids,
        col_ids,
        skip_diagonal=diagonal != KEPT,
        limit=limit,
        companion=guide,
    )


_TENSORS = 10


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.save_for_backward(*tensors, *output[-2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, drow: Tensor | None, dcol: Tensor | None, dmatch: Tensor | None, *dothers: Tensor | None
) -> tuple[Any, ...]:
    *tensors, row, col = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:5])
    columns, diagonal, *_ = ctx.options
    dcol, dmatch = dcol if columns else None, dmatch if diagonal == APART else None
    gradients = apply(logsumexp_backward, *tensors, *ctx.options, row, col, drow, dcol, dmatch, list(needs))
    return *asked_for(gradients, needs), *(None,) * (_TENSORS - 5 + len(ctx.options))


differentiable(logsumexp, _backward, _save)
differentiable(logsumexp_backward, refuse_second_derivative)
