"""Table and plot of a run of `million.py`: python benchmarks/million_report.py benchmarks/results/million.json."""

from pathlib import Path
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.tables import Table

PHASES = {
    "data": plots.OCHRE,
    "forward": plots.BLUE,
    "loss": plots.GREEN,
    "backward": plots.VIOLET,
    "optimizer": plots.INK,
    "other": plots.ORANGE,
}
NOTES = (
    "Backward includes encoding each chunk again. Data: rows and crops of the chunks. Other: what the trainer does between "
    "these. The host's peak is that of the whole process, data included."
)


def table(record: dict[str, Any]) -> Table:
    """Time by phase and both peaks, planned and measured."""
    rows = []
    for result in record["results"]:
        for who in ("planned", "measured"):
            numbers = result[who]
            phases = [f"{numbers[name]:.2f}" if name in numbers else "" for name in PHASES]
            host = f"{numbers['host_bytes'] / 2**30:.1f}" if "host_bytes" in numbers else ""
            gpu = f"{numbers['gpu_bytes'] / 2**30:.1f}"
            rows.append([f"{result['batch']:,}", who, *phases, f"{numbers['seconds']:.2f}", gpu, host])
    headings = ["pairs", "", *(f"{name}, s" for name in PHASES), "step, s", "GPU, GiB", "host, GiB"]
    return Table(headings, rows, notes=NOTES)


def draw(record: dict[str, Any]) -> Any:
    """Where the time of a step went, beside the plan, for each batch."""
    results = record["results"]
    if not results:
        return None
    title = f"One training step: seconds planned and measured; {reports.chip(record)}"
    figure, (panels,) = plots.figure(title, columns=len(results), size=(5.5 * len(results), 3.2))
    for axes, result in zip(panels, results, strict=True):
        for row, who in enumerate(("measured", "planned")):
            start = 0.0
            for name, colour in PHASES.items():
                seconds = result[who].get(name, 0.0)
                axes.barh(row, seconds, left=start, color=colour, label=name if who == "measured" else "_", height=0.6)
                start += seconds
            axes.text(start, row, f" {start:,.1f} s, {result[who]['gpu_bytes'] / 2**30:.1f} GiB", va="center")
        axes.set(title=f"{result['batch']:,} pairs", xlabel="seconds", yticks=(0, 1), yticklabels=("measured", "planned"))
        axes.set_xlim(0, 1.6 * max(sum(result[who].get(name, 0.0) for name in PHASES) for who in ("measured", "planned")))
        axes.grid(visible=False, axis="y")
    figure.legend(*panels[0].get_legend_handles_labels(), ncols=len(PHASES), loc="outside lower center", frameon=False)
    return figure


def report(path: Path) -> None:
    """Writes `.md` and `.png` beside the record."""
    reports.write(path, lambda record: table(record).markdown(), draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
