"""The table and the plot of a run of `plan_validation.py`.

python benchmarks/plan_validation_report.py benchmarks/results/plan_validation.json
"""

from pathlib import Path
from typing import Any

import reports

from megabatch.bench.towers import SIZES
from megabatch.planning import gpus
from megabatch.planning.losses import MEGABATCH, Shape, loss_seconds

COLOURS = {"ViT-B/32": "#0b6e4f", "ViT-B/16": "#5b6fb5", "ViT-L/14": "#c1440e"}
GIB = 2**30
LARGE = 2**16  # pairs from which on a per cent of the loss is worth anything


def planned_again(record: dict[str, Any]) -> dict[str, Any]:
    """The run with the times that the library plans for it now; what was measured, and planned memory, stay."""
    gpu = {known.name: known for known in gpus.CATALOGUE}.get(record["planned_for"], gpus.find("H200"))  # as the run chose it

    def again(r: dict[str, Any]) -> dict[str, Any]:
        shape = Shape(r["B"], 1, 1, SIZES[r["model"]].embedding, 4, half=True)
        encoders = r["encoder_seconds"] * r["encoder_efficiency"] / gpus.ENCODER_EFFICIENCY
        loss = loss_seconds(MEGABATCH, shape, gpu, "bf16")
        return r | {"planned_loss_seconds": loss, "planned_encoder_seconds": encoders}

    return record | {"results": [again(r) if r["status"] == "ok" else r for r in record["results"]]}


def table(record: dict[str, Any]) -> str:
    headings = ["model", "chunk", "B", "images", "peak GiB", "planned", "error", "loss ms", "planned", "error"]
    headings += ["encoders s", "planned", "of the rate"]
    lines = ["| " + " | ".join(headings) + " |", "|---|---:|---:|---|" + "---:|" * (len(headings) - 4)]
    for r in record["results"]:
        cells = [r["model"], r["chunk"], f"{r['B']:,}", r["source"]]
        if r["status"] != "ok":
            lines.append("| " + " | ".join(map(str, [*cells, r["status"], *([""] * 8)])) + " |")
            continue
        cells += [f"{r['peak_bytes'] / GIB:.2f}", f"{r['planned_bytes'] / GIB:.2f}", _off(r["planned_bytes"], r["peak_bytes"])]
        cells += [f"{1000 * r['loss_seconds']:,.1f}", f"{1000 * r['planned_loss_seconds']:,.1f}"]
        cells.append(_off(r["planned_loss_seconds"], r["loss_seconds"]))
        cells += [f"{r['encoder_seconds']:,.1f}", f"{r['planned_encoder_seconds']:,.1f}", f"{r['encoder_efficiency']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(record: dict[str, Any]) -> str:
    done = [r for r in record["results"] if r["status"] == "ok"]
    if not done:
        return "Nothing was measured."
    memory = max(abs(r["planned_bytes"] / r["peak_bytes"] - 1) for r in done)
    off = [abs(r["planned_loss_seconds"] / r["loss_seconds"] - 1) for r in done if r["B"] >= LARGE]
    timed = f", time of the loss within {max(off):.0%} from {LARGE:,} pairs on" if off else ""
    rates = [r["encoder_efficiency"] for r in done]
    return (
        f"Memory within {memory:.1%} of what was measured{timed}. Encoders ran at {min(rates):.2f} to {max(rates):.2f} of the "
        f"rate in the datasheet; a plan assumes {gpus.ENCODER_EFFICIENCY:.2f} unless told otherwise."
    )


NOTES = (
    "Peak: of allocated memory in a step with AdamW, weights and all. All embeddings and the whole loss are in place; of the "
    "chunks the first and last two are encoded, and the others return made-up embeddings. Encoders s: of all chunks, from the "
    "time of one. Of the rate: share of the dense bf16 rate in the datasheet. Measured once; memory was planned before the "
    "run, times are planned with the constants that the library has as this table is made, which this run and loss_gpu.md were "
    "used to choose. Small losses are not claimed to a per cent: a step of 4,096 pairs takes seconds, its loss a millisecond."
)


def _off(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    done = [r for r in record["results"] if r["status"] == "ok"]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(f"Plan against measurement; {record['machine']['gpu'] or record['machine']['cpu']}")
    shown = (
        ("peak memory, GiB", "peak_bytes", "planned_bytes", GIB),
        ("loss, seconds", "loss_seconds", "planned_loss_seconds", 1),
    )
    for axes, (label, found, planned, unit) in zip(figure.subplots(1, 2), shown, strict=True):
        values = [r[key] / unit for r in done for key in (found, planned)]
        ends = (0.7 * min(values), 1.4 * max(values))
        axes.plot(ends, ends, color="#999999", linewidth=1)
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#dddddd", label="within 10 %")
        for model in dict.fromkeys(r["model"] for r in done):
            points = [(r[found] / unit, r[planned] / unit) for r in done if r["model"] == model]
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS.get(model, "#222222"), label=model)
        axes.set(xscale="log", yscale="log", xlabel=f"measured {label}", ylabel=f"planned {label}", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if unit == GIB else (1,)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, _text, lambda record, plot: draw(planned_again(record), plot))


def _text(record: dict[str, Any]) -> str:
    again = planned_again(record)
    return "\n\n".join((summary(again), table(again), NOTES))


if __name__ == "__main__":
    reports.main(__doc__, report)
