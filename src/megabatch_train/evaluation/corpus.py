"""Retrieval from a corpus: files of texts, queries and relevance judgments, a search in bounded memory, and its metrics."""

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch import pairwise
from megabatch.tiles.block import accumulator_dtype
from megabatch.tiles.sums import Best
from megabatch.world import World
from megabatch_train.data.dataset import TEXT, Dataset, ReadingProgress, UnreadableSampleError, text_id
from megabatch_train.evaluation.embedding import device_of, embed_chunks
from megabatch_train.towers.late_interaction import token_dim
from megabatch_train.towers.tower import Pair, Tower

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# Texts in JSON lines, as in BEIR: {"_id": …, "title": …, "text": …}. Only the positions of the lines and the ids are in memory.


class TextFile(Dataset):
    """The texts of a file of JSON lines. A title comes before its text. Both sides of a sample are its text.

    Args:
        path: a file with the suffix .jsonl.
        option: the name of the option or the setting that names the file, for messages.
        ids: whether each line must have an "_id" of its own.
    """

    sides = (TEXT, TEXT)

    def __init__(self, path: Path, option: str, *, ids: bool = False) -> None:
        super().__init__()
        if path.suffix != ".jsonl":
            raise ValueError(f"{option} must be a file of JSON lines (.jsonl), got {path}")
        if not path.is_file():
            raise FileNotFoundError(f"{option} must be a file, but there is no file {path}")
        self.path, self.option, self._file = path, option, -1
        self.identifiers: list[str] = []
        starts, total, progress = array("q"), hashlib.sha256(), ReadingProgress("bytes read", path.stat().st_size)
        with path.open("rb") as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    starts.append(start)
                    record = _parse(line, f"{option}: line {number:,} of {path}")
                    if ids:
                        self.identifiers.append(_identify(record, f"{option}: line {number:,} of {path}"))
                start += len(line)
                total.update(line)
                progress.tell(start)
        self._starts = torch.tensor([*starts, start], dtype=torch.int64)
        self._digest = total.hexdigest()
        if not len(self):
            raise ValueError(f"{option} must have at least one line, got an empty file {path}")
        if ids and len(set(self.identifiers)) < len(self):
            seen: set[str] = set()
            repeated = next(name for name in self.identifiers if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"{option} must have each _id once, got {repeated!r} more than once in {path}")

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._starts) - 1

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for another process, which opens the file itself."""
        return {**self.__dict__, "_file": -1, "identifiers": []}

    def __del__(self) -> None:
        """Closes the file."""
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    def read(self, index: int, side: int) -> str:
        """Returns a text."""
        start, end = self._starts[self.check(index)].item(), self._starts[index + 1].item()
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY)
        line = os.pread(self._file, int(end - start), int(start))
        try:
            record = _parse(line.partition(b"\n")[0], "")
        except ValueError as error:
            raise UnreadableSampleError(f"{self.path} has changed since it was opened") from error
        return f"{record.get('title') or ''} {record['text']}".strip()

    def name(self, index: int) -> str:
        """Returns the id of a text, or its number."""
        return self.identifiers[index] if self.identifiers else f"{self.path.name}, text {index + 1}"

    def digest(self) -> str:
        """Returns a checksum of the file."""
        return self._digest


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{where} must be a JSON object, got {line[:80]!r}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{where} must be a JSON object with a "text", got {line[:80]!r}')
    if not isinstance(record.get("title") or "", str):
        raise ValueError(f'{where} must have a string as "title", got {record["title"]!r}')
    try:
        "".join(str(record.get(key)) for key in ("_id", "id", "title", "text")).encode()
    except UnicodeEncodeError as error:  # JSON can escape a single surrogate, but no tokenizer accepts one
        raise ValueError(f"{where} must be Unicode text, got half of a surrogate pair") from error
    return record


def _identify(record: dict[str, Any], where: str) -> str:
    value = record.get("_id", record.get("id"))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f'{where} must have an "_id", got {value!r}')
    return str(value)


# ----------------------------------------------------------------------------------------------------------------------
# Relevance judgments (qrels): for each query, documents and their relevance. Positive numbers mean relevant.

Judgments = dict[str, dict[str, int]]


def read_judgments(path: Path, option: str = "--qrels") -> Judgments:
    """Reads a file of judgments. Messages name the file by `option`.

    A file of BEIR has a header, and then lines with query-id, corpus-id and score. A file of TREC has lines with a query, an
    iteration, a document and its relevance.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{option} must be a file, but there is no file {path}")
    try:
        judgments = _parse_judgments(path, option)
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be UTF-8 text, got {path}: {error}") from error
    if not judgments:
        raise ValueError(f"{option} must have at least one judgment, got none in {path}")
    return judgments


def _parse_judgments(path: Path, option: str) -> Judgments:
    judgments: Judgments = {}
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            tabs = line.rstrip("\r\n").split("\t")
            cells = tabs if len(tabs) >= 3 else line.split()  # an id of BEIR may contain spaces
            if not line.strip():
                continue
            value = _as_int(cells[-1])
            if number == 1 and value is None and len(cells) == 3:
                continue  # the header
            if len(cells) not in (3, 4) or value is None:
                raise ValueError(
                    f"{option} must have lines with a query, a document and a whole number, got {line.rstrip()!r} in line "
                    f"{number:,} of {path}"
                )
            query, document = cells[0], cells[-2]
            before = judgments.setdefault(query, {}).setdefault(document, value)
            if before != value:
                raise ValueError(
                    f"{option} must judge a document once for a query, got {before} and {value} for {query} and {document} in "
                    f"{path}"
                )
    return judgments


def _as_int(text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        return None
    return value if abs(value) < 2**63 else None  # tensors have 64 bits


@dataclass(frozen=True)
class RetrievalConfig:
    """A corpus, queries and relevance judgments, which a run is evaluated on, too."""

    corpus: str = ""  # corpus.jsonl of BEIR, or a folder with the three files of a BEIR dataset; "" for no corpus
    queries: str = ""  # queries.jsonl (default: in the folder of the corpus)
    qrels: str = ""  # relevance judgments of BEIR or TREC (default: qrels/test.tsv in the folder of the corpus)

    def __post_init__(self) -> None:
        """Checks that there is a corpus."""
        if not self.corpus and (self.queries or self.qrels):
            raise ValueError(f"retrieval.corpus must be set with retrieval.queries or retrieval.qrels, got {self.corpus!r}")

    def paths(self) -> tuple[Path, Path, Path]:
        """Returns the paths of the corpus, of the queries and of the judgments."""
        given = Path(self.corpus)
        folder, corpus = (given, given / "corpus.jsonl") if given.is_dir() else (given.parent, given)
        queries = Path(self.queries) if self.queries else folder / "queries.jsonl"
        return corpus, queries, Path(self.qrels) if self.qrels else folder / "qrels" / "test.tsv"


class RetrievalTask:
    """A corpus, and the queries that have relevance judgments.

    Args:
        config: the files.
        prefix: what comes before "corpus", "queries" and "qrels" in messages, which name the options or the settings.
    """

    def __init__(self, config: RetrievalConfig, prefix: str = "--") -> None:
        if not Path(config.corpus).exists():
            raise FileNotFoundError(f"{prefix}corpus must be a file or a folder, but there is none at {config.corpus}")
        corpus, queries, qrels = config.paths()
        judgments = read_judgments(qrels, f"{prefix}qrels")
        self.queries = TextFile(queries, f"{prefix}queries", ids=True)
        self.corpus = TextFile(corpus, f"{prefix}corpus", ids=True)
        numbers = {name: number for number, name in enumerate(self.queries.identifiers)}
        self.names = [name for name in judgments if name in numbers]
        if not self.names:
            raise ValueError(
                f"{prefix}qrels must judge at least one query of {queries}, got {qrels}, which judges none of them"
            )
        if missing := len(judgments) - len(self.names):
            LOG.warning("%s of %s queries of %s are not in %s", f"{missing:,}", f"{len(judgments):,}", qrels, queries)
        self.rows = [numbers[name] for name in self.names]
        # Documents are searched in this order, so that documents with equal scores are ordered as by trec_eval: the id that is
        # last in alphabetical order comes first.
        self.order = sorted(range(len(self.corpus)), key=lambda row: self.corpus.identifiers[row].encode(), reverse=True)
        places = {self.corpus.identifiers[row]: place for place, row in enumerate(self.order)}
        self.relevance = Relevance.of([judgments[name] for name in self.names], places)
        if self.relevance.missing:
            LOG.warning("%s relevant documents of %s are not in %s", f"{self.relevance.missing:,}", qrels, corpus)

    def exclude(self) -> tuple[Tensor, Tensor]:  # (Q,), (M,) int64
        """Returns ids of queries and of documents in the order of the search. As in BEIR, a text does not retrieve itself."""
        documents = torch.tensor([text_id(self.corpus.identifiers[row]) for row in self.order])
        return torch.tensor([text_id(name) for name in self.names]), documents


# ----------------------------------------------------------------------------------------------------------------------
# Metrics of a ranking, as trec_eval defines them.


DEPTH = 1000  # documents of each query whose ranking is evaluated
CUT, RECALL_CUT = 10, 100
WAY, METRICS = "query_to_document", (f"nDCG@{CUT}", f"MRR@{CUT}", f"R@{RECALL_CUT}", "MAP")


class Relevance(NamedTuple):
    """The relevance of documents. Documents are numbered in the order of the search."""

    queries: int
    keys: Tensor  # (J,) int64, query · documents + document, in ascending order
    values: Tensor  # (J,) int64
    documents: int
    relevant: Tensor  # (Q,) number of relevant documents of each query, in the corpus or not
    ideal: Tensor  # (Q,) float64, DCG of the best ranking
    missing: int  # number of relevant documents that are not in the corpus

    @staticmethod
    def of(judgments: Sequence[dict[str, int]], places: dict[str, int]) -> "Relevance":
        """Converts the judgments of each query. `places` has the number of each document."""
        count, keys, values, missing = max(1, len(places)), [], [], 0
        relevant, ideal = [], []
        discounts = 1 / torch.arange(2, CUT + 2, dtype=torch.float64).log2()
        for query, judged in enumerate(judgments):
            gains = sorted((value for value in judged.values() if value > 0), reverse=True)
            relevant.append(len(gains))
            best = torch.tensor(gains[:CUT], dtype=torch.float64)
            ideal.append((best * discounts[: len(best)]).sum())
            for name, value in judged.items():
                if name in places:
                    keys.append(query * count + places[name])
                    values.append(value)
                else:
                    missing += value > 0
        order = torch.tensor(keys, dtype=torch.int64).argsort()
        return Relevance(
            len(judgments),
            torch.tensor(keys, dtype=torch.int64)[order],
            torch.tensor(values, dtype=torch.int64)[order],
            count,
            torch.tensor(relevant),
            torch.stack(ideal),
            missing,
        )

    def look_up(self, ranking: Tensor) -> Tensor:  # (Q, k) int64 → (Q, k) int64
        """Returns the relevance of ranked documents. It is 0 for documents without a judgment, and for −1."""
        keys = torch.arange(self.queries)[:, None] * self.documents + ranking
        if not len(self.keys):
            return torch.zeros_like(ranking)
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return self.values[places].masked_fill((self.keys[places] != keys) | (ranking < 0), 0)


def score_ranking(ranking: Tensor, relevance: Relevance) -> dict[str, Tensor]:  # (Q, k) int64
    """Returns the metrics of each query, (Q,) float64: nDCG@10, MRR@10, R@100 and MAP. They are 0 without relevant documents.

    Args:
        ranking: (Q, k) numbers of documents, best first; −1 for none. MAP counts these documents.
        relevance: the judgments.
    """
    gains = relevance.look_up(ranking).clamp(min=0).double()  # (Q, k)
    places = torch.arange(1, ranking.shape[1] + 1, dtype=torch.float64)
    hits = (gains > 0).double()
    count = relevance.relevant.double().clamp(min=1)
    cut = slice(0, CUT)
    values = (
        (gains[:, cut] / (places[cut] + 1).log2()).sum(1) / relevance.ideal.where(relevance.ideal > 0, 1.0),
        (hits[:, cut] / places[cut]).amax(1),
        hits[:, :RECALL_CUT].sum(1) / count,
        (hits * hits.cumsum(1) / places).sum(1) / count,
    )
    return dict(zip(METRICS, values, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# The search. Each rank embeds and searches its part of the corpus. Only a block of embeddings is in memory at a time, and the
# best documents of each query.


SEARCHED = 1 << 15  # embeddings that are searched at once
QUERIES = 1 << 12  # queries whose best documents are merged at once


@torch.no_grad()
def search_corpus(
    queries: Tensor,  # (Q, D)
    chunks: Iterable[Tensor],  # (n, D) each
    k: int,
    *,
    exclude: tuple[Tensor, Tensor] | None = None,  # (Q,), (M,) int64
    first: int = 0,
) -> Best:  # (Q, k)
    """Returns the k documents with the largest dot products for each query. The smaller number comes first among equal scores.

    Args:
        queries: (Q, D) embeddings.
        chunks: the embeddings of the documents.
        k: number of documents.
        exclude: ids of queries and of documents. A query does not find a document with the same id.
        first: number of the first document.
    """
    best = Best.none(len(queries), k, queries.new_zeros(0, dtype=accumulator_dtype(queries.dtype)))
    done = 0
    for block in _join(chunks, SEARCHED):
        documents = block.to(queries)
        ids = None if exclude is None else exclude[1][done : done + len(block)].to(queries.device)
        for begin in range(0, len(queries), QUERIES):
            part = slice(begin, begin + QUERIES)
            own = None if exclude is None or ids is None else (exclude[0][part].to(queries.device), ids)
            with torch.autocast(queries.device.type, enabled=False):  # but `chunks` are encoded under the autocast of a run
                values, indices = pairwise.pairwise_topk(queries[part], documents, min(k, len(block)), exclude=own)
            merged = Best(best.values[part], best.indices[part]).merge(
                Best(values, torch.where(indices < 0, indices, indices + first + done))
            )
            best.values[part], best.indices[part] = merged.values, merged.indices
        done += len(block)
    return best


def _join(chunks: Iterable[Tensor], rows: int) -> Iterator[Tensor]:
    """Yields blocks of at least `rows` rows, except the last one."""
    waiting: list[Tensor] = []
    for chunk in chunks:
        waiting.append(chunk)
        if sum(map(len, waiting)) >= rows:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def _towers(pair: Pair) -> tuple[Tower, Tower]:
    """Returns the towers for queries and for documents."""
    if pair.second.kind != TEXT:
        raise ValueError(
            f"MODEL must encode texts to search a corpus, got a model of {pair.first.kind}s and {pair.second.kind}s"
        )
    return (pair.first if pair.first.kind == TEXT else pair.second), pair.second


def evaluate_corpus(
    pair: Pair, task: RetrievalTask, *, chunk_size: int = 256, workers: int | Executor = 0, group: Any = None
) -> dict[str, float]:
    """Embeds the corpus, searches it for all queries, and returns the mean metrics and the numbers of queries and documents.

    MAP counts the first 1,000 documents of a query. The metrics agree with those of trec_eval. Each rank embeds a part of the
    corpus, and all ranks return the same result.

    Args:
        pair: the towers. The first encodes queries if it encodes texts, and the second one encodes documents.
        task: the corpus, queries and judgments.
        chunk_size: number of texts that a tower encodes at once.
        workers: as for `ReplaySource`.
        group: process group that the corpus is sharded over (default: no sharding).
    """
    query_tower, document_tower = _towers(pair)
    if token_dim(pair):
        raise ValueError(
            f"a search in a corpus needs a model with one vector per text, got the late-interaction model {pair.name!r}"
        )
    world = World.of(group, device_of(document_tower.module))
    options: dict[str, Any] = {"chunk_size": chunk_size, "workers": workers}
    own = task.rows[_share(len(task.rows), world)]
    queries = torch.cat([*embed_chunks(query_tower, task.queries, 0, own, **options)]) if own else None
    width = max(rows for (rows,) in world.gather_integers([0 if queries is None else queries.shape[1]]))
    if queries is None:
        queries = torch.empty(0, width, device=world.device, dtype=next(document_tower.module.parameters()).dtype)
    queries = world.gather_rows(queries)
    place = _share(len(task.order), world)
    query_ids, document_ids = task.exclude()
    k = min(DEPTH, len(task.order))
    chunks = embed_chunks(document_tower, task.corpus, 1, task.order[place], **options) if place.start < place.stop else []
    best = search_corpus(queries, chunks, k, exclude=(query_ids, document_ids[place]), first=place.start)
    ranking = Best.none(len(queries), k, best.values)
    for (_, values), (_, indices) in zip(world.blocks(best.values), world.blocks(best.indices), strict=True):
        ranking = ranking.merge(Best(values, indices))
    metrics = score_ranking(ranking.indices.cpu(), task.relevance)
    result = {f"{WAY}_{name}": values.mean().item() for name, values in metrics.items()}
    return {**result, "num_queries": len(task.names), "num_documents": len(task.corpus)}


def _share(count: int, world: World) -> slice:
    return slice(world.rank * count // world.size, (world.rank + 1) * count // world.size)
