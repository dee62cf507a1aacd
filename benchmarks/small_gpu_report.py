"""Table and plot of a run of `small_gpu.py`: python benchmarks/small_gpu_report.py benchmarks/results/small_gpu.json."""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, ratio
from megabatch.display.tables import Table

OURS, DENSE, BARE = "megabatch", "dense PyTorch", "bare products"
SYSTEMS = {OURS: plots.GREEN, DENSE: plots.ORANGE, "compiled": plots.VIOLET, "open_clip": plots.BLUE, "Liger": plots.OCHRE}
HOST = "host, ms", "cold, ms"
LEGEND = (
    "ms: forward + backward, several steps in flight, no CUDA graphs. Host: time in which a step returns without waiting for "
    "the GPU, one after another; cold: of one step after 2 ms without work. Dense PyTorch: all logits, autocast; compiled: the "
    "same by torch.compile. Bare products: the four products of an exact CLIP loss, or the three of SigLIP. In memory, over "
    "tiles: the other way of megabatch, which it does not take at this size."
)


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    clip = [row for row in record["results"] if row["loss"] == "clip_loss"]
    other = [row for row in record["results"] if row["loss"] != "clip_loss"]
    shown = [name for name in (*SYSTEMS, BARE, "in memory", "over tiles") if any(name in row["ms"] for row in clip)]
    rows = [_row(row, shown) for row in clip]
    headings = ["B", "D", *(f"{name}, ms" for name in shown), *HOST, "dense ÷ time", "bare ÷ time"]
    tables = [Table(headings, rows, names=()).markdown()]
    if other:
        shown = [OURS, DENSE, BARE, "over tiles"]
        rows = [[row["loss"], *_row(row, shown)] for row in other]
        headings = ["loss", "B", "D", *(f"{name}, ms" for name in shown), *HOST, "dense ÷ time", "bare ÷ time"]
        tables.append(Table(headings, rows).markdown())
    wrong = [f"{c['loss']} {c['dtype']}" for c in record["checks"] if not c["right"]]
    checked = f"Checked against float64: {len(record['checks'])} results of megabatch; wrong: {', '.join(wrong) or 'none'}."
    legend = LEGEND
    if record.get("nothing_host_ms"):  # not on a CPU
        legend += " An autograd function that computes nothing takes the host {:.3f} ms, and {:.3f} cold.".format(
            *record["nothing_host_ms"]
        )
    return reports.paragraphs("Small batches on a GPU, bf16, B pairs of embeddings D wide.", *tables, legend, checked)


def _row(row: dict[str, Any], shown: Any) -> list[object]:
    ms, host, cold = row["ms"], row["host_ms"], row.get("host_after_pause_ms", {})
    times = [cell(ms.get(name), ".3f") for name in shown]
    ours = ms.get(OURS)
    return [
        f"{row['B']:,}",
        row["D"],
        *times,
        cell(host.get(OURS), ".3f"),
        cell(cold.get(OURS), ".3f"),
        ratio(ms.get(DENSE), ours),
        ratio(ms.get(BARE), ours),
    ]


def draw(record: dict[str, Any]) -> Any:
    """Time of CLIP losses against the batch, for each width."""
    rows = [row for row in record["results"] if row["loss"] == "clip_loss"]
    widths = sorted({row["D"] for row in rows})
    title = f"CLIP loss, forward + backward, bf16; {reports.chip(record)}"
    figure, (panels,) = plots.figure(title, columns=len(widths), size=(5.5 * len(widths), 4.8))
    for axes, D in zip(panels, widths, strict=True):
        chosen = [row for row in rows if row["D"] == D]
        for name, colour in (SYSTEMS | {BARE: plots.INK}).items():
            points = [(row["B"], row["ms"][name]) for row in chosen if name in row["ms"]]
            plots.line(axes, points, name, colour, linestyle="--" if name == BARE else "-")
        host = [(row["B"], row["host_ms"][OURS]) for row in chosen if OURS in row["host_ms"]]
        plots.line(axes, host, "megabatch, host", plots.GREEN, linestyle=":")
        axes.set_ylabel(f"time, ms, D = {D}")
        plots.batch_axis(axes, [row["B"] for row in chosen])
        plots.log_axis(axes)
    plots.legend(panels[0])
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
