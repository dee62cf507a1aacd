"""Scores without a loss: the operator of all MaxSim scores, and the parts in which many documents are processed.

Documents may be on another device than the queries, or in a memory-mapped file. Each part of them is copied to the device of
the queries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.late.operators import MaxsimInputs, all_scores
from megabatch.late.tiles import TokenRows
from megabatch.operators.autograd import define, loop_under_vmap, statistic
from megabatch.tiles.block import windows
from megabatch.tiles.plan import SCORE_ELEMENTS, SCORE_STRIP


def _shape(given: MaxsimInputs) -> Tensor:
    return statistic(given.query, *given.sizes())


@define(MaxsimInputs, results=1, fake=_shape)
def maxsim_scores(given: MaxsimInputs) -> Tensor:
    """Returns the scores of all queries and documents, (N, M). The score of a document without vectors is −inf."""
    return all_scores(given.block(), given.backend)


loop_under_vmap(maxsim_scores)


def split_queries(query: TokenRows) -> list[tuple[slice, TokenRows]]:
    """Returns the queries of each strip of scores."""
    return [(rows, query.part(rows)[0]) for rows in windows(query.count, SCORE_STRIP.rows)]


def split_documents(document: TokenRows, queries: int, device: torch.device) -> Iterator[tuple[slice, TokenRows]]:
    """Yields the documents of each strip of scores on the device. Their vectors are bounded as well."""
    most = SCORE_STRIP.fit_to(max(queries, 1), max(document.count, 1)).columns
    vectors = max(1, SCORE_ELEMENTS // document.D)
    if document.lengths is None:
        for items in windows(document.count, max(1, min(most, vectors // document.max_length))):
            yield items, _move(document.part(items)[0], device)
        return
    lengths = document.lengths.cpu()
    ends, start = lengths.cumsum(0), 0
    while start < len(lengths):
        first = int(ends[start] - lengths[start])
        stop = min(start + most, max(start + 1, int(torch.searchsorted(ends, first + vectors, right=True))))
        window, some = slice(first, int(ends[stop - 1])), lengths[start:stop]
        valid = None if document.valid is None else document.valid[window]
        part = TokenRows(document.values[window], int(some.amax()), some, valid)
        yield slice(start, stop), _move(part, device)
        start = stop


def split_candidates(candidates: Tensor, width: int) -> Iterator[tuple[slice, slice]]:  # (N, K)
    """Yields the windows of queries and of columns whose documents, of `width` elements each, are gathered at once."""
    most = max(1, SCORE_ELEMENTS // 2 // width)
    columns = max(1, min(most, candidates.shape[1]))
    for rows in windows(len(candidates), max(1, most // columns)):
        for window in windows(candidates.shape[1], columns):
            yield rows, window


def gather_documents(document: TokenRows, index: Tensor, device: torch.device) -> TokenRows:  # (n,)
    """Returns the documents with these numbers on the device, as padded items. A negative number stands for no vectors."""
    exists = index >= 0
    item = index.clamp_min(0).to(document.values.device)
    step = torch.arange(document.max_length, device=item.device)
    if document.lengths is None:
        present, place = exists.to(item.device)[:, None].expand(-1, len(step)), item[:, None] * document.max_length + step
    else:
        lengths = document.lengths[item]
        step = step[: int(lengths.amax()) if len(lengths) else 1]
        present = (step < lengths[:, None]) & exists.to(item.device)[:, None]
        place = (document.starts()[item, None] + step).where(present, 0)
    width = place.shape[1]
    place, present = place.flatten(), present.flatten()
    if document.valid is not None:
        present = present & document.valid[place]
    return _move(TokenRows(document.values[place], width, None, present), device)


def _move(tokens: TokenRows, device: torch.device) -> TokenRows:
    parts = (None if part is None else part.to(device) for part in (tokens.lengths, tokens.valid))
    return TokenRows(tokens.values.to(device), tokens.max_length, *parts)
