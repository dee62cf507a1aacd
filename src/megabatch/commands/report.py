"""`megabatch report`: writes a run's report.html."""

import argparse

from megabatch.report import write_report
from megabatch.trainer.weights import load_newest


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    print(f"wrote {write_report(args.folder, args.query, load=lambda folder: load_newest(folder)[0])}")
    return 0
