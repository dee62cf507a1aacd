"""Row sums of softplus over the similarities; backward is a second pass, because every row may have a weight of its own."""

from typing import Any, NamedTuple

from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import column_sums, empty_gradients, finish, gradient_unit, statistic
from megabatch.operators.team import assemble
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.matching import matching_similarities


class Inputs(NamedTuple):
    """Pairs with equal ids are left out of the sums; or they are positives, and enter them as softplus(−s_ij)."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor  # (N,)
    ids: Tensor | None  # (N,) of rows and of columns
    ids_are_positives: bool
    apart: bool  # the pairs (i, i) are left out of the sums
    precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """The similarities."""
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            row_ids=self.ids,
            col_ids=self.ids,
            skip_diagonal=self.apart,
            ids_are_positives=self.ids_are_positives and self.ids is not None,
        )


def _shapes(given: Inputs) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0] if given.apart else 0)


@define(Inputs, results=2, fake=_shapes)
def softplus(given: Inputs) -> tuple[Tensor, Tensor]:
    """(Σ_j log(1 + exp s_ij), s_ii). The second is empty unless the pairs (i, i) are kept apart."""
    block = given.block()
    team = assemble(given.group, given.backend, block, "softplus", mean=given.apart)
    match = matching_similarities(block, team.local.matching_products(block)) if given.apart else block.zeros(0)
    return team.passes.softplus_sums(block), match


def _gradient_shapes(given: Inputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:4]


@define(Inputs, "Tensor dtotal, Tensor dmatch, bool[] needs", results=4, fake=_gradient_shapes)
def softplus_backward(
    given: Inputs,
    dtotal: Tensor,  # (N,)
    dmatch: Tensor,  # (N,) or (0,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """(dx, dy, dscale, drow_bias)."""
    block, wanted = given.block(), Needs(*needs)
    team = assemble(given.group, given.backend, block, "softplus backward", needs=wanted)
    unit = gradient_unit(block, dtotal, largest=team.largest)
    sums = column_sums(block, wanted)
    strips = team.passes.softplus_gradients(block, dtotal / unit, sums, wanted)
    own = dmatch / unit if given.apart else None
    return finish(team.local, block, strips, sums, wanted, scale=given.scale, unit=unit, dmatch=own)[:4]


derivative(softplus, softplus_backward, Inputs, learned=4, results=2)
