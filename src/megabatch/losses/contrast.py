"""What a query is compared with: keys and queries of the batch, hard negatives, keys of earlier steps. No loss yet.

Every loss of this family is a function of a few sums for each query i: log Σ exp(s) over what counts as a negative, and s_ii,
its similarity to its own key. Each kind of negative is one walk, and the walks are put together by adding exponentials.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from megabatch.arguments import Execution, execution
from megabatch.losses.sums import (
    APART,
    SKIPPED,
    Ceiling,
    log_add,
    logsumexp,
    matching_products,
    segment_logsumexp,
)

# Rows and columns of a walk; row i belongs to query i, column j is a negative of it.
QUERY_KEY: Final = "query-key"
KEY_QUERY: Final = "key-query"
QUERY_QUERY: Final = "query-query"
KEY_KEY: Final = "key-key"
Contrast = Literal["query-key", "key-query", "query-query", "key-key"]
CONTRASTS: tuple[Contrast, ...] = (QUERY_KEY, KEY_QUERY, QUERY_QUERY, KEY_KEY)
_EXCHANGED: dict[Contrast, Contrast] = {QUERY_KEY: KEY_QUERY, KEY_QUERY: QUERY_KEY, QUERY_QUERY: KEY_KEY, KEY_KEY: QUERY_QUERY}


class Negatives(NamedTuple):
    """Keys that no query of the batch matches: hard negatives, or keys of earlier steps.

    Over a group, each rank passes its own, as many as it has.

    Attributes:
        keys: (M, D), or (N, K, D) for K of each query.
        ids: (M,) or (N, K); not a negative of queries with the same id.
        log_q: (M,) or (N, K); subtracted from their similarities.
        owner: (M,) the query that each was found for, by its row on this rank; known for (N, K, D).
        private: whether they are negatives of their owner alone.
        guide: (M, E) or (N, K, E), the guide's embeddings of them.
    """

    keys: Tensor
    ids: Tensor | None = None
    log_q: Tensor | None = None
    owner: Tensor | None = None
    private: bool = False
    guide: Tensor | None = None

    def flat(self) -> "Negatives":
        """With one row for each key."""
        if self.keys.dim() == 2:
            return self
        N, K, _ = self.keys.shape
        flattened = (None if part is None else part.flatten(0, 1) for part in (self.keys, self.ids, self.log_q, self.guide))
        keys, ids, log_q, guide = flattened
        assert keys is not None
        owner = torch.arange(N, device=keys.device).repeat_interleave(K)
        return Negatives(keys, ids, log_q, owner, self.private, guide)


class Direction(NamedTuple):
    """What a loss is made of: queries that look for their keys, or keys for their queries."""

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
    run: Execution
    ids: Tensor | None = None  # (N,)
    log_q: Tensor | None = None  # (N,)
    negatives: tuple[Negatives, ...] = ()  # flat
    limit: Tensor | None = None  # (N,) products above are no negatives
    guide: tuple[Tensor, Tensor] | None = None  # (N, E), (N, E): whose products are compared with the limit

    def sums(self, scale: Tensor, contrast: Collection[Contrast], *, symmetric: bool) -> Sums:
        """The sums over the negatives named by `contrast`, and over further negatives; if `symmetric`, also those of keys."""
        exchanged = [_EXCHANGED[name] for name in contrast] if symmetric else []
        terms, match, share = self._terms(scale, {*contrast, *exchanged})
        of_query = [terms[name] for name in contrast] + [self._further(scale, n) for n in self.negatives]
        of_query += [self._further_of_keys(scale, n) for n in self.negatives if KEY_KEY in contrast and _is_owned(n)]
        queries = Direction(log_add(of_query, match), match if self.log_q is None else match - self.log_q)
        if not symmetric:
            return Sums((queries,), share)
        return Sums((queries, Direction(log_add([terms[name] for name in exchanged], match), match)), share)

    def _terms(self, scale: Tensor, names: Collection[Contrast]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """One (N,) for each name, the matching similarities and the share."""
        terms: dict[str, Tensor] = {}
        if QUERY_KEY in names and KEY_QUERY in names and self.limit is None:
            terms[QUERY_KEY], terms[KEY_QUERY], match, share = self._both_directions(scale)
        elif QUERY_KEY in names or KEY_QUERY in names:
            for name in (n for n in (QUERY_KEY, KEY_QUERY) if n in names):
                terms[name], match, share = self._in_batch(scale, name)
        else:
            products, _, share = matching_products(self.query, self.key, self.run)
            match = _scaled(products, scale)
        for name in (n for n in (QUERY_QUERY, KEY_KEY) if n in names):
            terms[name], *_ = self._in_batch(scale, name)
        return terms, match, share

    def _both_directions(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys of queries and queries of keys, from one pass."""
        correction = None if self.log_q is None else -self.log_q
        row, col, match, share = logsumexp(
            self.query,
            self.key,
            scale,
            self.run,
            col_bias=correction,
            ids=(self.ids, self.ids),
            diagonal=APART,
            columns=True,
        )
        if self.log_q is not None:
            col, match = col + self.log_q, match + self.log_q
        return row, col, match, share

    def _in_batch(self, scale: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """log Σ_{j≠i} exp s_ij, and s_ii and the share where rows and columns match."""
        side = {"query": self.query, "key": self.key}
        seen = {} if self.guide is None else dict(zip(side, self.guide, strict=True))
        rows, columns = name.split("-")
        correction = None if self.log_q is None or columns == "query" else -self.log_q
        row, _, match, share = logsumexp(
            side[rows],
            side[columns],
            scale,
            self.run,
            col_bias=correction,
            ids=(self.ids, self.ids),
            diagonal=SKIPPED if rows == columns else APART,
            ceiling=self._ceiling(seen.get(rows), seen.get(columns)),
        )
        return row, match if correction is None or rows == columns else match - correction, share

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
        """Each query against its own hard negatives alone: O(M·D), no walk."""
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
    """s, whose gradients are added up in float64 where they become that of the scale."""
    return (products.double() * scale).to(products.dtype)


def _is_owned(negatives: Negatives) -> bool:
    return negatives.owner is not None and not negatives.private
