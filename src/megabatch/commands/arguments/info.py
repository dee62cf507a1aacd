"""The arguments of `megabatch info`."""

import argparse

DESCRIPTION = """
Prints versions, devices, the default backend of each device, and the installed extras.

  megabatch info                 for bug reports: contains no names of hosts or users, and no paths
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`megabatch info` has no arguments."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
