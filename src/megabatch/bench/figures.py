"""The plots of `megabatch bench`: one figure for each question, from its record."""

from collections.abc import Callable
from typing import Any

from megabatch.bench.loss_systems import ABOUT, MEGABATCH, NAMES
from megabatch.bench.losses import MEMORY

COLOURS = dict(zip(NAMES, ("#0b6e4f", "#7a7a7a", "#c1440e", "#5b6fb5", "#b8860b", "#8e44ad"), strict=True))
MARKERS = dict(zip(NAMES, "oDsv^<", strict=True))
STEP_COLOURS = {
    "plain step": "#222222",
    "cached, budget 0": "#0b6e4f",
    "cached, auto": "#2fa37c",
    "accum-freq": "#c1440e",
    "GradCache": "#8e44ad",
    "towers alone": "#999999",
}
MIB = 2**20


def figures(record: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """{name of the file: (title, figure)}; those of parts that were not run, or where nothing was right, are missing."""
    drawn: dict[str, tuple[str, Callable[[str], Any]]] = {}
    if any(r["forward"] for r in record["losses"]):
        drawn["loss_memory"] = (
            "Memory of the loss",
            lambda title: _lines(record, title, "peak", "peak beyond the inputs, MiB", MIB),
        )
        drawn["loss_time"] = (
            "Time of the loss, forward and backward",
            lambda title: _lines(record, title, "seconds", "seconds", 1),
        )
        drawn["split"] = "Forward and backward at the largest batch", lambda title: _split(record, title)
        drawn["products"] = "Time of the bare products ÷ time of the loss", lambda title: _products(record, title)
    if any(r["peak"] for r in record["levels"]):
        drawn["levels"] = "Levels of tiling: memory of a rank", lambda title: _levels(record, title)
    if any(r["seconds"] for r in record["steps"]):
        beyond = "peak beyond weights and gradients, MiB"
        drawn["step_memory"] = "Memory of a training step", lambda title: _steps(record, title, "peak", beyond, MIB)
        drawn["step_speed"] = "Speed of a training step", lambda title: _steps(record, title, "pace", "pairs a second", 1)
    return {name: (title, draw(title)) for name, (title, draw) in drawn.items()}


def _figure(title: str, about: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    axes.set_title(about, fontsize=9, color="#555555")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _value(r: dict[str, Any], key: str) -> float | None:
    if key == "seconds":
        return None if r["forward"] is None else r["forward"] + r["backward"]
    value: float | None = r["peak"]
    return value


def _lines(record: dict[str, Any], title: str, key: str, label: str, unit: float) -> Any:
    figure, axes = _figure(title, _loss_of(record))
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system]
        points = [(r["batch"], value / unit) for r in rows if (value := _value(r, key))]
        if points:
            stopped = next((r["batch"] for r in rows if r["status"] == MEMORY), None)
            name = f"{system}, {ABOUT[system]}" + (f"; out of memory at {stopped:,}" if stopped else "")
            wide = 2.4 if system == MEGABATCH else 1.4
            axes.plot(*zip(*points, strict=True), color=COLOURS[system], marker=MARKERS[system], label=name, linewidth=wide)
    if key == "seconds":
        bare = [(p["batch"], p["seconds"]) for p in record["products"]]
        axes.plot(*zip(*bare, strict=True), "--", color="black", linewidth=1, label="bare products")
    _against_batch(axes, [r["batch"] for r in record["losses"]], label)
    return figure


def _against_batch(axes: Any, batches: list[int], label: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", xlabel="batch, pairs", ylabel=label)
    axes.set_xticks(sorted(set(batches)), [f"{b:,}" for b in sorted(set(batches))])
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def _loss_of(record: dict[str, Any]) -> str:
    return f"CLIP, {record['dtype']}, D = {record['width']}"


def _split(record: dict[str, Any], title: str) -> Any:
    batch = max(r["batch"] for r in record["losses"] if r["forward"])
    rows = [r for r in record["losses"] if r["batch"] == batch and r["forward"]]
    figure, axes = _figure(title, f"{batch:,} pairs; {_loss_of(record)}")
    names = [r["system"] for r in rows]
    axes.barh(names, [r["forward"] for r in rows], color="#67b99a", label="forward")
    axes.barh(names, [r["backward"] for r in rows], left=[r["forward"] for r in rows], color="#2c4a7c", label="backward")
    axes.set(xlabel="seconds")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    return figure


def _products(record: dict[str, Any], title: str) -> Any:
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    figure, axes = _figure(title, f"1 is the speed of the four products that no exact loss can avoid; {_loss_of(record)}")
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system]
        points = [(r["batch"], bare[r["batch"]] / value) for r in rows if (value := _value(r, "seconds"))]
        if points:
            axes.plot(*zip(*points, strict=True), color=COLOURS[system], marker=MARKERS[system], label=system)
    axes.axhline(1, color="black", linewidth=1)
    batches = sorted(bare)
    axes.set(xscale="log", xlabel="batch, pairs", ylabel="bare products ÷ loss", ylim=(0, None))
    axes.set_xticks(batches, [f"{b:,}" for b in batches])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure


def _bars(axes: Any, rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], text: str) -> None:
    bars = axes.barh([r["system"] for r in rows], [value(r) for r in rows], color="#0b6e4f")
    axes.bar_label(bars, fmt=text, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _levels(record: dict[str, Any], title: str) -> Any:
    rows = [r for r in record["levels"] if r["peak"]]
    about = record["levels_of"]
    figure, axes = _figure(title, f"{about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}")
    _bars(axes, rows, lambda r: r["peak"] / MIB, "%.0f")
    axes.set(xlabel="peak beyond the inputs, MiB")
    return figure


def _steps(record: dict[str, Any], title: str, key: str, label: str, unit: float) -> Any:
    about = record["steps_of"]
    figure, axes = _figure(title, f"{about['model']} towers, chunks of {about['chunk']}, {about['precision']}")
    for name, colour in STEP_COLOURS.items():
        rows = [r for r in record["steps"] if r["system"] == name and r["seconds"]]
        if rows and not (name == "towers alone" and key == "peak"):
            values = [r["peak"] / unit if key == "peak" else r["batch"] / r["seconds"] for r in rows]
            axes.plot([r["batch"] for r in rows], values, color=colour, marker="o", markersize=4, label=name)
    _against_batch(axes, [r["batch"] for r in record["steps"]], label)
    if key == "pace":
        from matplotlib.ticker import AutoLocator

        axes.set(yscale="linear", ylim=(0, None))
        axes.yaxis.set_major_locator(AutoLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return figure
