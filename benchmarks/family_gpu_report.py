"""The table and the plot of a run of `family_gpu.py`.

python benchmarks/family_gpu_report.py benchmarks/results/family_gpu.json
"""

from pathlib import Path
from typing import Any

import reports

OURS, BARE = "megabatch", "bare products"
COLOURS = {
    "sentence-transformers": "#c1440e",
    "info-nce-pytorch": "#8e44ad",
    "pytorch-metric-learning": "#b8860b",
    "open_clip": "#5b6fb5",
    "lightly": "#2c4a7c",
    "pairwise_logsumexp(z, z)": "#67b99a",
    "dense PyTorch": "#7a7a7a",
}


def table(record: dict[str, Any]) -> str:
    """Markdown."""
    checks = {(c["loss"], c["system"]): c for c in record["checks"]}
    lines = [
        "| loss | B | system | ms | × megabatch | products | bare ÷ time | extra GiB | value | error | gradient error |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in groups(record):
        ours = next((r.get("ms") for r in group if r["system"] == OURS), None)
        bare = next((r for r in group if r["system"] == BARE), None)
        for r in group:
            ms, check = r.get("ms"), checks.get((r["loss"], r["system"]), {})
            cells = [r["loss"], f"{r['rows']:,}", r["system"] + (", imprecise" if ms and r["status"] == "imprecise" else "")]
            cells += [f"{ms:.2f}" if ms else r["status"], f"{ms / ours:.2f}" if ms and ours else ""]
            cells += [f"{sum(bare['products']):g}" if bare else "", f"{bare['ms'] / ms:.3f}" if bare and ms else ""]
            cells += [
                f"{r['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in r else "",
                f"{r['value']:.4f}" if "value" in r else "",
            ]
            cells += [f"{check[key]:.0e}" if key in check else "" for key in ("loss_error", "gradient_error")]
            lines.append("| " + " | ".join(cells) + " |")
    about = (
        f"Width {record['width']}. Products: how many of B × B × width the formula needs at least. Bare: these, by PyTorch's "
        "library, in strips. Extra: peak beyond the inputs, gradients included. Errors: against float64, at a smaller batch; "
        "of the value in units of itself or of 1, of the worst gradient by its length. Imprecise: further off than bf16 inputs "
        "explain, by no more than logits rounded to bf16 do."
    )
    lines += [
        "",
        " ".join((about, record.get("note", ""))).strip(),
        "",
        "| loss | S | dX | dY | what is counted |",
        "|---|---:|---:|---:|---|",
    ]
    counted: dict[str, dict[str, Any]] = {}
    for r in record["results"]:
        if r["system"] == BARE:
            counted.setdefault(r["loss"], r)  # the large batch comes first
    for name, r in counted.items():
        lines.append(f"| {name} | {' | '.join(f'{count:g}' for count in r['products'])} | {r['note']} |")
    return "\n".join(lines)


def groups(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Results of the same loss and batch."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in record["results"]:
        found.setdefault((r["loss"], r["rows"]), []).append(r)
    return list(found.values())


def draw(record: dict[str, Any], path: Path) -> None:
    """Time and memory at the large batch; where a peer ends is said beside it."""
    from matplotlib.figure import Figure

    rows = max(r["rows"] for r in record["results"])
    names = list(dict.fromkeys(r["loss"] for r in record["results"] if r["rows"] == rows and "ms" in r))
    figure = Figure(figsize=(13, 1.6 + 0.42 * len(names)), layout="constrained")
    chip = record["machine"]["gpu"] or record["machine"]["cpu"]
    figure.suptitle(f"Losses of {rows:,} × {record['width']}, forward and backward; {chip}")
    left, right = figure.subplots(1, 2, sharey=True)
    places = {name: i for i, name in enumerate(names)}
    large = [r for r in record["results"] if r["rows"] == rows and r["loss"] in places]
    for axes, key, unit in ((left, "ms", 1.0), (right, "peak_bytes", 2**30)):
        ours = {r["loss"]: r[key] / unit for r in large if r["system"] == OURS and key in r}
        axes.barh([places[name] for name in ours], list(ours.values()), color="#0b6e4f", height=0.55, label=OURS)
        for system, colour in COLOURS.items():
            points = [(r[key] / unit, places[r["loss"]]) for r in large if r["system"] == system and key in r]
            if points:
                axes.plot(*zip(*points, strict=True), "D", color=colour, markersize=6, label=system)
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
        axes.set(xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    bare = [(r["ms"], places[r["loss"]]) for r in large if r["system"] == BARE]
    left.plot(*zip(*bare, strict=True), "|", color="black", markersize=16, markeredgewidth=2, label="products it needs")
    left.set(xlabel="milliseconds")
    right.set(xlabel="peak beyond the inputs, GiB")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.4, -0.6)
    edge = right.get_xlim()[1]
    for name, i in places.items():
        right.annotate("  " + where_it_ends(record, name, rows), (edge, i), va="center", fontsize=7.5, annotation_clip=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def where_it_ends(record: dict[str, Any], name: str, rows: int) -> str:
    """The largest batch of each peer that has no time at the large one."""
    parts = []
    for system in COLOURS:
        tried = [r for r in record["results"] if r["loss"] == name and r["system"] == system]
        worked = [r["rows"] for r in tried if "ms" in r]
        if (worked and rows not in worked) or any(r["status"] == "out of memory" for r in tried):
            parts.append(f"{system}: up to {max(worked):,}" if worked else f"{system}: {tried[-1]['status'].split(' (')[0]}")
    return "; ".join(parts)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, table, draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
