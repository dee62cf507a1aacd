"""Datasets by name: "emoji", "wordnet", tables of pairs, shards, folders of images, and mixtures of them."""

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from megabatch import extras, names
from megabatch.data import hub, mix
from megabatch.data.dataset import IMAGE, Dataset
from megabatch.data.demo import emoji, wordnet
from megabatch.data.folders import Folders, class_folders
from megabatch.data.places import place
from megabatch.data.remote import Url
from megabatch.data.rows import captioned
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
        size: pixels of a side of emoji; photographs keep their size.
        holdout: fraction of the samples that is held out: split "test" is this part, "train" the rest. For files only.
        options: arguments of the dataset's class: `columns`, `texts`, `root` and `encoding` of a `Table`, `caption_ids` of
            `Shards`. In a mixture they hold for all sources; options of one source are a table under its number, from "1" on.
    """
    if mix.BETWEEN in spec and not os.path.exists(spec):  # a Path refuses long names
        return _mixture(spec, split, size, holdout, options)
    if holdout and spec in WITH_SPLITS:
        raise ValueError(f"holdout must be 0 for {spec}, which has a test split of its own, got {holdout}")
    if spec == "emoji":
        given = {"size": size, **options} if size is not None else options
        return emoji.Emoji(split or "train", **_known(emoji.Emoji, given))
    if spec == "wordnet":
        return wordnet.WordNet(split or "train", **_known(wordnet.WordNet, options))
    if holdout and split in ("train", "test"):
        return _held_out([spec], [load(spec, **options)], split == "test", holdout)[0]
    if split is not None and not (holdout and split == "all"):
        raise ValueError(
            f"split must be left out for files, got {split!r} for {spec!r}; {' and '.join(WITH_SPLITS)} have splits"
        )
    return _from_files(spec, options)


def _mixture(spec: str, split: str | None, size: int | None, holdout: float, options: dict[str, Any]) -> Dataset:
    specs, weights = mix.parsed(spec)
    numbers = [str(number) for number in range(1, len(specs) + 1)]
    common = {name: value for name, value in options.items() if not name.isdecimal()}
    for name in [name for name in options if name not in common]:
        if name not in numbers:
            raise ValueError(f"options of a source must have its number, from 1 to {len(specs)}, got {name}")
        if not isinstance(options[name], dict):
            raise ValueError(f"options of source {name} must be a table, got {options[name]!r}")
    # Sources are split together, so that an image of two sources is on one side.
    together = bool(holdout) and split in ("train", "test")
    sources = [
        load(one, "all" if together else split, size=size, holdout=holdout, **{**common, **options.get(number, {})})
        for number, one in zip(numbers, specs, strict=True)
    ]
    return mix.Mix(_held_out(specs, sources, split == "test", holdout) if together else sources, weights)


def _held_out(specs: list[str], datasets: list[Dataset], test: bool, holdout: float) -> list[Dataset]:
    """The held-out part of each dataset for `test`, else the rest."""
    found = parts(datasets, holdout)
    for spec, (kept, held) in zip(specs, found, strict=True):
        share = len(held) / (len(kept) + len(held))
        if not test and abs(share - holdout) > holdout / 10:
            LOG.info(
                "holdout: %.1f %% of %s is held out instead of %.1f %%, because samples that share an image or a text stay "
                "together, and each of the others is drawn on its own",
                *(100 * share, spec, 100 * holdout),
            )
    return [held if test else kept for kept, held in found]


def _from_files(spec: str, options: dict[str, Any]) -> Dataset:
    if spec.startswith(hub.PREFIX) or hub.is_saved(spec.partition("@")[0]):
        return _with_images(hub.HubDataset, spec.removeprefix(hub.PREFIX), options)
    path = place(spec)
    if path.suffix == ".tar" and not (isinstance(path, Path) and path.is_dir()):
        return _with_images(Shards, spec, options)
    if path.suffix in names.TABLES:
        return _with_images(Table, spec, options)
    if isinstance(path, Url):
        return _from_folder(path, options)
    if not path.is_dir():
        if path.exists():
            return _with_images(Table, spec, options)  # says which endings a table may have
        raise ValueError(f"No such data: {spec}. Possible are: {'; '.join(names.DATA)}")
    if shards := sorted(path.glob("*.tar")):
        return _with_images(Shards, shards, options)
    if any(entry.suffix in names.TABLES for entry in path.iterdir()) or captioned(path) or not class_folders(path):
        return _with_images(Table, path, options)
    return _with_images(Folders, path, options)


def _from_folder(folder: Url, options: dict[str, Any]) -> Dataset:
    """The shards of a remote folder, or its table."""
    if shards := (folder / "*.tar").matches():
        return _with_images(Shards, shards, options)
    tables = [table for ending in names.TABLES for table in (folder / f"*{ending}").matches()]
    if len(tables) != 1:
        found = ", ".join(table.name for table in tables) or "none"
        raise ValueError(
            f"{folder} must have shards (.tar) or one table ({', '.join(names.TABLES)}), got {found}; name the file"
        )
    return _with_images(Table, tables[0].address, options)


def _with_images(kind: type[Dataset], files: Any, options: dict[str, Any]) -> Dataset:
    """The dataset; if it has images, the package that reads them must be installed."""
    made: Dataset = kind(files, **_known(kind, options))  # type: ignore[call-arg]
    if IMAGE in made.sides:
        extras.load("PIL.Image", extra="data", purpose="Reading images")
    return made


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
