"""`megabatch report`: writes the report.html of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megabatch_train.commands import add_trust, describe, model
from megabatch_train.names import tell

if TYPE_CHECKING:
    from megabatch_train.towers import Pair


DESCRIPTION = """
Writes report.html into the folder of a run. The page shows curves, the last evaluation, search
results for a few queries, the command and the configuration. It is one file without external
resources. The command also works while the run continues.

  megabatch report runs/emoji --query "smiling cat" --query "red heart"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch report`."""
    describe(parser, DESCRIPTION)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to search for in the test data; can be repeated (default: texts of the test data)",
    )
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    import torch

    from megabatch_train.display.report import write_report

    if not all(text.strip() for text in args.query):
        raise ValueError("--query must not be empty")

    def load(folder: Path) -> Pair:
        return model.load_pair(str(folder), torch.device("cpu"), trust=args.trust_remote_code)

    tell(f"wrote {write_report(args.folder, args.query, load=load)}")
    return 0
