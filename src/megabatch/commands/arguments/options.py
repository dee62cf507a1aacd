"""Options that commands share, and their types."""

import argparse
from typing import Any


def whole(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return value


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Adds `--columns`, which is a dict afterwards."""
    parser.add_argument(
        "--columns",
        nargs="+",
        action=_Columns,
        metavar="ROLE=NAME",
        help="columns of a table: image=NAME text=NAME, or query=NAME document=NAME; in training also negative=NAME and "
        "label=NAME, in evaluation score=NAME (default: found by common names)",
    )


class _Columns(argparse.Action):
    """Collects ROLE=NAME into a dict."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        parts = [text.partition("=") for text in values]
        if not all(role and name for role, _, name in parts):
            raise argparse.ArgumentError(
                self, f"must be ROLE=NAME, as in image=file text=description, got {' '.join(values)!r}"
            )
        setattr(namespace, self.dest, {role: name for role, _, name in parts})
