"""Cross-entropies under a teacher's softmax, of rows and of columns, from one pass over both; backward is one pass again."""

from typing import Any, NamedTuple

from torch import Tensor

from megabatch.operators.autograd import define, derivative
from megabatch.operators.gradients import choose_grad_scale, column_sums, empty_gradients, fill_mean_weight, finish, statistic
from megabatch.operators.team import passes_for
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.sums import SoftSum


class SoftCrossEntropyInputs(NamedTuple):
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
        """The student's similarities, with the teacher's as second model."""
        teacher = Block.of(self.teacher_x, self.teacher_y, self.teacher_scale, self.teacher_precision)
        return Block.of(self.x, self.y, self.scale, self.precision, second_model=teacher)


def _shapes(given: SoftCrossEntropyInputs) -> tuple[Tensor, ...]:
    x, N, M = given.x, given.x.shape[0], given.y.shape[0]
    return statistic(x, N), statistic(x, M), fill_mean_weight(x, 1.0), statistic(x, N, 5), statistic(x, M, 5)


@define(SoftCrossEntropyInputs, results=5, fake=_shapes)
def soft_cross_entropy(given: SoftCrossEntropyInputs) -> tuple[Tensor, ...]:
    """(−Σ_j p_ij log softmax_j(s)_ij, −Σ_i q_ij log softmax_i(s)_ij, mean_weight, and for backward the sums, packed).

    p and q are the teacher's softmaxes over columns and over rows.
    """
    block = given.block()
    passes = passes_for(given.group, given.backend, block, "soft cross-entropy", mean=True)
    row, col = passes.tiles.soft_statistics(block)
    return row.value(), col.value(), fill_mean_weight(given.x, passes.mean_weight), row.pack(), col.pack()


def _gradient_shapes(given: SoftCrossEntropyInputs, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))[:3]


@define(
    SoftCrossEntropyInputs, "Tensor row, Tensor col, Tensor drow, Tensor dcol, bool[] needs", results=3, fake=_gradient_shapes
)
def soft_cross_entropy_backward(
    given: SoftCrossEntropyInputs,
    row: Tensor,  # (N, 5)
    col: Tensor,  # (M, 5)
    drow: Tensor,  # (N,)
    dcol: Tensor,  # (M,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """(dx, dy, dscale)."""
    block, wanted = given.block(), Needs(*needs)
    passes = passes_for(given.group, given.backend, block, "soft cross-entropy backward", needs=wanted)
    grad_scale = choose_grad_scale(block, drow, dcol, largest=passes.largest)
    sums = column_sums(block, wanted)
    strips = passes.tiles.soft_gradients(
        block, SoftSum.unpack(row), SoftSum.unpack(col), drow / grad_scale, dcol / grad_scale, sums, wanted
    )
    return finish(passes.local, block, strips, sums, wanted, scale=given.scale, grad_scale=grad_scale)[:3]


derivative(soft_cross_entropy, soft_cross_entropy_backward, SoftCrossEntropyInputs, learned=3, results=2, saved=2)
