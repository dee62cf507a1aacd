"""Evaluation: recall and retrieval ranks with their chance level, zero-shot accuracy, and correlation with scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import pairwise
from megabatch.dispatch import Backend, Execution
from megabatch.losses import clip_loss, late_interaction_loss
from megabatch.pairwise import PairRanks
from megabatch.primitives import RankedEntries, accumulator_dtype, execution, matching_products, rank
from megabatch.tiles.sums import to_exact
from megabatch.world import World
from megabatch_train.data.dataset import Dataset, first_places, name_sides
from megabatch_train.evaluation.embedding import device_of, embed
from megabatch_train.evaluation.late_interaction import connect, rank_tokens
from megabatch_train.towers.late_interaction import pack, token_dim, unpack
from megabatch_train.towers.tower import Pair

# ----------------------------------------------------------------------------------------------------------------------
# Chance level: the expected recall and retrieval rank of a random order of the candidates.


def expect_recall(k: int, candidates: int, correct: float = 1) -> float:
    """Returns the probability that one of the first k candidates in random order is correct.

    Example: `expect_recall(5, 1000)` is 0.005, and with two correct candidates `expect_recall(5, 1000, 2)` is 0.00998.

    Args:
        k: number of first candidates.
        candidates: number of distinct candidates.
        correct: number of correct candidates. A mean over queries can be a fraction.
    """
    if k >= candidates:
        return 1.0
    if correct == 1:
        return k / candidates
    return 1 - math.prod(max(0.0, candidates - correct - i) / (candidates - i) for i in range(k))


def expect_rank(candidates: int, correct: float = 1) -> float:
    """Returns the mean retrieval rank of the first correct candidate in random order. Ranks count from 1.

    Other correct candidates do not count as candidates.
    """
    return (candidates - correct) / (correct + 1) + 1


# ----------------------------------------------------------------------------------------------------------------------
# Retrieval ranks of the best match, if rows have several matching columns or columns have several matching rows.
#
# The library ranks one entry of each row and of each column in one pass over the tiles. Here, this entry is the best match.
# Finding it takes one dot product for each matching pair. Ties and NaN are as in `pairwise_rank`: similarities within rounding
# error are equal, the smaller index comes first, and NaN ranks last. With one match per row, the results are equal.

ROWS = 8192  # number of pairs whose similarities are computed at once


@torch.no_grad()
def ranks_of_best(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    rows: Tensor,  # (P,) int64
    columns: Tensor,  # (P,) int64
    *,
    group: Any = None,
    backend: Backend = "auto",
) -> PairRanks:  # (N,), (M,) int64
    """Returns the retrieval rank of the best match of each row and of each column. Rank 0 is best.

    To rank row i, `(x @ y.T)[i]` is sorted in descending order. The rank is the first position of a matching column. Other
    matching columns are not counted. The matrix is not stored. A column without a match ranks last.

    Args:
        x: (N, D) embeddings.
        y: (M, D) embeddings of the same dtype.
        rows: (P,) row numbers of the matching pairs, counted over all ranks. Every row occurs at least once. With a group, this
            rank must pass all pairs of its rows and of its columns, and can pass other pairs.
        columns: (P,) column numbers of the matching pairs, counted over all ranks.
        group: process group that x and y are sharded over (default: no sharding).
        backend: see `clip_loss`.
    """
    run = execution(x, y, group=group, backend=backend)
    world = World.of(group, y.device)
    first, totals = _count_rows(world, x, y)
    _check_pairs(rows, columns, totals)
    pairs = torch.unique(torch.stack([rows, columns]), dim=1)  # a repeated pair counts once
    by_row = _MatchingEntries.find(x, y, pairs[0] - first[0], pairs[1], run, world)
    by_column = _MatchingEntries.find(y, x, pairs[1] - first[1], pairs[0], run, world)
    _check_all_have_pairs(by_row, "rows", "x", len(x))
    entries = RankedEntries(by_row.match, by_column.match, by_row.target, by_column.target)
    there, back = rank(x, y, run, entries)
    return PairRanks(there - by_row.count_before(), back - by_column.count_before())


class _MatchingEntries(NamedTuple):
    """The logit matrix entries of this rank's matching pairs, and the best entry of each row. For columns, exchange x and y."""

    rows: Tensor  # (P,) int64
    columns: Tensor  # (P,) int64, counted over all ranks
    similarity: Tensor  # (P,)
    noise: Tensor  # (P,) bound of the rounding error of the similarity
    match: Tensor  # (N,) the best similarity of each row
    target: Tensor  # (N,) int64, the column of the best similarity

    @staticmethod
    def find(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor, run: Execution, world: World) -> "_MatchingEntries":
        """Computes the entries of the pairs whose row is on this rank. Columns are counted over all ranks."""
        here = (rows >= 0) & (rows < len(x))
        rows, columns = rows[here], columns[here]
        similarity = torch.empty(len(rows), dtype=accumulator_dtype(x.dtype), device=x.device)
        noise = torch.empty_like(similarity)
        alone = run._replace(group="")
        for first, block in world.blocks(y):
            places = ((columns >= first) & (columns < first + len(block))).nonzero().flatten()
            for part in torch.split(places, ROWS):
                if len(part):
                    own, partners = x[rows[part]], block[columns[part] - first]
                    similarity[part], noise[part], _ = matching_products(own, partners, alone)
        return _MatchingEntries(rows, columns, similarity, noise, *_best(len(x), similarity, rows, columns))

    def count_before(self) -> Tensor:  # (N,) int64
        """Returns how many matching columns rank before a row's best match, because they equal it up to rounding or are NaN."""
        match, target = self.match[self.rows], self.target[self.rows]
        later = (self.similarity <= match + self.noise) & (self.columns > target)
        before = ~((self.similarity < match - self.noise) | later) & (self.columns != target)
        return torch.bincount(self.rows[before], minlength=len(self.match))


def _best(N: int, similarity: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:  # (N,), (N,) int64
    """Returns the best similarity of each row and the first column that has it. It is NaN if all matches of a row are NaN."""
    lowest, none = torch.finfo(similarity.dtype).min, torch.iinfo(torch.int64).max
    comparable = similarity.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=lowest)
    best = torch.full((N,), -torch.inf, dtype=comparable.dtype, device=comparable.device).scatter_reduce(
        0, rows, comparable, "amax"
    )
    among = torch.where(comparable == best[rows], columns, none)
    target = torch.full((N,), none, dtype=torch.int64, device=comparable.device).scatter_reduce(0, rows, among, "amin")
    return torch.where(best == -torch.inf, torch.nan, best), target


def _count_rows(world: World, x: Tensor, y: Tensor) -> tuple[list[int], list[int]]:
    """Returns the numbers of this rank's first rows of x and y, and the total numbers of rows of x and y."""
    counts = world.gather_integers([len(x), len(y)])
    return [sum(line[side] for line in counts[: world.rank]) for side in (0, 1)], [
        sum(line[side] for line in counts) for side in (0, 1)
    ]


def _check_pairs(rows: Tensor, columns: Tensor, totals: Sequence[int]) -> None:
    for name, value, side, length in (("rows", rows, "x", totals[0]), ("columns", columns, "y", totals[1])):
        if value.dtype != torch.int64 or value.dim() != 1 or len(value) != len(rows):
            raise ValueError(
                f"{name} must be a vector of int64, and rows and columns must have equal length, got {value.dtype}, "
                f"{tuple(value.shape)}"
            )
        if len(value) and not (int(value.min()) >= 0 and int(value.max()) < length):
            raise ValueError(
                f"{name} must be row numbers of {side}, from 0 to {length - 1}, got {int(value.min())} to {int(value.max())}"
            )


def _check_all_have_pairs(entries: _MatchingEntries, name: str, side: str, length: int) -> None:
    without = (torch.bincount(entries.rows, minlength=length) == 0).nonzero().flatten()
    if len(without):
        row = int(without[0])
        raise ValueError(f"{name} must contain every row of {side} at least once, got no pair for row {row} of {length}")


# ----------------------------------------------------------------------------------------------------------------------
# Recall and retrieval ranks in both directions, with the metric names of open_clip. The similarity matrix is not stored.


RECALLS = (1, 5, 10)
HEADLINES = ("text_to_image_R@1", "query_to_text_R@1")  # recall@1 of a search by text
CORPUS_HEADLINE = "corpus/query_to_document_nDCG@10"  # for a run without validation data


def find_headline(result: Mapping[str, float]) -> str:
    """Returns the metric that selects the best weights: recall@1 by text or by the second side, or nDCG of a corpus."""
    recalls = [key for key in result if key.endswith("_R@1")]
    return next(key for key in (*HEADLINES, *reversed(recalls), CORPUS_HEADLINE) if key in result)


def retrieval(
    image: Tensor,  # (N, D)
    text: Tensor,  # (M, D)
    owners: Tensor | None = None,  # (M,) int64
    *,
    pairs: tuple[Tensor, Tensor] | None = None,  # (P,), (P,) int64
    names: tuple[str, str] = ("image", "text"),
    group: Any = None,
    backend: Backend = "auto",
    token_dim: int = 0,
) -> dict[str, float]:
    """Computes recall@1, 5 and 10, mean reciprocal rank, nDCG@10, mean and median rank in both directions.

    Ranks count from 1. `num_samples` is N. `num_texts` is M, if M differs from N.

    Args:
        image: (N, D) embeddings of the first side.
        text: (M, D) embeddings of the second side.
        owners: (M,) the row of `image` that each text belongs to, if images have several texts. The best text counts. None if
            row i of `text` belongs to row i of `image`. With a group, an image and its texts must be on the same rank.
        pairs: (P,), (P,) the rows of `image` and of `text` that belong together, if texts can have several images too. Every
            row occurs at least once, and the best match counts. With a group, these are the pairs of all ranks, and rows are
            counted over all ranks.
        names: names of the two sides, as in "image_to_text_R@1" (`name_sides`).
        group: process group that the data is sharded over (default: no sharding). All ranks get the same result.
        backend: backend of `pairwise_rank`.
        token_dim: dim of a vector, if the rows are of a late-interaction model; 0 for embeddings.
    """
    world = World.of(group, image.device)
    if owners is not None and pairs is not None:
        raise ValueError("owners must be None if pairs are given, got both")
    if token_dim:
        there, back = rank_tokens(image, text, pairs, token_dim, group)
    elif owners is None and pairs is None:
        there, back = pairwise.pairwise_rank(image, text, group=group, backend=backend)
    else:
        if pairs is None:
            assert owners is not None
            texts = torch.arange(len(text), device=text.device)
            pairs = owners + world.row_offset(len(image)), texts + world.row_offset(len(text))
        there, back = ranks_of_best(image, text, *pairs, group=group, backend=backend)
    there, back = world.gather_rows(there), world.gather_rows(back)
    if not len(there) or not len(back):
        raise ValueError(f"image and text must have at least one row, got {len(there)} and {len(back)}")
    first, second = names
    counts = {"num_samples": len(there)} | ({f"num_{second}s": len(back)} if len(back) != len(there) else {})
    return {**_summary(f"{first}_to_{second}", there), **_summary(f"{second}_to_{first}", back), **counts}


def _summary(name: str, ranks: Tensor) -> dict[str, float]:
    ranks = ranks.cpu()  # some devices have no float64
    values = ranks.double()
    middle = values.quantile(0.5, interpolation="midpoint") if len(values) < 2**24 else values.median()  # quantile's limit
    result = {f"{name}_mean_rank": values.mean().item() + 1, f"{name}_median_rank": math.floor(middle.item()) + 1.0}
    positions = ranks.double()
    result |= {f"{name}_MRR": (1 / (positions + 1)).mean().item()}
    result |= {
        f"{name}_nDCG@10": torch.where(ranks < 10, 1 / (positions + 2).log2(), 0.0).mean().item()
    }  # only the best match counts
    return result | {f"{name}_R@{k}": (ranks < k).double().mean().item() for k in RECALLS}


# ----------------------------------------------------------------------------------------------------------------------
# Zero-shot classification: an image is assigned to the class whose text embedding is most similar.


TEMPLATES = (
    "{}",
    "a photo of a {}.",
    "a drawing of a {}.",
    "a picture of the {}.",
)  # general prompts; many datasets have special prompts
TOPS = (1, 5)


@torch.no_grad()
def classifier(
    encode: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str] = TEMPLATES, *, at_once: int = 64
) -> Tensor:  # (C, D)
    """Returns one unit vector per class: the normalized mean of the text embeddings of its name in all templates.

    Args:
        encode: function from texts to embeddings, (n,) -> (n, D).
        names: names of the classes.
        templates: texts with "{}" in place of the name.
        at_once: number of classes whose texts are encoded together.
    """
    if not names or not templates:
        raise ValueError(f"names and templates must not be empty, got {len(names)} and {len(templates)}")
    for template in templates:
        try:
            has_name = template.format("name") != template
        except (ValueError, LookupError, AttributeError):  # {name}, {0} {1}, {.x}, or a single brace
            has_name = False
        if not has_name:
            raise ValueError(f'templates must have a "{{}}" in place of the name, and no other braces, got {template!r}')
    classes = []
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        texts = encode([template.format(name) for name in part for template in templates])  # (n·templates, D)
        classes.append(F.normalize(F.normalize(texts, dim=-1).view(len(part), len(templates), -1).mean(1), dim=-1))
    return torch.cat(classes)


def zero_shot(image: Tensor, labels: Tensor, classes: Tensor, *, name: str = "imagenet", group: Any = None) -> dict[str, float]:
    """Computes top-1 and top-5 accuracy, with keys such as `{name}-zeroshot-val-top1`.

    Args:
        image: (N, D) embeddings.
        labels: (N,) int64 class numbers.
        classes: (C, D) result of `classifier`, equal on all ranks.
        name: name of the dataset.
        group: process group that the images are sharded over (default: no sharding). All ranks get the same result.
    """
    rows = torch.arange(len(image), device=image.device)
    ranks = World.of(group, image.device).gather_rows(ranks_of_best(image, classes.to(image), rows, labels).row).cpu()
    if not len(ranks):
        raise ValueError("image must have at least one row, got none")
    return {f"{name}-zeroshot-val-top{k}": (ranks < k).double().mean().item() for k in TOPS}


# ----------------------------------------------------------------------------------------------------------------------
# Semantic textual similarity (STS): how well the similarities of a model agree with the order of human scores.


def spearman(x: Tensor, y: Tensor) -> float:  # (n,), (n,)
    """Returns Spearman's rank correlation. Equal values get the mean of their ranks."""
    if len(x) < 2:
        raise ValueError(f"a correlation needs at least two scored pairs, got {len(x)}")
    a, b = (_ranks(values.cpu()) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def sts(
    pair: Pair, dataset: Dataset, scores: Tensor, *, chunk_size: int = 256, workers: Any = 0, group: Any = None
) -> dict[str, float]:
    """Returns the correlation of cosine similarities with scores (samples,). Skips unreadable samples and missing scores."""
    world = World.of(group, device_of(pair.second.module))
    if token_dim(pair):
        raise ValueError("a correlation with scores needs a model with one vector per text, got a late-interaction model")
    ours = list(range(world.rank, len(dataset), world.size))
    sides = [embed(pair.towers[side], dataset, side, ours, chunk_size=chunk_size, workers=workers) for side in (0, 1)]
    good = (dataset.usable(ours) & ~scores[ours].isnan()).to(sides[0].device)
    cosines = to_exact(torch.cosine_similarity(sides[0], sides[1])[good])
    all_cosines, all_scores = world.gather_rows(cosines), world.gather_rows(scores[ours].to(cosines)[good])
    failed = len(dataset) - len(all_cosines)
    return {"sts_spearman": spearman(all_cosines, all_scores), "num_samples": len(all_cosines), "num_failed": failed}


def _ranks(values: Tensor) -> Tensor:  # (n,) -> (n,) float64
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    ranks: Tensor = (ends - (count.double() - 1) / 2)[group]
    return ranks


# ----------------------------------------------------------------------------------------------------------------------
# Retrieval metrics of a model on a dataset: embeds this rank's shard, skips unreadable samples, and counts ranks.


KEPT_BYTES = 1 << 30  # largest size of embeddings that an evaluation keeps


class Evaluated(NamedTuple):
    """A dataset with the embeddings of its readable items and documents, which an evaluation has computed."""

    dataset: Dataset
    samples: tuple[Tensor, ...]  # (items,) and (documents,) int64, a sample of each item and of each document
    embeddings: tuple[Tensor, ...]  # (items, D) and (documents, D) in host memory
    token_dim: int = 0  # dim of a vector of a late-interaction model

    def rows(self, side: int, samples: Sequence[int]) -> tuple[Tensor, Tensor]:  # (k, D), (n,) bool
        """Returns the embeddings of one side of samples, and a mask of the samples that have an embedding."""
        ids = self.dataset.documents() if side else self.dataset.items()
        numbers = [
            part.tolist() if ids is None else ids.cpu()[part].tolist()
            for part in map(torch.as_tensor, (self.samples[side], samples))
        ]
        row_of = {number: row for row, number in enumerate(numbers[0])}
        places = torch.tensor([row_of.get(number, -1) for number in numbers[1]], dtype=torch.int64)
        return self.embeddings[side][places[places >= 0]], places >= 0


@torch.no_grad()
def evaluate(
    pair: Pair,
    dataset: Dataset,
    *,
    scale: float | None = None,
    chunk_size: int = 256,
    workers: int | Executor = 0,
    group: Any = None,
    keep: "Callable[[Evaluated], None] | None" = None,
) -> dict[str, float]:
    """Computes the metrics of `retrieval` over the distinct items and documents of a dataset.

    Samples with the same first side (`dataset.items`) are one item, such as an image with several captions. Samples with the
    same second side (`dataset.documents`) are one document, such as an answer to several questions. Each is ranked once, and
    each of its matches is correct. `num_pairs` is the number of different pairs, if items and documents have several matches.
    `num_failed` is the number of unreadable samples on all ranks. `clip_val_loss` is CLIP's loss over all pairs at `scale`
    (default: the scale of the model). Under autocast, the towers encode in half precision, but embeddings are compared in the
    dtype that they have. On all ranks, `keep` is called with the embeddings of all ranks, unless they need more than
    `KEPT_BYTES`.
    """
    world = World.of(group, device_of(pair.second.module))
    pairs = _pairs_of(dataset)
    if len(pairs.item_samples) < world.size:  # all ranks raise the error, because otherwise the others would wait forever
        raise ValueError(f"dataset must have at least one item for each of {world.size} ranks, got {len(pairs.item_samples)}")
    if len(pairs.document_samples) < world.size:
        group, world = None, World.of(None, world.device)  # with so few documents, each rank evaluates everything
    sides: list[Tensor] = []
    read: set[int] = set()
    for side, samples in enumerate((pairs.item_samples, pairs.document_samples)):
        mine = samples[_share(len(samples), world)].tolist()
        sides.append(embed(pair.towers[side], dataset, side, mine, chunk_size=chunk_size, workers=workers))
        read.update(mine)
    one_to_one = pairs.are_one_to_one  # also valid after samples are excluded: pair i stays the pair of item i and document i
    failed = set().union(*world.gather_objects({index for index in read if index in dataset.failures}))
    if failed:
        pairs, sides = _without(pairs, failed, sides, world)
    if not len(pairs.items):
        reason = next(text for text in world.gather_objects(next(iter(dataset.failures.values()), None)) if text)
        raise ValueError(f"none of {len(dataset):,} samples could be read, the first because {reason}")
    chosen = pairs.item_samples, pairs.document_samples
    if keep is not None and 4 * sum(map(len, chosen)) * sides[0].shape[1] <= KEPT_BYTES:
        keep(Evaluated(dataset, chosen, tuple(world.gather_rows(rows).cpu() for rows in sides), token_dim(pair)))
    names = name_sides(dataset.sides)
    matches = None if one_to_one else (pairs.items.to(world.device), pairs.documents.to(world.device))
    with torch.autocast(world.device.type, enabled=False):
        result = retrieval(*sides, pairs=matches, names=names, group=group, token_dim=token_dim(pair))
        scale = pair.logit_scale if scale is None else scale
        share = _loss(sides[0], sides[1], matches, pairs.ids(), scale, world, token_dim(pair))
    if (count := pairs.count_different()) > max(len(pairs.item_samples), len(pairs.document_samples)):
        result["num_pairs"] = count
    return {**result, "clip_val_loss": world.sum([share.item()])[0] / world.size, "num_failed": len(failed)}


class _EvaluationPairs(NamedTuple):
    """The pairs of a dataset on all ranks. Pair i consists of the item `items[i]` and the document `documents[i]`."""

    samples: Tensor  # (P,) int64 sample indices, sorted by item
    items: Tensor  # (P,) int64, in ascending order
    documents: Tensor  # (P,) int64, numbered in the order of first appearance
    item_samples: Tensor  # (items,) int64, a sample of each item
    document_samples: Tensor  # (documents,) int64, a sample of each document

    @property
    def are_one_to_one(self) -> bool:
        """Whether each item and each document is in only one pair. If so, pair i consists of item i and document i."""
        return len(self.items) == len(self.item_samples) == len(self.document_samples)

    def count_different(self) -> int:
        """Returns the number of different pairs."""
        return len(torch.unique(self.items * len(self.document_samples) + self.documents))

    def ids(self) -> Tensor | None:  # (P,) or (P, 2) int64
        """Returns ids for a loss. Pairs that share an item or a document are not each other's negatives."""
        if self.are_one_to_one:
            return None
        if len(self.document_samples) == len(self.items):
            return self.items
        if len(self.item_samples) == len(self.items):
            return self.documents
        return torch.stack([self.items, self.documents], dim=1)


def _pairs_of(dataset: Dataset) -> _EvaluationPairs:
    everything = torch.arange(len(dataset))
    items, documents = (everything if ids is None else ids.cpu() for ids in (dataset.items(), dataset.documents()))
    items = torch.unique(items, return_inverse=True)[1]
    samples = items.argsort(stable=True)
    items, documents = items[samples], torch.unique(documents[samples], return_inverse=True)[1]
    first = first_places(documents)
    documents = first.argsort().argsort()[documents]
    return _EvaluationPairs(samples, items, documents, samples[first_places(items)], samples[first_places(documents)])


def _share(count: int, world: World) -> slice:
    """Returns the range of items or documents that this rank evaluates."""
    return slice(world.rank * count // world.size, (world.rank + 1) * count // world.size)


def _without(
    pairs: _EvaluationPairs, failed: set[int], sides: list[Tensor], world: World
) -> tuple[_EvaluationPairs, list[Tensor]]:
    """Removes unreadable samples, and then items and documents without a pair, from the pairs and this rank's embeddings.

    If an image is unreadable, all its captions are skipped.
    """
    unreadable = torch.tensor(sorted(failed))
    good = ~torch.isin(pairs.samples, unreadable) & ~torch.isin(pairs.item_samples, unreadable)[pairs.items]
    numbers, representatives, embeddings = [], [], []
    for of_pairs, samples, rows in (
        (pairs.items[good], pairs.item_samples, sides[0]),
        (pairs.documents[good], pairs.document_samples, sides[1]),
    ):
        kept = torch.zeros(len(samples), dtype=torch.bool)
        kept[of_pairs] = True
        numbers.append((kept.cumsum(0) - 1)[of_pairs])
        representatives.append(samples[kept])
        embeddings.append(rows[kept[_share(len(samples), world)].to(rows.device)])
    return _EvaluationPairs(pairs.samples[good], *numbers, *representatives), embeddings


def _loss(
    items: Tensor,  # (N, D)
    documents: Tensor,  # (M, D)
    matches: tuple[Tensor, Tensor] | None,  # (P,), (P,) of all ranks; None if row i belongs to row i
    ids: Tensor | None,  # (P,) or (P, 2)
    scale: float,
    world: World,
    dim: int,
) -> Tensor:  # ()
    """Returns CLIP's loss of this rank's pairs against all pairs. A pair belongs to the rank of its item.

    `dim` is the dim of a vector of a late-interaction model, or 0.
    """
    if matches is None:
        return _clip_loss(items, documents, scale, None, world, dim)
    first = world.row_offset(len(items))
    mine = (matches[0] >= first) & (matches[0] < first + len(items))
    columns = matches[1][mine]
    partners = documents.new_empty(len(columns), documents.shape[1])
    for begin, block in world.blocks(documents):
        here = (columns >= begin) & (columns < begin + len(block))
        partners[here] = block[columns[here] - begin]
    own = items[matches[0][mine] - first]
    return _clip_loss(own, partners, scale, None if ids is None else ids.to(mine.device)[mine], world, dim)


def _clip_loss(items: Tensor, documents: Tensor, scale: float, ids: Tensor | None, world: World, dim: int) -> Tensor:  # ()
    if not dim:
        return clip_loss(items, documents, scale, ids=ids, group=world.group)
    ids = connect(ids, world) if ids is not None and ids.dim() == 2 else ids
    vectors = unpack(items, dim), pack(documents, dim)
    return late_interaction_loss(*vectors, scale, ids=ids, symmetric=True, group=world.group)
