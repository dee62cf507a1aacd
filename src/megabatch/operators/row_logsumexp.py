"""Row logsumexps alone, where nobody asks for those of columns; a limit may leave out pairs that are too similar."""

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
from megabatch.operators.logsumexp import APART, KEPT
from megabatch.operators.team import assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.tiles.backends import sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting


@torch.library.custom_op("megabatch::row_logsumexp", mutates_args=())
def row_logsumexp(
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
    diagonal: str,
    precision: str,
    guide_precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log Σ_j exp s_ij, s_ii, share, and for backward the sum itself, packed); as `logsumexp`, without columns.

    Pairs whose product is above the limit of their row are left out: their product ⟨x_i, y_j⟩, or if there is a guide its.
    """
    block = _block(
        x, y, scale, row_bias, col_bias, row_ids, col_ids, limit, guide_x, guide_y, diagonal, precision, guide_precision
    )
    with on_its_device(x):
        team = assemble(group, backend, block, "row logsumexp", mean=diagonal == APART)
        row = team.walks.row_statistics(block)
        match = block.zeros(0)
        if diagonal == APART:
            match = matching_similarities(block, team.local.matching_products(block))
        share = share_of_mean(x, team.share)
        return row.value().to(block.dtype), match, share, row.pack().to(sums_dtype(backend, block.dtype))


@row_logsumexp.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, diagonal, _precision, _guide_precision, backend, _group = options
    N = x.shape[0]
    match = statistic(x, N if diagonal == APART else 0)
    packed = x.new_empty(2, N, dtype=sums_dtype(backend, accumulator_dtype(x.dtype)))
    return statistic(x, N), match, share_of_mean(x, 1.0), packed


@torch.library.custom_op("megabatch::row_logsumexp_backward", mutates_args=())
def row_logsumexp_backward(
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
    backend: str,
    group: str,
    row: Tensor,  # (2, N)
    drow: Tensor | None,  # (N,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dy, dscale, drow_bias, dcol_bias). Which pairs are left out has no gradient."""
    block = _block(
        x, y, scale, row_bias, col_bias, row_ids, col_ids, limit, guide_x, guide_y, diagonal, precision, guide_precision
    )
    wanted = Needs(*needs)
    with on_its_device(x):
        given = {"what has a gradient": "nothing" if drow is None else "rows"}
        team = assemble(group, backend, block, "row logsumexp backward", needs=wanted, terms=given)
        unit = gradient_unit(block, drow, largest=team.largest)
        sums = column_sums(block, wanted)
        strips = team.walks.logsumexp_gradients(block, LogSum.unpack(row), None, in_units(drow, unit), None, sums, wanted)
        return finish(team.local, block, strips, sums, wanted, scale=scale, unit=unit, dmatch=in_units(dmatch, unit))


@row_logsumexp_backward.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor, *options: Any) -> Gradients:
    return empty_gradients(x, y, scale, Needs(*options[-1]))


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
    return Block(
        x,
        y,
        scale.to(accumulator_dtype(x.dtype)),
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
    ctx.save_for_backward(*tensors, output[-1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, drow: Tensor | None, dmatch: Tensor | None, *dothers: Tensor | None) -> tuple[Any, ...]:
    *tensors, row = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:5])
    diagonal, *_ = ctx.options
    dmatch = dmatch if diagonal == APART else None
    gradients = apply(row_logsumexp_backward, *tensors, *ctx.options, row, drow, dmatch, list(needs))
    return *asked_for(gradients, needs), *(None,) * (_TENSORS - 5 + len(ctx.options))


differentiable(row_logsumexp, _backward, _save)
differentiable(row_logsumexp_backward, refuse_second_derivative)
