"""The arguments MODEL and --data: a run's folder, or towers and datasets by name."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch_train import names
from megabatch_train.commands import CHUNK_HELP, DATA_HELP, MODEL_HELP, RUNS, WORKERS_HELP, whole
from megabatch_train.names import sanitize

if TYPE_CHECKING:
    import torch

    from megabatch_train.data.dataset import Dataset
    from megabatch_train.towers import Pair


LOG = logging.getLogger("megabatch")
NEGATIVE, OPTIONAL = "negative", ("negative", "label", "score")  # roles of columns that a table need not have
NAMED_RUNS = 8  # in the message for an unknown run


def add_columns(parser: argparse._ActionsContainer) -> None:
    """Adds `--columns`, which is a dict afterwards."""
    parser.add_argument(
        "--columns",
        nargs="+",
        action=_Columns,
        metavar="ROLE=NAME",
        help="columns of a table, such as image=file text=description (see megabatch help data; default: common names)",
    )


class _Columns(argparse.Action):
    """Collects ROLE=NAME into a dict; a role with several names into a list."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        found: dict[str, list[str]] = {}
        for text in values:
            role, is_given, name = text.partition("=")
            if not role or not is_given or (not name and role not in OPTIONAL):
                raise argparse.ArgumentError(
                    self, f"must be ROLE=NAME, as in image=file text=description, got {' '.join(values)!r}"
                )
            found.setdefault(role, []).append(name)
        twice = next((role for role, given in found.items() if len(given) > 1 and role != NEGATIVE), None)
        if twice is not None:
            raise argparse.ArgumentError(self, f"must name one column for {twice}, got {' and '.join(found[twice])}")
        setattr(namespace, self.dest, {role: given[0] if len(given) == 1 else given for role, given in found.items()})


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Adds `--trust-remote-code`."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code in the model's files, with all your rights"
    )


def add_dim(parser: argparse.ArgumentParser) -> None:
    """Adds `--dim`, of commands that compare embeddings."""
    parser.add_argument(
        "--dim",
        type=whole,
        metavar="N",
        help="keep the first N dimensions of embeddings, for --loss matryoshka (default: all)",
    )


def add_model_arguments(
    parser: argparse.ArgumentParser, default: str = "the run's validation data, or else its training data"
) -> None:
    """Adds the arguments that name the model and the data, which has a default."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--data", help=f"{DATA_HELP} (default: {default})")
    add_columns(parser)
    add_trust(parser)
    parser.add_argument(
        "--split", choices=("train", "test", "all"), help="split of emoji and wordnet (default: as in the run, or test)"
    )
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or "auto" (default): CUDA if there is a device')
    parser.add_argument("--chunk-size", type=whole, default=256, metavar="N", help=f"{CHUNK_HELP} (default: 256)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help=f"{WORKERS_HELP} (default: 0)")


@dataclass(frozen=True)
class Chosen:
    """A model, and the data to search or evaluate."""

    pair: Pair
    dataset: Dataset
    data: str
    split: str | None
    folder: Path | None  # of the run

    def redraw(self, size: int) -> Dataset:
        """The same samples as they are shown: emoji are drawn in this size."""
        from megabatch_train.data import load as data

        return data.load(self.data, self.split, size=size) if self.data == "emoji" else self.dataset

    def check_kinds(self, sides: Sequence[int]) -> None:
        """Checks that the model encodes these sides of the data, before anything is written."""
        for side in sides:
            if (kind := self.pair.towers[side].kind) != (wanted := self.dataset.sides[side]):
                raise ValueError(f"MODEL must encode side {side + 1} of the data, {wanted}s, got a model of {kind}s there")

    def keep_data(self, targets: Sequence[Path]) -> None:
        """Checks that no file which will be written is one of the data."""
        from megabatch_train.data import load as data

        specs = [self.data] if os.path.exists(self.data) else data.parse_spec(self.data)[0]
        files = [file for spec in specs for file in _local_files(spec) if os.path.exists(file)]
        for target in targets:
            if target.exists() and any(target.samefile(file) for file in files):
                raise ValueError(f"--output must not replace the data, got {target}; choose another --output")


def choose(args: argparse.Namespace, device: torch.device, *, images_alone: bool = False, training: bool = False) -> Chosen:
    """Loads the model and the data that the arguments name, and logs which data it is.

    Args:
        args: see `add_model_arguments`.
        device: of the model.
        images_alone: whether the data may be a folder of images without captions.
        training: whether the data of a run, if none is named, is its training data instead of its validation data.
    """
    from megabatch_train.data import load as data
    from megabatch_train.data.rows import ImageFolder, is_plain
    from megabatch_train.towers.models import image_size

    folder = run_of(args.model)
    spec, split, options, why = _data(args, folder, training=training)
    alone = images_alone and is_plain(Path(spec))

    def dataset(size: int | None) -> Dataset:
        return ImageFolder(spec) if alone else data.load(spec, split, size=size, **options)

    if folder is not None:
        pair = load_pair(args.model, device, trust=args.trust_remote_code)
        found = dataset(image_size(pair.name, pair.options))
    else:
        found = dataset(image_size(args.model, {}))
        pair = load_pair(args.model, device, found.sides, trust=args.trust_remote_code)
    if getattr(args, "dim", None) is not None:
        truncate_pair(pair, args.dim, folder)
    what = "images" if alone else "pairs"
    part = "" if split is None else f", {split} split"
    LOG.info("data: %s%s, %s %s%s", sanitize(spec), part, f"{len(found):,}", what, why)
    return Chosen(pair, found, spec, split, folder)


def truncate_pair(pair: Pair, dim: int, folder: Path | None) -> None:
    """Cuts the embeddings of a model (`--dim`), and warns if its run was not trained for that.

    Args:
        pair: the model, changed in place.
        dim: of the embeddings.
        folder: of the run; None for towers by name.
    """
    from megabatch_train.evaluation import results
    from megabatch_train.evaluation.embedding import truncate

    try:
        full = truncate(pair.towers, dim)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    loss = {} if folder is None else results.read_run(folder).config.get("loss", {})
    widths = loss.get("widths", []) if loss.get("name") == "matryoshka" else []
    if folder is not None and dim not in (*widths, full):
        trained = ", ".join(map(str, dict.fromkeys((*widths, full))))
        LOG.warning("embeddings are cut to %d of %d dimensions, but the run was trained for %s", dim, full, trained)
    else:
        LOG.info("embeddings are cut to %d of %d dimensions", dim, full)


def load_pair(spec: str, device: torch.device, kinds: tuple[str, str] = ("image", "text"), *, trust: bool = False) -> Pair:
    """The model of a run, or towers by name for sides of these kinds. With `trust`, code of the model's files may run."""
    from megabatch.cached import randomness
    from megabatch_train.towers import load
    from megabatch_train.towers.tower import allow_remote_code

    if run_of(spec) is not None:
        return load_run(Path(spec), device, trust=trust)[0]
    if not names.has_weights(spec):
        LOG.warning("weights: random, because %s names no trained ones", spec)
    randomness.seed_host(0)  # random weights are the same in every command, so that embeddings can be searched
    with allow_remote_code(trust):
        pair = load(spec, kinds)
    for tower in pair.towers:
        tower.module.to(device).eval()
    return pair


def run_of(spec: str) -> Path | None:
    """The folder of the run, which the path may be in; None for towers by name; an error if it can be neither."""
    folder = _run_of(Path(spec))
    if folder is None and spec != "small" and ":" not in spec:
        runs = list_runs(Path(spec).parent)
        near = names.nearest(spec, ["small", *runs])
        raise ValueError(f"No such run or model: {spec}{near}. {describe_runs(runs)}; `megabatch help models` lists the models")
    return folder


def list_runs(folder: Path) -> list[str]:
    """The runs in a folder and in `runs/`, newest first."""
    from megabatch_train.evaluation.results import CONFIG

    configs = {file for parent in (folder, Path(RUNS)) for file in parent.glob(f"*/{CONFIG}")}
    return [str(file.parent) for file in sorted(configs, key=lambda file: file.stat().st_mtime, reverse=True)]


def describe_runs(runs: Sequence[str]) -> str:
    """The runs in words, for the message that a run does not exist."""
    more = f" and {len(runs) - NAMED_RUNS:,} more" if len(runs) > NAMED_RUNS else ""
    return f"Runs: {', '.join(runs[:NAMED_RUNS])}{more}" if runs else f"There are no runs in {RUNS}/"


def _run_of(path: Path) -> Path | None:
    from megabatch_train.towers.models import WEIGHTS

    if not os.path.isdir(path):  # a Path refuses long names
        return None
    if path.name.startswith("step_"):
        return path.resolve().parent.parent
    return path.resolve().parent if path.name == "best" and (path / WEIGHTS).is_file() else path


def load_run(place: Path, device: torch.device, *, trust: bool = False) -> tuple[Pair, int | None]:
    """The model of a run, of its `best` folder or of a checkpoint, and the step of its weights if it is known.

    With `trust`, code of the model's files may run.
    """
    from megabatch_train.towers import models
    from megabatch_train.towers.tower import allow_remote_code
    from megabatch_train.trainer.checkpoints import CheckpointError
    from megabatch_train.trainer.run import load_newest

    try:
        with allow_remote_code(trust):
            pair, step = load_newest(place, device)
    except CheckpointError as error:
        raise ValueError(f"MODEL must be a checkpoint that is whole: {error}") from error
    LOG.info("weights: %s", _describe_weights(place, step))
    return pair, models.read_step(place) if step is None else step


def _describe_weights(place: Path, checkpoint: int | None) -> str:
    """Which weights of a run are used: the last ones, the best ones, or those of a checkpoint, by its step."""
    from megabatch_train.display import tables
    from megabatch_train.evaluation import results
    from megabatch_train.towers import models

    folder = _run_of(place) or place
    best = results.read_run(folder).best
    evaluated = f"after step {best['step']:,} ({tables.tell(best['metric'], best['value'])})" if best else ""
    if place.name == results.BEST and folder != place:
        return f"the best ones of {folder}" + (f", {evaluated}" if best else "")
    step = models.read_step(place) if checkpoint is None else checkpoint
    told = f"{'the last ones' if checkpoint is None else 'from a checkpoint'} of {folder}"
    told += "" if step is None else f", after step {step:,}"
    return told + (f"; {folder / results.BEST} has the best ones, {evaluated}" if best and best["step"] != step else "")


def _data(args: argparse.Namespace, folder: Path | None, *, training: bool) -> tuple[str, str | None, dict[str, Any], str]:
    """Name, split and options of the data, and why it was chosen, in words."""
    from megabatch_train.data import load as data
    from megabatch_train.evaluation import results

    options: dict[str, Any] = {}
    chosen_split, why = None, ""
    if args.data is not None:
        spec = str(args.data)
    else:
        run = None if folder is None else results.read_run(folder)
        found = None if run is None else run.training_part if training else run.test_data
        if run is None or found is None:
            raise ValueError(
                f"--data must be given, because {args.model!r} is no run with data; `megabatch help data` lists what it can be"
            )
        spec, chosen_split = run.locate(found[0]), found[1]
        options = run.training_options if training else run.test_options
        why = f", {'the training data of the run' if training else run.test_data_is}; --data names other data"
    if args.columns is not None:
        options = {**options, "columns": args.columns}
    split = args.split or chosen_split or ("test" if spec in data.WITH_SPLITS else None)
    return spec, split, options, why


def _local_files(spec: str) -> list[Path]:
    """The tables or shards of a path, a pattern or a folder; none for an address."""
    from megabatch_train.data.paths import expand_pattern, place

    path = place(spec)
    if not isinstance(path, Path):
        return []
    if os.path.isdir(path):
        return list(path.glob("*.tar")) or [entry for entry in path.iterdir() if entry.suffix in names.TABLES]
    return [Path(str(file)) for file in ([path] if os.path.exists(path) else expand_pattern(str(path)))]


def lines_of(path: str) -> Sequence[str]:
    """The non-empty lines of a file."""
    found = [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{path} must have at least one line, got none")
    return found
