"""The table and the plot of a run of `plan_validation.py`.

python benchmarks/plan_validation_report.py benchmarks/results/plan_validation.json
"""

from pathlib import Path
from typing import Any

import reports

from megabatch.bench.towers import SIZES
from megabatch.display import plots
from megabatch.display.tables import Table
from megabatch.planning import gpus
from megabatch.planning.losses import MEGABATCH, Shape, loss_seconds

COLOURS = {"ViT-B/32": plots.GREEN, "ViT-B/16": plots.BLUE, "ViT-L/14": plots.ORANGE}
GIB = 2**30
LARGE = 2**16  # pairs from which the time of the loss is claimed within per cents


def planned_again(record: dict[str, Any]) -> dict[str, Any]:
    """The record with times as the library plans them now; measurements and planned memory stay as they were."""
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
    rows = []
    for r in record["results"]:
        cells = [r["model"], r["chunk"], f"{r['B']:,}", r["source"]]
        if r["status"] != "ok":
            rows.append([*cells, r["status"], *([""] * 8)])
            continue
        cells += [f"{r['peak_bytes'] / GIB:.2f}", f"{r['planned_bytes'] / GIB:.2f}", _off(r["planned_bytes"], r["peak_bytes"])]
        cells += [f"{1000 * r['loss_seconds']:,.1f}", f"{1000 * r['planned_loss_seconds']:,.1f}"]
        cells.append(_off(r["planned_loss_seconds"], r["loss_seconds"]))
        cells += [f"{r['encoder_seconds']:,.1f}", f"{r['planned_encoder_seconds']:,.1f}", f"{r['encoder_efficiency']:.2f}"]
        rows.append(cells)
    return Table(headings, rows, names=(0, 3)).markdown()


def summary(record: dict[str, Any]) -> str:
    done = [r for r in record["results"] if r["status"] == "ok"]
    if not done:
        return "Nothing was measured."
    memory = max(abs(r["planned_bytes"] / r["peak_bytes"] - 1) for r in done)
    off = [abs(r["planned_loss_seconds"] / r["loss_seconds"] - 1) for r in done if r["B"] >= LARGE]
    timed = f", time of the loss within {max(off):.0%} from {LARGE:,} pairs on" if off else ""
    rates = [r["encoder_efficiency"] for r in done]
    return (
        f"Memory within {memory:.1%} of the measured memory{timed}. Encoders ran at {min(rates):.2f} to {max(rates):.2f} of "
        f"the rate in the datasheet; a plan assumes {gpus.ENCODER_EFFICIENCY:.2f} by default."
    )


NOTES = (
    "Peak: allocated memory in a step with AdamW, weights included. The step holds all embeddings and computes the whole loss; "
    "only the first and last two chunks are encoded, the others return random embeddings. Encoders s: the time of one chunk, "
    "extended to all. Of the rate: share of the dense bf16 rate in the datasheet. Measured once. Memory was planned before the "
    "run. Times are planned with the library's present constants, which were fitted to this run and to loss_gpu.md. Small "
    "losses are not planned to a per cent: a step of 4,096 pairs takes seconds, its loss a millisecond."
)


def _off(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


def draw(record: dict[str, Any]) -> Any:
    """Planned against measured values."""
    done = [r for r in record["results"] if r["status"] == "ok"]
    figure, (panels,) = plots.figure(f"Plan against measurement; {reports.chip(record)}", columns=2, size=(10, 4.6))
    shown = (
        ("peak memory, GiB", "peak_bytes", "planned_bytes", GIB),
        ("loss, seconds", "loss_seconds", "planned_loss_seconds", 1),
    )
    for axes, (label, found, planned, unit) in zip(panels, shown, strict=True):
        values = [r[key] / unit for r in done for key in (found, planned)]
        ends = (0.7 * min(values), 1.4 * max(values))
        axes.plot(ends, ends, color=plots.GREY, linewidth=1)
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=plots.LINE, label="within 10 %")
        for (model,), rows in reports.groups(done, "model").items():
            points = [(r[found] / unit, r[planned] / unit) for r in rows]
            plots.line(axes, points, model, COLOURS.get(model, plots.INK), linestyle="", markersize=6)
        axes.set(xlabel=f"measured {label}", ylabel=f"planned {label}", xlim=ends, ylim=ends)
        for which in ("x", "y"):
            plots.log_axis(axes, which)
        plots.legend(axes)
    return figure


def report(path: Path) -> None:
    """Writes both beside the JSON file."""
    reports.write(path, markdown, lambda record: draw(planned_again(record)))


def markdown(record: dict[str, Any]) -> str:
    """Summary, table and notes."""
    again = planned_again(record)
    return "\n\n".join((summary(again), table(again), NOTES))


if __name__ == "__main__":
    reports.main(__doc__, report)
