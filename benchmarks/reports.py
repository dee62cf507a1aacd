"""From the JSON file of a run to its table and its plot, on any machine. What they show is in each `*_report.py`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megabatch import machine

Run = dict[str, Any]


def write(path: Path, text: Callable[[Run], str], draw: Callable[[Run, Path], None]) -> None:
    """Writes both beside the JSON file, with the machine and the command; the plot where matplotlib is installed."""
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError:
        print("No plot: matplotlib is not installed")


def main(usage: str | None, report: Callable[[Path], None]) -> None:
    """Of a report script: the JSON file is its only argument."""
    if len(sys.argv) != 2:
        sys.exit(usage)
    report(Path(sys.argv[1]))
