"""Row logsumexps of the similarities of rows with one another: half the products of `logsumexp`, which knows of no symmetry."""

from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import gradient_unit, statistic
from megabatch.operators.team import Team, assemble
from megabatch.ring.symmetric import RingHalf
from megabatch.tiles.backends import EAGER, sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.precision import accumulator_dtype
from megabatch.tiles.symmetric import Half, SameLabel, Side

# Which pairs are summed.
ALL = "all, less equal ids"  # where there are ids
OTHERS = "all but the row itself"
EQUAL_IDS = "equal ids, but not the row itself"


class Inputs(NamedTuple):
    """Rows, and which of their pairs are summed."""

    z: Tensor  # (N, D)
    scale: Tensor  # ()
    ids: Tensor | None  # (N,)
    pairs: str
    precision: str
    backend: str
    group: str

    def block(self) -> tuple[Block, Tensor | None]:  # the order of its rows
        """The similarities. Where only pairs with equal ids are summed, rows are sorted by their ids."""
        z, ids, order = self.z, self.ids, None
        if self.pairs == EQUAL_IDS:
            assert ids is not None
            ids, order = torch.sort(ids.long(), stable=True)
            z = z[order]
        block = Block.of(
            z,
            z,
            self.scale,
            self.precision,
            row_ids=ids,
            col_ids=ids,
            skip_diagonal=self.pairs != ALL,
            only_equal_ids=order is not None,
            positives_within=ids is not None and order is None,  # with ids given, rows with equal ids are positives
        )
        return block, order

    def team(self, block: Block, operation: str, needs: Needs | None = None) -> Team:
        """The processes that work on the block."""
        terms = {"which pairs are summed": self.pairs}
        return assemble(self.group, self.backend, block, operation, needs=needs, terms=terms)

    def half(self, team: Team) -> Half | RingHalf:
        """The passes over half of the block."""
        if self.pairs == EQUAL_IDS:
            return team.symmetric(SameLabel())
        if self.backend == EAGER:
            return team.symmetric(Half(EAGER))
        from megabatch.tiles.triton_symmetric import KernelHalf

        return team.symmetric(KernelHalf())


def _shapes(given: Inputs) -> tuple[Tensor, Tensor]:
    N, dtype = given.z.shape[0], sums_dtype(given.backend, accumulator_dtype(given.z.dtype))
    return statistic(given.z, N), given.z.new_empty(2, N, dtype=dtype)


@define(Inputs, results=2, fake=_shapes)
def symmetric_logsumexp(given: Inputs) -> tuple[Tensor, Tensor]:
    """(log Σ_j exp s_ij, and for backward the sums themselves, packed)."""
    block, order = given.block()
    row = given.half(given.team(block, "symmetric logsumexp")).statistics(block)
    return _in_order(row.value().to(block.dtype), order), row.pack()


def _gradient_shapes(given: Inputs, row: Tensor, drow: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(given.z), torch.empty_like(given.scale)


@define(Inputs, "Tensor row, Tensor drow, bool[] needs", results=2, fake=_gradient_shapes)
def symmetric_logsumexp_backward(
    given: Inputs,
    row: Tensor,  # (2, N)
    drow: Tensor,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """(dz, dscale)."""
    block, order = given.block()
    team = given.team(block, "symmetric logsumexp backward", Needs(dx=True, dy=True, dscale=needs[1]))
    drow = drow if order is None else drow[order]
    unit = gradient_unit(block, drow, largest=team.largest)
    side = Side(LogSum.unpack(row), drow / unit, block.zeros(block.N, block.D))
    dscale = torch.zeros_like(given.scale, dtype=torch.float64)  # one number of all rows: every digit of it can be had
    given.half(team).gradients(block, side, dscale if needs[1] else None)
    dz = torch.empty_like(block.x)
    team.local.finish_rows(side.dz, dz, block.scale * unit, own=None, partners=dz, dmatch=None, precision=block.precision)
    return _in_order(dz, order), (dscale * unit).to(given.scale.dtype)


def _in_order(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


derivative(symmetric_logsumexp, symmetric_logsumexp_backward, Inputs, learned=2, results=1, saved=1)
