"""The commands of `megabatch`, and the arguments that several commands share.

Each module defines `add_arguments(parser)` and `run(args)`, which returns the exit status.
No module imports torch before `run`, so that `--help` prints at once. Functions import what they need.
"""

import argparse
import shutil
from typing import Any

HELP_WIDTH = 100  # characters in a line of help, at most
RUNS = "runs"  # folder of the runs that are started without --output
DATA_HELP = "table, shards, image folder or Hugging Face dataset; see `megabatch help data`"
MODEL_HELP = "folder of a run, checkpoint, or name of a model; see `megabatch help models`"
WORKERS_HELP = "number of data-loader workers; 0 reads samples in the main process"
CHUNK_HELP = "number of samples that a tower encodes at once"
LORA_HELP = "train LoRA adapters of this rank instead of the weights of an hf: model"
NEGATIVE, OPTIONAL = "negative", ("negative", "label", "score")  # roles that do not need a column


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
        help="split of emoji or wordnet (default: the split of the run, or else test)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help='"cpu", "cuda" or "auto", which is "cuda" if a CUDA device is available (default: auto)',
    )
    parser.add_argument("--chunk-size", type=parse_positive_int, default=256, metavar="N", help=f"{CHUNK_HELP} (default: 256)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help=f"{WORKERS_HELP} (default: 0)")
