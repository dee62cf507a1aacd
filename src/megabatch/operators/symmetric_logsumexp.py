"""Row logsumexps of the similarities of rows with one another: half the products of `logsumexp`, which knows of no symmetry."""

from typing import Any

import torch
from torch import Tensor

from megabatch.operators.gradients import gradient_unit, on_its_device, refuse_second_derivative, statistic
from megabatch.operators.team import Team, assemble
from megabatch.operators.transforms import apply, differentiable
from megabatch.ring.symmetric import RingHalf
from megabatch.tiles.backends import EAGER, sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import accumulator_dtype, by_matmul_setting
from megabatch.tiles.symmetric import Half, SameLabel, Side

# Which pairs are summed.
ALL = "all, less equal ids"  # where there are ids
OTHERS = "all but the row itself"
EQUAL_IDS = "equal ids, but not the row itself"


@torch.library.custom_op("megabatch::symmetric_logsumexp", mutates_args=())
def symmetric_logsumexp(
    z: Tensor,  # (N, D)
    scale: Tensor,  # ()
    ids: Tensor | None,  # (N,)
    pairs: str,
    precision: str,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """(log Σ_j exp s_ij, and for backward the sums themselves, packed)."""
    with on_its_device(z):
        block, order = _block(z, scale, ids, pairs, precision)
        team = assemble(group, backend, block, "symmetric logsumexp", terms={"which pairs are summed": pairs})
        row = _half(team, backend, pairs).statistics(block)
        values = row.value().to(block.dtype)
        return _in_order(values, order), row.pack()


@symmetric_logsumexp.register_fake
def _(z: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *_, backend, _group = options
    return statistic(z, z.shape[0]), z.new_empty(2, z.shape[0], dtype=sums_dtype(backend, accumulator_dtype(z.dtype)))


@torch.library.custom_op("megabatch::symmetric_logsumexp_backward", mutates_args=())
def symmetric_logsumexp_backward(
    z: Tensor,
    scale: Tensor,
    ids: Tensor | None,
    pairs: str,
    precision: str,
    backend: str,
    group: str,
    row: Tensor,  # (2, N)
    drow: Tensor,  # (N,)
    needs_scale: bool,
) -> tuple[Tensor, Tensor]:
    """(dz, dscale)."""
    with on_its_device(z):
        block, order = _block(z, scale, ids, pairs, precision)
        needs = Needs(dx=True, dy=True, dscale=needs_scale)
        team = assemble(
            group, backend, block, "symmetric logsumexp backward", needs=needs, terms={"which pairs are summed": pairs}
        )
        drow = drow if order is None else drow[order]
        unit = gradient_unit(block, drow, largest=team.largest)
        side = Side(LogSum.unpack(row), drow / unit, block.zeros(block.N, block.D))
        dscale = torch.zeros_like(scale, dtype=torch.float64)  # one number of all rows: every digit of it can be had
        _half(team, backend, pairs).gradients(block, side, dscale if needs_scale else None)
        dz = torch.empty_like(block.x)
        team.local.finish_rows(side.dz, dz, block.scale * unit, own=None, partners=dz, dmatch=None, precision=block.precision)
        return _in_order(dz, order), (dscale * unit).to(scale.dtype)


@symmetric_logsumexp_backward.register_fake
def _(z: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(scale)


def _block(
    z: Tensor, scale: Tensor, ids: Tensor | None, pairs: str, precision: str
) -> tuple[Block, Tensor | None]:  # the order of its rows
    """Where pairs of equal ids alone are summed, rows are sorted by their ids."""
    settled, scale = by_matmul_setting(precision, z.device.type), scale.to(accumulator_dtype(z.dtype))
    if pairs != EQUAL_IDS:
        within = ids is not None  # with ids given, rows with equal ids are positives and stay in the sum
        block = Block(z, z, scale, settled, row_ids=ids, col_ids=ids, skip_diagonal=pairs == OTHERS, positives_within=within)
        return block, None
    assert ids is not None
    ids, order = torch.sort(ids.long(), stable=True)
    z = z[order]
    return Block(z, z, scale, settled, row_ids=ids, col_ids=ids, skip_diagonal=True, only_equal_ids=True), order


def _in_order(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


def _half(team: Team, backend: str, pairs: str) -> Half | RingHalf:
    half = SameLabel() if pairs == EQUAL_IDS else _half_of(backend)
    return team.symmetric(half)


def _half_of(backend: str) -> Half:
    if backend == EAGER:
        return Half(EAGER)
    from megabatch.tiles.triton_symmetric import KernelHalf

    return KernelHalf()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (z, scale, ids), ctx.options = inputs[:3], inputs[3:]
    ctx.save_for_backward(z, scale, ids, output[1])


def _backward(ctx: Any, drow: Tensor, dsums: Tensor) -> tuple[Any, ...]:
    z, scale, ids, row = ctx.saved_tensors
    needs_z, needs_scale = ctx.needs_input_grad[:2]
    dz, dscale = apply(symmetric_logsumexp_backward, z, scale, ids, *ctx.options, row, drow, needs_scale)
    return dz if needs_z else None, dscale if needs_scale else None, None, None, None, None, None


differentiable(symmetric_logsumexp, _backward, _save)
differentiable(symmetric_logsumexp_backward, refuse_second_derivative)
