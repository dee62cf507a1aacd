"""Cross-entropies under a teacher's softmax, of rows and of columns, from one pass over both; backward is one pass again."""

from typing import Any, NamedTuple

from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import column_sums, empty_gradients, finish, gradient_unit, share_of_mean, statistic
from megabatch.operators.team import assemble
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.softsum import SoftSum


class Inputs(NamedTuple):
    """The student's and the teacher's embeddings."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    teacher_x: Tensor  # (N, E)
    teacher_y: Tensor  # (M, E)
    teacher_scale: Tensor  # ()
    precision: str
    teacher_precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """The student's similarities, with the teacher's as companion."""
        teacher = Block.of(self.teacher_x, self.teacher_y, self.teacher_scale, self.teacher_precision)
        return Block.of(self.x, self.y, self.scale, self.precision, companion=teacher)


def _shapes(given: Inputs) -> tuple[Tensor, ...]:
    x, N, M = given.x, given.x.shape[0], given.y.shape[0]
    return statistic(x, N), statistic(x, M), share_of_mean(x, 1.0), statistic(x, N, 5), statistic(x, M, 5)


@define(Inputs, results=5, fake=_shapes)
def soft_cross_entropy(given: Inputs) -> tuple[Tensor, ...]:
    """(−Σ_j p_ij log softmax_j(s)_ij, −Σ_i q_ij log softmax_i(s)_ij, share, and for backward the sums, packed).

    p and q are the teacher's softmaxes over columns and over rows.
    """
    block = given.block()
    team = assemble(given.group, given.backend, block, "soft cross-entropy", mean=True)
    row, col = team.passes.soft_statistics(block)
    return row.value(), col.value(), share_of_mean(given.x, team.share), row.pack(), col.pack()


def _gradient_shapes(given: Inputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:3]


@define(Inputs, "Tensor row, Tensor col, Tensor drow, Tensor dcol, bool[] needs", results=3, fake=_gradient_shapes)
def soft_cross_entropy_backward(
    given: Inputs,
    row: Tensor,  # (N, 5)
    col: Tensor,  # (M, 5)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """(dx, dy, dscale)."""
    block, wanted = given.block(), Needs(*needs)
    team = assemble(given.group, given.backend, block, "soft cross-entropy backward", needs=wanted)
    unit = gradient_unit(block, drow, dcol, largest=team.largest)
    sums = column_sums(block, wanted)
    strips = team.passes.soft_gradients(block, SoftSum.unpack(row), SoftSum.unpack(col), drow / unit, dcol / unit, sums, wanted)
    return finish(team.local, block, strips, sums, wanted, scale=given.scale, unit=unit)[:3]


derivative(soft_cross_entropy, soft_cross_entropy_backward, Inputs, learned=3, results=2, saved=2)
