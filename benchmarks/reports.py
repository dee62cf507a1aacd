"""From the JSON record of a benchmark to its Markdown table and its plot. Each `*_report.py` defines both."""

import json
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from megabatch import machine
from megabatch.display import plots

Record = dict[str, Any]
Row = dict[str, Any]


def write(path: Path, text: Callable[[Record], str], draw: Callable[[Record], Any]) -> None:
    """Writes `.md` and `.png` beside the record, with the machine and the command. Without matplotlib there is no plot.

    Args:
        path: of the JSON record.
        text: the Markdown of a record.
        draw: the matplotlib figure of a record.
    """
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    if plots.available():
        plots.save(draw(record), path.with_suffix(".png"))
    else:
        print("No plot: matplotlib is not installed")


def main(usage: str | None, report: Callable[[Path], None]) -> None:
    """Runs a report script; the path of the JSON record is its only argument."""
    if len(sys.argv) != 2:
        sys.exit(usage)
    report(Path(sys.argv[1]))


def groups(rows: list[Row], *keys: str) -> dict[Hashable, list[Row]]:
    """{values of the keys: rows that have them}, in the order of the rows."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def chip(record: Record) -> str:
    """The GPU, or the CPU of a machine without one."""
    return str(record["machine"]["gpu"] or record["machine"]["cpu"])


def paragraphs(*parts: str) -> str:
    """Markdown paragraphs without the empty ones."""
    return "\n\n".join(part for part in parts if part)
