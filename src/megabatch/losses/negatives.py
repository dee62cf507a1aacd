"""Negatives from outside the batch: hard negatives, or keys of earlier steps; and their checks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import checks, primitives


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

    Example:
        hard = mb.Negatives(hard, private=True)  # (N, K, D): K negatives of each query, for that query alone
        loss = mb.info_nce_loss(query, key, scale=50.0, negatives=[hard, bank])
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


def checked(value: Any, query: Tensor, ids: Tensor | None, *, against_keys: bool, guided: bool) -> tuple[Negatives, ...]:
    """The argument `negatives` of a loss, checked: flat, and in the types that operators take.

    Args:
        value: None, a tensor, `Negatives`, or a sequence of these.
        query: (N, D).
        ids: (N,) of the batch.
        against_keys: whether keys of the batch are compared with them, too.
        guided: whether a guide decides which of them are left out.
    """
    if value is None:
        return ()
    several = not isinstance(value, (Tensor, Negatives))
    if several and not isinstance(value, Sequence):
        raise TypeError(f"negatives must be a tensor, Negatives, a sequence of these or None, got {type(value).__name__}")
    named = [(f"negatives[{i}]", part) for i, part in enumerate(value)] if several else [("negatives", value)]
    return tuple(_checked(part, name, query, ids, against_keys=against_keys, guided=guided) for name, part in named)


def _checked(value: Any, name: str, query: Tensor, ids: Tensor | None, *, against_keys: bool, guided: bool) -> Negatives:
    if isinstance(value, Tensor):
        value = Negatives(value)
    if not isinstance(value, Negatives):
        raise TypeError(f"{name} must be a tensor or Negatives, got {type(value).__name__}")
    _check_shapes(value, name, query)
    flat = value.flat()
    keys = flat.keys
    checks.embeddings(query, keys, ("query", name))
    checks.ids(flat.ids, f"{name}.ids", keys, name)
    checks.offsets(flat.log_q, f"{name}.log_q", keys, name)
    checks.ids(flat.owner, f"{name}.owner", keys, name)
    if flat.owner is not None and _can_look_at(flat.owner) and ((flat.owner < 0) | (flat.owner >= len(query))).any():
        raise ValueError(f"{name}.owner must be numbers of queries, 0 to {len(query) - 1}, got {flat.owner.tolist()[:8]} …")
    if flat.private and flat.owner is None:
        raise ValueError(f"{name} must have shape (N, K, D) or owners to be private, got shape {tuple(keys.shape)}")
    if flat.ids is not None and ids is None:
        raise ValueError(f"ids must be given where {name}.ids are, because the two are compared, got None")
    if flat.ids is not None and flat.owner is not None and not flat.private and against_keys:
        raise ValueError(
            f'{name}.ids must be None with the contrast "key-key": there the negatives of a query are left out by their owner, '
            "and an operator leaves out pairs by one kind of id"
        )
    if guided:
        if flat.guide is None:
            raise ValueError(f"{name}.guide must be given where guide is, with the guide's embeddings of these keys, got None")
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
        raise ValueError(f"{name} must have shape (M, D), or (N, K, D) for K of each query, got shape {shape}")
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
    """Whether the host can read values without waiting for a GPU. On the meta device and in a traced graph there are none."""
    return not values.is_cuda and not values.is_meta and not torch.compiler.is_compiling()
