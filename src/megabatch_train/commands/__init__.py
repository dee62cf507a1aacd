"""One module for each command of `megabatch`, with `add_arguments(parser)` and `run(args)`, which returns the exit status.

Nothing imports torch before `run`, so that help appears at once: functions import what they need.
"""

import argparse


def whole(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return value
