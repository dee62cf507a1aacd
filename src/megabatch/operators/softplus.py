"""Row sums of softplus over the logits. Backward needs a second pass, because the rows may have different weights."""

from typing import Any, NamedTuple

from torch import Tensor

from megabatch.operators.autograd import (
    choose_grad_scale,
    column_sums,
    define,
    derivative,
    empty_gradients,
    finish,
    passes_for,
    statistic,
)
from megabatch.tiles.block import Block, Needs, matching_logits


class SoftplusInputs(NamedTuple):
    """The embeddings and ids. Pairs with equal ids are excluded, or they are positives and are summed as softplus(−s_ij)."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor  # (N,)
    ids: Tensor | None  # (N,) the ids of both rows and columns
    ids_are_positives: bool
    separate: bool  # whether the pairs (i, i) are excluded from the sums and returned as a separate vector
    precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """Returns the description of the logits."""
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            row_ids=self.ids,
            col_ids=self.ids,
            skip_diagonal=self.separate,
            ids_are_positives=self.ids_are_positives and self.ids is not None,
        )


def _softplus_shapes(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    return statistic(given.x, given.x.shape[0]), statistic(given.x, given.x.shape[0] if given.separate else 0)


@define(SoftplusInputs, results=2, fake=_softplus_shapes)
def softplus(given: SoftplusInputs) -> tuple[Tensor, Tensor]:
    """Returns (Σ_j log(1 + exp s_ij), s_ii). The second result is empty if the diagonal is not separate."""
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "softplus", mean=given.separate)
    match = matching_logits(block, passes.local.matching_products(block)) if given.separate else block.zeros(0)
    return passes.tiles.softplus_sums(block), match


def _gradient_shapes(given: SoftplusInputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:4]


@define(SoftplusInputs, "Tensor dtotal, Tensor dmatch, bool[] needs", results=4, fake=_gradient_shapes)
def softplus_backward(
    given: SoftplusInputs,
    dtotal: Tensor,  # (N,)
    dmatch: Tensor,  # (N,) or (0,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Returns (dx, dy, dscale, drow_bias)."""
    block, needed = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "softplus backward", needs=needed)
    grad_scale = choose_grad_scale(block.scale, block.precision, dtotal, largest=passes.largest)
    sums = column_sums(block, needed)
    strips = passes.tiles.softplus_gradients(block, dtotal / grad_scale, sums, needed)
    own = dmatch / grad_scale if given.separate else None
    return finish(passes.local, block, strips, sums, needed, scale=given.scale, grad_scale=grad_scale, dmatch=own)[:4]


derivative(softplus, softplus_backward, SoftplusInputs, learned=4, results=2)
