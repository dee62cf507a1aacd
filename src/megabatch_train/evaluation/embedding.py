"""Embeddings for evaluation and search: computes them, searches them, mines hard negatives, and stores them in files."""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras, file_io, pairwise
from megabatch.cached.replay import checksum
from megabatch.cached.streaming import map_rows
from megabatch.cached.tower import call
from megabatch.tiles.block import accumulator_dtype, windows
from megabatch.tiles.sums import MAX_K, Best
from megabatch_train.data.dataset import FILE, VALUE, Dataset, ReadingProgress, UnreadableSampleError, blank
from megabatch_train.towers import Pair
from megabatch_train.towers.tower import Tower, use_evaluation_mode

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Embeddings of samples for evaluation and search. They are computed chunk by chunk, without gradients and augmentation.


def embed(
    tower: Tower,
    dataset: Dataset,
    side: int,
    indices: Sequence[int] | None = None,
    *,
    chunk_size: int = 256,
    workers: int | Executor = 0,
) -> Tensor:  # (n, D)
    """Returns embeddings of one side of samples. An unreadable sample is encoded as a blank; `dataset.usable` masks it."""
    chunks = list(embed_chunks(tower, dataset, side, indices, chunk_size=chunk_size, workers=workers))
    if not chunks:
        raise ValueError("indices must contain at least one sample, got none")
    return torch.cat(chunks)


@torch.no_grad()
def embed_chunks(
    tower: Tower,
    dataset: Dataset,
    side: int,
    indices: Sequence[int] | None = None,
    *,
    chunk_size: int = 256,
    workers: int | Executor = 0,
) -> Iterator[Tensor]:  # (n, D) each
    """Yields the embeddings of `embed` one chunk at a time, so that they need not all be in memory. Logs the progress."""
    if tower.kind != dataset.sides[side]:
        raise ValueError(f"tower must encode side {side} of the dataset, {dataset.sides[side]}, got a tower for {tower.kind}")
    chosen = range(len(dataset)) if indices is None else indices
    source = dataset.source(chosen, side, tower, augment=False, workers=workers)
    spans = [(part.start, part.stop) for part in windows(len(chosen), chunk_size)]
    progress = ReadingProgress(f"{tower.plural} embedded", len(chosen))
    for (_, done), inputs in zip(spans, source.chunks(spans, device_of(tower.module)), strict=True):
        with use_evaluation_mode(tower.module):
            embeddings = call(tower.module, inputs)
        yield embeddings  # outside of `use_evaluation_mode`, because the caller may train between chunks
        progress.tell(done)


def readable(
    tower: Tower, dataset: Dataset, side: int, indices: Sequence[int], *, chunk_size: int, workers: int | Executor
) -> Iterator[Tensor]:  # (n, D) each
    """Yields the embeddings of `embed_chunks` with NaN for unreadable samples, so that they never match in a search."""
    position = 0
    for chunk in embed_chunks(tower, dataset, side, indices, chunk_size=chunk_size, workers=workers):
        usable = dataset.usable(indices[position : position + len(chunk)]).to(chunk.device)
        position += len(chunk)
        yield chunk.masked_fill(~usable[:, None], math.nan)


@torch.no_grad()
def encode(tower: Tower, samples: Sequence[Any]) -> Tensor:  # (n, D)
    """Returns embeddings of texts or images that are not in a dataset, such as queries and class names."""
    inputs = tower.collate([tower.prepare(sample, None) for sample in samples])
    device = device_of(tower.module)
    with use_evaluation_mode(tower.module):
        embeddings: Tensor = call(tower.module, map_rows(lambda tensor: tensor.to(device), inputs))
        return embeddings


def truncate(towers: Sequence[Tower], dim: int) -> int:
    """Truncates all later embeddings of towers to their first `dim` columns, and normalizes them to unit length.

    Args:
        towers: towers, which can share a module. The modules are changed in place.
        dim: embedding dimension, from 1 to the full dimension.

    Returns:
        The full dimension.
    """
    blanks = [tower for tower in towers if tower.kind not in (VALUE, FILE)]
    if not blanks:
        raise ValueError(f"dim needs a tower of texts, images or recordings, got towers of {towers[0].kind}s, got dim {dim}")
    full = min(encode(tower, [blank(tower.kind)]).shape[1] for tower in blanks)
    if not 1 <= dim <= full:
        raise ValueError(f"dim must be from 1 to {full}, the embedding dimension, got {dim}")
    if dim < full:
        for module in {id(tower.module): tower.module for tower in towers}.values():
            module.register_forward_hook(lambda module, inputs, output: F.normalize(output[:, :dim], dim=-1))
    return full


def read_or_none(dataset: Dataset, index: int, side: int) -> Any:
    """Reads one side of a sample. Returns None if it cannot be read."""
    try:
        return dataset.read(index, side)
    except UnreadableSampleError:
        return None


def read_stored_or_none(dataset: Dataset, index: int, side: int) -> Any:
    """Reads one side of a sample without decoding images. Returns None if it cannot be read."""
    try:
        return dataset.read_stored(index, side)
    except UnreadableSampleError:
        return None


def device_of(module: nn.Module) -> torch.device | None:
    """Returns the device of the first parameter of a module; None without parameters."""
    first = next(module.parameters(), None)
    return None if first is None else first.device


# ----------------------------------------------------------------------------------------------------------------------
# The best matches of a few queries among many embeddings. Only one chunk and the best matches so far are in memory.


ROWS = 4096  # number of embeddings that are scored and sorted at once


class Matches(NamedTuple):
    """The matches of each query, best first."""

    scores: Tensor  # (Q, k) similarities
    indices: Tensor  # (Q, k) int64


@torch.no_grad()
def search(queries: Tensor, embeddings: Tensor | Iterable[Tensor], k: int = 8) -> Matches:  # (Q, D), (M, D) or chunks of it
    """Returns the k rows of `embeddings` that are most similar to each query. Among equal scores, the smaller index is first.

    A row with NaN is replaced by the score −inf and the index −1, and comes last.

    Args:
        queries: (Q, D) embeddings.
        embeddings: (M, D), or its rows in chunks, as `embed_chunks` yields them.
        k: number of matches per query, at most 1,024. There are fewer if `embeddings` has fewer rows.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    best = Best.none(len(queries), k, queries.new_zeros(0, dtype=accumulator_dtype(queries.dtype)))
    position = 0
    for chunk in torch.split(embeddings, ROWS) if isinstance(embeddings, Tensor) else embeddings:
        if chunk.dim() != 2 or chunk.shape[1] != queries.shape[1]:
            raise ValueError(
                f"embeddings must have the dimension of the queries, {queries.shape[1]}, got shape {tuple(chunk.shape)}"
            )
        scores, indices = pairwise.pairwise_topk(queries, chunk.to(queries), k)
        best = best.merge(Best(scores, torch.where(indices < 0, indices, indices + position)))
        position += len(chunk)
    return Matches(*(part[:, :position] for part in best))


# ----------------------------------------------------------------------------------------------------------------------
# Hard negatives: documents that a model ranks high for a query although they do not match it.


QUERIES_AT_ONCE = 8192  # number of queries in one search


@dataclass(frozen=True)
class Choice:
    """The documents that can be negatives of a query. Names are as in `mine_hard_negatives` of sentence-transformers.

    The score of a document is the dot product of its embedding and the embedding of the query.

    Args:
        negatives: number of negatives of each query.
        range_min: number of best documents that are skipped, because they are probably unlabeled matches.
        range_max: number of best documents that are considered (default: as many as needed).
        max_score: largest score of a negative.
        min_score: smallest score of a negative.
        absolute_margin: the score of a negative is below s − absolute_margin, where s is the score of the positive.
        relative_margin: the score of a negative is below s − relative_margin·|s|.
        sampling: "top" for the best documents of the range, "random" for a random choice.
    """

    negatives: int
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling: str = "top"

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.negatives < 1 or self.range_min < 0:
            raise ValueError(
                f"negatives must be at least 1 and range_min at least 0, got {self.negatives} and {self.range_min}"
            )
        if self.range_max is not None and self.range_max < self.range_min + self.negatives:
            raise ValueError(
                f"range_max must be at least range_min + negatives, {self.range_min + self.negatives}, got {self.range_max}"
            )
        for name in ("max_score", "min_score", "absolute_margin", "relative_margin"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                raise ValueError(f"{name} must be a number, got nan")
        if self.sampling not in ("top", "random"):
            raise ValueError(f'sampling must be "top" or "random", got {self.sampling!r}')
        if self.candidates > MAX_K:
            by_default = (
                "range_min + negatives" if self.sampling == "top" else "range_min + 4·negatives, if sampling is random,"
            )
            what = by_default if self.range_max is None else "range_max"
            raise ValueError(f"{what} must be at most {MAX_K}, got {self.candidates}")

    @property
    def candidates(self) -> int:
        """The number of best documents of each query, from which the negatives are chosen."""
        if self.range_max is not None:
            return self.range_max
        return self.range_min + self.negatives * (4 if self.sampling == "random" else 1)

    def limit(self, positive: Tensor) -> Tensor | None:  # (n,) → (n,)
        """Returns the score that every negative must be below; None without a limit."""
        limits = (
            [] if self.max_score is None else [torch.full_like(positive, self.max_score).nextafter(positive.new_tensor(9e9))]
        )
        if self.absolute_margin is not None:
            limits.append(positive - self.absolute_margin)
        if self.relative_margin is not None:
            limits.append(positive - self.relative_margin * positive.abs())
        return torch.stack(limits).amin(0) if limits else None


class InnerProducts:
    """Inner products of embeddings. On a GPU, embeddings are rounded to float16. A subclass can define other scores."""

    def __init__(self, query: Tensor, document: Tensor | None, device: torch.device | None) -> None:
        assert document is not None, "only scores contain the documents"
        self.device, self.queries, self.documents = query.device if device is None else device, len(query), len(document)
        dtype = torch.float16 if self.device.type == "cuda" else query.dtype
        self._query, self._document, self.dtype = query, document.to(self.device, dtype), accumulator_dtype(dtype)

    def of_matches(self, rows: slice, positive: Tensor) -> Tensor:  # (n,) int64 -> (n,)
        """Returns the inner product of each of these queries with its document."""
        partners = self._document[positive.to(self.device)]
        return (self._query[rows].to(partners).to(self.dtype) * partners.to(self.dtype)).sum(1)

    def topk(self, rows: slice, k: int, **options: Any) -> Tensor:  # (n, k) int64
        """Returns the most similar documents of these queries."""
        return pairwise.pairwise_topk(self._query[rows].to(self._document), self._document, k, **options).indices


class _MatchingDocuments:
    """The matching documents of each query, for queries with several rows."""

    def __init__(self, queries: Tensor, positive: Tensor, documents: int) -> None:  # (N,), (N,) int64
        self._queries, self._documents = queries, documents
        self._pairs = torch.unique(queries * documents + positive)
        self._counts = torch.bincount(self._pairs // documents)  # number of documents of each query

    def most_others(self, rows: slice) -> int:
        """Returns how many matching documents a query of these rows has at most, in addition to the document of its row."""
        return int(self._counts[self._queries[rows]].max()) - 1

    def remove(self, candidates: Tensor, rows: slice) -> Tensor:  # (n, k) int64
        """Removes the matching documents from the candidates of these rows, and fills the end of each row with −1."""
        keys = self._queries[rows, None].to(candidates.device) * self._documents + candidates
        gone = torch.isin(keys, self._pairs.to(candidates.device)) | (candidates < 0)
        order = gone.int().argsort(dim=1, stable=True)
        return candidates.masked_fill(gone, -1).gather(1, order)


@torch.no_grad()
def hard_negatives(
    query: Tensor | InnerProducts,  # (N, D)
    document: Tensor | None,  # (M, D)
    positive: Tensor,  # (N,) int64
    choice: Choice,
    *,
    ids: tuple[Tensor, Tensor] | None = None,  # (N,), (M,)
    queries: Tensor | None = None,  # (N,) int64
    first: int = 0,
    device: torch.device | None = None,
) -> Iterator[Tensor]:  # (n, negatives) int64 each
    """Yields the row numbers of the hard negatives of each query, best first. Missing negatives are −1.

    Each yielded tensor has the negatives of several queries.

    Args:
        query: (N, D) embeddings, or the scores of all queries and documents.
        document: (M, D) embeddings; None with scores.
        positive: (N,) the document of each query.
        choice: the documents that can be negatives.
        ids: ids of queries and documents. A document is not a negative of a query with the same id (default: only the
            document of the query is excluded).
        queries: a number for each row of `query`, counted from 0. Rows with equal numbers are one query, and the documents of
            all these rows are not its negatives. `queries` cannot be combined with `ids`.
        first: query to begin with.
        device: device of the computation (default: device of the queries).
    """
    scores = query if isinstance(query, InnerProducts) else InnerProducts(query, document, device)
    own, others = (positive, torch.arange(scores.documents)) if ids is None else ids
    others = others.to(scores.device)
    matching = None if queries is None else _MatchingDocuments(queries, positive, scores.documents)
    lowest = None if choice.min_score is None else torch.tensor(choice.min_score, dtype=scores.dtype, device=scores.device)
    for rows in windows(slice(first, scores.queries), QUERIES_AT_ONCE):
        match = scores.of_matches(rows, positive[rows])
        more = 0 if matching is None else matching.most_others(rows)
        candidates = scores.topk(
            rows,
            min(choice.candidates + more, MAX_K),
            exclude=(own[rows].to(scores.device), others),
            above=None if lowest is None else lowest.nextafter(lowest - 1),
            below=choice.limit(match),
        )
        if matching is not None:
            candidates = matching.remove(candidates, rows)[:, : choice.candidates]
        candidates = candidates[:, choice.range_min :]
        yield (
            candidates[:, : choice.negatives] if choice.sampling == "top" else _draw(candidates, choice.negatives, rows)
        ).cpu()


def _draw(candidates: Tensor, count: int, rows: slice) -> Tensor:  # (n, k) → (n, count)
    """Draws some candidates at random, and keeps their order. The draw of a row depends only on its number."""
    generator = torch.Generator()
    drawn = [torch.rand(candidates.shape[1], generator=generator.manual_seed(row)) for row in range(rows.start, rows.stop)]
    keys = torch.stack(drawn).to(candidates.device).masked_fill(candidates < 0, 2.0)
    places = keys.topk(min(count, candidates.shape[1]), dim=1, largest=False).indices.sort(dim=1).values
    return candidates.gather(1, places)


# ----------------------------------------------------------------------------------------------------------------------
# Embeddings in files. They are written chunk by chunk, so that a stopped command can continue, and a search reads them.
#
# `megabatch embed` writes one file for each side. In NumPy's format, another file has the samples as JSON lines. A Parquet file
# contains embeddings and samples.


FORMATS = (".npy", ".parquet")
EMBEDDING = "embedding"  # column of a Parquet file
SAMPLE = ("name", "path", "text")  # keys of a sample
_ABOUT = "megabatch"  # key of the file's metadata


class Stored:
    """Embeddings of one side in a file. They are written chunk by chunk in float32."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path.with_suffix(".bin"), total
        self._dim_file = path.with_suffix(".width")
        self.dim = int(self._dim_file.read_text()) if self._dim_file.exists() else 0
        size = self.path.stat().st_size if self.path.exists() else 0
        self.done = size // (4 * self.dim) if self.dim else 0
        if self.path.exists():
            os.truncate(self.path, self.done * 4 * self.dim)  # removes an incomplete row

    def append(self, chunk: Tensor) -> None:  # (n, D)
        """Appends rows to the file."""
        if not self.dim:
            self.dim = chunk.shape[1]
            self._dim_file.write_text(str(self.dim))
        with self.path.open("ab") as file:
            file.write(chunk.float().cpu().contiguous().numpy().tobytes())
        self.done += len(chunk)

    def rows(self) -> Tensor:  # (N, D)
        """Returns all rows. They are memory-mapped."""
        return torch.from_file(str(self.path), shared=False, size=self.done * self.dim).view(self.done, self.dim)

    def count_unreadable(self) -> int:
        """Returns the number of samples that could not be read."""
        return int(self.rows()[:, 0].isnan().sum())

    def fill(self, tower: Tower, dataset: Dataset, side: int, *, chunk_size: int, workers: int | Executor) -> None:
        """Embeds the samples that are not in the file yet, as `embed` does. The rows of unreadable samples are NaN."""
        if self.done:
            LOG.info("%s of %s %s are embedded already", f"{self.done:,}", f"{self.total:,}", tower.plural)
        rest = range(self.done, self.total)
        if not rest:
            return
        for chunk in readable(tower, dataset, side, rest, chunk_size=chunk_size, workers=workers):
            self.append(chunk)


def fingerprint(pair: Pair) -> Any:
    """Returns a checksum of a model. Embeddings of different models must not be compared."""
    return checksum([pair.name, dict(pair.options), [tower.module.state_dict() for tower in pair.towers]])


def digest(samples: Iterable[Any], number: int) -> str:
    """Returns a checksum of samples. Only one sample is in memory at a time."""
    total, progress = hashlib.sha256(), ReadingProgress("samples checksummed", number)
    for done, sample in enumerate(samples, 1):
        total.update(f"{checksum(sample)},".encode())
        progress.tell(done)
    return total.hexdigest()


def work_folder(output: Path) -> Path:
    """Returns the folder that keeps embeddings until the output is complete."""
    return output.with_name(output.name + ".work")


def targets(output: Path) -> list[Path]:
    """Returns the files that `write` writes."""
    return [output] if output.suffix == ".parquet" else [output.with_suffix(ending) for ending in (".json", ".jsonl", ".npy")]


def check_output(output: Path) -> None:
    """Checks the extension, the package and existing files before the work begins. Raises an error if `write` would fail.

    `write` replaces only files of an earlier `write`. Any other existing file raises an error.
    """
    if output.suffix not in FORMATS:
        raise ValueError(f"--output must end in {' or '.join(FORMATS)}, got {str(output)!r}")
    _load_writer(output)
    file_io.remove_leftovers(output.parent, {path.name for path in targets(output)}.__contains__)  # of a killed command
    existing = [path for path in targets(output) if os.path.lexists(path)]
    if folders := [path for path in existing if path.is_dir()]:
        raise ValueError(f"--output must be a file, got {folders[0]}, which is a folder")
    if existing and not _is_ours(output):
        named = " and ".join(str(path) for path in existing)
        raise ValueError(f"--output must replace only files that `megabatch embed` wrote, got {named}; choose another --output")


def _is_ours(output: Path) -> bool:
    """Returns whether `write` wrote the existing files."""
    try:
        if output.suffix == ".parquet":
            return _names_model(_about_parquet(output))
        described, listed, _ = targets(output)
        with listed.open("rb") if listed.exists() else nullcontext() as file:
            has_samples = file is None or list(json.loads(file.readline())) == list(SAMPLE)
        return has_samples and _names_model(json.loads(described.read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # the file is missing or has another format
        return False


def _names_model(about: Any) -> bool:
    return isinstance(about, dict) and "weights" in about


def _about_parquet(path: Path) -> Any:
    parquet = extras.load("pyarrow.parquet", purpose="Reading Parquet")
    return json.loads((parquet.read_schema(path).metadata or {}).get(_ABOUT.encode(), b"null"))


def continue_or_begin(work: Path, about: dict[str, Any]) -> None:
    """Continues the work in a folder, or begins it. Raises an error if the folder is for another model or other data."""
    path = work / "about.json"
    if path.exists():
        before = json.loads(path.read_text())
        changed = [name for name, value in about.items() if before.get(name) != value]
        if changed:
            raise ValueError(
                f"{work} must have the same model and data, but these have changed: {', '.join(changed)}. Remove the folder "
                "to embed everything again, or choose another --output"
            )
        return
    work.mkdir(parents=True, exist_ok=True)
    file_io.write(path, lambda file: file.write(json.dumps(about).encode()))


def write(output: Path, stored: Stored, samples: Iterable[dict[str, Any]], about: dict[str, Any]) -> None:
    """Writes embeddings, samples and `about` to one Parquet file, or to the three files of `targets`.

    Args:
        output: path that ends in one of `FORMATS`.
        stored: all embeddings.
        samples: one table row for each embedding. All rows have the same keys.
        about: description of the model and the data.
    """
    package = _load_writer(output)
    if output.suffix == ".parquet":
        _write_parquet(package, output, stored, samples, about)
        return
    header = {"descr": "<f4", "fortran_order": False, "shape": (stored.path.stat().st_size // (4 * stored.dim), stored.dim)}

    def array(file: Any) -> None:
        package.lib.format.write_array_header_1_0(file, header)
        with stored.path.open("rb") as rows:
            shutil.copyfileobj(rows, file, 1 << 24)

    # `about` is written first, because it marks the files as ours. The array is written last, because it completes the output.
    described, listed, _ = targets(output)
    lines = (json.dumps(sample, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n" for sample in samples)
    file_io.write(described, lambda file: file.write(json.dumps(about, indent=1).encode()))
    file_io.write(listed, lambda file: file.writelines(lines))
    file_io.write(output, array)


def _load_writer(output: Path) -> ModuleType:
    """Imports pyarrow or NumPy."""
    if output.suffix == ".parquet":
        return extras.load("pyarrow", purpose="Writing Parquet")
    return extras.load("numpy", purpose="Writing embeddings")


def _write_parquet(
    arrow: ModuleType, output: Path, stored: Stored, samples: Iterable[dict[str, Any]], about: dict[str, Any]
) -> None:
    parquet = extras.load("pyarrow.parquet", purpose="Writing Parquet")
    texts, kind = iter(samples), arrow.list_(arrow.float32(), stored.dim)
    metadata = {_ABOUT: json.dumps(about)}

    def table(file: Any) -> None:
        writer = None
        for rows in torch.split(stored.rows(), ROWS):
            some = [next(texts) for _ in range(len(rows))]
            columns = {key: arrow.array([sample[key] for sample in some], arrow.string()) for key in some[0]}
            columns[EMBEDDING] = arrow.FixedSizeListArray.from_arrays(rows.flatten().numpy(), type=kind)
            rows_table = arrow.table(columns).replace_schema_metadata(metadata)
            writer = writer or parquet.ParquetWriter(file, rows_table.schema)
            writer.write_table(rows_table)
        assert writer is not None, "a dataset has at least one sample"
        writer.close()

    file_io.write(output, table)


class Saved:
    """Reads embeddings that `write` wrote.

    Args:
        path: path that ends in one of `FORMATS`.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in FORMATS:
            raise ValueError(f"embeddings must be a file that ends in {' or '.join(FORMATS)}, got {path}")
        if not path.is_file():
            raise FileNotFoundError(f"No such file: {path}")
        self.path = path
        if path.suffix == ".parquet":
            parquet = extras.load("pyarrow.parquet", purpose="Reading Parquet")
            self.about: dict[str, Any] = _about_parquet(path)
            names = [name for name in parquet.read_schema(path).names if name != EMBEDDING]
            self.samples: list[dict[str, Any]] = parquet.read_table(path, columns=names).to_pylist()
        else:
            about, samples, _ = targets(path)
            if not (about.is_file() and samples.is_file()):
                raise FileNotFoundError(
                    f"{path} must have {about.name} and {samples.name} in the same folder, as embed writes them"
                )
            self.about = json.loads(about.read_text("utf-8"))
            with samples.open("rb") as lines:
                self.samples = [json.loads(line) for line in lines]
        if not _names_model(self.about):
            raise ValueError(f"{path} must be a file that `megabatch embed` wrote, got one without the name of a model")
        if path.suffix == ".npy" and (rows := self.count()) != len(self.samples):
            raise ValueError(
                f"{path} must have a row for each line of {path.stem}.jsonl, got {rows:,} and {len(self.samples):,}"
            )

    def count(self) -> int:
        """Returns the number of embeddings in a file in NumPy's format."""
        return len(self._array())

    def chunks(self) -> Iterator[Tensor]:  # (n, D) each
        """Yields the embeddings, at most `ROWS` at a time."""
        if self.path.suffix == ".parquet":
            parquet = extras.load("pyarrow.parquet", purpose="Reading Parquet")
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(ROWS, columns=[EMBEDDING]):
                    flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
                    yield torch.tensor(flat).view(len(batch), -1)
            return
        array = self._array()
        for first in range(0, len(array), ROWS):
            yield torch.from_numpy(array[first : first + ROWS].copy())

    def _array(self) -> Any:  # (N, D)
        """Returns the memory-mapped rows of a file in NumPy's format."""
        numpy = extras.load("numpy", purpose="Reading embeddings")
        return numpy.load(self.path, mmap_mode="r", allow_pickle=False)
