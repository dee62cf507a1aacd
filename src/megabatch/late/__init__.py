"""Late interaction: queries and documents of many vectors each, compared by the best match of every query vector.

s_ij = scale · Σ_t max_u ⟨q_it, d_ju⟩ is the MaxSim score of ColBERT. Neither the scores nor the winners are held, unless all of
them fit in a workspace of fixed size.
"""

from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import checks
from megabatch.dispatch import Backend, Execution, Group
from megabatch.late import operators as own_operators
from megabatch.late.tiles import TokenRows
from megabatch.operators import apply
from megabatch.pairwise import LogSumExp
from megabatch.primitives import KEPT, SEPARATE, SKIPPED, accumulator_dtype, execution, number, widen_float16

__all__ = ["KEPT", "SEPARATE", "Similarities", "Tokens", "maxsim_logsumexp"]


class Tokens(NamedTuple):
    """Items of many vectors: the tokens of texts, or the patches of pages.

    Attributes:
        values: (N, L, D) padded, or (T, D) packed: the vectors of one item after those of another.
        mask: (N, L) or (T,) bool; vectors where it is False do not count. None if all do.
        lengths: (N,) integers of at least 1, for packed items: how many vectors each has.

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
    """The similarities between two checked sets of items, and how calls run."""

    def __init__(
        self,
        query: Tensor | Tokens,
        document: Tensor | Tokens,
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
        self.query, self.document = (
            _items(value, mask, name) for value, mask, name in zip((query, document), masks, names, strict=True)
        )
        self.run: Execution = execution(
            self.query.values, self.document.values, names, group=group, purpose=purpose, loss=loss, backend=backend
        )
        self.scale = number(scale, "scale", self.query.values, shared=True)
        self.normalize, self.names = normalize, names
        self._query_vectors = self.query.values  # as they were given

    def share_query(self) -> None:
        """Prepares the query for several operators (`primitives.widen_float16`), here and in `against`."""
        self.query = replace(self.query, values=widen_float16(self.query.values))

    def against(self, document: Tensor | Tokens, name: str) -> "Similarities":
        """The same queries, which are shared, against other documents."""
        other = copy(self)
        other.document, other.names = _items(document, None, name), (self.names[0], name)
        checks.embeddings(self._query_vectors, other.document.values, other.names)
        return other

    def check_pairs(self) -> None:
        """At least one query, if no other rank can have one."""
        if not self.run.group and self.query.count == 0:
            raise ValueError(f"{self.names[0]} must have at least one item: the mean over no pairs is undefined")

    def check_ids(self, ids: Any) -> None:
        """One integer for each query, which is its document's as well; or None."""
        checks.ids(ids, "ids", self._rows(self.query), self.names[0])

    def check_exclude(self, value: Any) -> None:
        """None, "diagonal", or (row ids, column ids)."""
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
        """(row, column, match, mean_weight), as `primitives.logsumexp`."""
        row, col, match, mean_weight, *_ = apply(own_operators.maxsim_logsumexp, *self._inputs(ids, diagonal, columns=columns))
        return row, col, match, mean_weight

    def of_own(self) -> tuple[Tensor, Tensor]:  # (N, M / N), ()
        """(similarities of each query to its own documents, mean_weight)."""
        scores, mean_weight = apply(own_operators.maxsim_pairs, *self._inputs((None, None), KEPT, columns=False))
        return scores, mean_weight

    def _inputs(self, ids: tuple[Tensor | None, Tensor | None], diagonal: str, *, columns: bool) -> tuple[Any, ...]:
        query, document = self.query, self.document
        learned = query.values, document.values, self.scale
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)  # a gradient may come
        return (
            *learned,
            *(query.lengths, document.lengths, query.valid, document.valid),
            *ids,
            *(self.normalize, columns, keep, query.width, document.width, diagonal),
            *self.run,
        )


def _items(value: Tensor | Tokens, mask: Tensor | None, name: str) -> TokenRows:
    tokens = value if isinstance(value, Tokens) else Tokens(value)
    if not isinstance(tokens.values, Tensor):
        raise TypeError(f"{name} must be a tensor or Tokens, got {type(tokens.values).__name__}")
    if mask is not None and tokens.mask is not None:
        raise ValueError(f"{name}_mask must be None where {name} has a mask of its own")
    mask, values, lengths = tokens.mask if mask is None else mask, tokens.values, tokens.lengths
    expected = 3 if lengths is None else 2
    if values.dim() != expected or 0 in values.shape[1:]:
        layout = "(items, vectors, width)" if lengths is None else "(vectors, width) with lengths"
        raise ValueError(f"{name} must have shape {layout}, none of the last ones 0, got {tuple(values.shape)}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != values.shape[:-1]:
            came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of {name} must have shape {tuple(values.shape[:-1])}, got {came}")
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
            f"{name}.lengths must be at least 1 and add up to the {len(values)} vectors of {name}, got a least of {least} "
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
    """Row and column logsumexps of all MaxSim scores, both from one pass over them.

    Same as, without the products and without the scores:

        s = scale * torch.einsum("itd,jud->ijtu", query, document).amax(3).sum(2)
        return s.logsumexp(1), s.logsumexp(0)

    Differentiable once, in query, document and scale. Of equal products the first wins, and gets the gradient. Masked vectors
    do not count. A query without vectors has the score 0 with every document; a document without vectors is left out of all
    sums. Memory beyond inputs and gradients is a float32 sum of the gradients and a workspace of fixed size. See
    `pairwise_logsumexp` for the precision.

    Examples:
        ```python
        row, col = mb.maxsim_logsumexp(query, document, 20.0, document_mask=mask)
        ```

    Args:
        query: (N, Lq, D) vectors, or `Tokens`.
        document: (M, Ld, D) vectors of the same dtype, or `Tokens`.
        scale: a float, or a tensor of one element.
        query_mask: (N, Lq); vectors where it is False do not count.
        document_mask: (M, Ld); the same.
        exclude: None, "diagonal" or (row ids, column ids); see `pairwise_logsumexp`.
        normalize: divide the scores of a query by its number of vectors.
        group: see `clip_loss`. Sums are over the queries and documents of all ranks; the documents' vectors travel.
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
