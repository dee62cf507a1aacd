"""Late interaction: queries and documents have many vectors each, and a score sums the best match of every query vector.

s_ij = scale · Σ_t max_u ⟨q_it, d_ju⟩ is the MaxSim score of ColBERT. Scores and argmax indices are not stored, unless all of
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
        self._query_vectors = self.query.values  # before `share_query`

    def share_query(self) -> None:
        """Prepares the query for several operators. Results of `against` share the query (`primitives.widen_float16`)."""
        self.query = replace(self.query, values=widen_float16(self.query.values))

    def against(self, document: Tensor | Tokens, name: str) -> "Similarities":
        """Returns the scores of the shared queries with other documents."""
        other = copy(self)
        other.document, other.names = _items(document, None, name), (self.names[0], name)
        checks.embeddings(self._query_vectors, other.document.values, other.names)
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

    def of_own(self) -> tuple[Tensor, Tensor]:  # (N, M / N), ()
        """Returns (the scores of each query with its own documents, mean_weight)."""
        scores, mean_weight = apply(own_operators.maxsim_pairs, *self._inputs((None, None), KEPT, columns=False))
        return scores, mean_weight

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
