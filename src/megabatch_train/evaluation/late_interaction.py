"""Evaluation, search, mining and files of late-interaction models, whose embeddings are rows of several vectors.

`towers.late_interaction` describes the rows. A file contains the vectors of all texts one after another, without padding.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch.late import Tokens, maxsim_scores, maxsim_topk
from megabatch.pairwise import PairRanks
from megabatch.tiles.block import windows
from megabatch.world import World
from megabatch_train.evaluation.embedding import InnerProducts, Matches, Saved, Stored, search, targets
from megabatch_train.towers import Pair
from megabatch_train.towers.late_interaction import pack, token_dim, unpack

QUERIES_AT_ONCE = 1024  # number of texts whose scores with all other texts are in memory
ROWS_AT_ONCE = 256  # number of texts of a file that are read at once

# ----------------------------------------------------------------------------------------------------------------------
# InnerProducts and retrieval ranks.


def search_any(model: Pair | int, queries: Tensor, embeddings: Tensor | Iterable[Tensor], k: int) -> Matches:  # (Q, k)
    """Returns the k best rows for each query: by MaxSim for a late-interaction model, else by `embedding.search`.

    For late interaction, missing matches have the score −∞ and the number −1.

    Args:
        model: the model, or the dim of its vectors; 0 for one vector per sample.
        queries: rows of the queries.
        embeddings: the rows to search, or chunks of them.
        k: number of matches per query.
    """
    dim = model if isinstance(model, int) else token_dim(model)
    if not dim:
        return search(queries, embeddings, k)
    embeddings = torch.split(embeddings, ROWS_AT_ONCE) if isinstance(embeddings, Tensor) else embeddings
    best = maxsim_topk(unpack(queries, dim), (pack(chunk.to(queries), dim) for chunk in embeddings), k)
    return Matches(best.values, best.indices)


def score_any(queries: Tensor, documents: Tensor, dim: int) -> Tensor:  # (Q, M)
    """Returns the scores of all rows: MaxSim scores, or inner products if `dim` is 0."""
    if not dim:
        return queries @ documents.T
    return maxsim_scores(unpack(queries, dim), pack(documents.to(queries), dim))


def connect(ids: Tensor, world: World) -> Tensor:  # (n, 2) int64 -> (n,) int64
    """Returns one id for each pair of this rank. Pairs of the batch that a chain of shared texts connects have equal ids."""
    columns = [torch.unique(column, return_inverse=True)[1] for column in world.gather_rows(ids).T]
    labels = torch.arange(len(columns[0]), device=ids.device)
    while True:
        before = labels
        for column in columns:
            smallest = torch.full_like(labels, len(labels)).scatter_reduce(0, column, labels, "amin")
            labels = smallest[column]
        if torch.equal(labels, before):
            first = world.row_offset(len(ids))
            return labels[first : first + len(ids)]


@torch.no_grad()
def rank_tokens(
    query: Tensor, document: Tensor, pairs: tuple[Tensor, Tensor] | None, dim: int, group: Any
) -> PairRanks:  # (N, L · dim), (M, L · dim) -> (N,), (M,)
    """Returns the retrieval ranks of `evaluate.ranks_of_best` by MaxSim scores. Every rank gets the vectors of all ranks.

    Equal scores are ordered by number, and NaN ranks last.

    Args:
        query: rows of this rank.
        document: rows of this rank.
        pairs: the matching queries and documents of all ranks; None if query i belongs to document i.
        dim: dim of a vector.
        group: process group that the rows are sharded over.
    """
    world = World.of(group, query.device)
    firsts = world.row_offset(len(query)), world.row_offset(len(document))
    mine = [slice(first, first + len(rows)) for first, rows in zip(firsts, (query, document), strict=True)]
    queries, documents = world.gather_rows(query), world.gather_rows(document)
    if pairs is None:
        numbers = torch.arange(len(queries), device=query.device)
        pairs = numbers, numbers
    packed = pack(documents, dim)
    there = [
        _rank(maxsim_scores(unpack(queries[rows], dim), packed), rows, *pairs) for rows in windows(mine[0], QUERIES_AT_ONCE)
    ]
    every_query = unpack(queries, dim)
    back = [
        _rank(maxsim_scores(every_query, pack(documents[rows], dim)).T, rows, pairs[1], pairs[0])
        for rows in windows(mine[1], QUERIES_AT_ONCE)
    ]
    none = torch.zeros(0, dtype=torch.int64, device=query.device)
    return PairRanks(torch.cat([none, *there]), torch.cat([none, *back]))


def _rank(scores: Tensor, rows: slice, own: Tensor, partners: Tensor) -> Tensor:  # (n, M), (P,), (P,) -> (n,) int64
    """Returns the rank of the best match of some rows. Other matches do not count."""
    here = (own >= rows.start) & (own < rows.stop)
    matches = torch.zeros_like(scores, dtype=torch.bool)
    matches[own[here] - rows.start, partners[here]] = True
    comparable = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = comparable.masked_fill(~matches, -torch.inf).amax(1, keepdim=True)
    numbers = torch.arange(scores.shape[1], device=scores.device)
    is_best = matches & (comparable == best)
    first = torch.where(is_best, numbers, len(numbers)).amin(1, keepdim=True)
    before = (comparable > best) | ((comparable == best) & (numbers < first))
    failed = best[:, 0] == -torch.inf  # the match is NaN, so it ranks after all other texts
    ranks: Tensor = (before & ~matches).sum(1)
    return torch.where(failed, scores.shape[1] - matches.sum(1), ranks)


# ----------------------------------------------------------------------------------------------------------------------
# Hard negatives by MaxSim scores, for `embedding.hard_negatives`.


class MaxSim(InnerProducts):
    """The MaxSim scores of stored queries and documents.

    Args:
        query: vectors of the queries.
        document: vectors of the candidates.
        device: device of the computation.
    """

    def __init__(self, query: "StoredTokens", document: Tokens, device: torch.device) -> None:
        assert document.lengths is not None, "stored vectors are packed"
        self._stored, self._candidates, self.device = query, document, device
        self.dtype, self.queries, self.documents = torch.float32, query.done, len(document.lengths)

    def of_matches(self, rows: slice, positive: Tensor) -> Tensor:  # (n,) int64 -> (n,)
        """Returns the score of each query with its own document."""
        candidates = positive[:, None].to(self.device)
        return maxsim_scores(self._queries(rows), self._candidates, candidates=candidates)[:, 0]

    def topk(self, rows: slice, k: int, **options: Any) -> Tensor:  # (n, k) int64
        """Returns the best candidates of each query, as `maxsim_topk` does."""
        return maxsim_topk(self._queries(rows), self._candidates, k, **options).indices

    def _queries(self, rows: slice) -> Tokens:
        values, _, lengths = self._stored.part(range(rows.start, rows.stop))
        assert lengths is not None, "stored vectors are packed"
        return Tokens(values.to(self.device), lengths=lengths.to(self.device))


# ----------------------------------------------------------------------------------------------------------------------
# Files: the vectors of all texts one after another, and the number of vectors of each text. They are memory-mapped.

LENGTHS = ".lengths.npy"  # ending of the file with the numbers of vectors


class StoredTokens(Stored):
    """Vectors of texts in a file, in float32. They are written chunk by chunk. An unreadable text has one NaN vector.

    Args:
        path: path of the files, without an ending.
        total: number of texts.
        token_dim: dim of a vector.
    """

    def __init__(self, path: Path, total: int, token_dim: int) -> None:
        self.path, self.total, self.dim = path.with_suffix(".bin"), total, token_dim
        self._lengths_path = path.with_suffix(".lengths")
        sizes = [file.stat().st_size if file.exists() else 0 for file in (self._lengths_path, self.path)]
        counts = self._read_lengths(sizes[0] // 8).cumsum(0)
        complete = int((counts <= sizes[1] // (4 * token_dim)).sum())
        self.done, self.vectors = complete, int(counts[complete - 1]) if complete else 0
        for file, size in ((self._lengths_path, 8 * self.done), (self.path, 4 * token_dim * self.vectors)):
            if file.exists():
                os.truncate(file, size)  # removes incomplete texts

    def append(self, chunk: Tensor) -> None:  # (n, L · token_dim)
        """Appends the vectors of rows to the file."""
        missing = chunk.isnan().all(1)
        values, _, lengths = pack(chunk.masked_fill(missing[:, None], 0.0).float().cpu(), self.dim)
        assert lengths is not None, "`pack` returns lengths"
        starts = lengths.cumsum(0) - lengths
        values[starts[missing.cpu()]] = torch.nan
        for path, tensor in ((self.path, values), (self._lengths_path, lengths)):
            with path.open("ab") as file:
                file.write(tensor.contiguous().numpy().tobytes())
        self.done, self.vectors = self.done + len(chunk), self.vectors + len(values)

    def _read_lengths(self, count: int) -> Tensor:  # (n,) int64
        if not count:
            return torch.zeros(0, dtype=torch.int64)
        return torch.from_file(str(self._lengths_path), shared=False, size=count, dtype=torch.int64)

    def tokens(self) -> Tokens:
        """Returns all vectors, (T, token_dim), which are memory-mapped, and the number of vectors of each text."""
        values = torch.from_file(str(self.path), shared=False, size=self.vectors * self.dim).view(-1, self.dim)
        return Tokens(values, lengths=self._read_lengths(self.done))

    def part(self, numbers: Iterable[int]) -> Tokens:
        """Returns the vectors of some texts, which are copied unless all texts are chosen in order."""
        values, _, lengths = self.tokens()
        assert lengths is not None, "`tokens` returns lengths"
        chosen = torch.tensor(list(numbers), dtype=torch.int64)
        if torch.equal(chosen, torch.arange(self.done)):
            return Tokens(values, lengths=lengths)
        starts, own = (lengths.cumsum(0) - lengths)[chosen], lengths[chosen]
        places = torch.arange(int(own.sum())) + (starts - (own.cumsum(0) - own)).repeat_interleave(own)
        return Tokens(values[places], lengths=own)

    def count_unreadable(self) -> int:
        """Returns the number of texts that could not be read."""
        values, _, lengths = self.tokens()
        assert lengths is not None, "`tokens` returns lengths"
        return int(values[lengths.cumsum(0) - lengths, 0].isnan().sum())

    def write_lengths(self, output: Path) -> None:
        """Writes the number of vectors of each text, in NumPy's format, next to the vectors."""
        numpy = extras.load("numpy", purpose="Writing embeddings")
        lengths = self._read_lengths(self.done).numpy()
        file_io.write(locate_lengths(output), lambda file: numpy.save(file, lengths))


class SavedTokens(Saved):
    """Reads the vectors of a file of `megabatch embed`."""

    def count(self) -> int:
        """Returns the number of texts. Raises an error if the two files do not belong together."""
        lengths, vectors = self._lengths(), len(self._array())
        if lengths.ndim != 1 or int(lengths.sum()) != vectors:
            raise ValueError(
                f"{self.path} must have as many vectors as {locate_lengths(self.path).name} counts, {int(lengths.sum()):,}, "
                f"got {vectors:,}"
            )
        return len(lengths)

    def chunks(self) -> Iterator[Tensor]:  # (n, L · dim) each
        """Yields the rows of the texts."""
        lengths, array = torch.from_numpy(self._lengths()), self._array()
        ends = lengths.cumsum(0)
        for rows in windows(len(lengths), ROWS_AT_ONCE):
            own, first = lengths[rows], int(ends[rows.start] - lengths[rows.start])
            values = torch.from_numpy(array[first : int(ends[rows.stop - 1])].copy())
            padded = values.new_zeros(len(own), int(own.max()), values.shape[1])
            padded[torch.arange(padded.shape[1]) < own[:, None]] = values
            yield padded.flatten(1)

    def _lengths(self) -> Any:
        numpy, path = extras.load("numpy", purpose="Reading embeddings"), locate_lengths(self.path)
        if not path.is_file():
            raise FileNotFoundError(f"{self.path} must have {path.name} in the same folder, as embed writes it")
        return numpy.load(path, allow_pickle=False)


def locate_lengths(output: Path) -> Path:
    """Returns the path of the file with the number of vectors of each text."""
    return output.with_name(output.stem + LENGTHS)


def check_lengths(output: Path) -> bool:
    """Returns whether an earlier `output` has a file of lengths. Raises an error if that file does not belong to it."""
    path = locate_lengths(output)
    if not os.path.lexists(path):
        return False
    if not _has_vectors(output):
        raise ValueError(f"--output must replace only files that `megabatch embed` wrote, got {path}; choose another --output")
    return True


def open_saved(path: Path) -> Saved:
    """Opens a file of `megabatch embed`."""
    return SavedTokens(path) if path.suffix == ".npy" and _has_vectors(path) else Saved(path)


def _has_vectors(path: Path) -> bool:
    """Returns whether the description of a file says that samples have several vectors."""
    try:
        about = json.loads(targets(path.with_suffix(".npy"))[0].read_text("utf-8"))
    except (OSError, ValueError):  # the file is missing or damaged
        return False
    return isinstance(about, dict) and bool(about.get("token_dim"))
