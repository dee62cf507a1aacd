"""The commands of `megabatch`. Each module defines `add_arguments(parser)` and `run(args)`, which returns the exit status.

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
