"""Late interaction: queries and documents have many vectors each, and a score sums the best match of every query vector.

s_ij = scale · Σ_t max_u ⟨q_it, d_ju⟩ is the MaxSim score of ColBERT. Scores and argmax indices are not stored, unless all of
them fit in a workspace of fixed size.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Execution, Group, Reduction, late_loss_is_dense
from megabatch.late import operators as own_operators
from megabatch.late import scores
from megabatch.late.tiles import LateBlock, TokenRows
from megabatch.operators import apply
from megabatch.pairwise import LogSumExp, TopK, each_row, largest_below
from megabatch.primitives import KEPT, SEPARATE, SKIPPED, accumulator_dtype, execution, number, widen_float16
from megabatch.tiles.block import HALF_DTYPE, TRITON, by_matmul_setting
from megabatch.tiles.plan import SCORE_ELEMENTS
from megabatch.tiles.sums import Best, best_columns

__all__ = ["KEPT", "SEPARATE", "Similarities", "Tokens", "maxsim_logsumexp", "maxsim_scores", "maxsim_topk"]


class Tokens(NamedTuple):
    """Items with many vectors each, such as the tokens of texts or the patches of pages.

    Attributes:
        values: (N, L, D) for padded items, or (T, D) for packed items, with the vectors of all items concatenated.
        mask: (N, L) or (T,) bool, False for vectors that do not count. None if all vectors count.
        lengths: (N,) integers of at least 1, the numbers of vectors of packed items.

    Examples:
        ```python
        document = mb.Tokens(vectors, lengths=lengths)  # (T, D) and (N,), without padding
        loss = mb.late_interaction_loss(query, document, scale=20.0)
        ```
    """

    values: Tensor
    mask: Tensor | None = None
    lengths: Tensor | None = None


class Similarities:
    """The MaxSim scores between two sets of checked items, and the settings with which operators compute them."""

    def __init__(
        self,
        query: Tensor | Tokens,
        document: Tensor | Tokens | None,  # None for no documents, if `against` gets them
        scale: float | Tensor,
        *,
        masks: tuple[Tensor | None, Tensor | None] = (None, None),
        names: tuple[str, str] = ("query", "document"),
        normalize: bool = False,
        group: Group = None,
        purpose: str = "",
        loss: str = "",
        backend: Backend = "auto",
    ) -> None:
        self.query = _items(query, masks[0], names[0])
        self.document = TokenRows(self.query.values[:0], 1) if document is None else _items(document, masks[1], names[1])
        self.run: Execution = execution(
            self.query.values, self.document.values, names, group=group, purpose=purpose, loss=loss, backend=backend
        )
        self.scale = number(scale, "scale", self.query.values, shared=True)
        self.normalize, self.names = normalize, names
        self._query_vectors = self.query.values  # before `share_query`

    def share_query(self) -> None:
        """Prepares the query for several operators. Results of `against` share the query (`primitives.widen_float16`)."""
        self.query = replace(self.query, values=widen_float16(self.query.values))

    def against(self, document: Tensor | Tokens | TokenRows, name: str) -> "Similarities":
        """Returns the scores of the shared queries with other documents."""
        other = copy(self)
        other.document = document if isinstance(document, TokenRows) else _items(document, None, name)
        other.names = self.names[0], name
        checks.embeddings(self._query_vectors, other.document.values, other.names)
        return other

    def of_queries(self, query: TokenRows) -> "Similarities":
        """Returns the scores of some of the queries."""
        other = copy(self)
        other.query = query
        return other

    def check_pairs(self) -> None:
        """Raises if there is no query, unless other ranks may have queries."""
        if not self.run.group and self.query.count == 0:
            raise ValueError(f"{self.names[0]} must have at least one item: the mean over no pairs is undefined")

    def check_ids(self, ids: Any) -> None:
        """Raises unless `ids` is None or has one integer for each query, which is also the id of its document."""
        checks.ids(ids, "ids", self._rows(self.query), self.names[0])

    def check_exclude(self, value: Any) -> None:
        """Raises unless `value` is None, "diagonal", or (row ids, column ids)."""
        checks.exclude(value, self._rows(self.query), self._rows(self.document), self.names)

    @staticmethod
    def _rows(items: TokenRows) -> Tensor:  # (N, 0)
        return items.values.new_empty(items.count, 0)

    def logsumexp(
        self,
        *,
        ids: tuple[Tensor | None, Tensor | None] = (None, None),
        diagonal: str = KEPT,
        columns: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N,), (M,) or (0,), (N,) or (0,), ()
        """Returns (row, column, match, mean_weight), like `primitives.logsumexp`."""
        row, col, match, mean_weight, *_ = apply(own_operators.maxsim_logsumexp, *self._inputs(ids, diagonal, columns=columns))
        return row, col, match, mean_weight

    def dense_loss(self, ids: Tensor | None, reduction: Reduction, *, symmetric: bool) -> Tensor | None:  # ()
        """Returns the loss of the pairs, or None if the scores are not stored all at once (`dispatch.late_loss_is_dense`)."""
        N = self.query.count
        if not late_loss_is_dense(self.query.values, N, N * N * self.query.max_length, self.run, reduction):
            return None
        from megabatch.late.small import loss_of_pairs  # imports Triton

        share = (1 / N if reduction == "mean" else 1.0) / (2 if symmetric else 1)
        return loss_of_pairs(self._block(), ids, share, symmetric=symmetric)

    def of_own(self) -> tuple[Tensor, Tensor]:  # (N, M / N), ()
        """Returns (the scores of each query with its own documents, mean_weight)."""
        of_pairs, mean_weight = apply(own_operators.maxsim_pairs, *self._inputs((None, None), KEPT, columns=False))
        return of_pairs, mean_weight

    def all(self, ids: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:  # (N, M)
        """Returns all scores without a gradient, and −inf for pairs with equal ids."""
        result: Tensor = scores.maxsim_scores(*self._inputs(ids, KEPT, columns=False))
        return result

    def reads(self, document: TokenRows) -> bool:
        """Returns whether the kernels can read the documents where they are, or copy them within the limit of a workspace."""
        values, query = document.values, self.query.values
        if self.run.backend != TRITON or values.device != query.device:
            return False
        from megabatch.kernels.operands import is_readable

        half = HALF_DTYPE.get(self.run.precision)
        return values.numel() <= SCORE_ELEMENTS or (values.dtype == half and is_readable(values))

    def of_candidates(self, candidates: Tensor) -> Tensor:  # (N, K) int64
        """Returns the scores of candidates by a kernel."""
        from megabatch.late.small import candidate_scores

        return candidate_scores(self._block(), candidates)

    def _block(self) -> LateBlock:
        """Returns the block for a kernel, whose scale is not rounded."""
        precision = by_matmul_setting(self.run.precision, self.query.values.device.type)
        return LateBlock(self.query, self.document, self.scale, precision, self.query.weights() if self.normalize else None)

    def _inputs(self, ids: tuple[Tensor | None, Tensor | None], diagonal: str, *, columns: bool) -> tuple[Any, ...]:
        query, document = self.query, self.document
        learned = query.values, document.values, self.scale
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)  # backward may be called
        return (
            *learned,
            *(query.lengths, document.lengths, query.valid, document.valid),
            *ids,
            *(self.normalize, columns, keep, query.max_length, document.max_length, diagonal),
            *self.run,
        )


def _items(value: Tensor | Tokens, mask: Tensor | None, name: str) -> TokenRows:
    tokens = value if isinstance(value, Tokens) else Tokens(value)
    if not isinstance(tokens.values, Tensor):
        raise TypeError(f"{name} must be a tensor or Tokens, got {type(tokens.values).__name__}")
    if mask is not None and tokens.mask is not None:
        raise ValueError(f"{name}_mask must be None if {name} is Tokens with a mask, got two masks")
    mask, values, lengths = tokens.mask if mask is None else mask, tokens.values, tokens.lengths
    expected = 3 if lengths is None else 2
    if values.dim() != expected or 0 in values.shape[1:]:
        layout = "(items, vectors, dim), where vectors and dim" if lengths is None else "(vectors, dim) with lengths, where dim"
        raise ValueError(f"{name} must have shape {layout} must not be 0, got {tuple(values.shape)}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != values.shape[:-1]:
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of {name} must have shape {tuple(values.shape[:-1])}, got {got}")
        if mask.device != values.device:
            raise ValueError(f"the mask of {name} must be on {values.device}, got {mask.device}")
        mask = mask.bool().reshape(-1)
    if lengths is None:
        return TokenRows(values.flatten(0, 1), values.shape[1], None, mask)
    if isinstance(lengths, Tensor) and lengths.dim() != 1:
        raise ValueError(f"{name}.lengths must have shape (items,), got {tuple(lengths.shape)}")
    checks.ids(lengths, f"{name}.lengths", lengths, name)
    lengths = lengths.to(values.device, torch.int64)
    least, most, total = torch.stack((lengths.amin(), lengths.amax(), lengths.sum())).tolist() if len(lengths) else (1, 1, 0)
    if least < 1 or total != len(values):
        raise ValueError(
            f"{name}.lengths must be at least 1 and add up to the {len(values)} vectors of {name}, got a minimum of {least} "
            f"and a sum of {total}"
        )
    return TokenRows(values, most, lengths, mask)


def maxsim_logsumexp(
    query: Tensor | Tokens,  # (N, Lq, D)
    document: Tensor | Tokens,  # (M, Ld, D)
    scale: float | Tensor = 1.0,
    *,
    query_mask: Tensor | None = None,  # (N, Lq) bool
    document_mask: Tensor | None = None,  # (M, Ld) bool
    exclude: str | tuple[Tensor, Tensor] | None = None,
    normalize: bool = False,
    group: Group = None,
    backend: Backend = "auto",
) -> LogSumExp:  # (N,), (M,)
    """Returns the row and column logsumexps of all MaxSim scores. One pass over the scores computes both.

    The result equals the result of this code, but neither the dot products nor the scores are stored:

        s = scale * torch.einsum("itd,jud->ijtu", query, document).amax(3).sum(2)
        return s.logsumexp(1), s.logsumexp(0)

    The result is differentiable once, with respect to query, document and scale. Among equal dot products, only the first one
    gets a gradient. Masked vectors do not count. A query without vectors has the score 0 with every document. A document
    without vectors is excluded from all sums. In addition to inputs and gradients, the operation needs a float32 accumulator
    of the gradients and a workspace of fixed size. See `pairwise_logsumexp` for the precision.

    Examples:
        ```python
        row, col = mb.maxsim_logsumexp(query, document, 20.0, document_mask=mask)
        ```

    Args:
        query: (N, Lq, D) vectors, or `Tokens`.
        document: (M, Ld, D) vectors of the same dtype, or `Tokens`.
        scale: a float, or a tensor of one element.
        query_mask: (N, Lq) bool, False for vectors that do not count.
        document_mask: (M, Ld) bool, False for vectors that do not count.
        exclude: None, "diagonal" or (row ids, column ids), see `pairwise_logsumexp`.
        normalize: whether to divide the scores of a query by its number of vectors.
        group: see `clip_loss`. Sums are over the queries and documents of all ranks. Ranks send the vectors of documents.
        backend: see `clip_loss`.
    """
    similarities = Similarities(
        query, document, scale, masks=(query_mask, document_mask), normalize=normalize, group=group, backend=backend
    )
    similarities.check_exclude(exclude)
    ids = (None, None) if exclude is None or isinstance(exclude, str) else (exclude[0], exclude[1])
    diagonal = SKIPPED if isinstance(exclude, str) else KEPT
    row, col, *_ = similarities.logsumexp(ids=ids, diagonal=diagonal, columns=True)
    dtype = accumulator_dtype(similarities.query.values.dtype)
    return LogSumExp(row.to(dtype), col.to(dtype))


def maxsim_scores(
    query: Tensor | Tokens,  # (N, Lq, D)
    document: Tensor | Tokens,  # (M, Ld, D)
    *,
    candidates: Tensor | None = None,  # (N, K) int64
    query_mask: Tensor | None = None,  # (N, Lq) bool
    document_mask: Tensor | None = None,  # (M, Ld) bool
    normalize: bool = False,
    backend: Backend = "auto",
) -> Tensor:  # (N, M) or (N, K)
    """Computes the MaxSim scores of all queries and documents, or of K candidates for each query.

    The result equals the result of this code, but the dot products are not stored:

        s = torch.einsum("itd,jud->ijtu", query, document).amax(3).sum(2)
        return s if candidates is None else s.gather(1, candidates)

    There is no gradient, so inputs must not require one. Masked vectors do not count. A query without vectors has the score 0
    with every document. A document without vectors has the score −inf. NaN in a vector makes the scores of its query or
    document NaN. Scores are float32, or float64 for float64 inputs. In addition to the scores, the operation needs a workspace
    of at most 1 GiB, for any number of documents.

    Examples:
        ```python
        scores = mb.maxsim_scores(query, document, candidates=mb.pairwise_topk(pooled_query, pooled_document, 100).indices)
        ```

    Args:
        query: (N, Lq, D) vectors, or `Tokens`.
        document: (M, Ld, D) vectors of the same dtype, or `Tokens`. They may be on another device than the queries, such as in
            a memory-mapped file. Some documents at a time are copied to the device of the queries.
        candidates: (N, K) integers, the documents to score for each query. The score of −1 is −inf.
        query_mask: (N, Lq) bool, False for vectors that do not count.
        document_mask: (M, Ld) bool, False for vectors that do not count.
        normalize: whether to divide the scores of a query by its number of vectors.
        backend: see `clip_loss`.
    """
    similarities = Similarities(query, None, 1.0, masks=(query_mask, None), normalize=normalize, backend=backend)
    documents, device = _items(document, document_mask, "document"), similarities.query.values.device
    if torch.is_grad_enabled():
        checks.without_gradient([similarities.query.values, documents.values], ["query", "document"])
    N, M = similarities.query.count, documents.count
    if candidates is not None:
        return _score_candidates(similarities, documents, candidates)
    result = similarities.query.values.new_empty(N, M, dtype=accumulator_dtype(similarities.query.values.dtype))
    queries = scores.split_queries(similarities.query)
    for columns, part in scores.split_documents(documents, N, device):
        against = similarities.against(part, "document")
        for rows, some in queries:
            result[rows, columns] = against.of_queries(some).all()
    return result


def _score_candidates(similarities: Similarities, documents: TokenRows, candidates: Tensor) -> Tensor:  # (N, K)
    query, M = similarities.query, documents.count
    if not isinstance(candidates, Tensor) or candidates.dtype not in (torch.int64, torch.int32) or candidates.dim() != 2:
        given = f"{candidates.dtype} {tuple(candidates.shape)}" if isinstance(candidates, Tensor) else type(candidates).__name__
        raise TypeError(f"candidates must be an int64 or int32 tensor of shape (queries, candidates), got {given}")
    if len(candidates) != query.count:
        raise ValueError(f"candidates must have {query.count} rows, one for each query, got {len(candidates)}")
    if candidates.device != query.values.device:
        raise ValueError(f"candidates must be on {query.values.device}, like the queries, got {candidates.device}")
    least, most = torch.stack(candidates.aminmax()).tolist() if candidates.numel() else (-1, -1)
    if least < -1 or most >= M:
        raise ValueError(f"candidates must be from -1 to {M - 1}, because there are {M} documents, got {least} to {most}")
    result = query.values.new_full(candidates.shape, -torch.inf, dtype=accumulator_dtype(query.values.dtype))
    if not M or not candidates.numel():
        return result
    if similarities.reads(documents):
        return similarities.against(documents, "document").of_candidates(candidates.long())
    for rows, columns in scores.split_candidates(candidates, documents.max_length * documents.D):
        some = scores.gather_documents(documents, candidates[rows, columns].flatten().long(), query.values.device)
        pairs = similarities.against(some, "document").of_queries(query.part(rows)[0])
        result[rows, columns] = pairs.of_own()[0]
    return result


@torch.no_grad()
def maxsim_topk(
    query: Tensor | Tokens,  # (N, Lq, D)
    document: Tensor | Tokens | Iterable[Tensor | Tokens],  # (M, Ld, D)
    k: int,
    *,
    query_mask: Tensor | None = None,  # (N, Lq) bool
    document_mask: Tensor | None = None,  # (M, Ld) bool
    exclude: str | Sequence[Tensor] | None = None,
    above: float | Tensor | None = None,  # or (N,)
    below: float | Tensor | None = None,  # or (N,)
    normalize: bool = False,
    backend: Backend = "auto",
) -> TopK:  # (N, k), (N, k) int64
    """Finds the k documents with the largest MaxSim scores for each query, sorted.

    Ties go to the smaller document number. There is no gradient. Equivalent PyTorch code, which stores the scores:

        s = mb.maxsim_scores(query, document)
        return s.sort(dim=1, descending=True, stable=True)[:, :k]

    The search is exact. If a query has fewer than k candidates, its last entries have the value −inf and the index −1. A score
    that is NaN is never chosen, and a document without vectors is never chosen. The operation needs a workspace of at most
    1 GiB, for any number of documents.

    Examples:
        Documents in a memory-mapped file of packed vectors, searched by queries on a GPU:

        ```python
        vectors = torch.from_numpy(np.memmap("vectors.f16", np.float16, "r").reshape(-1, 128))
        document = mb.Tokens(vectors, lengths=torch.from_numpy(np.diff(offsets)))  # offsets: (M + 1,)
        scores, numbers = mb.maxsim_topk(query, document, 10)
        ```

    Args:
        query: (N, Lq, D) vectors, or `Tokens`.
        document: (M, Ld, D) vectors of the same dtype, or `Tokens`, or an iterable of these, whose documents are numbered
            consecutively. They may be on another device than the queries, see `maxsim_scores`.
        k: the number of documents to find for each query, at most 1,024.
        query_mask: (N, Lq) bool, False for vectors that do not count.
        document_mask: (M, Ld) bool, False for vectors that do not count. For an iterable, its `Tokens` have masks instead.
        exclude: None; "diagonal" to exclude document i for query i; or (query ids, document ids), integers of shapes (N,) and
            (M,), to exclude pairs with equal ids. With an iterable, ids are not allowed.
        above: a number, or one number for each query, (N,). Only scores larger than this are chosen.
        below: a number, or one number for each query, (N,). Only scores smaller than this are chosen.
        normalize: whether to divide the scores of a query by its number of vectors.
        backend: see `clip_loss`.
    """
    checks.best(k)
    similarities = Similarities(query, None, 1.0, masks=(query_mask, None), normalize=normalize, backend=backend)
    queries = similarities.query.values.new_empty(similarities.query.count, 0)
    for name, bound in (("above", above), ("below", below)):
        checks.bound(bound, name, queries, "query")
    is_single = isinstance(document, (Tensor, Tokens))
    if not is_single and (document_mask is not None or not (exclude is None or isinstance(exclude, str))):
        raise ValueError("document_mask and ids in exclude must be None if document is an iterable; pass Tokens with masks")
    if not is_single and not isinstance(document, Iterable):
        raise TypeError(f"document must be a tensor, Tokens or an iterable of these, got {type(document).__name__}")
    limit = None if below is None else largest_below(each_row(below, queries))
    groups = [("document", document)] if is_single else ((f"document[{i}]", part) for i, part in enumerate(document))
    best = _search(similarities, groups, k, document_mask, exclude, limit)
    if above is not None:
        low = ~(best.values > each_row(above, queries)[:, None])
        best = Best(best.values.masked_fill(low, -torch.inf), best.indices.masked_fill(low, -1))
    return TopK(*best)


def _search(
    similarities: Similarities,
    groups: Iterable[tuple[str, Any]],  # names and documents
    k: int,
    mask: Tensor | None,
    exclude: str | Sequence[Tensor] | None,
    limit: Tensor | None,  # (N,)
) -> Best:  # (N, k)
    values = similarities.query.values
    queries, N, first = scores.split_queries(similarities.query), similarities.query.count, 0
    best = [Best.none(some.count, k, values.new_empty(0, dtype=accumulator_dtype(values.dtype))) for _, some in queries]
    for name, group in groups:
        documents = _items(group, mask, name)
        checks.exclude(exclude, values.new_empty(N, 0), values.new_empty(documents.count, 0), ("query", name))
        for columns, part in scores.split_documents(documents, N, values.device):
            against = similarities.against(part, name)
            for i, (rows, some) in enumerate(queries):
                s = against.of_queries(some).all(_ids_of(exclude, rows, columns, first, values.device))
                if limit is not None:
                    s.masked_fill_(s > limit[rows, None], -torch.inf)
                best[i] = best_columns(s, first + columns.start, k, best[i])
        first += documents.count
    return Best(*(torch.cat(parts) for parts in zip(*best, strict=True))) if best else Best.none(0, k, values)


def _ids_of(
    exclude: str | Sequence[Tensor] | None, rows: slice, columns: slice, first: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:  # (n,), (m,)
    """Returns ids that are equal for excluded pairs. Column 0 has the number `first`."""
    if exclude is None:
        return None, None
    if isinstance(exclude, str):
        row_numbers = torch.arange(rows.start, rows.stop, device=device)
        return row_numbers, torch.arange(first + columns.start, first + columns.stop, device=device)
    return exclude[0][rows].long(), exclude[1][columns].long()
