"""The arguments that losses of queries and keys share: checked, and made into a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch import arguments, validation
from megabatch.arguments import Backend, Group
from megabatch.losses.contrast import CONTRASTS, KEY_KEY, Batch, Contrast, Negatives
from megabatch.losses.sums import Reduction, ceiling_above, pairs

_NAMES = ("query", "key")


def batch_of(
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
    group: Group,
    reduction: Reduction,
    backend: Backend,
) -> tuple[Batch, Tensor]:
    """Everything a loss was given, and its scale as a tensor."""
    _check_contrast(contrast)
    purpose = _purpose(contrast, symmetric=symmetric)
    run = pairs(query, key, _NAMES, ids=ids, group=group, purpose=purpose, reduction=reduction, backend=backend)
    validation.offsets(log_q, "log_q", key, "key")
    further = tuple(n.flat() for n in _checked_negatives(negatives, query, ids, contrast, guided=guide is not None))
    limit = _limit(query, key, margin, guide, backend)
    number = arguments.number(scale, "scale", query, shared=True)
    correction = arguments.offsets(log_q, query)
    return Batch(query, key, run, ids, correction, further, limit, guide), number


def _purpose(contrast: Sequence[Contrast], *, symmetric: bool) -> str:
    """What ranks would not notice by their operations: different contrasts are walks of the same kind."""
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
        validation.offsets(margin, "margin", query, "query")
    else:
        validation.number(margin, "margin", query)
    if isinstance(margin, Tensor):
        validation.without_gradient([margin], ["margin"])
    if guide is None:
        return ceiling_above(query.detach(), key.detach(), margin, backend)
    _check_guide(guide, query)
    return ceiling_above(guide[0], guide[1], margin)


def _check_guide(guide: Any, query: Tensor) -> None:
    if not isinstance(guide, Sequence) or len(guide) != 2:
        raise TypeError(f"guide must be a pair of embeddings, those of query and of key, got {type(guide).__name__}")
    names = ("guide[0]", "guide[1]")
    validation.embeddings(guide[0], guide[1], names, same_rows=True)
    validation.same_rows(guide[0], names[0], query, "query")
    validation.without_gradient(guide, names)


def _checked_negatives(
    value: Any, query: Tensor, ids: Tensor | None, contrast: Sequence[Contrast], *, guided: bool
) -> list[Negatives]:
    if value is None:
        return []
    several = not isinstance(value, Tensor | Negatives)
    if several and not isinstance(value, Sequence):
        raise TypeError(f"negatives must be a tensor, Negatives, a sequence of these or None, got {type(value).__name__}")
    named = [(f"negatives[{i}]", part) for i, part in enumerate(value)] if several else [("negatives", value)]
    return [_checked(part, name, query, ids, contrast, guided=guided) for name, part in named]


def _checked(
    value: Any, name: str, query: Tensor, ids: Tensor | None, contrast: Sequence[Contrast], *, guided: bool
) -> Negatives:
    if isinstance(value, Tensor):
        value = Negatives(value)
    if not isinstance(value, Negatives):
        raise TypeError(f"{name} must be a tensor or Negatives, got {type(value).__name__}")
    given = value.keys
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor of embeddings, got {type(given).__name__}")
    if given.dim() not in (2, 3):
        shape = tuple(given.shape)
        raise ValueError(f"{name} must have shape (M, D), or (N, K, D) for K of each query, got shape {shape}")
    if given.dim() == 3:
        if len(given) != len(query):
            raise ValueError(f"{name} must have {len(query)} rows, one for each query, got shape {tuple(given.shape)}")
        if value.owner is not None:
            raise ValueError(f"{name}.owner must be None where keys have shape (N, K, D): row i belongs to query i")
        for part, what in ((value.ids, "ids"), (value.log_q, "log_q"), (value.guide, "guide")):
            if part is not None and not isinstance(part, Tensor):
                raise TypeError(f"{name}.{what} must be a tensor or None, got {type(part).__name__}")
            if part is not None and part.shape[:2] != given.shape[:2]:
                raise ValueError(f"{name}.{what} must have shape {tuple(given.shape[:2])}, got {tuple(part.shape)}")
    flat = value.flat()
    keys = flat.keys
    validation.embeddings(query, keys, ("query", name))
    validation.ids(flat.ids, f"{name}.ids", keys, name)
    validation.offsets(flat.log_q, f"{name}.log_q", keys, name)
    validation.ids(flat.owner, f"{name}.owner", keys, name)
    if flat.owner is not None and _can_look_at(flat.owner) and ((flat.owner < 0) | (flat.owner >= len(query))).any():
        raise ValueError(f"{name}.owner must be numbers of queries, 0 to {len(query) - 1}, got {flat.owner.tolist()[:8]} …")
    if flat.private and flat.owner is None:
        raise ValueError(f"{name} must have shape (N, K, D) or owners to be private, got shape {tuple(keys.shape)}")
    if flat.ids is not None and ids is None:
        raise ValueError(f"ids must be given where {name}.ids are: they say which queries have no negative in them")
    if flat.ids is not None and flat.owner is not None and not flat.private and KEY_KEY in contrast:
        raise ValueError(
            f'{name}.ids must be None with the contrast "key-key": there the negatives of a query are left out by their owner, '
            "and a walk leaves out pairs by one kind of id"
        )
    if guided:
        if flat.guide is None:
            raise ValueError(f"{name}.guide must be given where guide is: the guide's embeddings of these keys")
        validation.embeddings(flat.guide, flat.guide, (f"{name}.guide", f"{name}.guide"))
        validation.same_rows(flat.guide, f"{name}.guide", keys, name)
        validation.without_gradient([flat.guide], [f"{name}.guide"])
    owner = None if flat.owner is None else flat.owner.long()
    log_q = arguments.offsets(flat.log_q, query)
    return flat._replace(owner=owner, log_q=log_q)


def _can_look_at(values: Tensor) -> bool:
    """On CUDA the host would have to wait for them; on the meta device, and while a graph is traced, there are none."""
    return not values.is_cuda and not values.is_meta and not torch.compiler.is_compiling()
