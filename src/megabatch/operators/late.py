"""Logsumexps of late interaction, and the scores of queries with documents of their own.

Backward finds the winners again, unless forward could keep all of them in a workspace.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.operators.definition import define, derivative
from megabatch.operators.gradients import gradient_unit, in_units, share_of_mean, statistic
from megabatch.operators.logsumexp import APART, KEPT
from megabatch.ring.agreement import agree, settle
from megabatch.ring.late import Documents, RingLate
from megabatch.ring.ranks import Ranks
from megabatch.tiles import kernel_plan, late
from megabatch.tiles.block import windows
from megabatch.tiles.logsum import LogSum
from megabatch.tiles.maxsim import Kept
from megabatch.tiles.precision import accumulator_dtype
from megabatch.tiles.tokens import LateBlock, Tokens


class Inputs(NamedTuple):
    """Two sets of items, and the similarity of late interaction between them."""

    query: Tensor  # (Tq, D)
    document: Tensor  # (Td, D)
    scale: Tensor  # ()
    query_lengths: Tensor | None  # (N,)
    document_lengths: Tensor | None  # (M,)
    query_valid: Tensor | None  # (Tq,)
    document_valid: Tensor | None  # (Td,)
    row_ids: Tensor | None  # (N,)
    col_ids: Tensor | None  # (M,)
    normalize: bool
    columns: bool
    keep: bool
    query_width: int
    document_width: int
    diagonal: str
    precision: str
    backend: str
    group: str

    def block(self) -> LateBlock:
        """The similarities."""
        query = Tokens(self.query, self.query_width, self.query_lengths, self.query_valid)
        return LateBlock.of(
            query,
            Tokens(self.document, self.document_width, self.document_lengths, self.document_valid),
            self.scale,
            self.precision,
            weight=1 / query.counts().clamp_min(1).to(accumulator_dtype(self.query.dtype)) if self.normalize else None,
            row_ids=self.row_ids,
            col_ids=self.col_ids,
            skip_diagonal=self.diagonal != KEPT,
        )

    def sizes(self) -> tuple[int, int]:
        """N and M."""
        block = (self.query, self.query_width, self.query_lengths), (self.document, self.document_width, self.document_lengths)
        N, M = (Tokens(*side).count for side in block)
        return N, M

    def terms(self) -> dict[str, Any]:
        """What ranks have to agree on."""
        excluded = "ids" if self.row_ids is not None else self.diagonal
        dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (self.query, self.document))
        return {
            "the width of the embeddings": self.query.shape[1],
            "the dtype of the embeddings": dtypes,
            "the precision": self.precision,
            "the backend": self.backend,
            "the kind of device": self.query.device.type,
            "what is excluded": excluded,
            "document_mask": "given" if self.document_valid is not None else "None",
            "normalize": self.normalize,
            "what is summed": "rows and columns" if self.columns else "rows",
        }


@dataclass(frozen=True)
class _Team:
    """The passes of one process or of all ranks."""

    statistics: Callable[..., tuple[LogSum, LogSum]]
    gradients: Callable[..., None]
    share: float
    largest: Callable[[Tensor], Tensor] | None = None


def _assemble(given: Inputs, block: LateBlock, operation: str, *, mean: bool = False, **terms: str) -> _Team:
    if not given.group:
        alone = partial(late.statistics, backend=given.backend), partial(late.gradients, backend=given.backend)
        return _Team(*alone, 1 / max(block.N, 1))
    ranks = Ranks.at(given.group, operation, block.device)
    ranks = agree(ranks, {**given.terms(), "the route": ranks.route, **terms}, block.N, len(block.document.values))
    if mean:
        _check_rows(ranks)
    column_bytes = block.document.D * (block.document.values.element_size() + block.dtype.itemsize)
    documents = Documents.of_all_ranks(block.document, ranks)
    ring = RingLate(ranks, settle(ranks, column_bytes), given.backend, documents)

    def largest(number: Tensor) -> Tensor:
        return torch.cat(ranks.all_gather(number.reshape(1))).amax()

    return _Team(ring.statistics, ring.gradients, ranks.size / max(sum(ranks.rows), 1), largest)


def _check_rows(ranks: Ranks) -> None:
    if sum(ranks.rows) == 0:
        raise ValueError("the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank")


def _shapes(given: Inputs) -> tuple[Tensor, ...]:
    N, M = given.sizes()
    M = M if given.columns else 0
    match = statistic(given.query, N if given.diagonal == APART else 0)
    sums = (statistic(given.query, 2, size) for size in (N, M))
    kept = _room_to_keep(given, given.block()) or _nothing_kept(given)
    return statistic(given.query, N), statistic(given.query, M), match, share_of_mean(given.query, 1.0), *sums, *kept


def _room_to_keep(given: Inputs, block: LateBlock) -> Kept | None:
    return late.backend_for(given.backend, block).room_to_keep(block) if given.keep and not given.group else None


def _nothing_kept(given: Inputs) -> Kept:
    return Kept(*(given.query.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.int16)))


@define(Inputs, results=8, fake=_shapes)
def maxsim_logsumexp(given: Inputs) -> tuple[Tensor, ...]:
    """(log Σ_j exp s_ij, log Σ_i exp s_ij, s_ii, share, and for backward the two sums themselves, packed, scores and winners).

    Without `columns` the second and the sixth have no entries; s_ii has none unless the diagonal is kept apart. Scores and
    winners have entries if there is a gradient to come (`keep`), one process, and a workspace holds all of them.
    """
    block, apart = given.block(), given.diagonal == APART
    team = _assemble(given, block, "late interaction", mean=apart)
    kept = _room_to_keep(given, block)
    row, col = team.statistics(block, columns=given.columns, **({} if kept is None else {"kept": kept}))
    match = late.pair_scores(block, kept)[:, 0].contiguous() if apart and block.N else block.zeros(0)
    of_columns = (col.value(), col.pack()) if given.columns else (block.zeros(0), block.zeros(2, 0))
    share = share_of_mean(given.query, team.share)
    return row.value(), of_columns[0], match, share, row.pack(), of_columns[1], *(kept or _nothing_kept(given))


def _gradient_shapes(given: Inputs, *arguments: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(given.query), torch.empty_like(given.document), torch.empty_like(given.scale)


@define(
    Inputs,
    "Tensor row, Tensor col, Tensor scores, Tensor winners, Tensor? drow, Tensor? dcol, Tensor? dmatch, bool[] needs",
    results=3,
    fake=_gradient_shapes,
)
def maxsim_logsumexp_backward(
    given: Inputs,
    row: Tensor,  # (2, N)
    col: Tensor,  # (2, M) or (2, 0)
    scores: Tensor,  # (M, N) or (0,)
    winners: Tensor,
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """(dquery, ddocument, dscale)."""
    block = given.block()
    dcol, dmatch = dcol if given.columns else None, dmatch if given.diagonal == APART else None
    used = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "nothing"
    team = _assemble(given, block, "late interaction backward", used=used)
    unit = gradient_unit(block, drow, dcol, largest=team.largest)
    factor = block.scale * unit
    dquery, ddocument = block.zeros(*given.query.shape), torch.empty_like(given.document)
    dscale = torch.zeros((), dtype=torch.float64, device=block.device) if needs[2] else None
    kept = Kept(scores, winners) if scores.numel() else None
    # One process rounds the gradients of some documents after the other. Those of a ring's columns travel as a whole.
    at_once = kernel_plan.documents_at_once(block.document.width, block.document.D)
    for items in [slice(0, block.M)] if given.group else windows(block.M, at_once):
        part, place = block.of_documents(items)
        sums = block.zeros(len(part.document.values), block.document.D)
        team.gradients(
            part,
            row=LogSum.unpack(row),
            col=LogSum.unpack(col).part(items) if given.columns else None,
            drow=in_units(drow, unit),
            dcol=None if dcol is None else dcol[items] / unit,
            dquery=dquery,
            ddocument=sums,
            dscale=dscale,
            **({} if kept is None else {"kept": kept.of_documents(items)}),
        )
        if dmatch is not None and block.N:
            pairs, own = block.pairs(items)
            late.pair_gradients(pairs, dmatch[items, None] / unit, dquery[own], sums, dscale)
        ddocument[place] = sums.mul_(factor)
    return dquery.mul_(factor).to(given.query.dtype), ddocument, _of_scale(dscale, unit, given)


def _of_scale(dscale: Tensor | None, unit: Tensor, given: Inputs) -> Tensor:
    return torch.zeros_like(given.scale) if dscale is None else (dscale * unit).to(given.scale.dtype)


derivative(maxsim_logsumexp, maxsim_logsumexp_backward, Inputs, learned=3, results=3, saved=4, whole=False)


def _pair_shapes(given: Inputs) -> tuple[Tensor, Tensor]:
    N, M = given.sizes()
    return statistic(given.query, N, M // max(N, 1)), share_of_mean(given.query, 1.0)


@define(Inputs, results=2, fake=_pair_shapes)
def maxsim_pairs(given: Inputs) -> tuple[Tensor, Tensor]:
    """(s of each query with its own documents, (N, M / N), share). The documents of one query come after another's."""
    block = given.block()
    share = 1 / max(block.N, 1)
    if given.group:
        ranks = Ranks.at(given.group, "late interaction of pairs", block.device)
        ranks = agree(ranks, given.terms(), block.N, 0)
        _check_rows(ranks)
        share = ranks.size / sum(ranks.rows)
    return late.pair_scores(block), share_of_mean(given.query, share)


@define(Inputs, "Tensor dscores, bool[] needs", results=3, fake=_gradient_shapes)
def maxsim_pairs_backward(given: Inputs, dscores: Tensor, needs: list[bool]) -> tuple[Tensor, ...]:
    """(dquery, ddocument, dscale)."""
    block = given.block()
    unit = gradient_unit(block, dscores)
    dquery, ddocument = (block.zeros(*side.shape) for side in (given.query, given.document))
    dscale = torch.zeros((), dtype=torch.float64, device=block.device) if needs[2] else None
    late.pair_gradients(block, dscores / unit, dquery, ddocument, dscale)
    factor = block.scale * unit
    sums = (total.mul_(factor).to(side.dtype) for total, side in ((dquery, given.query), (ddocument, given.document)))
    return *sums, _of_scale(dscale, unit, given)


derivative(maxsim_pairs, maxsim_pairs_backward, Inputs, learned=3, results=1)
