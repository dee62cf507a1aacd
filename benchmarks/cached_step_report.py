"""The table and the plot of a run of `cached_step.py`.

python benchmarks/cached_step_report.py benchmarks/results/cached_step.json
"""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import gib, ratio
from megabatch.display.tables import Table

ALONE = "towers alone"
COLOURS = {
    "plain step": plots.INK,
    "cached, budget 0": plots.GREEN,
    "cached, auto": plots.MINT,
    "cached, replay": plots.BLUE,
    "accum-freq": plots.ORANGE,
    "GradCache": plots.VIOLET,
    ALONE: plots.GREY,
}
HEADINGS = [
    "model",
    "B",
    "chunk",
    "system",
    "pairs/s",
    "÷ towers alone",
    "peak GiB",
    "beyond weights, gradients",
    "loss, share",
]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    return reports.paragraphs(_steps(record), _checks(record), _towers(record), _ratios(record))


def _steps(record: dict[str, Any]) -> str:
    results = record["results"]
    bare = [r for r in results if r["system"] == ALONE and "seconds" in r]
    rows = []
    for r in results:
        pace, peak = r.get("pairs_per_second"), r.get("peak_bytes")
        # The largest batch of the towers alone that is not larger than this one.
        base = next((b["pairs_per_second"] for b in reversed(bare) if b["model"] == r["model"] and r["B"] >= b["B"]), None)
        shown = f"{pace:.0f}{' †' if 'encoded' in r else ''}" if pace else r["status"]
        cells = [r["model"], f"{r['B']:,}", r["chunk"], r["system"], shown, ratio(pace, base, ".3f")]
        rows.append([*cells, gib(peak and peak + r["held_bytes"]), gib(peak), _loss_share(r)])
    part = "† Some chunks of the step were timed, with the loss of the whole batch, and extended to all chunks."
    notes = (part if any("encoded" in r for r in results) else "", record.get("note", ""))
    return reports.paragraphs(Table(HEADINGS, rows, names=(0, 3)).markdown(), *notes)


def _loss_share(r: dict[str, Any]) -> str:
    return f"{100 * r['loss_seconds'] / r['seconds']:.1f} %" if "loss_seconds" in r else ""


def _checks(record: dict[str, Any]) -> str:
    if not record["checks"]:
        return "Gradients were not compared in this run."
    headings = ["model", "system", "error of all towers' gradients", "scale's gradient ÷ the right one", ""]
    rows = [[c["model"], c["system"], f"{c['error']:.0e}", f"{c['scale']:.4f}", c["status"]] for c in record["checks"]]
    title = "Gradients against the plain step, float32, a small batch in chunks:"
    return Table(headings, rows, title, names=(0, 1, 4)).markdown()


def _towers(record: dict[str, Any]) -> str:
    where = ", ".join(f"{model} from {library}" for model, library in record.get("towers", {}).items())
    return f"Towers: {where}; random weights, synthetic images, bf16 autocast."


def _ratios(record: dict[str, Any]) -> str:
    """Speed relative to the towers alone, and the loss's share of a step."""
    rows = []
    for (model, B), group in reports.groups(record["results"], "model", "B").items():
        found = {r["system"]: r for r in group if "seconds" in r}
        seconds = {name: r["seconds"] for name, r in found.items()}
        cached = [ratio(seconds.get(ALONE), seconds.get(name), ".3f") for name in ("cached, budget 0", "cached, auto")]
        cells = [*cached, _loss_share(found.get("cached, budget 0", {}))]
        if any(cells):
            rows.append([model, f"{B:,}", *cells])
    headings = ["model", "B", "budget 0 ÷ towers alone", "auto ÷ towers alone", "loss, share of budget 0"]
    return Table(headings, rows).markdown()


def draw(record: dict[str, Any]) -> Any:
    """For each model, speed and memory against the batch."""
    found = reports.groups(record["results"], "model")
    title = f"One training step; {reports.chip(record)}"
    figure, grid = plots.figure(title, rows=len(found), columns=2, size=(11, 4.4 * len(found)))
    for (speed, memory), ((model,), rows) in zip(grid, found.items(), strict=True):
        for name, colour in COLOURS.items():
            chosen = sorted((r for r in rows if r["system"] == name and "seconds" in r), key=lambda r: r["B"])
            style = "--" if name == ALONE else "-"
            plots.line(speed, [(r["B"], r["pairs_per_second"]) for r in chosen], name, colour, linestyle=style)
            if name != ALONE:
                points = [(r["B"], (r["peak_bytes"] + r["held_bytes"]) / 2**30) for r in chosen if "peak_bytes" in r]
                plots.line(memory, points, name, colour)
        for axes, label in ((speed, "pairs a second"), (memory, "peak, GiB")):
            axes.set(title=model, ylabel=label)
            axes.set_ylim(0, 1.1 * max((y for line in axes.lines for y in line.get_ydata()), default=1.0))
            plots.batch_axis(axes, [r["B"] for r in rows])
            plots.legend(axes)
    return figure


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
