"""Markdown and a plot from the JSON of `train_speed.py`: python benchmarks/train_speed_report.py results/train_speed.json."""

from pathlib import Path
from typing import Any

import reports
from reports import Record, chip

from megabatch.display import numbers, plots
from megabatch.display.tables import Table

COLOURS = {"megabatch": plots.GREEN, "open_clip": plots.ORANGE, "towers alone": plots.GREY}
HEADINGS = ["system, batch", "pairs/s", "× open_clip's best", "waiting for data", "MFU", "peak, GiB", "steps"]


def name(row: dict[str, Any]) -> str:
    """The system, its variant and its batch."""
    return f"{row['system']}{', ' + row['variant'] if row['variant'] else ''}, {numbers.pairs(row['batch'])}"


def markdown(record: Record) -> str:
    """One table: rate, ratio to open_clip's best, wait for data, share of the peak rate, memory; and the phases of ours."""
    rows = record["results"]
    theirs = max((row["rate"] for row in rows if row["system"] == "open_clip" and "rate" in row), default=None)
    about = (
        f"# Speed of training\n\n{record['model']}, {record['samples']:,} pairs of JPEGs and captions in webdataset shards, "
        f"{chip(record)}. Rates are over the steps after the first two; open_clip's trainer has {record['workers']} workers. "
        "The towers alone read no data and compute no loss. A cached step encodes each chunk twice, unless it keeps its graph; "
        "encoded once is the upper bound."
    )
    phases = [f"- {name(row)}: {shares(row['phases'])}" for row in rows if "phases" in row]
    table = Table(HEADINGS, [cells(row, theirs) for row in rows]).markdown()
    return reports.paragraphs(about, table, "Time by phase:\n\n" + "\n".join(phases) if phases else "")


def cells(row: dict[str, Any], theirs: float | None) -> list[str]:
    """A row of the table; `theirs` is open_clip's best rate."""
    if "failed" in row:
        return [name(row), row["failed"], *[""] * (len(HEADINGS) - 2)]
    of_time = [numbers.percent(row[key]) if key in row else "" for key in ("data_share", "mfu")]
    rate, ratio = f"{row['rate']:,.0f}", numbers.ratio(row["rate"], theirs)
    return [name(row), rate, ratio, *of_time, numbers.gib(row.get("peak_bytes"), ".1f"), str(row["steps"])]


def shares(phases: dict[str, float]) -> str:
    """Phases in words, the longest first."""
    whole = sum(phases.values())
    longest = sorted(phases.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{key} {numbers.percent(seconds / whole)}" for key, seconds in longest)


def draw(record: Record) -> Any:
    """A bar for each run that has a rate."""
    rows = [row for row in record["results"] if "rate" in row]
    bars = [(name(row), row["rate"]) for row in rows]
    size, about = (8.0, 1.5 + 0.4 * len(bars)), f"{record['model']}, {chip(record)}"
    figure, ((axes,),) = plots.figure("Pairs a second, from files to the optimizer", size=size, about=about)
    plots.bars(axes, bars, "{:,.0f}", [COLOURS[row["system"]] for row in rows])
    return figure


def report(path: Path) -> None:
    """Writes the table and the plot beside the record."""
    reports.write(path, markdown, draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
