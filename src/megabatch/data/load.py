"""Datasets by name: "emoji", "wordnet", a table of pairs, or a pattern of shards."""

import inspect
import logging
from pathlib import Path
from typing import Any

from megabatch import extras, names
from megabatch.data.dataset import IMAGE, Dataset
from megabatch.data.demo import emoji, wordnet
from megabatch.data.folders import Folders, class_folders
from megabatch.data.shards import Shards
from megabatch.data.split import parts
from megabatch.data.tables import Table

LOG = logging.getLogger("megabatch")
WITH_SPLITS = ("emoji", "wordnet")


def load(spec: str, split: str | None = None, *, size: int | None = None, holdout: float = 0.0, **options: Any) -> Dataset:
    """Loads a dataset by name.

    Args:
        spec: see `megabatch.names.DATA`.
        split: "train" (default), "test" or "all" of a dataset with splits; files have none without `holdout`.
        holdout: fraction of files that is held out: split "test" is this part, "train" the rest.
        size: pixels of a side of emoji; photographs keep their size.
        options: arguments of the dataset's class: `columns`, `texts`, `root` and `encoding` of a `Table`, `caption_ids` of
            `Shards`.
    """
    if holdout and spec in WITH_SPLITS:
        raise ValueError(f"holdout must be 0 for {spec}, which has a test split of its own, got {holdout}")
    if spec == "emoji":
        given = {"size": size, **options} if size is not None else options
        return emoji.Emoji(split or "train", **_known(emoji.Emoji, given))
    if spec == "wordnet":
        return wordnet.WordNet(split or "train", **_known(wordnet.WordNet, options))
    if holdout and split in ("train", "test"):
        train, test = parts(load(spec, **options), holdout)
        share = len(test) / (len(train) + len(test))
        if split == "train" and abs(share - holdout) > holdout / 10:
            LOG.info(
                "holdout: %.1f %% of %s is held out instead of %.1f %%, because samples that share an image or a text stay "
                "together, and each of the others is drawn on its own",
                *(100 * share, spec, 100 * holdout),
            )
        return test if split == "test" else train
    if split is not None and not (holdout and split == "all"):
        raise ValueError(
            f"split must be left out for files, got {split!r} for {spec!r}; {' and '.join(WITH_SPLITS)} have splits"
        )
    if spec.endswith(".tar"):
        extras.load("PIL.Image", extra="data", purpose="Reading images")
        return Shards(spec, **_known(Shards, options))
    if Path(spec).exists() or spec.endswith(names.TABLES):
        return _from_place(Path(spec), options)
    raise ValueError(f"No such data: {spec}. Possible are: {'; '.join(names.DATA)}")


def _from_place(path: Path, options: dict[str, Any]) -> Dataset:
    """A table, or all shards of a folder."""
    shards = sorted(path.glob("*.tar")) if path.is_dir() else []
    if shards:
        extras.load("PIL.Image", extra="data", purpose="Reading images")
        return Shards(shards, **_known(Shards, options))
    if path.is_dir() and not any(entry.suffix in names.TABLES for entry in path.iterdir()) and class_folders(path):
        extras.load("PIL.Image", extra="data", purpose="Reading images")
        return Folders(path, **_known(Folders, options))
    table = Table(path, **_known(Table, options))
    if IMAGE in table.sides:
        extras.load("PIL.Image", extra="data", purpose="Reading images")
    return table


def _known(kind: type[Dataset], options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the dataset's class has all of them."""
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


def credits(spec: str) -> tuple[str, ...]:
    """Attribution of a dataset by name, without loading it; empty for files."""
    return {"emoji": emoji.CREDITS, "wordnet": wordnet.CREDITS}.get(spec, ())
