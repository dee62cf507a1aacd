"""`megabatch report`: writes a run's report.html."""

import argparse

from megabatch.report import write_report


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    print(f"wrote {write_report(args.folder, args.query)}")
    return 0
