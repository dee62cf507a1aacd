"""One module for each command of `megabatch`, with `add_arguments(parser)` and `run(args)`, which returns the exit status.

No module imports torch before `run`, so that help appears at once. Functions import what they need.
"""

import argparse
import shutil
from typing import Any

HELP_WIDTH = 100  # characters of a line of help in a wide terminal
RUNS = "runs"  # the folder of runs without --output
DATA_HELP = "table, shards, image folder or Hugging Face dataset; see megabatch help data"
MODEL_HELP = "folder of a run, checkpoint, or model by name; see megabatch help models"
WORKERS_HELP = "data-loader workers that read samples in parallel, 0 for none"
CHUNK_HELP = "samples that a tower encodes at once"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints a description as it is, and options in lines of at most `HELP_WIDTH` characters."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": min(shutil.get_terminal_size().columns - 2, HELP_WIDTH), **options})


def describe(parser: argparse.ArgumentParser, description: str) -> None:
    """Sets the description of a command."""
    parser.description, parser.formatter_class = description, HelpFormatter


def whole(text: str) -> int:
    """Parses a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return value
