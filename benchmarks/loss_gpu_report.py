"""The table and the plot of a run of `loss_gpu.py`: python benchmarks/loss_gpu_report.py benchmarks/results/loss_gpu.json."""

from pathlib import Path
from typing import Any

import reports

LEGEND = (
    "Bare products: the matrix products that an exact loss cannot avoid, four for CLIP and three for SigLIP. "
    "Bare ÷ time: their time over that of the system. × megabatch: how many times what megabatch takes. "
    "Extra GiB: memory at the peak beyond the inputs, gradients included. "
    "Errors: relative to float64, that of the gradients on sampled rows. WRONG: further off than bf16 explains."
)


def table(record: dict[str, Any]) -> str:
    lines = [
        "Contrastive losses on a GPU, forward + backward, bf16, B pairs of embeddings D wide.",
        "",
        "| loss | B | D | system | ms | TFLOP/s | bare ÷ time | × megabatch | extra GiB | value | error | gradient error |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in groups(record):
        bare = next(r["ms"] for r in group if r["system"] == "bare products")
        ours = next((r.get("ms") for r in group if r["system"] == "megabatch"), None)
        for r in group:
            ms = r.get("ms")
            operations = (8 if r["loss_name"] == "clip" else 6) * r["B"] ** 2 * r["D"]
            wrong = f"WRONG ({r['wrong_ms']:.0f} ms)" if "wrong_ms" in r else r["status"]
            cells = [r["loss_name"], f"{r['B']:,}", r["D"], r["system"], f"{ms:.2f}" if ms else wrong]
            cells += [f"{operations / ms / 1e9:.0f}" if ms else "", f"{bare / ms:.3f}" if ms else ""]
            cells += [f"{ms / ours:.2f}" if ms and ours else "", f"{r['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in r else ""]
            cells += [f"{r['loss']:.4f}" if "loss" in r else ""]
            cells += [f"{r[key]:.0e}" if key in r else "" for key in ("loss_error", "gradient_error")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", LEGEND, "", "Forward alone: time of the bare product S ÷ time.", ""]
    for group in groups(record):
        if "forward_ms" in group[0]:
            bare = next(r["parts"]["S"] for r in group if r["system"] == "bare products")
            ours = group[0]
            lines.append(f"- {ours['B']:,}×{ours['D']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms)")
    for r in record.get("large", []):
        errors = ", ".join(f"{name} {value:.0e}" for name, value in r["errors"].items())
        against = f", {r['against_64k']:.3f} of (B/64k)² times the time at 64k" if "against_64k" in r else ""
        lines.append(
            f"- B = {r['B']:,}, D = {r['D']}: {r['seconds']:.1f} s forward + backward{against}; "
            f"{r['peak_bytes'] / 2**30:.1f} GiB beyond the inputs, gradients included; loss {r['loss']:.4f}; "
            f"errors on sampled rows against float64: {errors}"
        )
    return "\n".join(lines)


def groups(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in record["results"]:
        found.setdefault((result["loss_name"], result["B"], result["D"]), []).append(result)
    return list(found.values())


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(f"CLIP loss, forward + backward, bf16, D = 512; {record['machine']['gpu']}")
    names = list(dict.fromkeys(r["system"] for r in record["results"] if r["loss_name"] == "clip"))
    colours = {"megabatch": "#0b6e4f", "bare products": "#222222"}
    others = iter(("#c1440e", "#8e44ad", "#1f77b4", "#b8860b"))
    styles = {name: colours.get(name) or next(others) for name in names}
    for axes, (label, key) in zip(
        figure.subplots(1, 2), (("time, ms", "ms"), ("memory beyond the inputs, GiB", "peak_bytes")), strict=True
    ):
        for name in names:
            chosen = [r for r in record["results"] if r["loss_name"] == "clip" and r["D"] == 512 and r["system"] == name]
            points = sorted((r["B"], r[key] / (2**30 if key == "peak_bytes" else 1)) for r in chosen if r.get(key))
            if points:
                dashed = "--" if name == "bare products" else "-"
                axes.plot(*zip(*points, strict=True), dashed, color=styles[name], marker="o", markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel="batch, pairs", ylabel=label)
        ticks = sorted({r["B"] for r in record["results"] if r["D"] == 512})
        axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, table, draw)


if __name__ == "__main__":
    reports.main(__doc__, report)
