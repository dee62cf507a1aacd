"""The operators of late interaction: logsumexps of the scores and their gradients, on one process or on several ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.late import tiles
from megabatch.late.tiles import Kept, LateBlock, TokenRows, Weigh
from megabatch.operators.autograd import (
    choose_grad_scale,
    define,
    derivative,
    divide_gradient,
    fill_mean_weight,
    logit,
    statistic,
)
from megabatch.operators.two_pass import KEPT, SEPARATE
from megabatch.ring.lap import Lap, Merge, Tensors, Work
from megabatch.ring.passes import add
from megabatch.ring.ranks import Ranks, agree, choose_route
from megabatch.ring.routes import Route
from megabatch.tiles.block import EAGER, HALF_DTYPE, windows
from megabatch.tiles.eager import diagonal_of
from megabatch.tiles.sums import LogSum, exact_dtype, to_exact, weighted_softmax

# ----------------------------------------------------------------------------------------------------------------------
# Logsumexps and their gradients, over the tiles of an engine: `tiles` or `kernels`.
#
# In this file, a tile is a matrix of scores, with one number for each query and document. Only the engines access the dot
# products of vectors.


class LateBackend(Protocol):
    """The functions of an engine. The docstrings in `late.tiles` define them."""

    def allocate_kept(self, block: LateBlock) -> Kept | None: ...  # noqa: D102

    def score_tiles(self, block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]: ...  # noqa: D102

    def add_gradients(  # noqa: D102
        self, block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
    ) -> None: ...


def backend_for(name: str, block: LateBlock) -> LateBackend:
    """Returns the engine with this name. An empty block always uses the PyTorch engine."""
    if name == EAGER or block.is_empty:
        return tiles
    from megabatch.late import kernels

    return kernels


def tile_statistics(block: LateBlock, backend: str, *, columns: bool, kept: Kept | None = None) -> tuple[LogSum, LogSum]:
    """Returns row sums (N,) and column sums (M,) of exp(s). Without `columns`, column sums are empty, (0,). Fills `kept`."""
    empty, sums = _empty_documents(block), None
    for rows, window, largest in () if block.is_empty else backend_for(backend, block).score_tiles(block, kept):
        s = _similarities(block, empty, rows, window, largest)
        parts = [LogSum.of_exponentials(s.clone() if columns else s, 1)]
        if columns:
            parts.append(LogSum.of_exponentials(s, 0))
        if s.shape == (block.N, block.M):
            return parts[0], parts[1] if columns else LogSum.empty(0, dtype=block.dtype, device=block.device)
        sums = sums or _empty_sums(block, columns=columns)
        for whole, items, part in zip(sums, (rows, window), parts, strict=False):
            whole.part(items).add_(part)
    return sums or _empty_sums(block, columns=columns)


def _empty_sums(block: LateBlock, *, columns: bool) -> tuple[LogSum, LogSum]:
    row, col = (LogSum.empty(size, dtype=block.dtype, device=block.device) for size in (block.N, block.M if columns else 0))
    return row, col


def tile_gradients(
    block: LateBlock,
    backend: str,
    row: LogSum,  # (N,) sums over all columns, which may be more than the columns of the block
    col: LogSum | None,  # (M,)
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dquery: Tensor,  # (Tq, D) added to
    ddocument: Tensor,  # (Td, D) added to
    dscale: Tensor | None,  # () in `exact_dtype`, added to
    kept: Kept | None = None,
) -> None:
    """Adds the gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩ to `dquery`, `ddocument` and `dscale`.

    The gradients of the vectors are not yet multiplied by `block.scale`, because the weights of a tile are rounded to half
    precision, and weights that contain the scale could overflow.
    """
    if block.is_empty:
        return
    by_row = None if drow is None else row.softmax_factors(drow)
    by_column = None if dcol is None or col is None else col.softmax_factors(dcol)
    empty = _empty_documents(block)

    def weigh(largest: Tensor, rows: slice, columns: slice) -> Tensor:
        s = _similarities(block, empty, rows, columns, largest)
        parts = []
        if by_row is not None:
            out = s if by_column is None else torch.empty_like(s)
            parts.append(weighted_softmax(s, *(factor[rows, None].to(s.dtype) for factor in by_row), out=out))
        if by_column is not None:
            parts.append(weighted_softmax(s, *(factor[columns].to(s.dtype) for factor in by_column), out=s))
        g = parts[0].add_(parts[1]) if len(parts) == 2 else parts[0] if parts else torch.zeros_like(s)
        weights = g if block.weight is None else g.mul_(block.weight[rows, None])
        if dscale is not None:
            finite = largest if empty is None else largest.masked_fill(empty[columns], 0.0)  # because 0·∞ is NaN
            dscale.add_((to_exact(weights) * finite).sum())
        return weights

    backend_for(backend, block).add_gradients(block, weigh, dquery, ddocument, kept)


def pair_scores(block: LateBlock, kept: Kept | None = None) -> Tensor:  # (N, K)
    """Returns the scores of each query with its own K documents, and −inf for documents without vectors.

    If `kept` is given, K must be 1, and the scores are read from `kept`.
    """
    empty = _empty_documents(block)
    if kept is None:
        parts = [pairs.sums() * block.factors(rows) for rows, pairs in tiles.pair_tiles(block)]
        scores = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else block.zeros(0, block.M)
    else:
        scores = kept.scores.diagonal()[:, None] * block.factors(slice(0, block.N))
    return scores if empty is None else scores.masked_fill_(empty.view(scores.shape), -torch.inf)


def pair_gradients(
    block: LateBlock, dscores: Tensor, dquery: Tensor, ddocument: Tensor, dscale: Tensor | None
) -> None:  # (N, K)
    """Adds the gradients of ⟨dscores, pair_scores⟩ to `dquery`, `ddocument` and `dscale`, like `tile_gradients`."""
    empty = _empty_documents(block)
    for rows, pairs in tiles.pair_tiles(block):
        (largest, winners), g = pairs.largest(), dscores[rows]
        if empty is not None:
            missing = empty.view(dscores.shape)[rows]
            largest, g = largest.masked_fill(missing, 0.0), g.masked_fill(missing, 0.0)
        weights = g if block.weight is None else g * block.weight[rows, None]
        if dscale is not None:
            dscale += (to_exact(weights) * largest).sum()
        pairs.add_gradients(weights, winners, dquery, ddocument)


def all_scores(block: LateBlock, backend: str) -> Tensor:  # (N, M)
    """Returns all scores, and −inf for documents without vectors and for excluded pairs."""
    if block.is_empty:
        return block.zeros(block.N, block.M)
    empty, scores = _empty_documents(block), None
    for rows, columns, largest in backend_for(backend, block).score_tiles(block):
        s = _similarities(block, empty, rows, columns, largest)
        if s.shape == (block.N, block.M):
            return s.contiguous()
        scores = block.zeros(block.N, block.M) if scores is None else scores
        scores[rows, columns] = s
    assert scores is not None
    return scores


def _empty_documents(block: LateBlock) -> Tensor | None:  # (M,) bool
    return None if block.document.valid is None else block.document.counts() == 0


def _similarities(block: LateBlock, empty: Tensor | None, rows: slice, columns: slice, largest: Tensor) -> Tensor:  # (n, m)
    """Returns the scores s of a tile, with −inf for excluded pairs."""
    s = largest * block.factors(rows)
    if empty is not None:
        s.masked_fill_(empty[columns], -torch.inf)
    if block.row_ids is not None and block.col_ids is not None:
        s.masked_fill_(block.row_ids[rows, None] == block.col_ids[columns], -torch.inf)
    if block.skip_diagonal:
        shifted = slice(columns.start + block.first_column, columns.stop + block.first_column)
        diagonal_of(s, rows, shifted).fill_(-torch.inf)
    return s


# ----------------------------------------------------------------------------------------------------------------------
# Late interaction over all ranks: queries stay on their rank, and the vectors of all documents visit it.
#
# The columns of a lap are vectors, not documents. A value of a document, such as its id, is sent at the position of its first
# vector. Each rank sends the count and the lengths of its documents to all ranks before the lap.


@dataclass(frozen=True)
class Documents:
    """The number and the lengths of the documents of one rank."""

    count: int
    max_length: int
    lengths: Tensor | None  # (M,)

    @classmethod
    def of_all_ranks(cls, own: TokenRows, ranks: Ranks) -> list["Documents"]:
        """Returns the documents of each rank."""
        device = own.values.device
        own_sizes = torch.tensor([own.count, own.max_length, own.lengths is not None], device=device)
        sizes = [tuple(part.tolist()) for part in ranks.all_gather(own_sizes)]
        if not any(packed for _, _, packed in sizes):
            return [cls(count, max_length, None) for count, max_length, _ in sizes]
        own_lengths = torch.zeros(max(count for count, _, _ in sizes), dtype=torch.int64, device=device)
        own_lengths[: own.count] = own.all_lengths()
        lengths = ranks.all_gather(own_lengths)
        return [cls(count, max_length, part[:count]) for (count, max_length, _), part in zip(sizes, lengths, strict=True)]


@dataclass(frozen=True)
class RingLate:
    """The passes over the documents of all ranks."""

    ranks: Ranks  # `ranks.columns` counts vectors
    route: Route
    backend: str
    documents: list[Documents]  # of each rank

    def statistics(self, block: LateBlock, *, columns: bool) -> tuple[LogSum, LogSum]:
        """Returns row sums (N,) and column sums (M,) of exp(s) over the whole batch.

        Without `columns`, the column sums are empty, (0,).
        """
        block = self._prepare(block)
        row = LogSum.empty(block.N, dtype=block.dtype, device=block.device)

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited, _ = self._visit_block(block, blocks, here)
            by_row, by_column = tile_statistics(visited, self.backend, columns=columns)
            row.add_(by_row)
            return (
                [_spread(part, visited.document, fill) for part, fill in zip(by_column, _EMPTY, strict=False)]
                if columns
                else ()
            )

        home = self._lap(self._columns(block), work, LogSum.merge if columns else add)
        if not columns:
            return row, LogSum.empty(0, dtype=block.dtype, device=block.device)
        starts = block.document.starts()
        return row, LogSum(*(part[starts] for part in home))

    def gradients(
        self,
        block: LateBlock,
        row: LogSum,
        col: LogSum | None,
        drow: Tensor | None,
        dcol: Tensor | None,
        dquery: Tensor,
        ddocument: Tensor,
        dscale: Tensor | None,
    ) -> None:
        """Adds gradients like `tile_gradients`. `ddocument` receives the sum over all ranks."""
        block = self._prepare(block)
        weights: list[Tensor] = []
        if col is not None and dcol is not None:
            weights = [_spread(part, block.document, fill) for part, fill in zip((*col, dcol), (*_EMPTY, 0.0), strict=True)]

        def work(blocks: tuple[int, ...], here: Tensors) -> Tensors:
            visited, rest = self._visit_block(block, blocks, here)
            starts = visited.document.starts()
            shift, total, dcol_here = (part[starts] for part in rest) if rest else (None, None, None)
            whole = None if shift is None or total is None else LogSum(shift, total)
            partial = ddocument if blocks == (self.ranks.rank,) else block.zeros(len(visited.document.values), block.query.D)
            tile_gradients(visited, self.backend, row, whole, drow, dcol_here, dquery, partial, dscale)
            return [partial]

        self._lap([*self._columns(block), *weights], work, add)

    def _lap(self, own: list[Tensor], work: Work, merge: Merge) -> Tensors:
        return Lap(self.route, self.ranks).run(own, work, merge)

    def _prepare(self, block: LateBlock) -> LateBlock:
        """Returns the block of a lap. In half precision, its vectors are rounded once, before they are sent.

        If a rank has different numbers of queries and documents, the excluded diagonal of the whole batch is expressed by ids.
        """
        half = HALF_DTYPE.get(block.precision)
        if half is not None:
            query, document = (replace(side, values=side.values.to(half)) for side in (block.query, block.document))
            block = replace(block, query=query, document=document)
        counts = tuple(part.count for part in self.documents)
        if block.skip_diagonal and self.ranks.rows != counts:
            assert block.row_ids is None, "ids and a diagonal at once come from losses, whose queries and documents are pairs"
            rank = self.ranks.rank
            firsts = sum(self.ranks.rows[:rank]), sum(counts[:rank])
            row_ids, col_ids = (
                torch.arange(first, first + size, device=block.device)
                for first, size in zip(firsts, (block.N, block.M), strict=True)
            )
            block = replace(block, row_ids=row_ids, col_ids=col_ids, skip_diagonal=False)
        return block

    def _columns(self, block: LateBlock) -> list[Tensor]:
        tokens = block.document
        ids = None if block.col_ids is None else _spread(block.col_ids.long(), tokens, 0)
        return [part for part in (tokens.values, tokens.valid, ids) if part is not None]

    def _visit_block(self, block: LateBlock, blocks: tuple[int, ...], here: Tensors) -> tuple[LateBlock, Tensors]:
        """Returns the block of the local queries and the visiting documents, and the other tensors of these documents."""
        values, *rest = here
        valid = None if block.document.valid is None else rest.pop(0)
        present = [self.documents[rank] for rank in blocks if self.documents[rank].count]
        max_length = max((part.max_length for part in present), default=1)
        lengths = None
        if any(part.lengths is not None or part.max_length != max_length for part in present):
            each = (
                torch.full((part.count,), part.max_length, device=values.device) if part.lengths is None else part.lengths
                for part in present
            )
            lengths = torch.cat(list(each))
        tokens = TokenRows(values, max_length, lengths, valid)
        ids = None if block.col_ids is None else rest.pop(0)[tokens.starts()]
        diagonal = block.skip_diagonal and blocks == (self.ranks.rank,)
        return replace(block, document=tokens, col_ids=ids, skip_diagonal=diagonal), rest


_EMPTY = (-torch.inf, 0.0)  # shift and total of an empty sum


def _spread(values: Tensor, tokens: TokenRows, fill: float) -> Tensor:  # (M,) → (T,)
    """Returns a tensor with the value of each document at the position of its first vector, and `fill` elsewhere."""
    spread = values.new_full((len(tokens.values),), fill)
    spread[tokens.starts()] = values
    return spread


# ----------------------------------------------------------------------------------------------------------------------
# Logsumexps of late interaction, and the scores of queries with their own documents.
#
# Backward computes the argmax indices again, unless forward could store all of them in a workspace.


class MaxsimInputs(NamedTuple):
    """Two sets of items, and the settings of the scores between them."""

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
    query_max_length: int
    document_max_length: int
    diagonal: str
    precision: str
    backend: str
    group: str

    def block(self) -> LateBlock:
        """Returns the description of the scores."""
        query = TokenRows(self.query, self.query_max_length, self.query_lengths, self.query_valid)
        return LateBlock.of(
            query,
            TokenRows(self.document, self.document_max_length, self.document_lengths, self.document_valid),
            self.scale,
            self.precision,
            weight=query.weights() if self.normalize else None,
            row_ids=self.row_ids,
            col_ids=self.col_ids,
            skip_diagonal=self.diagonal != KEPT,
        )

    def sizes(self) -> tuple[int, int]:
        """Returns N and M."""
        query = self.query, self.query_max_length, self.query_lengths
        document = self.document, self.document_max_length, self.document_lengths
        N, M = (TokenRows(*side).count for side in (query, document))
        return N, M

    def terms(self) -> dict[str, Any]:
        """Returns values that must be equal on all ranks."""
        excluded = "ids" if self.row_ids is not None else self.diagonal
        dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (self.query, self.document))
        return {
            "the embedding dimension": self.query.shape[1],
            "the dtype of the embeddings": dtypes,
            "the precision": self.precision,
            "the backend": self.backend,
            "the device type": self.query.device.type,
            "the set of excluded pairs": excluded,
            "document_mask": "given" if self.document_valid is not None else "None",
            "normalize": self.normalize,
            "the direction of the sums": "rows and columns" if self.columns else "rows",
        }


@dataclass(frozen=True)
class _LatePasses:
    """The passes over the tiles of one process, or of all ranks."""

    statistics: Callable[..., tuple[LogSum, LogSum]]
    gradients: Callable[..., None]
    mean_weight: float
    largest: Callable[[Tensor], Tensor] | None = None


def _passes_for(
    given: MaxsimInputs, block: LateBlock, operation: str, *, mean: bool = False, outputs: str = "empty"
) -> _LatePasses:
    if not given.group:
        passes = partial(tile_statistics, backend=given.backend), partial(tile_gradients, backend=given.backend)
        return _LatePasses(*passes, 1 / max(block.N, 1))
    ranks = Ranks.at(given.group, operation, block.device)
    terms = {**given.terms(), "the route": ranks.route, "the set of outputs that have a gradient": outputs}
    ranks = agree(ranks, terms, block.N, len(block.document.values))
    if mean:
        _check_rows(ranks)
    column_bytes = block.document.D * (block.document.values.element_size() + block.dtype.itemsize)
    documents = Documents.of_all_ranks(block.document, ranks)
    ring = RingLate(ranks, choose_route(ranks, column_bytes), given.backend, documents)

    def largest(number: Tensor) -> Tensor:
        return torch.cat(ranks.all_gather(number.reshape(1))).amax()

    return _LatePasses(ring.statistics, ring.gradients, ranks.size / max(sum(ranks.rows), 1), largest)


def _check_rows(ranks: Ranks) -> None:
    if sum(ranks.rows) == 0:
        raise ValueError("the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank")


def _shapes(given: MaxsimInputs) -> tuple[Tensor, ...]:
    N, M = given.sizes()
    M = M if given.columns else 0
    match = logit(given.query, N if given.diagonal == SEPARATE else 0)
    sums = (statistic(given.query, 2, size) for size in (N, M))
    kept = _allocate_kept(given, given.block()) or _keep_nothing(given)
    return logit(given.query, N), logit(given.query, M), match, fill_mean_weight(given.query, 1.0), *sums, *kept


def _allocate_kept(given: MaxsimInputs, block: LateBlock) -> Kept | None:
    return backend_for(given.backend, block).allocate_kept(block) if given.keep and not given.group else None


def _keep_nothing(given: MaxsimInputs) -> Kept:
    return Kept(*(given.query.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.int16)))


@define(MaxsimInputs, results=8, fake=_shapes)
def maxsim_logsumexp(given: MaxsimInputs) -> tuple[Tensor, ...]:
    """Returns (log Σ_j exp s_ij, log Σ_i exp s_ij, s_ii, mean_weight, row, col, scores, argmax).

    The last four are for backward. `row` and `col` are packed sums. Without `columns`, the second result and `col` are empty.
    If the diagonal is not separate, s_ii is empty. The first three results have the `exact_dtype`. Scores and argmax indices
    are empty if backward cannot be called (`keep`), if there are several ranks, or if they do not fit in a workspace.
    """
    block, separate = given.block(), given.diagonal == SEPARATE
    passes = _passes_for(given, block, "late interaction", mean=separate)
    kept = _allocate_kept(given, block)
    row, col = passes.statistics(block, columns=given.columns, **({} if kept is None else {"kept": kept}))
    match = logit(given.query, 0)
    if separate and block.N:
        match = pair_scores(block, kept)[:, 0].to(exact_dtype(block.device), copy=True)
    of_columns = (col.value(), col.pack()) if given.columns else (logit(given.query, 0), block.zeros(2, 0))
    mean_weight = fill_mean_weight(given.query, passes.mean_weight)
    return row.value(), of_columns[0], match, mean_weight, row.pack(), of_columns[1], *(kept or _keep_nothing(given))


def _gradient_shapes(given: MaxsimInputs, *arguments: Any) -> tuple[Tensor, ...]:
    query, document = (side.new_empty(side.shape) for side in (given.query, given.document))
    return query, document, torch.empty_like(given.scale)


@define(
    MaxsimInputs,
    "Tensor row, Tensor col, Tensor scores, Tensor winners, Tensor? drow, Tensor? dcol, Tensor? dmatch, bool[] needs",
    results=3,
    fake=_gradient_shapes,
)
def maxsim_logsumexp_backward(
    given: MaxsimInputs,
    row: Tensor,  # (2, N)
    col: Tensor,  # (2, M) or (2, 0)
    scores: Tensor,  # (M, N) or (0,)
    winners: Tensor,
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dmatch: Tensor | None,  # (N,)
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Returns (dquery, ddocument, dscale)."""
    block = given.block()
    dcol, dmatch = dcol if given.columns else None, dmatch if given.diagonal == SEPARATE else None
    outputs = " ".join(name for name, d in (("rows", drow), ("columns", dcol)) if d is not None) or "empty"
    passes = _passes_for(given, block, "late interaction backward", outputs=outputs)
    grad_scale = choose_grad_scale(block.scale, block.precision, drow, dcol, matches=dmatch, largest=passes.largest)
    factor = block.scale * grad_scale
    dquery, ddocument = block.zeros(*given.query.shape), given.document.new_empty(given.document.shape)
    dscale = torch.zeros((), dtype=exact_dtype(block.device), device=block.device) if needs[2] else None
    kept = Kept(scores, winners) if scores.numel() else None
    # One process computes and rounds the gradients of a few documents at a time. Several ranks process all documents at once,
    # because they send the gradients of all documents.
    count = kernel_plan.documents_at_once(block.document.max_length, block.document.D)
    for items in [slice(0, block.M)] if given.group else windows(block.M, count):
        part, vectors = block.of_documents(items)
        sums = block.zeros(len(part.document.values), block.document.D)
        passes.gradients(
            part,
            row=LogSum.unpack(row),
            col=LogSum.unpack(col).part(items) if given.columns else None,
            drow=divide_gradient(drow, grad_scale),
            dcol=divide_gradient(None if dcol is None else dcol[items], grad_scale),
            dquery=dquery,
            ddocument=sums,
            dscale=dscale,
            **({} if kept is None else {"kept": kept.of_documents(items)}),
        )
        if dmatch is not None and block.N:
            pairs, own = block.pairs(items)
            pair_gradients(pairs, divide_gradient(dmatch[items, None], grad_scale), dquery[own], sums, dscale)
        ddocument[vectors] = sums.mul_(factor)
    return dquery.mul_(factor).to(given.query.dtype), ddocument, _of_scale(dscale, grad_scale, given)


def _of_scale(dscale: Tensor | None, grad_scale: Tensor, given: MaxsimInputs) -> Tensor:
    return torch.zeros_like(given.scale) if dscale is None else (dscale * grad_scale).to(given.scale.dtype)


derivative(maxsim_logsumexp, maxsim_logsumexp_backward, MaxsimInputs, learned=3, results=3, saved=4, materialize=False)


def _pair_shapes(given: MaxsimInputs) -> tuple[Tensor, Tensor]:
    N, M = given.sizes()
    return statistic(given.query, N, M // max(N, 1)), fill_mean_weight(given.query, 1.0)


@define(MaxsimInputs, results=2, fake=_pair_shapes)
def maxsim_pairs(given: MaxsimInputs) -> tuple[Tensor, Tensor]:
    """Returns (the scores of each query with its own documents, (N, M / N), mean_weight).

    Documents 0 to K − 1 belong to query 0, documents K to 2K − 1 to query 1, and so on, where K = M / N.
    """
    block = given.block()
    mean_weight = 1 / max(block.N, 1)
    if given.group:
        ranks = Ranks.at(given.group, "late interaction of pairs", block.device)
        ranks = agree(ranks, given.terms(), block.N, 0)
        _check_rows(ranks)
        mean_weight = ranks.size / sum(ranks.rows)
    return pair_scores(block), fill_mean_weight(given.query, mean_weight)


@define(MaxsimInputs, "Tensor dscores, bool[] needs", results=3, fake=_gradient_shapes)
def maxsim_pairs_backward(given: MaxsimInputs, dscores: Tensor, needs: list[bool]) -> tuple[Tensor, ...]:
    """Returns (dquery, ddocument, dscale)."""
    block = given.block()
    grad_scale = choose_grad_scale(block.scale, block.precision, dscores)
    dquery, ddocument = (block.zeros(*side.shape) for side in (given.query, given.document))
    dscale = torch.zeros((), dtype=exact_dtype(block.device), device=block.device) if needs[2] else None
    pair_gradients(block, dscores / grad_scale, dquery, ddocument, dscale)
    factor = block.scale * grad_scale
    sums = (total.mul_(factor).to(side.dtype) for total, side in ((dquery, given.query), (ddocument, given.document)))
    return *sums, _of_scale(dscale, grad_scale, given)


derivative(maxsim_pairs, maxsim_pairs_backward, MaxsimInputs, learned=3, results=1)
