"""Types of options for argparse."""

import argparse


def whole(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return value
