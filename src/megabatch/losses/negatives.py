"""Negatives from outside the batch, and the sums over all negatives of a query that InfoNCE, DCL and HCL share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from megabatch import checks, primitives
from megabatch.dispatch import Backend, Execution, Group, Reduction
from megabatch.primitives import (
    SEPARATE,
    SKIPPED,
    Ceiling,
    LogSums,
    ceiling_above,
    execution,
    log_add,
    logits_of,
    logsumexp,
    matching_products,
    segment_logsumexp,
)

# ----------------------------------------------------------------------------------------------------------------------
# Negatives from outside the batch, which are hard negatives or keys of earlier steps, and the checks of them.


class Negatives(NamedTuple):
    """Keys that match no query of the batch, such as hard negatives or keys of earlier steps.

    In a group, each rank passes its own negatives, and the numbers may differ between ranks.

    Attributes:
        keys: (M, D), or (N, K, D) for K keys of each query.
        ids: (M,) or (N, K). A key is not a negative of queries with an equal id. If the ids of the batch have two columns, the
            shape is (M, 2) or (N, K, 2).
        log_q: (M,) or (N, K), subtracted from the logits of each key.
        owner: (M,) the query that each key was mined for, as a row on this rank. It must be None if keys are (N, K, D).
        private: whether each key is a negative of only its owner.
        guide: (M, E) or (N, K, E), the guide's embeddings of the keys.

    Examples:
        ```python
        hard = mb.Negatives(hard, private=True)  # (N, K, D): K negatives of each query, used only for that query
        loss = mb.info_nce_loss(query, key, scale=50.0, negatives=[hard, bank])
        ```
    """

    keys: Tensor
    ids: Tensor | None = None
    log_q: Tensor | None = None
    owner: Tensor | None = None
    private: bool = False
    guide: Tensor | None = None

    def flat(self) -> "Negatives":
        """Returns the negatives with one row for each key."""
        if self.keys.dim() == 2:
            return self
        N, K, _ = self.keys.shape
        flattened = (None if part is None else part.flatten(0, 1) for part in (self.keys, self.ids, self.log_q, self.guide))
        keys, ids, log_q, guide = flattened
        assert keys is not None
        owner = torch.arange(N, device=keys.device).repeat_interleave(K)
        return Negatives(keys, ids, log_q, owner, self.private, guide)


def check_negatives(
    value: Any, query: Tensor, ids: Tensor | None, *, against_keys: bool, guided: bool
) -> tuple[Negatives, ...]:
    """Checks the argument `negatives` of a loss. Returns it flattened, with the dtypes that operators expect.

    Args:
        value: None, a tensor, `Negatives`, or a sequence of these.
        query: (N, D).
        ids: (N,) of the batch.
        against_keys: whether keys of the batch are compared with the negatives as well.
        guided: whether a guide decides which negatives are excluded.
    """
    if value is None:
        return ()
    several = not isinstance(value, (Tensor, Negatives))
    if several and not isinstance(value, Sequence):
        raise TypeError(f"negatives must be a tensor, Negatives, a sequence of these or None, got {type(value).__name__}")
    named = [(f"negatives[{i}]", part) for i, part in enumerate(value)] if several else [("negatives", value)]
    return tuple(_check_part(part, name, query, ids, against_keys=against_keys, guided=guided) for name, part in named)


def _check_part(value: Any, name: str, query: Tensor, ids: Tensor | None, *, against_keys: bool, guided: bool) -> Negatives:
    if isinstance(value, Tensor):
        value = Negatives(value)
    if not isinstance(value, Negatives):
        raise TypeError(f"{name} must be a tensor or Negatives, got {type(value).__name__}")
    _check_shapes(value, name, query)
    flat = value.flat()
    keys = flat.keys
    checks.embeddings(query, keys, ("query", name))
    checks.ids(flat.ids, f"{name}.ids", keys, name, two_columns=True)
    checks.offsets(flat.log_q, f"{name}.log_q", keys, name)
    checks.ids(flat.owner, f"{name}.owner", keys, name)
    if flat.owner is not None and _can_look_at(flat.owner) and ((flat.owner < 0) | (flat.owner >= len(query))).any():
        raise ValueError(f"{name}.owner must be numbers of queries, 0 to {len(query) - 1}, got {flat.owner.tolist()[:8]} …")
    if flat.private and flat.owner is None:
        raise ValueError(f"{name} must have shape (N, K, D) or owners to be private, got shape {tuple(keys.shape)}")
    if flat.ids is not None and ids is None:
        raise ValueError(f"ids must be given if {name}.ids are, because the two are compared, got None")
    if flat.ids is not None and ids is not None and flat.ids.dim() != ids.dim():
        raise ValueError(
            f"{name}.ids must have as many columns as ids, because the two are compared, got shapes {tuple(flat.ids.shape)} "
            f"and {tuple(ids.shape)}"
        )
    if flat.ids is not None and flat.owner is not None and not flat.private and against_keys:
        raise ValueError(
            f'{name}.ids must be None with the contrast "key-key", because this contrast excludes the negatives of a query by '
            "their owner, and an operator excludes pairs by only one kind of id"
        )
    if guided:
        if flat.guide is None:
            raise ValueError(f"{name}.guide must be given if guide is, with the guide's embeddings of these keys, got None")
        checks.embeddings(flat.guide, flat.guide, (f"{name}.guide", f"{name}.guide"))
        checks.same_rows(flat.guide, f"{name}.guide", keys, name)
        checks.without_gradient([flat.guide], [f"{name}.guide"])
    owner = None if flat.owner is None else flat.owner.long()
    return flat._replace(owner=owner, log_q=primitives.offsets(flat.log_q, query))


def _check_shapes(value: Negatives, name: str, query: Tensor) -> None:
    given = value.keys
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor of embeddings, got {type(given).__name__}")
    if given.dim() not in (2, 3):
        shape = tuple(given.shape)
        raise ValueError(f"{name} must have shape (M, D), or (N, K, D) for K negatives of each query, got shape {shape}")
    if given.dim() == 2:
        return
    if len(given) != len(query):
        raise ValueError(f"{name} must have {len(query)} rows, one for each query, got shape {tuple(given.shape)}")
    if value.owner is not None:
        raise ValueError(f"{name}.owner must be None where keys have shape (N, K, D): row i belongs to query i")
    for part, what in ((value.ids, "ids"), (value.log_q, "log_q"), (value.guide, "guide")):
        if part is not None and not isinstance(part, Tensor):
            raise TypeError(f"{name}.{what} must be a tensor or None, got {type(part).__name__}")
        if part is not None and part.shape[:2] != given.shape[:2]:
            raise ValueError(f"{name}.{what} must have shape {tuple(given.shape[:2])}, got {tuple(part.shape)}")


def _can_look_at(values: Tensor) -> bool:
    """Returns whether the CPU can read the values without synchronizing. Meta and traced tensors have no values."""
    return values.is_cpu and not torch.compiler.is_compiling()


# ----------------------------------------------------------------------------------------------------------------------
# The sums over all negatives: the batch, hard negatives and keys of earlier steps.
#
# Every loss of this family is a function of two numbers for each query i: log Σ exp(s) over its negatives, and the logit s_ii
# of its own key. Each kind of negative takes one pass. The sums are combined by adding exponentials.


# The rows and columns of a pass. Row i belongs to query i, and column j is a negative of it.
QUERY_KEY: Final = "query-key"
KEY_QUERY: Final = "key-query"
QUERY_QUERY: Final = "query-query"
KEY_KEY: Final = "key-key"
Contrast = Literal["query-key", "key-query", "query-query", "key-key"]
CONTRASTS: tuple[Contrast, ...] = (QUERY_KEY, KEY_QUERY, QUERY_QUERY, KEY_KEY)
_SWAPPED: dict[Contrast, Contrast] = {QUERY_KEY: KEY_QUERY, KEY_QUERY: QUERY_KEY, QUERY_QUERY: KEY_KEY, KEY_KEY: QUERY_QUERY}


class Direction(NamedTuple):
    """The inputs of a loss for one direction, from queries to keys or from keys to queries."""

    negatives: Tensor  # (N,) float64, log Σ exp(s) over the negatives of query i; −inf without negatives
    match: Tensor  # (N,) float64, s_ii


class ContrastSums(NamedTuple):
    """One or both directions. A sum over local queries, multiplied by `mean_weight`, is this rank's part of a batch mean."""

    directions: tuple[Direction, ...]
    mean_weight: Tensor  # ()


@dataclass(frozen=True)
class ContrastBatch:
    """Queries, their keys and the options of a loss. Row i of `key` belongs to row i of `query`."""

    query: Tensor  # (N, D)
    key: Tensor  # (N, D)
    scale: Tensor  # () float64
    contrast: Sequence[Contrast]
    symmetric: bool
    run: Execution
    ids: Tensor | None  # (N,) or (N, 2)
    log_q: Tensor | None  # (N,)
    negatives: tuple[Negatives, ...]  # flat
    limit: Tensor | None  # (N,) keys with a larger dot product are excluded
    guide: tuple[Tensor, Tensor] | None  # (N, E), (N, E); if given, their dot products are compared with the limit

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
        loss: str,
        **settings: Any,
    ) -> "ContrastBatch":
        """Checks the arguments of a loss. In a group, ranks compare the name of the loss and the `settings`."""
        _check_contrast(contrast)
        comparable = None if margin is None else "tensor" if isinstance(margin, Tensor) else margin
        loss = primitives.describe_loss(group, loss, **settings, margin=comparable, reduction=reduction)
        purpose = describe_purpose(contrast, symmetric=symmetric)
        run = primitives.pairs(
            *(query, key, ("query", "key")),
            ids=ids,
            reduction=reduction,
            group=group,
            purpose=purpose,
            loss=loss,
            backend=backend,
        )
        checks.offsets(log_q, "log_q", key, "key")
        further = check_negatives(negatives, query, ids, against_keys=KEY_KEY in contrast, guided=guide is not None)
        limit = _limit(query, key, margin, guide, backend)
        number, correction = primitives.number(scale, "scale", query, shared=True), primitives.offsets(log_q, query)
        query, key = primitives.widen_float16(query), primitives.widen_float16(key)
        further = tuple(part._replace(keys=primitives.widen_float16(part.keys)) for part in further)
        return cls(query, key, number, contrast, symmetric, run, ids, correction, further, limit, guide)

    def sums(self, scale: Tensor | None = None) -> ContrastSums:
        """Computes the sums over the negatives of `contrast` and over further negatives.

        If `symmetric`, this includes the sums of the direction from keys to queries.

        Args:
            scale: () replaces the scale of the batch.
        """
        scale = self.scale if scale is None else scale
        swapped = [_SWAPPED[name] for name in self.contrast] if self.symmetric else []
        terms, match, mean_weight = self._terms(scale, {*self.contrast, *swapped})
        of_query = [terms[name] for name in self.contrast] + [self._further(scale, n) for n in self.negatives]
        if KEY_KEY in self.contrast:
            owned = [n for n in self.negatives if n.owner is not None and not n.private]
            of_query += [self._further_of_keys(scale, n) for n in owned]
        queries = Direction(log_add(of_query, match), match if self.log_q is None else match - self.log_q)
        if not self.symmetric:
            return ContrastSums((queries,), mean_weight)
        return ContrastSums((queries, Direction(log_add([terms[name] for name in swapped], match), match)), mean_weight)

    def _terms(self, scale: Tensor, names: Collection[Contrast]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Returns a vector (N,) for each name, the matching logits and the `mean_weight`."""
        terms: dict[str, Tensor] = {}
        match = mean_weight = None
        if QUERY_KEY in names and KEY_QUERY in names and self.limit is None:
            terms[QUERY_KEY], terms[KEY_QUERY], match, mean_weight = self._in_batch(scale, QUERY_KEY, columns=True)
        for name in (name for name in CONTRASTS if name in names and name not in terms):
            sums = self._in_batch(scale, name)
            terms[name] = sums.row
            if name in (QUERY_KEY, KEY_QUERY):
                match, mean_weight = sums.match, sums.mean_weight
        if match is None or mean_weight is None:
            products, _, mean_weight = matching_products(self.query, self.key, self.run)
            match = logits_of(products, scale, self.run)
        return terms, match, mean_weight

    def _in_batch(self, scale: Tensor, name: str, *, columns: bool = False) -> LogSums:
        """Computes log Σ_{j≠i} exp s_ij, and s_ii if rows and columns match.

        With `columns`, one pass computes both directions.
        """
        side = {"query": self.query, "key": self.key}
        guide = {} if self.guide is None else dict(zip(side, self.guide, strict=True))
        of_rows, of_columns = name.split("-")
        log_q = None if of_columns == "query" else self.log_q
        row, col, match, mean_weight = logsumexp(
            side[of_rows],
            side[of_columns],
            scale,
            self.run,
            col_bias=None if log_q is None else -log_q,
            ids=(self.ids, self.ids),
            diagonal=SKIPPED if of_rows == of_columns else SEPARATE,
            columns=columns,
            ceiling=self._ceiling(guide.get(of_rows), guide.get(of_columns)),
        )
        if log_q is not None and of_rows != of_columns:
            col, match = col + log_q if columns else col, match + log_q
        return LogSums(row, col, match, mean_weight)

    def _further(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Sums each query over keys from outside the batch."""
        if negatives.private:
            return self._private(scale, negatives)
        ids = (None, None) if self.ids is None or negatives.ids is None else (self.ids, negatives.ids)
        return self._against(scale, self.query, negatives, ids, None if self.guide is None else self.guide[0])

    def _further_of_keys(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Sums each key over the hard negatives of other queries."""
        assert negatives.owner is not None
        # The ids of different ranks must differ.
        first = primitives.rank_in(self.run) << 40
        own = torch.arange(first, first + len(self.key), device=self.key.device)
        ids = own, negatives.owner + first
        return self._against(scale, self.key, negatives, ids, None if self.guide is None else self.guide[1])

    def _against(
        self,
        scale: Tensor,
        rows: Tensor,  # (N, D)
        negatives: Negatives,
        ids: tuple[Tensor | None, Tensor | None],
        guide: Tensor | None,  # (N, E)
    ) -> Tensor:  # (N,)
        return logsumexp(
            rows,
            negatives.keys,
            scale,
            self.run,
            col_bias=None if negatives.log_q is None else -negatives.log_q,
            ids=ids,
            ceiling=self._ceiling(guide, negatives.guide),
        ).row

    def _private(self, scale: Tensor, negatives: Negatives) -> Tensor:  # (N,)
        """Sums each query over its own hard negatives, in O(M·D) and without a pass over all pairs."""
        owner = negatives.owner
        assert owner is not None
        products, *_ = matching_products(self.query[owner], negatives.keys, self.run._replace(group=""))
        s = logits_of(products, scale, self.run)
        if negatives.log_q is not None:
            s = s - negatives.log_q
        if self.ids is not None and negatives.ids is not None:
            same = self.ids[owner] == negatives.ids
            s = s.masked_fill(same if same.dim() == 1 else same.any(1), -torch.inf)
        if self.limit is not None:
            compared = products.detach()
            if self.guide is not None and negatives.guide is not None:
                rows = self.guide[0][owner]
                compared, *_ = matching_products(rows, negatives.guide, execution(rows, negatives.guide))
            s = s.masked_fill(compared > self.limit[owner], -torch.inf)
        return segment_logsumexp(s, owner, len(self.query))

    def _ceiling(self, rows: Tensor | None, columns: Tensor | None) -> Ceiling | None:
        return None if self.limit is None else Ceiling(self.limit, rows, columns)


def describe_purpose(contrast: Sequence[Contrast], *, symmetric: bool) -> str:
    """Returns the contrasts as text. Ranks compare it, because different contrasts may run the same operators."""
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
        given = f"{len(guide)} values" if isinstance(guide, Sequence) else type(guide).__name__
        raise TypeError(f"guide must be a pair of embeddings, of query and of key, got {given}")
    names = ("guide[0]", "guide[1]")
    checks.embeddings(guide[0], guide[1], names, same_rows=True)
    checks.same_rows(guide[0], names[0], query, "query")
    checks.without_gradient(guide, names)
