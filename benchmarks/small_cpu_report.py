"""Table and plot of a run of `small_cpu.py`: python benchmarks/small_cpu_report.py benchmarks/results/small_cpu.json."""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, ratio
from megabatch.display.tables import Table

OURS, DENSE = "megabatch", "dense PyTorch"
COLOURS = (plots.GREEN, plots.ORANGE, plots.BLUE, plots.VIOLET, plots.OCHRE)
LEGEND = (
    "ms: forward + backward, the median of rounds in which both systems take turns, each in a process of its own. Dense: all "
    "logits, and F.cross_entropy, F.logsigmoid or logsumexp. Errors: relative to float64."
)


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    rows = record["results"]
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    headings = ["loss", "B"]
    for count in counts:
        headings += [f"megabatch, ms, {_threads(count)}", "dense PyTorch, ms", "dense ÷ time"]
    headings += ["loss error", "dense", "largest gradient error", "dense"]
    table = []
    for (loss, B), found in reports.groups(rows, "loss", "B").items():  # type: ignore[misc]
        cells: list[object] = [loss, f"{B:,}"]
        for row in found:
            ms = row["ms"]
            cells += [f"{ms[OURS]:.3f}", f"{ms[DENSE]:.3f}", ratio(ms[DENSE], ms[OURS])]
        errors = [row["errors"] for row in found]
        cells += [cell(max(e[system][0] for e in errors), ".0e") for system in (OURS, DENSE)]
        cells += [cell(max(max(e[system][1:]) for e in errors), ".0e") for system in (OURS, DENSE)]
        table.append(cells)
    wrong = [f"{row['loss']} at {row['B']:,}" for row in rows if not row["right"]]
    checked = f"Checked against float64: {len(rows)} results of megabatch; wrong: {', '.join(wrong) or 'none'}."
    title = f"Small batches on a CPU, float32, B pairs of embeddings {rows[0]['D']} wide."
    return reports.paragraphs(title, Table(headings, table).markdown(), LEGEND, checked)


def draw(record: dict[str, Any]) -> Any:
    """The time of dense PyTorch ÷ ours against the batch."""
    rows = record["results"]
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    title = f"Small batches, float32, D = {rows[0]['D']}; {record['machine']['cpu']}"
    figure, (panels,) = plots.figure(title, columns=len(counts), size=(5.5 * len(counts), 4.8))
    for axes, count in zip(panels, counts, strict=True):
        chosen = [row for row in rows if row["threads"] == count]
        for (loss,), colour in zip(reports.groups(chosen, "loss"), COLOURS, strict=True):  # type: ignore[misc]
            points = [(row["B"], row["ms"][DENSE] / row["ms"][OURS]) for row in chosen if row["loss"] == loss]
            plots.line(axes, points, loss, colour)
        axes.axhline(1, color=plots.INK, linewidth=1)
        axes.set(ylabel=f"time of dense PyTorch ÷ time, {_threads(count)}", ylim=(0, None))
        plots.batch_axis(axes, [row["B"] for row in chosen])
    plots.legend(panels[0])
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
