"""`megabatch report`: a run on one page."""

import argparse

from megabatch.report import write_report

DESCRIPTION = """
Writes report.html into a run's folder: curves, the last evaluation, a gallery of queries with what
was found, the configuration and the command. The page is one file that needs nothing else; it
follows light and dark, prints, and fits a phone. It can be written while a run goes on.

  megabatch report runs/emoji --query "smiling cat" --query "red heart"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `megabatch report`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="of the run")
    parser.add_argument(
        "--query", action="append", default=[], metavar="TEXT", help="searched for in the gallery; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page and says where."""
    print(f"wrote {write_report(args.folder, args.query)}")
    return 0
