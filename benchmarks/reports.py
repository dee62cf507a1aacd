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


def write(path: Path, text: Callable[[Record], str], draw: Callable[[Record], Any] | None = None) -> None:
    """Writes `.md` and `.png` beside the record, with the machine and the command. Without matplotlib there is no plot.

    Args:
        path: of the JSON record.
        text: the Markdown of a record.
        draw: the matplotlib figure of a record; None if it would show nothing.
    """
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    if draw is None:
        return
    if not plots.available():
        print("No plot: matplotlib is not installed")
    elif (figure := draw(record)) is not None:
        plots.save(figure, path.with_suffix(".png"))


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


def time_and_memory(title: str, rows: list[Row], ours: str, bare: str) -> Any:
    """A figure of the systems' time and of their memory beyond the inputs, against the batch."""
    figure, (panels,) = plots.figure(title, columns=2, size=(11, 4.8))
    others = iter((plots.ORANGE, plots.VIOLET, plots.BLUE, plots.OCHRE))
    colours = {ours: plots.GREEN, bare: plots.INK}
    for name in dict.fromkeys(r["system"] for r in rows):
        colour, chosen = colours.get(name) or next(others), [r for r in rows if r["system"] == name]
        for axes, key, unit in zip(panels, ("ms", "peak_bytes"), (1, 2**30), strict=True):
            points = sorted((r["B"], r[key] / unit) for r in chosen if r.get(key))
            plots.line(axes, points, name, colour, linestyle="--" if name == bare else "-")
    for axes, label in zip(panels, ("time, ms", "memory beyond the inputs, GiB"), strict=True):
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["B"] for r in rows])
        plots.log_axis(axes)
        plots.legend(axes)
    return figure
