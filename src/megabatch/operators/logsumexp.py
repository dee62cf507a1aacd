"""Logsumexps of the rows of the similarities, and of their columns if wanted, from one pass; backward is one pass again."""

from typing import Any, NamedTuple

from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import (
    Gradients,
    column_sums,
    empty_gradients,
    finish,
    gradient_unit,
    in_units,
    share_of_mean,
    statistic,
)
from megabatch.operators.team import assemble
from megabatch.tiles.backends import sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.matching import matching_similarities
from megabatch.tiles.precision import accumulator_dtype

# What becomes of the main diagonal.
KEPT = "kept"  # part of the sums
SKIPPED = "skipped"  # left out
APART = "apart"  # left out of the sums and returned as a vector of its own


class Inputs(NamedTuple):
    """Pairs with equal ids are left out, and pairs whose product ⟨x_i, y_j⟩, or the guide's, is above the limit of row i."""

    x: Tensor  # (N, D)
    y: Tensor  # (M, D)
    scale: Tensor  # ()
    row_bias: Tensor | None  # (N,)
    col_bias: Tensor | None  # (M,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    limit: Tensor | None  # (N,) without `columns` only
    guide_x: Tensor | None  # (N, E)
    guide_y: Tensor | None  # (M, E)
    columns: bool
    diagonal: str
    precision: str
    guide_precision: str
    backend: str
    group: str

    def block(self) -> Block:
        """The similarities."""
        guide = None
        if self.guide_x is not None and self.guide_y is not None:
            guide = Block.of(self.guide_x, self.guide_y, None, self.guide_precision)
        return Block.of(
            self.x,
            self.y,
            self.scale,
            self.precision,
            row_bias=self.row_bias,
            col_bias=self.col_bias,
            row_ids=self.row_ids,
            col_ids=self.col_ids,
            skip_diagonal=self.diagonal != KEPT,
            limit=self.limit,
            companion=guide,
        )

    def terms(self) -> dict[str, Any]:
        """What ranks have to agree on."""
        return {"what is summed": "rows and columns" if self.columns else "rows"}


def _shapes(given: Inputs) -> tuple[Tensor, ...]:
    N, M = given.x.shape[0], given.y.shape[0] if given.columns else 0
    dtype = sums_dtype(given.backend, accumulator_dtype(given.x.dtype))
    row, col = (given.x.new_empty(2, size, dtype=dtype) for size in (N, M))
    match = statistic(given.x, N if given.diagonal == APART else 0)
    return statistic(given.x, N), statistic(given.x, M), match, share_of_mean(given.x, 1.0), row, col


@define(Inputs, results=6, fake=_shapes)
def logsumexp(given: Inputs) -> tuple[Tensor, ...]:
    """(log Σ_j exp s_ij, log Σ_i exp s_ij, s_ii, share, and for backward the two sums themselves, packed).

    Without `columns` the second and the last have no entries. s_ii is empty unless the diagonal is kept apart. `share` turns
    a sum over local pairs into this rank's part of a mean.
    """
    block, apart = given.block(), given.diagonal == APART
    team = assemble(given.group, given.backend, block, "logsumexp", mean=apart, terms=given.terms())
    row, col = team.passes.logsumexp_statistics(block, columns=given.columns)
    match = matching_similarities(block, team.local.matching_products(block)) if apart else block.zeros(0)
    values = row.value().to(block.dtype), col.value().to(block.dtype)
    packed = sums_dtype(given.backend, block.dtype)
    return *values, match, share_of_mean(given.x, team.share), row.pack().to(packed), col.pack().to(packed)


def _gradient_shapes(given: Inputs, *arguments: Any) -> Gradients:
    return empty_gradients(given.x, given.y, given.scale, Needs(*arguments[-1]))


@define(
    Inputs,
    "Tensor row, Tensor col, Tensor? drow, Tensor? dcol, Tensor? dmatch, bool[] needs",
    results=5,
    fake=_gradient_shapes,
)
def logsumexp_backward(
    given: Inputs,
    row: Tensor,  # (2, N)
    col: Tensor,  # (2, M), or (2, 0) without columns
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> Gradients:
    """(dx, dy, dscale, drow_bias, dcol_bias). The choice of the pairs that a limit leaves out has no gradient."""
    block, wanted = given.block(), Needs(*needs)
    dcol, dmatch = dcol if given.columns else None, dmatch if given.diagonal == APART else None
    used = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "nothing"
    terms = {**given.terms(), "what has a gradient": used}
    team = assemble(given.group, given.backend, block, "logsumexp backward", needs=wanted, terms=terms)
    unit = gradient_unit(block, drow, dcol, largest=team.largest)
    sums = column_sums(block, wanted)
    strips = team.passes.logsumexp_gradients(
        block,
        LogSum.unpack(row),
        LogSum.unpack(col) if given.columns else None,
        in_units(drow, unit),
        in_units(dcol, unit),
        sums,
        wanted,
    )
    return finish(team.local, block, strips, sums, wanted, scale=given.scale, unit=unit, dmatch=in_units(dmatch, unit))


derivative(logsumexp, logsumexp_backward, Inputs, learned=5, results=3, saved=2, whole=False)
