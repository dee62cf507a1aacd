"""Datasets by name: loads, mixes and splits the data that the user names, and finds hard negatives."""

import bisect
import glob
import inspect
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.cached.sources import Source
from megabatch_train import names
from megabatch_train.data import demo
from megabatch_train.data.dataset import (
    IMAGE,
    MIXED,
    TEXT,
    Dataset,
    Part,
    Preparation,
    Wrapper,
    components,
    find_components,
    number_values,
    text_id,
)
from megabatch_train.data.hub import PREFIX, HubDataset, is_saved
from megabatch_train.data.loader import Mixture
from megabatch_train.data.paths import Url, has_magic, is_url, place
from megabatch_train.data.rows import Folders, class_folders, has_captions
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# A mixture of several datasets, such as "3 * photos/*.tar + 1 * drawings.csv".
#
# An epoch has as many samples as all sources together, and each source contributes its share. If the share is larger than
# the source, samples are repeated. If the share is smaller, the next epoch continues where this one stopped. `Order` chooses
# the samples by the seed and the number of the epoch. Without weights, an epoch has each sample once.

BETWEEN = " + "
_WEIGHT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*\*(\s*)(.*)", re.DOTALL)


def parse_spec(spec: str) -> tuple[list[str], list[float] | None]:
    """Returns the names of the sources and their weights, or None instead of weights if no source has one."""
    specs = [part.strip() for part in spec.split(BETWEEN)]
    weighted = [_parse_weight(part) for part in specs]
    if any(weighted) and not all(weighted):
        raise ValueError(f'every source or none must have a weight, as in "3 * photos.csv + 1 * drawings.csv", got {spec!r}')
    names = [part[1] for part in weighted if part] or specs
    if not all(names):
        raise ValueError(f"every source must have a name, got {spec!r}")
    return names, [part[0] for part in weighted if part] or None


def anchor_mixture(spec: str, anchor_one: Callable[[str], str]) -> str:
    """Returns the mixture with `anchor_one` applied to each name. The weights stay the same."""
    anchored = []
    for part in (part.strip() for part in spec.split(BETWEEN)):
        weighted = _parse_weight(part)
        name = part if weighted is None else weighted[1]
        anchored.append(part.removesuffix(name) + anchor_one(name))
    return BETWEEN.join(anchored)


def _parse_weight(spec: str) -> tuple[float, str] | None:
    """Returns a weight and its source, or None if there is no weight. "3*.csv" has no weight if files match this pattern."""
    match = _WEIGHT.fullmatch(spec)
    if match is None or (not match[2] and glob.glob(spec)):
        return None
    return float(match[1]), match[3]


class Mix(Wrapper):
    """The samples of several datasets, one dataset after another.

    Args:
        sources: datasets with the same kinds of sides.
        weights: share of each source in an epoch. They need not sum to one (default: the number of samples of each source).
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        for source in sources:
            if tuple(source.sides) != tuple(sources[0].sides):
                kinds = " and ".join(" to ".join(one.sides) for one in (sources[0], source))
                raise ValueError(f"sources that are mixed must have the same sides, got {kinds}")
            if columns := source.negative_columns:
                raise ValueError(
                    f"sources that are mixed must be pairs, got hard negatives in the column {columns[0]}; "
                    '--set data_options.columns.negative="" excludes them'
                )
        self.sources, self.sides = list(sources), sources[0].sides
        self.credits = tuple(dict.fromkeys(line for source in sources for line in source.credits))
        self.problems = [problem for source in sources for problem in source.problems]
        self._ends = list(itertools.accumulate(map(len, sources)))
        parts = tuple(len(source) if source.groups is None else source.groups for source in sources)
        self.groups = Mixture(parts, tuple(map(float, weights or map(len, sources))))

    def __len__(self) -> int:
        """Returns the number of samples of all sources."""
        return self._ends[-1]

    def find(self, index: int) -> tuple[Dataset, int]:
        """Returns the source that has a sample, and the index of the sample there."""
        number = bisect.bisect_right(self._ends, self.check(index))
        return self.sources[number], index - (self._ends[number - 1] if number else 0)

    def ids(self, indices: Sequence[int]) -> Tensor:  # (n,) or (n, 2) int64
        """Returns the ids of the sources. Samples without an id get one, because a batch can contain a sample twice."""
        samples = torch.as_tensor(indices, dtype=torch.int64)
        numbers = torch.bucketize(samples, torch.tensor(self._ends), right=True)
        ids = torch.empty(len(samples), 2, dtype=torch.int64)
        columns = 1
        for number, source in enumerate(self.sources):
            of_source = numbers == number
            own = samples[of_source] - (self._ends[number] - len(source))
            source_ids = source.ids(own.tolist())
            source_ids = own if source_ids is None else source_ids.long()  # the ids of no sample can have another dtype
            columns = max(columns, source_ids.dim())
            # If a source has one id per sample, both columns contain it. Different sources have no id in common.
            ids[of_source] = (source_ids[:, None] if source_ids.dim() == 1 else source_ids).expand(-1, 2) ^ text_id(str(number))
        return ids if columns == 2 else ids[:, 0].contiguous()

    def items(self) -> Tensor | None:  # (samples,) int64
        """Joins the items of the sources."""
        return self._join_ids([source.items() for source in self.sources])

    def documents(self) -> Tensor | None:  # (samples,) int64
        """Joins the documents of the sources."""
        return self._join_ids([source.documents() for source in self.sources])

    def _join_ids(self, ids_by_source: list[Tensor | None]) -> Tensor | None:
        """Returns one id per sample. Sources share no ids. If a source has no ids, each of its samples gets a unique id."""
        if all(ids is None for ids in ids_by_source):
            return None
        joined, first = [], 0
        for source, ids in zip(self.sources, ids_by_source, strict=True):
            # Ids are renumbered from 0 because a part of a dataset keeps the ids of the full dataset, which can be any numbers.
            own = torch.arange(len(source)) if ids is None else torch.unique(ids, return_inverse=True)[1]
            joined.append(first + own)
            first += len(source)
        return torch.cat(joined)


# ----------------------------------------------------------------------------------------------------------------------
# The holdout: a part of a dataset for evaluation. It depends on the names of samples, so every run and every rank has the
# same part.
#
# Samples that share an image or a text, directly or through other samples, stay together, so that no image and no text is in
# both parts. The names of the samples of such a group decide where the group goes. A group of more than half of all samples is
# always trained on. In a folder of classes, equal ids mean equal classes, so each image is drawn separately. Sources of a
# mixture are split together, so images with the same name or path stay together.


STEPS = 10**9  # the fraction is rounded to a multiple of 1 / STEPS


def parts(datasets: Sequence[Dataset], fraction: float) -> list[tuple[Dataset, Dataset]]:
    """Splits each dataset into a training part and a held-out part of about `fraction`. Neither part is empty.

    Across datasets, samples with the same name, the same path or (in tables) the same second text, value or path stay together.
    """

    def each(value: Callable[[Dataset, int], Any]) -> list[Any]:
        return [value(dataset, index) for dataset in datasets for index in range(len(dataset))]

    names, units = each(lambda dataset, index: dataset.name(index)), _units(datasets[0])
    if len(datasets) > 1:
        units = number_values([(which, unit) for which, one in enumerate(datasets) for unit in _units(one).tolist()])
        places = each(lambda one, index: _path(one, index) or (id(one), index))
        texts = each(lambda one, index: one.key(index, 1) if isinstance(one, Table) else (id(one), index))
        for shared in (names, places, texts):
            units = find_components(units, number_values(shared))
    least: dict[int, int] = {}  # the smallest key of a unit decides, so the order of samples does not matter
    keys, numbers = [text_id(name) for name in names], units.tolist()
    for number, key in zip(numbers, keys, strict=True):
        least[number] = min(key, least.get(number, key))
    largest, size = Counter(numbers).most_common(1)[0]
    if 2 * size > len(numbers):
        least[largest] = STEPS - 1  # not held out
    held = iter([least[number] % STEPS < fraction * STEPS for number in numbers])
    return [_split(dataset, list(itertools.islice(held, len(dataset))), fraction, size) for dataset in datasets]


def _path(dataset: Dataset, index: int) -> str | None:
    """Returns the path or URL of the image; None if the image has no file, or if its name is already the URL."""
    path = None if is_url(dataset.name(index)) else dataset.place(index)
    return path and os.path.abspath(path)


def _units(dataset: Dataset) -> Tensor:  # (samples,) int64
    """Returns a number per sample. Samples with equal numbers stay together."""
    ids = None if isinstance(dataset, Folders) else dataset.ids(range(len(dataset)))
    ids = dataset.items() if ids is None else ids
    return torch.arange(len(dataset)) if ids is None else components(ids)


def _split(dataset: Dataset, held: list[bool], fraction: float, largest: int) -> tuple[Dataset, Dataset]:
    """Returns both parts. `largest` is the number of samples in the largest group that stays together."""
    train, test = ([index for index, out in enumerate(held) if out is held_out] for held_out in (False, True))
    if not train or not test:
        why = ""
        if largest > 1:
            what = {IMAGE: "an image or a text", TEXT: "a text"}.get(dataset.sides[0], f"a text or the same {dataset.sides[0]}")
            why = (
                f"; {largest:,} samples share {what} with one another, directly or through other samples, and stay together, "
                "so that none is in both parts. --validation names other data to evaluate on"
            )
        raise ValueError(
            f"holdout must leave samples for training and for evaluation, got {fraction} of {len(dataset):,} samples{why}"
        )
    return dataset.part(train), dataset.part(test)


# ----------------------------------------------------------------------------------------------------------------------
# Hard negatives of a table: additional texts that a step encodes together with the second side of its pairs.


class WithNegatives(Part):
    """A table that appends the hard negatives of a batch to the second side of the batch.

    Args:
        table: a table with columns of negatives.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table, range(len(table)))
        self.table, self.failures = table, table.failures

    def source(self, indices: Sequence[int], side: int, preparation: Preparation, **options: Any) -> Source:
        """Returns a source. The second side has the negatives after the samples, in the order of `Table.negatives_of`."""
        further = self.table.negatives_of(indices).tolist() if side == 1 else []
        return self.table.source([*indices, *further], side, preparation, **options)

    def owners(self, indices: Sequence[int]) -> Tensor:  # (m,) int64
        """Returns, for each negative, the position of its sample in `indices`."""
        counts = [self.table.negative_count(index) for index in indices]
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    def negative_ids(self, indices: Sequence[int]) -> Tensor:  # (m,) or (m, 2) int64
        """Returns the ids of each negative, which are the ids of a sample with its text, or else an unused number."""
        return self.table.negative_ids(self.table.negatives_of(indices))


# ----------------------------------------------------------------------------------------------------------------------
# Datasets by name: "emoji", "wordnet", tables of pairs, shards, folders of images, and mixtures of them.


WITH_SPLITS = ("emoji", "wordnet")


def load(spec: str, split: str | None = None, *, size: int | None = None, holdout: float = 0.0, **options: Any) -> Dataset:
    """Loads a dataset by name.

    Args:
        spec: see `megabatch_train.names.DATA`.
        split: "train" (default), "test" or "all" for a dataset with splits. Files have splits only with `holdout`.
        size: side length of emoji in pixels. Photographs keep their size.
        holdout: fraction of the samples that is held out, for files. The split "test" is this part, and "train" is the rest.
        options: arguments of the dataset's class: `columns`, `texts`, `root` and `encoding` of a `Table`, `caption_ids` of
            `Shards`. In a mixture they apply to all sources. Options of one source are a table under its number, from "1".
    """
    if BETWEEN in spec and not os.path.exists(spec):  # a Path raises an error for long names
        return _mixture(spec, split, size, holdout, options)
    if holdout and spec in WITH_SPLITS:
        raise ValueError(f"holdout must be 0 for {spec}, which has its own test split, got {holdout}")
    if spec == "emoji":
        given = {"size": size, **options} if size is not None else options
        return demo.Emoji(split or "train", **_check_options(demo.Emoji, given))
    if spec == "wordnet":
        return demo.WordNet(split or "train", **_check_options(demo.WordNet, options))
    if holdout and split in ("train", "test"):
        return _hold_out([spec], [load(spec, **options)], split == "test", holdout)[0]
    if split is not None and not (holdout and split == "all"):
        raise ValueError(
            f"split must not be set for files, got {split!r} for {spec!r}; {' and '.join(WITH_SPLITS)} have splits"
        )
    return _from_files(spec, options)


def _mixture(spec: str, split: str | None, size: int | None, holdout: float, options: dict[str, Any]) -> Dataset:
    specs, weights = parse_spec(spec)
    numbers = [str(number) for number in range(1, len(specs) + 1)]
    common = {name: value for name, value in options.items() if not name.isdecimal()}
    for name in [name for name in options if name not in common]:
        if name not in numbers:
            raise ValueError(f"options of a source must have its number, from 1 to {len(specs)}, got {name}")
        if not isinstance(options[name], dict):
            raise ValueError(f"options of source {name} must be a table, got {options[name]!r}")
    # Sources are split together, so that an image of two sources is in one part.
    together = bool(holdout) and split in ("train", "test")
    sources = [
        load(one, "all" if together else split, size=size, holdout=holdout, **{**common, **options.get(number, {})})
        for number, one in zip(numbers, specs, strict=True)
    ]
    return Mix(_hold_out(specs, sources, split == "test", holdout) if together else sources, weights)


def _hold_out(specs: list[str], datasets: list[Dataset], test: bool, holdout: float) -> list[Dataset]:
    """Returns the held-out part of each dataset if `test` is true, and otherwise the other part."""
    splits = parts(datasets, holdout)
    for spec, (kept, held) in zip(specs, splits, strict=True):
        share = len(held) / (len(kept) + len(held))
        if not test and abs(share - holdout) > holdout / 10:
            LOG.info(
                "holdout: %.1f %% of %s is held out instead of %.1f %%, because samples that share an image or a text stay "
                "together, and each other sample is drawn separately",
                *(100 * share, spec, 100 * holdout),
            )
    return [held if test else kept for kept, held in splits]


def _from_files(spec: str, options: dict[str, Any]) -> Dataset:
    if spec.startswith(PREFIX) or is_saved(spec.partition("@")[0]):
        return _with_images(HubDataset, spec.removeprefix(PREFIX), options)
    path = place(spec)
    if path.suffix == ".tar" and not (isinstance(path, Path) and path.is_dir()):
        return _with_images(Shards, spec, options)
    if path.suffix in names.TABLES:
        return _with_images(Table, spec, options)
    if isinstance(path, Url):
        return _from_folder(path, options)
    if not path.is_dir():
        if path.exists():
            return _with_images(Table, spec, options)  # raises an error with the possible endings
        raise ValueError(f"No such data: {spec}. Possible are: {'; '.join(names.DATA)}")
    if shards := sorted(path.glob("*.tar")):
        return _with_images(Shards, shards, options)
    if any(entry.suffix in names.TABLES for entry in path.iterdir()) or has_captions(path) or not class_folders(path):
        return _with_images(Table, path, options)
    return _with_images(Folders, path, options)


def _from_folder(folder: Url, options: dict[str, Any]) -> Dataset:
    """Loads the shards of a remote folder, or its table."""
    if shards := (folder / "*.tar").matches():
        return _with_images(Shards, shards, options)
    tables = [table for ending in names.TABLES for table in (folder / f"*{ending}").matches()]
    if len(tables) != 1:
        table_names = ", ".join(table.name for table in tables) or "none"
        raise ValueError(
            f"{folder} must have shards (.tar) or one table ({', '.join(names.TABLES)}), got {table_names}; name the file"
        )
    return _with_images(Table, tables[0].address, options)


def _with_images(kind: type[Dataset], files: Any, options: dict[str, Any]) -> Dataset:
    """Creates the dataset. If it has images, checks that the package that reads images is installed."""
    dataset: Dataset = kind(files, **_check_options(kind, options))  # type: ignore[call-arg]
    if IMAGE in dataset.sides or MIXED in dataset.sides:
        extras.load("PIL.Image", purpose="Reading images")
    return dataset


def _check_options(kind: type[Dataset], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options. Raises an error if the class of the dataset lacks one of them."""
    parameters = inspect.signature(kind).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in names:
            has = f"has {', '.join(names)}" if names else "has none"
            raise ValueError(
                f"data_options (of validation data: validation_options) must be options of {kind.__name__}, which {has}, "
                f"got {name!r}"
            )
    return options


def anchor(spec: str, directory: Path) -> str:
    """Returns the data specification with absolute paths, for relative paths that exist in a directory.

    Args:
        spec: see `megabatch_train.names.DATA`.
        directory: the directory that relative paths start from.
    """
    if has_magic(str(directory)) or BETWEEN in str(directory):  # the directory name would be parsed as a pattern or a mixture
        return spec
    if BETWEEN in spec and not (directory / spec).exists():
        return anchor_mixture(spec, lambda name: _anchor_one(name, directory))
    return _anchor_one(spec, directory)


def _anchor_one(spec: str, directory: Path) -> str:
    prefix = PREFIX if spec.startswith(PREFIX) else ""
    name = spec.removeprefix(prefix)
    if name in WITH_SPLITS or is_url(name) or os.path.isabs(name):
        return spec
    plain = Path(name)
    while has_magic(str(plain)):
        plain = plain.parent
    candidates = (plain, Path(name.partition("@")[0]))  # the folder of a dataset can be followed by a split
    return f"{prefix}{directory / name}" if any((directory / path).exists() for path in candidates) else spec


def anchor_options(options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the options of data with an absolute `root`, which is the folder of a table's files. See `anchor`."""
    return {
        key: anchor_options(value, directory)
        if isinstance(value, Mapping) and key.isdecimal()
        else anchor(value, directory)
        if key == "root" and isinstance(value, str)
        else value
        for key, value in options.items()
    }


def credits(spec: str) -> tuple[str, ...]:
    """Returns the attribution of a dataset by name without loading it. Files have none."""
    return {"emoji": demo.EMOJI_CREDITS, "wordnet": demo.WORDNET_CREDITS}.get(spec, ())
