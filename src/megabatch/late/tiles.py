"""Logsumexps of late interaction and their gradients, over the tiles of a backend: `maxsim` or `kernels`.

A tile here is a matrix of scores, one number for each query and document; the products of their vectors stay in the backend.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megabatch.late import maxsim
from megabatch.late.maxsim import Kept, Weigh
from megabatch.tiles import backends
from megabatch.tiles.eager import diagonal_of
from megabatch.tiles.sums import LogSum, weighted_softmax
from megabatch.tiles.tokens import LateBlock


class LateBackend(Protocol):
    """What `maxsim` has, which says what it means."""

    def room_to_keep(self, block: LateBlock) -> Kept | None: ...  # noqa: D102

    def score_tiles(self, block: LateBlock, kept: Kept | None = None) -> Iterator[tuple[slice, slice, Tensor]]: ...  # noqa: D102

    def add_gradients(  # noqa: D102
        self, block: LateBlock, weigh: Weigh, dquery: Tensor, ddocument: Tensor, kept: Kept | None = None
    ) -> None: ...


def backend_for(name: str, block: LateBlock) -> LateBackend:
    """By its name; a block without similarities needs no kernels."""
    if name == backends.EAGER or block.is_empty:
        return maxsim
    from megabatch.late import kernels

    return kernels


def statistics(block: LateBlock, backend: str, *, columns: bool, kept: Kept | None = None) -> tuple[LogSum, LogSum]:
    """Row sums (N,) and column sums (M,) of exp(s); without `columns` these are empty, (0,). Fills `kept`."""
    empty, found = _empty_documents(block), None
    for rows, window, largest in () if block.is_empty else backend_for(backend, block).score_tiles(block, kept):
        s = _similarities(block, empty, rows, window, largest)
        parts = [LogSum.of_exponentials(s.clone() if columns else s, 1)]
        if columns:
            parts.append(LogSum.of_exponentials(s, 0))
        if s.shape == (block.N, block.M):
            return parts[0], parts[1] if columns else LogSum.empty(0, dtype=block.dtype, device=block.device)
        found = found or _no_sums(block, columns=columns)
        for sums, place, part in zip(found, (rows, window), parts, strict=False):
            sums.part(place).add_(part)
    return found or _no_sums(block, columns=columns)


def _no_sums(block: LateBlock, *, columns: bool) -> tuple[LogSum, LogSum]:
    row, col = (LogSum.empty(size, dtype=block.dtype, device=block.device) for size in (block.N, block.M if columns else 0))
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
    dscale: Tensor | None,  # () float64, added to
    kept: Kept | None = None,
) -> None:
    """Adds the gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩ to those of the vectors and of the scale.

    The vectors' gradients lack the factor `block.scale`: the weights of a tile are rounded to half precision, and with the
    scale they could leave its range.
    """
    if block.is_empty:
        return
    by_row = None if drow is None else row.softmax_factors(drow)
    by_column = None if dcol is None or col is None else col.softmax_factors(dcol)
    empty = _empty_documents(block)

    def weigh(largest: Tensor, rows: slice, columns: slice) -> Tensor:
        s = _similarities(block, empty, rows, columns, largest)
        parts = []
        if by_row is not None:
            out = s if by_column is None else torch.empty_like(s)
            parts.append(weighted_softmax(s, *(factor[rows, None].to(s.dtype) for factor in by_row), out=out))
        if by_column is not None:
            parts.append(weighted_softmax(s, *(factor[columns].to(s.dtype) for factor in by_column), out=s))
        g = parts[0].add_(parts[1]) if len(parts) == 2 else parts[0] if parts else torch.zeros_like(s)
        weights = g if block.weight is None else g.mul_(block.weight[rows, None])
        if dscale is not None:
            known = largest if empty is None else largest.masked_fill(empty[columns], 0.0)  # 0·∞ is not 0
            dscale.add_((weights.double() * known).sum())
        return weights

    backend_for(backend, block).add_gradients(block, weigh, dquery, ddocument, kept)


def pair_scores(block: LateBlock, kept: Kept | None = None) -> Tensor:  # (N, K)
    """s of each query with its own K documents; −inf for documents without vectors. `kept` has those of one document each."""
    empty = _empty_documents(block)
    if kept is None:
        parts = [pairs.sums() * block.factors(rows) for rows, pairs in maxsim.pair_tiles(block)]
        scores = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else block.zeros(0, block.M)
    else:
        scores = kept.scores.diagonal()[:, None] * block.factors(slice(0, block.N))
    return scores if empty is None else scores.masked_fill_(empty.view(scores.shape), -torch.inf)


def pair_gradients(
    block: LateBlock, dscores: Tensor, dquery: Tensor, ddocument: Tensor, dscale: Tensor | None
) -> None:  # (N, K)
    """Adds the gradients of ⟨dscores, pair_scores⟩ to those of the vectors and of the scale, as `gradients`."""
    empty = _empty_documents(block)
    for rows, pairs in maxsim.pair_tiles(block):
        (largest, winners), g = pairs.largest(), dscores[rows]
        if empty is not None:
            missing = empty.view(dscores.shape)[rows]
            largest, g = largest.masked_fill(missing, 0.0), g.masked_fill(missing, 0.0)
        weights = g if block.weight is None else g * block.weight[rows, None]
        if dscale is not None:
            dscale += (weights.double() * largest).sum()
        pairs.add_gradients(weights, winners, dquery, ddocument)


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
