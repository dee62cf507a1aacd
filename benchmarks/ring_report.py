"""The table and the plot of a run of `ring.py`: python benchmarks/ring_report.py benchmarks/results/ring.json."""

from functools import partial
from typing import Any

import reports
from ring_systems import ABOUT

from megabatch.bench.levels import TILES
from megabatch.bench.measure import OK
from megabatch.display import plots
from megabatch.display.numbers import cell
from megabatch.display.tables import Table

MIB = 2**20
HEADINGS = [
    "ranks",
    "system",
    "peak MiB of a rank",
    "s, all ranks on these cores",
    "MiB sent by a rank",
    "loss error",
    "grad. error",
]
LEGEND = (
    "Peak: resident memory beyond the inputs, gradients included, of the rank that needs most. Sent: forward and backward, "
    "without the small messages in which ranks agree; open_clip's collectives are not counted. Errors: of the mean over ranks, "
    "relative to float64."
)
PANELS = (
    ("peak memory of a rank, MiB", "peak", MIB),
    ("seconds, all ranks on the same cores", "seconds", 1),
    ("MiB sent by a rank", "sent", MIB),
)


def _title(record: dict[str, Any]) -> str:
    return f"CLIP loss over ranks, forward and backward, float32, {record['batch']:,} pairs in all, D = {record['width']}"


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    rows = []
    for r in record["results"]:
        peak, sent = (None if r[key] is None else r[key] / MIB for key in ("peak", "sent"))
        seconds = f"{r['seconds']:.2f}" if r["status"] == OK else r["status"].split(":")[0]
        cells = [r["world"], r["system"], cell(peak, ".0f"), seconds, cell(sent, ".2f")]
        rows.append([*cells, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    systems = "\n".join(f"- {system}: {about}" for system, about in ABOUT.items())
    return reports.paragraphs(Table(HEADINGS, rows, f"{_title(record)}.", LEGEND, names=(1,)).markdown(), systems)


def draw(record: dict[str, Any]) -> Any:
    """Memory, time and bytes sent against the number of ranks."""
    figure, (panels,) = plots.figure(_title(record), columns=3, size=(13, 4.8))
    others = iter((plots.ORANGE, plots.OCHRE, plots.BLUE, plots.VIOLET, plots.GREY, plots.MINT))
    colours = {name: plots.GREEN if name == TILES else next(others) for name in ABOUT}
    for axes, (label, key, unit) in zip(panels, PANELS, strict=True):
        for name, marker in zip(ABOUT, "sDvP<>o", strict=True):
            points = [(r["world"], r[key] / unit) for r in record["results"] if r["system"] == name and r[key]]
            plots.line(axes, points, name, colours[name], marker=marker, linewidth=2.4 if name == TILES else 1.2)
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["world"] for r in record["results"]], "ranks")
        plots.log_axis(axes)
    plots.legend(panels[1])
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
