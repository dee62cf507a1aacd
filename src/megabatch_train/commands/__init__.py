"""The commands of `megabatch`, the arguments that they share, and the model and the data that these arguments name.

Each command has the functions `add_arguments(parser)` and `run(args)`, which returns the exit status. No module imports torch
before `run`, so that `--help` prints at once. Functions import what they need.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch_train.names import PYTHON, TABLES, has_weights, nearest, sanitize

if TYPE_CHECKING:
    import torch

    from megabatch_train.data.dataset import Dataset
    from megabatch_train.towers import Pair

LOG = logging.getLogger("megabatch")
HELP_WIDTH = 100  # characters in a line of help, at most
RUNS = "runs"  # folder of the runs that are started without --output
DATA_HELP = "table, shards, image folder or Hugging Face dataset; see `megabatch help data`"
MODEL_HELP = "folder of a run, checkpoint, or name of a model; see `megabatch help models`"
WORKERS_HELP = "number of data-loader workers; 0 reads samples in the main process"
CHUNK_HELP = "number of samples that a tower encodes at once"
LORA_HELP = "train LoRA adapters of this rank instead of the weights of an hf: or open_clip: model"
NEGATIVE, OPTIONAL = "negative", ("negative", "label", "score")  # roles that do not need a column
NAMED_RUNS = 8  # largest number of runs in the message about an unknown run
# Modules with several commands. The other commands have a module of their name.
SHARED_MODULES = {
    **dict.fromkeys(("info", "help", "config", "report", "export"), "small"),
    "embed": "search",
    "search": "search",
}


class Command(NamedTuple):
    """A command of a module with several commands."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def find_command(name: str) -> Any:
    """Imports a command. Returns an object with the functions `add_arguments` and `run`."""
    module = importlib.import_module(f"megabatch_train.commands.{SHARED_MODULES.get(name, name)}")
    return module.COMMANDS[name] if name in SHARED_MODULES else module


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and wraps the help of options at `HELP_WIDTH` characters."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": min(shutil.get_terminal_size().columns - 2, HELP_WIDTH), **options})


def describe(parser: argparse.ArgumentParser, description: str) -> None:
    """Sets the description of a command."""
    parser.description, parser.formatter_class = description, HelpFormatter


def parse_positive_int(text: str) -> int:
    """Parses a whole number of at least 1, for `type=` of an argument."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Arguments of several commands.


def add_columns(parser: argparse._ActionsContainer) -> None:
    """Adds `--columns`, whose value is a dict."""
    parser.add_argument(
        "--columns",
        nargs="+",
        action=_Columns,
        metavar="ROLE=NAME",
        help="roles of columns, such as image=file text=description (see `megabatch help data`; default: by name)",
    )


class _Columns(argparse.Action):
    """Collects ROLE=NAME in a dict. A role with several names has a list."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        columns: dict[str, list[str]] = {}
        for text in values:
            role, is_given, name = text.partition("=")
            if not role or not is_given or (not name and role not in OPTIONAL):
                raise argparse.ArgumentError(
                    self, f"must be ROLE=NAME, such as image=file text=description, got {' '.join(values)!r}"
                )
            columns.setdefault(role, []).append(name)
        repeated = next((role for role, given_names in columns.items() if len(given_names) > 1 and role != NEGATIVE), None)
        if repeated is not None:
            raise argparse.ArgumentError(self, f"must name one column for {repeated}, got {' and '.join(columns[repeated])}")
        setattr(
            namespace,
            self.dest,
            {role: given_names[0] if len(given_names) == 1 else given_names for role, given_names in columns.items()},
        )


def add_trust(parser: argparse._ActionsContainer) -> None:
    """Adds `--trust-remote-code`."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the files of the model, with all your permissions",
    )


def add_dim(parser: argparse.ArgumentParser) -> None:
    """Adds `--dim`, for commands that compare embeddings."""
    parser.add_argument(
        "--dim",
        type=parse_positive_int,
        metavar="N",
        help="keep only the first N dimensions of the embeddings of --loss matryoshka (default: all)",
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--json`. With it, standard output is one JSON document (`print_json`), and messages go to standard error."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as one JSON document")


def print_json(value: Any) -> None:
    """Prints the result of a command with `--json`. JSON has no numbers for NaN and ±∞, so they become null."""
    print(json.dumps(_without_nan(value), indent=1, default=str))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_model_arguments(
    parser: argparse.ArgumentParser, default: str = "validation data of the run, or else its training data"
) -> None:
    """Adds the arguments of commands that load a model and data. `default` describes the default of `--data`."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--data", help=f"{DATA_HELP} (default: {default})")
    add_columns(parser)
    add_trust(parser)
    parser.add_argument(
        "--split",
        choices=("train", "test", "all"),
        help="split of emoji or wordnet (default: the split of the run, or else test; train for mine)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help='"cpu", "cuda", "mps", "xpu" or "auto", which is the accelerator that PyTorch finds (default: auto)',
    )
    parser.add_argument("--chunk-size", type=parse_positive_int, default=256, metavar="N", help=f"{CHUNK_HELP} (default: 256)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help=f"{WORKERS_HELP} (default: 0)")


# ----------------------------------------------------------------------------------------------------------------------
# The model and the data that the arguments name: a folder, a file, or a special form such as "open_clip:ViT-B-32".


@dataclass(frozen=True)
class ModelAndData:
    """A model and the data that a command uses."""

    pair: Pair
    dataset: Dataset
    data: str
    split: str | None
    folder: Path | None  # of the run; None for a model by name

    def redraw(self, size: int) -> Dataset:
        """Returns the data for display. Emoji are drawn again with this side length, and other data are unchanged."""
        from megabatch_train.data import load as data

        return data.load(self.data, self.split, size=size) if self.data == "emoji" else self.dataset

    def check_kinds(self, sides: Sequence[int]) -> None:
        """Raises an error if the model does not encode these sides of the data."""
        for side in sides:
            if (kind := self.pair.towers[side].kind) != (expected := self.dataset.sides[side]):
                raise ValueError(f"MODEL must encode side {side + 1} of the data, {expected}s, got a model of {kind}s there")

    def keep_data(self, targets: Sequence[Path]) -> None:
        """Raises an error if a file that will be written is a file of the data."""
        from megabatch_train.data import load as data

        specs = [self.data] if os.path.exists(self.data) else data.parse_spec(self.data)[0]
        files = [file for spec in specs for file in _local_files(spec) if os.path.exists(file)]
        for target in targets:
            if target.exists() and any(target.samefile(file) for file in files):
                raise ValueError(f"--output must not replace the data, got {target}; choose another --output")


def choose(
    args: argparse.Namespace, device: torch.device, *, allow_images_only: bool = False, training: bool = False
) -> ModelAndData:
    """Loads the model and the data that the arguments name, and logs the data.

    Args:
        args: arguments of `add_model_arguments`.
        device: device of the model.
        allow_images_only: whether the data can be a folder of images without captions.
        training: whether the default for a run is its training data instead of its validation data.
    """
    from megabatch_train.data import load as data
    from megabatch_train.data.rows import ImageFolder, is_plain
    from megabatch_train.towers.models import image_size

    folder = run_of(args.model)
    spec, split, options, why = _choose_data(args, folder, training=training)
    images_only = allow_images_only and is_plain(Path(spec))

    def dataset(size: int | None) -> Dataset:
        return ImageFolder(spec) if images_only else data.load(spec, split, size=size, **options)

    if folder is not None:
        pair = load_pair(args.model, device, trust=args.trust_remote_code)
        loaded = dataset(image_size(pair.name, pair.options))
    else:
        loaded = dataset(image_size(args.model, {}))
        pair = load_pair(args.model, device, loaded.sides, trust=args.trust_remote_code)
    if getattr(args, "dim", None) is not None:
        truncate_pair(pair, args.dim, folder)
    what = "images" if images_only else "pairs"
    part = "" if split is None else f", {split} split"
    LOG.info("data: %s%s, %s %s%s", sanitize(spec), part, f"{len(loaded):,}", what, why)
    return ModelAndData(pair, loaded, spec, split, folder)


def truncate_pair(pair: Pair, dim: int, folder: Path | None) -> None:
    """Cuts the embeddings of a model to `--dim` dimensions. Warns if its run was not trained for them.

    Args:
        pair: the model. It is changed in place.
        dim: embedding dimension.
        folder: folder of the run, or None for a model by name.
    """
    from megabatch_train.evaluation import results
    from megabatch_train.evaluation.embedding import truncate
    from megabatch_train.towers.late_interaction import token_dim

    if token_dim(pair):
        raise ValueError(f"--dim must not be set for a late-interaction model, got {dim}")
    try:
        full = truncate(pair.towers, dim)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    loss = {} if folder is None else results.read_run(folder).config.get("loss", {})
    dims = loss.get("widths", []) if loss.get("name") == "matryoshka" else []
    if folder is not None and dim not in (*dims, full):
        trained_dims = ", ".join(map(str, dict.fromkeys((*dims, full))))
        LOG.warning("embeddings are cut to %d of %d dimensions, but the run was trained for %s", dim, full, trained_dims)
    else:
        LOG.info("embeddings are cut to %d of %d dimensions", dim, full)


def load_pair(
    spec: str, device: torch.device, kinds: tuple[str, str] | None = ("image", "text"), *, trust: bool = False
) -> Pair:
    """Loads the model of a run, or a model by name for sides of these kinds. With `trust`, code from its files can run.

    If `kinds` is None, a model by name has its own sides.
    """
    from megabatch.cached import second_pass
    from megabatch_train.towers import load
    from megabatch_train.towers.tower import allow_remote_code

    if run_of(spec) is not None:
        return load_run(Path(spec), device, trust=trust)[0]
    if not has_weights(spec) and not spec.startswith(PYTHON):
        LOG.warning("weights: random, because the name %s does not include weights", spec)
    second_pass.seed_host(0)  # every command has the same random weights, so that `search` can use the embeddings of `embed`
    with allow_remote_code(trust):
        pair = load(spec, kinds)
    for tower in pair.towers:
        tower.module.to(device).eval()
    return pair


def run_of(spec: str) -> Path | None:
    """Returns the folder of the run that contains this path, or None for a model by name. Raises an error if it is neither."""
    folder = _find_run(Path(spec))
    if folder is None and spec != "small" and ":" not in spec:
        runs = list_runs(Path(spec).parent)
        near = nearest(spec, ["small", *runs])
        raise ValueError(f"No such run or model: {spec}{near}. {describe_runs(runs)}; `megabatch help models` lists the models")
    return folder


def list_runs(folder: Path) -> list[str]:
    """Returns the runs in a folder and in `runs/`, newest first."""
    from megabatch_train.evaluation.results import CONFIG

    configs = {file for parent in (folder, Path(RUNS)) for file in parent.glob(f"*/{CONFIG}")}
    return [str(file.parent) for file in sorted(configs, key=lambda file: file.stat().st_mtime, reverse=True)]


def describe_runs(runs: Sequence[str]) -> str:
    """Returns a sentence with the runs, for the message that a run does not exist."""
    more = f" and {len(runs) - NAMED_RUNS:,} more" if len(runs) > NAMED_RUNS else ""
    return f"Runs: {', '.join(runs[:NAMED_RUNS])}{more}" if runs else f"There are no runs in {RUNS}/"


def _find_run(path: Path) -> Path | None:
    from megabatch_train.towers.models import WEIGHTS

    if not os.path.isdir(path):  # `Path.is_dir` raises an error for a long name
        return None
    if path.name.startswith("step_"):
        return path.resolve().parent.parent
    return path.resolve().parent if path.name == "best" and (path / WEIGHTS).is_file() else path


def load_run(path: Path, device: torch.device, *, trust: bool = False) -> tuple[Pair, int | None]:
    """Loads the model of a run, of its folder `best`, or of a checkpoint.

    With `trust`, code from its files can run. Returns the model and the step of its weights. An unknown step is None.
    """
    from megabatch_train.towers import models
    from megabatch_train.towers.tower import allow_remote_code
    from megabatch_train.trainer.checkpoints import CheckpointError
    from megabatch_train.trainer.run import load_newest

    try:
        with allow_remote_code(trust):
            pair, step = load_newest(path, device)
    except CheckpointError as error:
        raise ValueError(f"MODEL must be an intact checkpoint: {error}") from error
    LOG.info("weights: %s", _describe_weights(path, step))
    return pair, models.read_step(path) if step is None else step


def _describe_weights(path: Path, checkpoint: int | None) -> str:
    """Returns words for the weights of a run: the last weights, the best weights, or the weights of a checkpoint."""
    from megabatch_train.display import tables
    from megabatch_train.evaluation import results
    from megabatch_train.towers import models

    folder = _find_run(path) or path
    best = results.read_run(folder).best
    evaluated = f"after step {best['step']:,} ({tables.tell(best['metric'], best['value'])})" if best else ""
    if path.name == results.BEST and folder != path:
        return f"best of {folder}" + (f", {evaluated}" if best else "")
    step = models.read_step(path) if checkpoint is None else checkpoint
    text = f"{'last' if checkpoint is None else 'checkpoint'} of {folder}"
    text += "" if step is None else f", after step {step:,}"
    return text + (f"; the best weights are in {folder / results.BEST}, {evaluated}" if best and best["step"] != step else "")


def _choose_data(
    args: argparse.Namespace, folder: Path | None, *, training: bool
) -> tuple[str, str | None, dict[str, Any], str]:
    """Returns the name, the split and the options of the data, and words that say why it was chosen."""
    from megabatch_train.data import load as data
    from megabatch_train.evaluation import results

    options: dict[str, Any] = {}
    run_split, why = None, ""
    if args.data is not None:
        spec = str(args.data)
    else:
        run = None if folder is None else results.read_run(folder)
        data_and_split = None if run is None else run.training_part if training else run.test_data
        if run is None or data_and_split is None:
            raise ValueError(
                f"--data is required, because {args.model!r} is not a run with data; `megabatch help data` lists its values"
            )
        spec, run_split = run.locate(data_and_split[0]), data_and_split[1]
        options = run.training_options if training else run.test_options
        why = f", {'the training data of the run' if training else run.test_data_is}; --data names other data"
    if args.columns is not None:
        options = {**options, "columns": args.columns}
    if getattr(args, "holdout", None) is not None:
        options, run_split = {**options, "holdout": args.holdout}, "train"
    usual = "train" if training else "test"
    split = args.split or run_split or (usual if spec in data.WITH_SPLITS else None)
    return spec, split, options, why


def _local_files(spec: str) -> list[Path]:
    """Returns the tables or shards of a path, a pattern or a folder, or an empty list for a URL."""
    from megabatch_train.data.paths import expand_pattern, place

    path = place(spec)
    if not isinstance(path, Path):
        return []
    if os.path.isdir(path):
        return list(path.glob("*.tar")) or [entry for entry in path.iterdir() if entry.suffix in TABLES]
    return [Path(str(file)) for file in ([path] if os.path.exists(path) else expand_pattern(str(path)))]


def lines_of(path: str) -> Sequence[str]:
    """Returns the non-empty lines of a file."""
    lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} must have at least one line, got none")
    return lines
