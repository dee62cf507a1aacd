"""The record of `megabatch bench` as plots, one for each question, and as one HTML page: sentences, plots, tables, machine."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megabatch import machine
from megabatch.bench.loss_systems import ABOUT, MEGABATCH, NAMES
from megabatch.bench.measure import MEMORY
from megabatch.bench.tables import tables, verdict
from megabatch.display import pages, plots

COLOURS = dict(zip(NAMES, (plots.GREEN, plots.GREY, plots.ORANGE, plots.BLUE, plots.OCHRE, plots.VIOLET), strict=True))
MARKERS = dict(zip(NAMES, "oDsv^<", strict=True))
STEP_COLOURS = {
    "plain step": plots.INK,
    "cached, budget 0": plots.GREEN,
    "cached, auto": plots.MINT,
    "accum-freq": plots.ORANGE,
    "GradCache": plots.VIOLET,
    "towers alone": plots.GREY,
}
BESIDE = {  # the plots above each part's table
    "losses": ("loss_memory", "loss_time", "split", "products"),
    "levels": ("levels",),
    "steps": ("step_memory", "step_speed"),
}
MIB = 2**20

Row = dict[str, Any]


def figures(record: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """{file name: (title, figure)} of the parts that were run and have a right result."""
    drawn: dict[str, tuple[str, Callable[[str], Any]]] = {}
    if any(r["forward"] for r in record["losses"]):
        drawn["loss_memory"] = "Memory of the loss", partial(_losses, record, memory=True)
        drawn["loss_time"] = "Time of the loss, forward and backward", partial(_losses, record, memory=False)
        drawn["split"] = "Forward and backward at the largest batch", partial(_split, record)
        drawn["products"] = "Time of the bare products ÷ time of the loss", partial(_products, record)
    if any(r["peak"] for r in record["levels"]):
        drawn["levels"] = "Levels of tiling: memory of a rank", partial(_levels, record)
    if any(r["seconds"] for r in record["steps"]):
        drawn["step_memory"] = "Memory of a training step", partial(_steps, record, memory=True)
        drawn["step_speed"] = "Speed of a training step", partial(_steps, record, memory=False)
    return {name: (title, draw(title)) for name, (title, draw) in drawn.items()}


def page(record: dict[str, Any], drawn: dict[str, tuple[str, Any]]) -> str:
    """The HTML file of a record and its `figures`."""
    sections = [pages.paragraph(sentence) for sentence in verdict(record)]
    for part, table in tables(record).items():
        above = pages.figures(drawn[name] for name in BESIDE[part] if name in drawn)
        sections.append(pages.section(table.title, above, pages.table(table)))
    about = pages.faint(f"{machine.summary(record['machine'])}.")
    sections.append(pages.section("Machine and command", about, pages.code(record["command"])))
    return pages.page("megabatch bench", sections)


def _seconds(r: Row) -> float | None:
    return None if r["forward"] is None else r["forward"] + r["backward"]


def _loss_of(record: dict[str, Any]) -> str:
    return f"CLIP, {record['dtype']}, D = {record['width']}"


def _losses(record: dict[str, Any], title: str, memory: bool) -> Any:
    figure, ((axes,),) = plots.figure(title, about=_loss_of(record))
    draw_losses(axes, record, memory=memory)
    return figure


def draw_losses(axes: Any, record: dict[str, Any], *, memory: bool) -> None:
    """Peak memory of each loss against the batch, or its time."""
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system]
        found = [(r["batch"], r["peak"] and r["peak"] / MIB if memory else _seconds(r)) for r in rows]
        stopped = next((r["batch"] for r in rows if r["status"] == MEMORY), None)
        name = f"{system}, {ABOUT[system]}" + (f"; out of memory at {stopped:,}" if stopped else "")
        width = 2.4 if system == MEGABATCH else 1.4
        points = [(batch, value) for batch, value in found if value]
        plots.line(axes, points, name, COLOURS[system], marker=MARKERS[system], markersize=6, linewidth=width)
    if not memory:
        bare = [(p["batch"], p["seconds"]) for p in record["products"]]
        plots.line(axes, bare, "bare products", plots.INK, marker=None, linestyle="--", linewidth=1)
    axes.set_ylabel("peak beyond the inputs, MiB" if memory else "seconds")
    plots.batch_axis(axes, [r["batch"] for r in record["losses"]])
    plots.log_axis(axes)
    plots.legend(axes)


def _split(record: dict[str, Any], title: str) -> Any:
    batch = max(r["batch"] for r in record["losses"] if r["forward"])
    rows = [r for r in record["losses"] if r["batch"] == batch and r["forward"]]
    figure, ((axes,),) = plots.figure(title, about=f"{batch:,} pairs; {_loss_of(record)}")
    names, forward = [r["system"] for r in rows], [r["forward"] for r in rows]
    axes.barh(names, forward, color=plots.MINT, label="forward")
    axes.barh(names, [r["backward"] for r in rows], left=forward, color=plots.BLUE, label="backward")
    axes.set(xlabel="seconds")
    axes.invert_yaxis()
    plots.legend(axes)
    return figure


def _products(record: dict[str, Any], title: str) -> Any:
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    about = f"1 is the speed of the four products that every exact loss needs; {_loss_of(record)}"
    figure, ((axes,),) = plots.figure(title, about=about)
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system]
        points = [(r["batch"], bare[r["batch"]] / value) for r in rows if (value := _seconds(r))]
        plots.line(axes, points, system, COLOURS[system], marker=MARKERS[system], markersize=6)
    axes.axhline(1, color=plots.INK, linewidth=1)
    axes.set(ylabel="bare products ÷ loss", ylim=(0, None))
    plots.batch_axis(axes, list(bare))
    plots.legend(axes)
    return figure


def _levels(record: dict[str, Any], title: str) -> Any:
    about = record["levels_of"]
    shown = f"{about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    figure, ((axes,),) = plots.figure(title, about=shown)
    plots.bars(axes, [(r["system"], r["peak"] / MIB) for r in record["levels"] if r["peak"]])
    axes.set(xlabel="peak beyond the inputs, MiB")
    return figure


def _steps(record: dict[str, Any], title: str, memory: bool) -> Any:
    about = record["steps_of"]
    shown = f"{about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    figure, ((axes,),) = plots.figure(title, about=shown)
    for name, colour in STEP_COLOURS.items():
        rows = [r for r in record["steps"] if r["system"] == name and r["seconds"]]
        if not (memory and name == "towers alone"):
            points = [(r["batch"], r["peak"] / MIB if memory else r["batch"] / r["seconds"]) for r in rows]
            plots.line(axes, points, name, colour)
    plots.batch_axis(axes, [r["batch"] for r in record["steps"]])
    if memory:
        axes.set_ylabel("peak beyond weights and gradients, MiB")
        plots.log_axis(axes)
    else:
        axes.set(ylabel="pairs a second", ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    plots.legend(axes)
    return figure
