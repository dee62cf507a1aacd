"""Logsumexps of late interaction and their gradients, over the tiles of a backend: `maxsim` or `triton_maxsim`.

A tile here is a matrix of scores, one number for each query and document; the products of their vectors stay in the backend.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megabatch.tiles import backends, maxsim
from megabatch.tiles.in_memory import diagonal_of
from megabatch.tiles.logsum import LogSum, weighted_softmax
from megabatch.tiles.maxsim import Weigh
from megabatch.tiles.tokens import LateBlock


class Backend(Protocol):
    """What `maxsim` has, which says what it means."""

    def score_tiles(self, block: LateBlock) -> Iterator[tuple[slice, slice, Tensor]]: ...  # noqa: D102

    def add_gradients(self, block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor) -> None: ...  # noqa: D102


def backend_for(name: str, block: LateBlock) -> Backend:
    """By its name; a block without similarities needs no kernels."""
    if name == backends.EAGER or block.is_empty:
        return maxsim
    from megabatch.tiles import triton_maxsim

    return triton_maxsim


def statistics(block: LateBlock, backend: str, *, columns: bool) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s); without `columns` these are empty, (0,)."""
    row = LogSum.empty(block.N, dtype=block.dtype, device=block.device)
    col = LogSum.empty(block.M if columns else 0, dtype=block.dtype, device=block.device)
    if block.is_empty:
        return row, col
    empty = _empty_documents(block)
    for rows, window, largest in backend_for(backend, block).score_tiles(block):
        s = _similarities(block, empty, rows, window, largest)
        row.part(rows).add_exponentials_(s, dim=1, out=torch.empty_like(s))
        if columns:
            col.part(window).add_exponentials_(s, dim=0, out=s)
    return row, col


def gradients(
    block: LateBlock,
    backend: str,
    row: LogSum,  # (N,) the whole sums, of which the block may be a part
    col: LogSum | None,  # (M,)
    drow: Tensor | None,  # (N,)
    dcol: Tensor | None,  # (M,)
    dquery: Tensor,  # (Tq, D) added to
    ddocument: Tensor,  # (Td, D) added to
) -> Tensor:  # () float64
    """Adds the gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩ to those of the vectors; returns that of the scale.

    The vectors' gradients lack the factor `block.scale`: the weights of a tile are rounded to half precision, and with the
    scale they could leave its range.
    """
    dscale = torch.zeros((), dtype=torch.float64, device=block.device)
    if block.is_empty:
        return dscale
    by_row = None if drow is None else row.softmax_factors(drow)
    by_column = None if dcol is None or col is None else col.softmax_factors(dcol)
    empty = _empty_documents(block)

    def weigh(largest: Tensor, rows: slice, columns: slice) -> Tensor:
        s = _similarities(block, empty, rows, columns, largest)
        g = torch.zeros_like(s)
        if by_row is not None:
            g += weighted_softmax(s, *(factor[rows, None].to(s.dtype) for factor in by_row), out=torch.empty_like(s))
        if by_column is not None:
            g += weighted_softmax(s, *(factor[columns].to(s.dtype) for factor in by_column), out=torch.empty_like(s))
        weights = g if block.weight is None else g * block.weight[rows, None]
        known = largest if empty is None else largest.masked_fill(empty[columns], 0.0)  # 0·∞ is not 0
        dscale.add_((weights.double() * known).sum())
        return weights

    backend_for(backend, block).add_gradients(block, weigh, dquery, ddocument)
    return dscale


def pair_scores(block: LateBlock) -> Tensor:  # (N, K)
    """s of each query with its own K documents; −inf for documents without vectors."""
    each = block.M // max(block.N, 1)
    scores, empty = block.zeros(block.N, each), _empty_documents(block)
    for rows, pairs in maxsim.pair_tiles(block):
        scores[rows] = pairs.largest()[0] * block.factors(rows)
    return scores if empty is None else scores.masked_fill_(empty.view(scores.shape), -torch.inf)


def pair_gradients(block: LateBlock, dscores: Tensor, dquery: Tensor, ddocument: Tensor) -> Tensor:  # (N, K) → () float64
    """Adds the gradients of ⟨dscores, pair_scores⟩ to those of the vectors, as `gradients`; returns that of the scale."""
    dscale = torch.zeros((), dtype=torch.float64, device=block.device)
    empty = _empty_documents(block)
    for rows, pairs in maxsim.pair_tiles(block):
        largest, g = pairs.largest()[0], dscores[rows]
        if empty is not None:
            missing = empty.view(dscores.shape)[rows]
            largest, g = largest.masked_fill(missing, 0.0), g.masked_fill(missing, 0.0)
        weights = g if block.weight is None else g * block.weight[rows, None]
        dscale += (weights.double() * largest).sum()
        pairs.add_gradients(weights, dquery, ddocument)
    return dscale


def _empty_documents(block: LateBlock) -> Tensor | None:  # (M,) bool
    return None if block.document.valid is None else block.document.counts() == 0


def _similarities(block: LateBlock, empty: Tensor | None, rows: slice, columns: slice, largest: Tensor) -> Tensor:  # (n, m)
    """The similarities of a tile; −inf where a pair is left out."""
    s = largest * block.factors(rows)
    if empty is not None:
        s.masked_fill_(empty[columns], -torch.inf)
    if block.row_ids is not None and block.col_ids is not None:
        s.masked_fill_(block.row_ids[rows, None] == block.col_ids[columns], -torch.inf)
    if block.skip_diagonal:
        shifted = slice(columns.start + block.first_column, columns.stop + block.first_column)
        diagonal_of(s, rows, shifted).fill_(-torch.inf)
    return s
