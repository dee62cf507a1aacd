"""Checks of the arguments of `cached_backward`, before any computation."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from megabatch.cached.budget import ALL, AUTO
from megabatch.cached.roles import DEVICE, HOST, Role


def gradients_possible() -> None:
    """Refuses a call under `no_grad` or `inference_mode`."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("cached_backward must be called with gradients enabled, got a call under torch.inference_mode()")
    if not torch.is_grad_enabled():
        raise RuntimeError("cached_backward must be called with gradients enabled, got a call under torch.no_grad()")


def roles(towers: Any, chunk_size: Any, *, further_rows: bool = False) -> list[Role]:
    """One role for each pair (tower, inputs)."""
    if not isinstance(towers, Sequence) or isinstance(towers, str):
        raise TypeError(f"towers must be a list of pairs (tower, inputs), got {_kind(towers)}")
    if not towers:
        raise ValueError("towers must have at least one pair (tower, inputs), got an empty list")
    for i, pair in enumerate(towers):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
            raise TypeError(f"towers[{i}] must be a pair (tower, inputs), got {_kind(pair)}{length}")
        if not callable(pair[0]):
            raise TypeError(f"towers[{i}][0] must be a module or another callable, got {_kind(pair[0])}")
    sizes = _chunk_sizes(chunk_size, len(towers))
    made = [Role(i, tower, inputs, size) for i, ((tower, inputs), size) in enumerate(zip(towers, sizes, strict=True))]
    for role in made:
        if any(getattr(module, "static_graph", False) for module in role.shared):
            raise ValueError(
                f"{role.name}[0] must be wrapped without static_graph=True, got a DistributedDataParallel with it, which "
                "cannot skip a reduction; a cached step has a backward pass for every chunk and one reduction"
            )
        for module in role.modules:
            if type(module).__module__.split(".")[0] == "deepspeed":
                raise ValueError(
                    f"{role.name}[0] must be a module, or wrapped in DDP or FSDP2, got {type(module).__name__} of DeepSpeed, "
                    "whose own backward pass reduces gradients; FSDP2 shards what ZeRO shards, and reduces once a step"
                )
    counts = [len(role.source) for role in made]
    if len(set(counts)) > 1 and not further_rows:
        raise ValueError(
            f"towers must all have the same number of samples, got {', '.join(map(str, counts))} (rows of their inputs)"
        )
    return made


def _chunk_sizes(value: Any, towers: int) -> list[int]:
    sizes = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Tensor) else [value] * towers
    if len(sizes) != towers:
        raise ValueError(f"chunk_size must be one number or one for each of the {towers} towers, got {len(sizes)} numbers")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"chunk_size must be an integer or a list of integers, got {_kind(size)}")
        if size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {size}")
    return [int(size) for size in sizes]


def options(loss_fn: Any, budget: Any, budget_fraction: Any, scaler: Any, embeddings: Any, on_chunk: Any) -> None:
    """Checks the other arguments."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the embeddings of each tower, got {_kind(loss_fn)}")
    _budget(budget, budget_fraction)
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"scaler must be a GradScaler or None, got {_kind(scaler)}")
    if embeddings not in (DEVICE, HOST):
        raise ValueError(f"embeddings must be 'device' or 'host', got {embeddings!r}")
    if on_chunk is not None and not callable(on_chunk):
        raise TypeError(f"on_chunk must be a function of a Progress or None, got {_kind(on_chunk)}")


def _budget(value: Any, fraction: Any) -> None:
    known = value is None or (isinstance(value, str) and value in (AUTO, ALL))
    if not known and (isinstance(value, bool) or not isinstance(value, Integral) or value < 0):
        hint = "; a fraction of the free memory is budget_fraction" if isinstance(value, float) else ""
        raise ValueError(f'budget must be a number of bytes (an int), "auto", "all" or None, got {value!r}{hint}')
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"budget_fraction must be more than 0 and at most 1, got {fraction!r}")
    if value is not None:
        raise ValueError(f"budget must be left out with budget_fraction={fraction}, got {value!r}")


def loss(value: Any) -> None:
    """Checks the value that `loss_fn` returned."""
    if not isinstance(value, Tensor):
        raise TypeError(f"loss_fn must return a scalar tensor, got {_kind(value)}")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(f"loss_fn must return a scalar, got {_kind(value)} of shape {tuple(value.shape)}")


def _kind(value: Any) -> str:
    return f"a tensor of {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else type(value).__name__
