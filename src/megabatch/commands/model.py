"""The arguments MODEL and --data: a run's folder, or towers and datasets by name."""

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megabatch import names
from megabatch.cached import randomness
from megabatch.data import load as data
from megabatch.data import mix
from megabatch.data.dataset import IMAGE, TEXT, Dataset
from megabatch.data.folders import Images, is_plain
from megabatch.data.places import expanded, place
from megabatch.report import saved_run
from megabatch.towers import Pair, load
from megabatch.towers.load import image_size
from megabatch.towers.saved import WEIGHTS

LOG = logging.getLogger("megabatch")


@dataclass(frozen=True)
class Chosen:
    """A model, and the data to search or evaluate."""

    pair: Pair
    dataset: Dataset
    data: str
    split: str | None
    folder: Path | None  # of the run

    def drawn(self, size: int) -> Dataset:
        """The same samples as they are shown: emoji are drawn in this size."""
        return data.load(self.data, self.split, size=size) if self.data == "emoji" else self.dataset

    def check_kinds(self, sides: Sequence[int]) -> None:
        """Checks that the model encodes these sides of the data, before anything is written."""
        for side in sides:
            if (kind := self.pair.towers[side].kind) != (wanted := self.dataset.sides[side]):
                raise ValueError(f"MODEL must encode side {side + 1} of the data, {wanted}s, got a model of {kind}s there")

    def keep_data(self, targets: Sequence[Path]) -> None:
        """Checks that no file which will be written is one of the data."""
        specs = [self.data] if os.path.exists(self.data) else mix.parsed(self.data)[0]
        files = [file for spec in specs for file in _local_files(spec) if os.path.exists(file)]
        for target in targets:
            if target.exists() and any(target.samefile(file) for file in files):
                raise ValueError(f"--output must not replace the data, got {target}; choose another --output")


def choose(args: argparse.Namespace, device: torch.device, *, images_alone: bool = False) -> Chosen:
    """Loads the model and the data that the arguments name.

    Args:
        args: see `commands.arguments.model`.
        device: of the model.
        images_alone: whether the data may be a folder of images without captions.
    """
    folder = run_of(args.model)
    spec, split, options = _data(args, folder)
    alone = images_alone and is_plain(Path(spec))

    def dataset(size: int | None) -> Dataset:
        return Images(spec) if alone else data.load(spec, split, size=size, **options)

    if folder is not None:
        pair = load_pair(args.model, device)
        found = dataset(image_size(pair.name, pair.options))
    else:
        found = dataset(image_size(args.model, {}))
        pair = load_pair(args.model, device, found.sides)
    return Chosen(pair, found, spec, split, folder)


def load_pair(spec: str, device: torch.device, kinds: tuple[str, str] = (IMAGE, TEXT)) -> Pair:
    """The model of a run, or towers by name for sides of these kinds."""
    if run_of(spec) is not None:
        return _loaded(Path(spec), device)
    randomness.seed_host(0)  # random weights are the same in every command, so that embeddings can be searched
    pair = load(spec, kinds)
    for tower in pair.towers:
        tower.module.to(device).eval()
    return pair


def run_of(spec: str) -> Path | None:
    """The folder of the run, which the path may be in; None for towers by name; an error if it can be neither."""
    folder = _run_of(Path(spec))
    if folder is None and spec != "small" and ":" not in spec:
        near = names.nearest(spec, ["small"])
        raise ValueError(f"No such run or model: {spec}{near}. Possible are the folder of a run; {'; '.join(names.MODELS)}")
    return folder


def _run_of(path: Path) -> Path | None:
    if not os.path.isdir(path):  # a Path refuses long names
        return None
    if path.name.startswith("step_"):
        return path.resolve().parent.parent
    return path.resolve().parent if path.name == "best" and (path / WEIGHTS).is_file() else path


def _loaded(place: Path, device: torch.device) -> Pair:
    from megabatch.trainer.checkpoint import CheckpointError
    from megabatch.trainer.weights import load_newest

    try:
        pair, step = load_newest(place, device)
    except CheckpointError as error:
        raise ValueError(f"MODEL must be a checkpoint that is whole: {error}") from error
    if step is not None:
        LOG.info("weights after step %d, from a checkpoint of %s", step, place)
    return pair


def _data(args: argparse.Namespace, folder: Path | None) -> tuple[str, str | None, dict[str, Any]]:
    options: dict[str, Any] = {}
    chosen_split = None
    if args.data is not None:
        spec = str(args.data)
    else:
        run = None if folder is None else saved_run.read(folder)
        found = None if run is None else run.test_data
        if run is None or found is None:
            raise ValueError(
                f"--data must be given, because {args.model!r} does not name any; possible are: {'; '.join(names.DATA)}"
            )
        spec, options = found[0], run.test_options
        chosen_split = found[1]
        if run.tests_on_training_data:
            LOG.info("%s is the data the run was trained on; --data names other data", spec)
    if args.columns is not None:
        options = {**options, "columns": args.columns}
    split = args.split or chosen_split or ("test" if spec in data.WITH_SPLITS else None)
    return spec, split, options


def _local_files(spec: str) -> list[Path]:
    """The tables or shards of a path, a pattern or a folder; none for an address."""
    path = place(spec)
    if not isinstance(path, Path):
        return []
    if os.path.isdir(path):
        return list(path.glob("*.tar")) or [entry for entry in path.iterdir() if entry.suffix in names.TABLES]
    return [Path(str(file)) for file in ([path] if os.path.exists(path) else expanded(str(path)))]


def lines_of(path: str) -> Sequence[str]:
    """The non-empty lines of a file."""
    found = [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{path} must have at least one line, got none")
    return found
