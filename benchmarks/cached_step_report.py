"""The table and the plot of a run of `cached_step.py`.

python benchmarks/cached_step_report.py benchmarks/results/cached_step.json
"""

from pathlib import Path
from typing import Any

import reports

COLOURS = {
    "plain step": "#222222",
    "cached, budget 0": "#0b6e4f",
    "cached, auto": "#2fa37c",
    "cached, replay": "#8fd3bb",
    "accum-freq": "#c1440e",
    "GradCache": "#8e44ad",
    "towers alone": "#999999",
}


def table(record: dict[str, Any]) -> str:
    lines = [
        "| model | B | chunk | system | pairs/s | ÷ towers alone | peak GiB | beyond weights, gradients | loss, share |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    bare = {
        (r["model"], r["B"]): r["pairs_per_second"]
        for r in record["results"]
        if r["system"] == "towers alone" and "seconds" in r
    }
    for r in record["results"]:
        pace = r.get("pairs_per_second")
        of_bare = [v for (model, B), v in bare.items() if model == r["model"] and r["B"] >= B]
        part = " †" if "encoded" in r else ""
        cells = [r["model"], f"{r['B']:,}", r["chunk"], r["system"], f"{pace:.0f}{part}" if pace else r["status"]]
        cells.append(f"{pace / of_bare[-1]:.3f}" if pace and of_bare else "")
        if "peak_bytes" in r:
            cells += [f"{(r['peak_bytes'] + r['held_bytes']) / 2**30:.2f}", f"{r['peak_bytes'] / 2**30:.2f}"]
        else:
            cells += ["", ""]
        cells.append(f"{100 * r['loss_seconds'] / r['seconds']:.1f} %" if "loss_seconds" in r else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if any("encoded" in r for r in record["results"]):
        lines += ["", "† Some chunks of the step were timed, with the loss of the whole batch, and extended to all chunks."]
    if "note" in record:
        lines += ["", record["note"]]
    lines += ["", *_checks(record)]
    where = ", ".join(f"{model} from {library}" for model, library in record.get("towers", {}).items())
    return "\n".join([*lines, "", f"Towers: {where}; random weights, synthetic images, bf16 autocast."])


def _checks(record: dict[str, Any]) -> list[str]:
    if not record["checks"]:
        return ["Gradients were not compared in this run."]
    lines = ["Gradients against the plain step, float32, a small batch in chunks:", ""]
    lines += [
        "| model | system | error of all towers' gradients | scale's gradient ÷ the right one | |",
        "|---|---|---:|---:|---|",
    ]
    for c in record["checks"]:
        lines.append(f"| {c['model']} | {c['system']} | {c['error']:.0e} | {c['scale']:.4f} | {c['status']} |")
    return lines


def ratios(record: dict[str, Any]) -> str:
    """Speed against that of the towers alone, and the part of a step that is the loss."""
    lines = [
        "| model | B | budget 0 ÷ towers alone | auto ÷ towers alone | loss, share of budget 0 |",
        "|---|---:|---:|---:|---:|",
    ]
    for model, B in dict.fromkeys((r["model"], r["B"]) for r in record["results"]):
        found = {r["system"]: r for r in record["results"] if (r["model"], r["B"]) == (model, B) and "seconds" in r}
        alone = found.get("towers alone")
        cells = [model, f"{B:,}"]
        for name in ("cached, budget 0", "cached, auto"):
            cells.append(f"{alone['seconds'] / found[name]['seconds']:.3f}" if alone and name in found else "")
        whole = found.get("cached, budget 0", {})
        cells.append(f"{100 * whole['loss_seconds'] / whole['seconds']:.1f} %" if "loss_seconds" in whole else "")
        if any(cells[2:]):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(r["model"] for r in record["results"]))
    figure = Figure(figsize=(11, 4.4 * len(models)), layout="constrained")
    figure.suptitle(f"One training step; {record['machine']['gpu'] or record['machine']['cpu']}")
    grid = figure.subplots(len(models), 2, squeeze=False)
    for row, model in zip(grid, models, strict=True):
        for axes, (label, key) in zip(row, (("pairs a second", "pairs_per_second"), ("peak, GiB", "peak_bytes")), strict=True):
            for name, colour in COLOURS.items():
                chosen = [r for r in record["results"] if r["model"] == model and r["system"] == name and key in r]
                points = [(r["B"], (r[key] + r["held_bytes"]) / 2**30 if key == "peak_bytes" else r[key]) for r in chosen]
                if points and not (name == "towers alone" and key == "peak_bytes"):
                    dashed = "--" if name == "towers alone" else "-"
                    axes.plot(*zip(*sorted(points), strict=True), dashed, color=colour, marker="o", markersize=4, label=name)
            axes.set(title=model, xscale="log", xlabel="batch, pairs", ylabel=label)
            axes.set_ylim(0, 1.1 * max((y for line in axes.lines for y in line.get_ydata()), default=1.0))
            ticks = sorted({r["B"] for r in record["results"] if r["model"] == model})
            axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, lambda record: "\n\n".join((table(record), ratios(record))), draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
