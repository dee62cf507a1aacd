"""The arguments of `megabatch report`."""

import argparse

DESCRIPTION = """
Writes report.html into a run's folder: curves, the last evaluation, search results for a few
queries, the command and the configuration. The page is one file; it has a light and a dark style,
prints, and fits a phone. It can be written while the run goes on.

  megabatch report runs/emoji --query "smiling cat" --query "red heart"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch report`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="the run's folder")
    parser.add_argument(
        "--query", action="append", default=[], metavar="TEXT", help="text to search for in the test data; may be repeated"
    )
