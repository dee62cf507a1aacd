"""For losses that look at rows alone: sums over the keys of each query, with a ceiling where too similar is not a negative.

Precision and ranks are as in `pairwise`. Arguments were checked by the loss that calls.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import arguments, operators, validation
from megabatch.operators.logsumexp import APART, KEPT, SKIPPED
from megabatch.tiles.precision import FLOAT32

__all__ = ["APART", "KEPT", "SKIPPED", "Ceiling", "ceiling_above", "matching_products", "row_logsumexp"]


class Ceiling(NamedTuple):
    """Pairs above it are left out: by their product, or by that of a guide, another model's embeddings of rows and columns."""

    limit: Tensor  # (N,)
    guide_x: Tensor | None = None  # (N, E)
    guide_y: Tensor | None = None  # (M, E)


def row_logsumexp(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor,
    *,
    col_bias: Tensor | None = None,  # (M,)
    ids: tuple[Tensor | None, Tensor | None] = (None, None),  # (N,), (M,)
    diagonal: str = KEPT,
    ceiling: Ceiling | None = None,
    group: Any = None,
    purpose: str = "",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,) or (0,), ()
    """(log Σ_j exp s_ij, s_ii, share): the rows of `pairwise_logsumexp` without the columns, which nothing is spent on.

    s_ii is there if the diagonal is APART.
    """
    precision = validation.embeddings(x, y)
    limit = guide_x = guide_y = None
    guide_precision = FLOAT32
    if ceiling is not None:
        limit, guide_x, guide_y = ceiling
        if guide_x is not None:
            guide_precision = validation.embeddings(guide_x, guide_y)
    row, _, match, share, *_ = operators.apply(
        operators.logsumexp,
        x,
        y,
        arguments.number(scale, "scale", x),
        None,
        arguments.offsets(col_bias, x),
        *ids,
        limit,
        guide_x,
        guide_y,
        False,
        diagonal,
        precision,
        guide_precision,
        validation.backend(backend, precision, x.device),
        validation.group(group, purpose),
    )
    return row, match, share


def matching_products(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    *,
    group: Any = None,
    purpose: str = "",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # (N,), (N,), ()
    """(⟨x_i, y_i⟩, how far rounding may have moved it, share), from the same rounded inputs as all other products."""
    precision = validation.embeddings(x, y, same_rows=True)
    settled = validation.backend(backend, precision, x.device)
    products, noise, share = operators.apply(operators.matching, x, y, precision, settled, validation.group(group, purpose))
    return products, noise, share


@torch.no_grad()
def ceiling_above(
    x: Tensor,  # (N, D)
    y: Tensor,  # (N, D)
    margin: float | Tensor,  # or (N,)
    backend: str = "auto",
) -> Tensor:  # (N,)
    """⟨x_i, y_i⟩ + margin, and what rounding may add: a key that occurs twice is not above itself."""
    products, noise, _ = matching_products(x, y, backend=backend)
    return products + margin + noise
