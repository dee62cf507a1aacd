"""The table and the plot of a run of `family_gpu.py`.

python benchmarks/family_gpu_report.py benchmarks/results/family_gpu.json
"""

from functools import partial
from typing import Any

import reports

from megabatch.display import plots
from megabatch.display.numbers import cell, gib, ratio
from megabatch.display.tables import Table

OURS, BARE = "megabatch", "bare products"
COLOURS = {
    "sentence-transformers": plots.ORANGE,
    "info-nce-pytorch": plots.VIOLET,
    "pytorch-metric-learning": plots.OCHRE,
    "open_clip": plots.BLUE,
    "lightly": plots.INK,
    "pairwise_logsumexp(z, z)": plots.MINT,
    "dense PyTorch": plots.GREY,
}
HEADINGS = ["loss", "B", "system", "ms", "× megabatch", "products", "bare ÷ time", "extra GiB", "value", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    checks = {(c["loss"], c["system"]): c for c in record["checks"]}
    rows = []
    for group in reports.groups(record["results"], "loss", "rows").values():
        ours = next((r.get("ms") for r in group if r["system"] == OURS), None)
        bare = next((r for r in group if r["system"] == BARE), None)
        for r in group:
            ms, check = r.get("ms"), checks.get((r["loss"], r["system"]), {})
            name = r["system"] + (", imprecise" if ms and r["status"] == "imprecise" else "")
            cells = [r["loss"], f"{r['rows']:,}", name, cell(ms, ".2f") or r["status"], ratio(ms, ours)]
            cells += [f"{sum(bare['products']):g}" if bare else "", ratio(bare and bare["ms"], ms, ".3f")]
            cells += [gib(r.get("peak_bytes")), cell(r.get("value"), ".4f")]
            rows.append([*cells, *(cell(check.get(key), ".0e") for key in ("loss_error", "gradient_error"))])
    about = (
        f"Width {record['width']}. Products: the least number of products of B × B × width that the formula needs. Bare: their "
        "time with PyTorch's matrix product, in strips. Extra: peak memory beyond the inputs, gradients included. Errors: "
        "relative to float64 at a smaller batch; of the value relative to itself or to 1, whichever is larger; the largest of "
        "all gradients, by norm. Imprecise: the error is larger than bf16 inputs explain, and no larger than bf16 logits "
        "explain."
    )
    return reports.paragraphs(
        Table([*HEADINGS, "gradient error"], rows, names=(0, 2)).markdown(),
        " ".join((about, record.get("note", ""))).strip(),
        _counted(record),
    )


def _counted(record: dict[str, Any]) -> str:
    """The products of each loss, as its largest batch has them."""
    found = reports.groups([r for r in record["results"] if r["system"] == BARE], "loss")
    rows = [[name, *(f"{count:g}" for count in first["products"]), first["note"]] for (name,), (first, *_) in found.items()]
    return Table(["loss", "S", "dX", "dY", "what is counted"], rows, names=(0, 4)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Time and memory at the largest batch; the largest batch of a peer that cannot run it is written beside."""
    most = max(r["rows"] for r in record["results"])
    names = list(dict.fromkeys(r["loss"] for r in record["results"] if r["rows"] == most and "ms" in r))
    title = f"Losses of {most:,} × {record['width']}, forward and backward; {reports.chip(record)}"
    figure, ((left, right),) = plots.figure(title, columns=2, size=(13, 1.6 + 0.42 * len(names)))
    places = {name: i for i, name in enumerate(names)}
    large = [r for r in record["results"] if r["rows"] == most and r["loss"] in places]
    for axes, key, unit in ((left, "ms", 1.0), (right, "peak_bytes", 2**30)):
        ours = {r["loss"]: r[key] / unit for r in large if r["system"] == OURS and key in r}
        axes.barh([places[name] for name in ours], list(ours.values()), color=plots.GREEN, height=0.55, label=OURS)
        for system, colour in COLOURS.items():
            points = [(r[key] / unit, places[r["loss"]]) for r in large if r["system"] == system and key in r]
            plots.line(axes, points, system, colour, linestyle="", marker="D", markersize=6)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        plots.log_axis(axes, "x")
    bare = [(r["ms"], places[r["loss"]]) for r in large if r["system"] == BARE]
    line = {"linestyle": "", "marker": "|", "markersize": 16, "markeredgewidth": 2}
    plots.line(left, bare, "products it needs", plots.INK, **line)
    left.set(xlabel="milliseconds")
    right.set(xlabel="peak beyond the inputs, GiB")
    left.set_yticks(range(len(names)), names)
    right.set_yticks(range(len(names)), [""] * len(names))
    edge = right.get_xlim()[1]
    for name, i in places.items():
        right.annotate("  " + where_it_ends(record, name, most), (edge, i), va="center", fontsize=7.5, annotation_clip=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def where_it_ends(record: dict[str, Any], name: str, rows: int) -> str:
    """The largest batch of each peer that could not run the largest of all."""
    parts = []
    for system in COLOURS:
        tried = [r for r in record["results"] if r["loss"] == name and r["system"] == system]
        worked = [r["rows"] for r in tried if "ms" in r]
        if (worked and rows not in worked) or any(r["status"] == "out of memory" for r in tried):
            parts.append(f"{system}: up to {max(worked):,}" if worked else f"{system}: {tried[-1]['status'].split(' (')[0]}")
    return "; ".join(parts)


report = partial(reports.write, text=markdown, draw=draw)

if __name__ == "__main__":
    reports.main(__doc__, report)
