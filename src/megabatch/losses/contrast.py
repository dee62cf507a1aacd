"""The sums of the losses over queries and keys: over the batch, hard negatives and keys of earlier steps.

Every loss of this family is a function of two numbers for each query i: log Σ exp(s) over its negatives, and s_ii, its
similarity to its own key. Each kind of negative takes one pass, and their sums are put together by adding exponentials.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from megabatch import checks, primitives
from megabatch.losses import negatives as further_negatives
from megabatch.losses.formulas import log_add, segment_logsumexp
from megabatch.losses.negatives import Negatives
from megabatch.primitives import (
    APART,
    SKIPPED,
    Backend,
    Ceiling,
    Execution,
    Group,
    LogSums,
    Reduction,
    ceiling_above,
    execution,
    logsumexp,
    matching_products,
)

# Rows and columns of a pass; row i belongs to query i, column j is a negative of it.
QUERY_KEY: Final = "query-key"
KEY_QUERY: Final = "key-query"
QUERY_QUERY: Final = "query-query"
KEY_KEY: Final = "key-key"
Contrast = Literal["query-key", "key-query", "query-query", "key-key"]
CONTRASTS: tuple[Contrast, ...] = (QUERY_KEY, KEY_QUERY, QUERY_QUERY, KEY_KEY)
_SWAPPED: dict[Contrast, Contrast] = {QUERY_KEY: KEY_QUERY, KEY_QUERY: QUERY_KEY, QUERY_QUERY: KEY_KEY, KEY_KEY: QUERY_QUERY}


class Direction(NamedTuple):
    """The numbers that a loss is made of: of queries that look for their keys, or of keys that look for their queries."""

    negatives: Tensor  # (N,) log Σ exp(s) over the negatives of query i; −inf without any
    match: Tensor  # (N,) s_ii


class Sums(NamedTuple):
    """One direction or both. A sum over local queries times `share` is this rank's part of a mean over the batch."""

    directions: tuple[Direction, ...]
    share: Tensor  # ()


@dataclass(frozen=True)
class Batch:
    """Queries, their keys, and what is known of them; row i of `key` belongs to row i of `query`."""

    query: Tensor  # (N, D)
    key: Tensor  # (N, D)
    scale: Tensor  # () float64
    contrast: Sequence[Contrast]
    symmetric: bool
    run: Execution
    ids: Tensor | None  # (N,)
    log_q: Tensor | None  # (N,)
    negatives: tuple[Negatives, ...]  # flat
    limit: Tensor | None  # (N,) keys with a larger product are left out
    guide: tuple[Tensor, Tensor] | None  # (N, E), (N, E): whose products are compared with the limit

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        scale: float | Tensor,
        negatives: Tensor | Negatives | Sequence[Tensor | Negatives] | None,
        contrast: Sequence[Contrast],
        *,
        symmetric: bool,
        ids: Tensor | None,
        log_q: Tensor | None,
        margin: float | Tensor | None,
        guide: tuple[Tensor, Tensor] | None,
        reduction: Reduction,
        group: Group,
        backend: Backend,
    ) -> "Batch":
        """The arguments of a loss, checked."""
        _check_contrast(contrast)
        purpose = _purpose(contrast, symmetric=symmetric)
        run = primitives.pairs(
            query, key, ("query", "key"), ids=ids, reduction=reduction, group=group, purpose=purpose, backend=backend
        )
        checks.offsets(log_q, "log_q", key, "key")
        further = further_negatives.checked(negatives, query, ids, against_keys=KEY_KEY in contrast, guided=guide is not None)
        limit = _limit(query, key, margin, guide, backend)
        number, correction = primitives.number(scale, "scale", query, shared=True), primitives.offsets(log_q, query)
        return cls(query, key, number, contrast, symmetric, run, ids, correction, further, limit, guide)

    def sums(self, scale: Tensor | None = None) -> Sums:
        """The sums over the negatives named by `contrast`, and over further negatives; if `symmetric`, also the sums of keys.

        Args:
            scale: () in place of the batch's own.
        """
        scale = self.scale if scale is None else scale
        swapped = [_SWAPPED[name] for name in self.contrast] if self.symmetric else []
        terms, match, share = self._terms(scale, {*self.contrast, *swapped})
        of_query = [terms[name] for name in self.contrast] + [self._further(scale, n) for n in self.negatives]
        if KEY_KEY in self.contrast:
            owned = [n for n in self.negatives if n.owner is not None and not n.private]
            of_query += [self._further_of_keys(scale, n) for n in owned]
        queries = Direction(log_add(of_query, match), match if self.log_q is None else match - self.log_q)
        if not self.symmetric:
            return Sums((queries,), share)
        return Sums((queries, Direction(log_add([terms[name] for name in swapped], match), match)), share)

    def _terms(self, scale: Tensor, names: Collection[Contrast]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """One (N,) for each name, the matching similarities and the share."""
        terms: dict[str, Tensor] = {}
        match = share = None
        if QUERY_KEY in names and KEY_QUERY in names and self.limit is None:
            terms[QUERY_KEY], terms[KEY_QUERY], match, share = self._in_batch(scale, QUERY_KEY, columns=True)
        for name in (name for name in CONTRASTS if name in names and name not in terms):
            sums = self._in_batch(scale, name)
            terms[name] = sums.row
            if name in (QUERY_KEY, KEY_QUERY):
                match, share = sums.match, sums.share
        if match is None or share is None:
            products, _, share = matching_products(self.query, self.key, self.run)
            match = _scaled(products, scale)
        return terms, match, share

    def _in_batch(self, scale: Tensor, name: str, *, columns: bool = False) -> LogSums:
        """log Σ_{j≠i} exp s_ij, with `columns` both directions from one pass, and s_ii where rows and columns match."""
        side = {"query": self.query, "key": self.key}
        seen = {} if self.guide is None else dict(zip(side, self.guide, strict=True))
        of_rows, of_columns = name.split("-")
        log_q = None if of_columns == "query" else self.log_q
        row, col, match, share = logsumexp(
            side[of_rows],
            side[of_columns],
            scale,
            self.run,
            col_bias=None if log_q is None else -log_q,
            ids=(self.ids, self.ids),
            diagonal=SKIPPED if of_rows == of_columns else APART,
            columns=columns,
            ceiling=self._ceiling(seen.get(of_rows), seen.get(of_columns)),
        )
        if log_q is not None and of_rows != of_columns:
            col, match = col + log_q if columns else col, match + log_q
        return LogSums(row, col, match, share)

    def _further(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Queries against keys that are not of the batch."""
        if negatives.private:
            return self._private(scale, negatives)
        ids = (None, None) if self.ids is None or negatives.ids is None else (self.ids, negatives.ids)
        return self._against(scale, self.query, negatives, ids, None if self.guide is None else self.guide[0])

    def _further_of_keys(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Keys against the hard negatives of other queries."""
        assert negatives.owner is not None
        # Rows of different ranks have to differ.
        first = self.run.rank << 40
        own = torch.arange(first, first + len(self.key), device=self.key.device)
        ids = own, negatives.owner + first
        return self._against(scale, self.key, negatives, ids, None if self.guide is None else self.guide[1])

    def _against(
        self,
        scale: Tensor,
        rows: Tensor,  # (N, D)
        negatives: Negatives,
        ids: tuple[Tensor | None, Tensor | None],
        seen: Tensor | None,  # (N, E)
    ) -> Tensor:  # (N,)
        return logsumexp(
            rows,
            negatives.keys,
            scale,
            self.run,
            col_bias=None if negatives.log_q is None else -negatives.log_q,
            ids=ids,
            ceiling=self._ceiling(seen, negatives.guide),
        ).row

    def _private(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Each query against its own hard negatives alone: O(M·D), no pass over pairs."""
        owner = negatives.owner
        assert owner is not None
        products, *_ = matching_products(self.query[owner], negatives.keys, self.run._replace(group=""))
        s = _scaled(products, scale)
        if negatives.log_q is not None:
            s = s - negatives.log_q
        if self.ids is not None and negatives.ids is not None:
            s = s.masked_fill(self.ids[owner] == negatives.ids, -torch.inf)
        if self.limit is not None:
            compared = products.detach()
            if self.guide is not None and negatives.guide is not None:
                seen = self.guide[0][owner]
                compared, *_ = matching_products(seen, negatives.guide, execution(seen, negatives.guide))
            s = s.masked_fill(compared > self.limit[owner], -torch.inf)
        return segment_logsumexp(s, owner, len(self.query))

    def _ceiling(self, rows: Tensor | None, columns: Tensor | None) -> Ceiling | None:
        return None if self.limit is None else Ceiling(self.limit, rows, columns)


def _scaled(products: Tensor, scale: Tensor) -> Tensor:  # (K,), () float64
    """s. The terms of the scale's gradient are added up in float64."""
    return (products.double() * scale).to(products.dtype)


def _purpose(contrast: Sequence[Contrast], *, symmetric: bool) -> str:
    """The contrasts in words, which ranks compare: different contrasts run the same operators, so nothing else would differ."""
    names: list[str] = [name for name in CONTRASTS if name in contrast] or ["nothing"]
    return " ".join(["contrast", *names, *(["symmetric"] if symmetric else [])])


def _check_contrast(value: Any) -> None:
    wrong = isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value)
    if wrong or len(set(value)) < len(value) or not set(value) <= set(CONTRASTS):
        raise ValueError(f"contrast must be a sequence of different names of {', '.join(map(repr, CONTRASTS))}, got {value!r}")


def _limit(
    query: Tensor, key: Tensor, margin: float | Tensor | None, guide: tuple[Tensor, Tensor] | None, backend: Backend
) -> Tensor | None:  # (N,)
    if margin is None and guide is None:
        return None
    margin = 0.0 if margin is None else margin
    if isinstance(margin, Tensor) and margin.numel() != 1:
        checks.offsets(margin, "margin", query, "query")
    else:
        checks.number(margin, "margin", query)
    if isinstance(margin, Tensor):
        checks.without_gradient([margin], ["margin"])
    if guide is None:
        return ceiling_above(query.detach(), key.detach(), margin, backend)
    _check_guide(guide, query)
    return ceiling_above(guide[0], guide[1], margin)


def _check_guide(guide: Any, query: Tensor) -> None:
    if not isinstance(guide, Sequence) or len(guide) != 2:
        came = f"{len(guide)} values" if isinstance(guide, Sequence) else type(guide).__name__
        raise TypeError(f"guide must be a pair of embeddings, of query and of key, got {came}")
    names = ("guide[0]", "guide[1]")
    checks.embeddings(guide[0], guide[1], names, same_rows=True)
    checks.same_rows(guide[0], names[0], query, "query")
    checks.without_gradient(guide, names)
