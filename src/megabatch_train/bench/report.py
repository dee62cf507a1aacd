"""The parts of `megabatch bench`. The module runs each part, and converts its record to tables, sentences and figures."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megabatch import extras
from megabatch.world import available_memory
from megabatch_train import machine
from megabatch_train.bench import losses, steps
from megabatch_train.bench.losses import ABOUT, ABOUT_LEVELS, BLOCKS, LOCAL, MEGABATCH, NAMES, TILES, VANILLA, pairs, truth_of
from megabatch_train.bench.measure import FAILED, LATE, MEMORY, MISSING, OK, WRONG, Row
from megabatch_train.bench.steps import CACHED, PLAIN
from megabatch_train.display import plots
from megabatch_train.display import tables as display
from megabatch_train.display.tables import TextTable, cell, ratio

# ----------------------------------------------------------------------------------------------------------------------
# The three parts of `megabatch bench`. Each function returns the entries of its part in the record.


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run. They are smaller on a CPU and much smaller with `--quick`."""

    batches: list[int]
    width: int
    seconds: float  # time to measure one loss at one batch size
    limit: float  # seconds for all losses, and again for all steps; later measurements are skipped
    level_batch: int  # large enough that the block of a rank is larger than a tile
    ranks: int
    model: str
    step_batches: list[int]
    chunk: int


SIZES = {  # (device, quick)
    ("cpu", True): Sizes([64, 256, 1024, 4096], 256, 0.3, 18.0, 4096, 2, "tiny", [32, 64, 128], 16),
    ("cpu", False): Sizes([64, 256, 1024, 4096, 16384], 512, 3.0, math.inf, 8192, 4, "tiny", [128, 512, 2048], 16),
    ("cuda", True): Sizes([64, 256, 1024, 4096, 16384, 65536], 512, 0.3, 60.0, 4096, 2, "ViT-B/32", [1024, 2048, 4096], 256),
    ("cuda", False): Sizes(
        [64, 256, 1024, 4096, 16384, 65536, 262144], 512, 1.5, 600.0, 8192, 4, "ViT-B/32", [4096, 16384, 65536], 1024
    ),
}
MEMORY_SHARE = 0.8  # fraction of the available memory; a dense loss that needs more is skipped
REPEATS = 2  # number of timed steps over ranks

Say = Callable[[str, float], None]  # (current task, fraction of the part that is done)


def run_losses(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Measures memory and time of each loss and of only its matmuls, at each batch size."""
    memory = available_memory() if device == "cpu" else None
    limit = None if memory is None else int(MEMORY_SHARE * memory)
    entries: dict[str, Any] = {"losses": [], "products": []}
    all_work = sum(batch**2 for batch in sizes.batches) * (1 + len(NAMES))
    work_done = 0
    until = time.perf_counter() + sizes.limit
    for result in losses.measure(sizes.batches, sizes.width, device, sizes.seconds, limit, until):
        entries["losses" if isinstance(result, losses.LossResult) else "products"].append(asdict(result))
        work_done += result.batch**2
        say(f"{result.batch:,} pairs", work_done / all_work)
    return entries


def run_levels(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Measures the loss over ranks at each level of tiling, always on the CPU."""
    batch, width, world = sizes.level_batch, sizes.width, sizes.ranks
    say(f"{batch:,} pairs on {world} ranks", 0.1)
    right = truth_of(*pairs(batch, width))
    systems = {
        name: system for name, system in losses.LEVELS.items() if name in (TILES, BLOCKS) or extras.is_installed("open_clip")
    }
    results = losses.measure_levels(systems, world, batch, width, REPEATS, right)
    about = {"batch": batch, "world": world, "width": width}
    return {"levels": [asdict(result) for result in reversed(results)], "levels_of": about}


def run_steps(sizes: Sizes, device: str, say: Say) -> dict[str, Any]:
    """Measures memory and speed of a training step at each batch size."""
    names = list(steps.SYSTEMS)
    rows = []
    say("comparing gradients", 0.0)
    until = time.perf_counter() + sizes.limit
    for result in steps.measure(sizes.model, sizes.step_batches, sizes.chunk, device, names, until):
        rows.append(asdict(result))
        say(f"{result.batch:,} pairs, {result.system}", len(rows) / (len(names) * len(sizes.step_batches)))
    precision = "bf16 autocast" if device == "cuda" else "float32"
    return {"steps": rows, "steps_of": {"model": sizes.model, "chunk": sizes.chunk, "precision": precision}}


# ----------------------------------------------------------------------------------------------------------------------
# The record as tables and as a few sentences, for the terminal and for the page.

MIB = 2**20
OURS = (MEGABATCH, TILES, *CACHED)
BUSY = 0.1  # if other programs use a larger fraction of the cores, a sentence says that times are not valid
SHORT = {MEMORY: "no memory", LATE: "no time"}


def tables(record: dict[str, Any]) -> dict[str, TextTable]:
    """Returns the table of each part that was run: "losses", "levels" and "steps"."""
    build_table = {"losses": losses_table, "levels": _levels_table, "steps": _steps_table}
    return {part: build(record) for part, build in build_table.items() if record[part]}


def verdict(record: dict[str, Any]) -> list[str]:
    """Returns a sentence for each part that was run, and a warning if other programs used the machine."""
    describe = {"losses": _describe_losses, "levels": _describe_levels, "steps": _describe_steps}
    sentences = [sentence(record) for part, sentence in describe.items() if record[part]]
    share = record["others"] or 0.0
    if record["device"] == "cpu" and share > BUSY:
        sentences.append(f"Other programs used {share:.0%} of the cores. Memory and errors are valid, but times are not.")
    return sentences


def _marks(rows: list[dict[str, Any]]) -> dict[int, str]:
    wrong = {i: display.WRONG for i, r in enumerate(rows) if r["status"] == WRONG}
    return {i: display.OURS for i, r in enumerate(rows) if r["system"] in OURS} | wrong


def _describe_losses(record: dict[str, Any]) -> str:
    """Compares megabatch with the fastest and the smallest baseline, at the largest batch that it shares with a baseline."""
    correct = [r for r in record["losses"] if r["status"] == OK]
    ours = {r["batch"]: r for r in correct if r["system"] == MEGABATCH}
    if not ours:
        return f"There is no result of megabatch's loss: {_why(record['losses'], MEGABATCH)}."
    others = [r for r in correct if r["system"] != MEGABATCH and r["batch"] in ours]
    batch = max(r["batch"] for r in others) if others else max(ours)
    own = ours[batch]
    summary = f"Loss: at {batch:,} pairs megabatch takes {_seconds(own):.3g} s and {own['peak'] / MIB:.0f} MiB"
    if not others:
        return f"{summary}. No baseline gave a correct result."
    rows = [r for r in others if r["batch"] == batch]
    fastest, leanest = min(rows, key=_seconds), min(rows, key=lambda r: r["peak"])
    return (
        f"{summary}. The fastest baseline, {fastest['system']}, takes {_seconds(fastest) / _seconds(own):.2f} times the time. "
        f"{leanest['system']} takes {leanest['peak'] / max(1, own['peak']):.1f} times the memory, the least of all baselines."
    )


def _describe_levels(record: dict[str, Any]) -> str:
    """Compares the memory that a rank needs with fewer levels of tiling to the memory with all levels."""
    peaks = {r["system"]: r["peak"] for r in record["levels"] if r["status"] == OK}
    if TILES not in peaks:
        return f"There is no result of megabatch's ring: {_why(record['levels'], TILES)}."
    about = record["levels_of"]
    summary = (
        f"Levels: at {about['batch']:,} pairs on {about['world']} ranks megabatch takes {peaks[TILES] / MIB:.0f} MiB per rank"
    )
    without = [
        f"{phrase} {peaks[name] / max(1, peaks[TILES]):.1f} times as much"
        for name, phrase in ((BLOCKS, "without tiles"), (LOCAL, "without the ring"), (VANILLA, "with all logits"))
        if name in peaks
    ]
    return ", ".join([summary, *without]) + "."


def _describe_steps(record: dict[str, Any]) -> str:
    """Compares gradient caching with the plain step, at the largest batch that both can run."""
    correct = {(r["system"], r["batch"]): r for r in record["steps"] if r["status"] == OK}
    batches = [batch for system, batch in correct if system == CACHED[0]]
    if not batches:
        return f"There is no result of gradient caching: {_why(record['steps'], CACHED[0])}."
    both = [batch for batch in batches if (PLAIN, batch) in correct]
    batch = max(both or batches)
    own, plain = correct[CACHED[0], batch], correct.get((PLAIN, batch))
    summary = (
        f"Step: at {batch:,} pairs a step with gradient caching takes {own['peak'] / MIB:.0f} MiB and {own['seconds']:.3g} s"
    )
    if plain is None:
        return f"{summary}. The plain step could not be measured."
    return f"{summary}. The plain step takes {plain['peak'] / MIB:.0f} MiB and {plain['seconds']:.3g} s."


def _why(rows: list[dict[str, Any]], system: str) -> str:
    return ", ".join(dict.fromkeys(_first_line(r["status"]) for r in rows if r["system"] == system)) or "it was not run"


def _first_line(status: str) -> str:
    return status.split(":")[0]


def _seconds(r: Row) -> float:
    return float(r["forward"] + r["backward"])


def _three_digits(value: float) -> str:
    """Formats a number with three digits, as in "0.287", "2.87", "28.7", "287" or "2,870"."""
    digits = sum(value < bound for bound in (1, 10, 100))
    return f"{value:,.{digits}f}"


def losses_table(record: dict[str, Any]) -> TextTable:
    """Returns the table of time, memory and errors of each loss at each batch size.

    If the matmuls were not measured, it has no column for them.
    """
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    ours = {r["batch"]: r for r in record["losses"] if r["system"] == MEGABATCH and r["status"] == OK}
    measured = [r for r in record["losses"] if r["status"] != MISSING]
    rows = []
    for r in measured:
        cells = [f"{r['batch']:,}", r["system"]]
        if r["status"] == OK:
            base, seconds = ours.get(r["batch"]), _seconds(r)
            cells += [_three_digits(1000 * time) for time in (r["forward"], r["backward"], seconds)]
            cells += [ratio(bare.get(r["batch"]), seconds), ratio(seconds, base and _seconds(base))]
            cells.append(_three_digits(r["peak"] / MIB))
            cells.append(ratio(r["peak"], base and base["peak"], ".1f"))
        else:
            cells += [SHORT.get(r["status"], _first_line(r["status"])), "", "", "", "", "", ""]
        rows.append([*cells, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    not_installed = ", ".join(dict.fromkeys(r["system"] for r in record["losses"] if r["status"] == MISSING))
    headings = ["batch", "system", "forward ms", "backward ms", "total ms", "bare ÷ total"]
    headings += ["× time", "peak MiB", "× memory", "loss error", "grad. error"]
    if not bare:
        for cells in (headings, *rows):
            del cells[5]
    which = "; ".join(f"{name}: {ABOUT[name]}" for name in dict.fromkeys(r["system"] for r in measured))
    products = "Bare ÷ total: time of the four matmuls that every exact loss needs ÷ time of the loss. " if bare else ""
    notes = (
        f"{which}. {products}× time, × memory: multiples of the values of megabatch. Peak: memory in addition to the inputs, "
        "including gradients. Errors: relative to float64, for gradients on sampled rows. WRONG: the error is larger than the "
        "precision explains, so the loss is not timed."
        + (f" Not installed, or not for this device: {not_installed}." if not_installed else "")
    )
    failed = {r["system"]: r["status"] for r in record["losses"] if r["status"].startswith(FAILED)}
    notes += "".join(f" {name} {status}." for name, status in failed.items())
    title = f"CLIP loss, forward and backward, {record['dtype']}, D = {record['width']}"
    return TextTable(headings, rows, title, notes, names=(1,), marks=_marks(measured))


def _levels_table(record: dict[str, Any]) -> TextTable:
    rows = []
    for r in record["levels"]:
        speed = [f"{r['peak'] / MIB:.0f}", f"{r['seconds']:.3f}"] if r["status"] == OK else [_first_line(r["status"]), ""]
        rows.append([r["system"], *speed, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    about = record["levels_of"]
    title = f"Levels of tiling: {about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    headings = ["system", "peak MiB of a rank", "seconds", "loss error", "grad. error"]
    which = "; ".join(f"{name}: {ABOUT_LEVELS[name]}" for name in (r["system"] for r in record["levels"]))
    notes = f"{which}. The ranks are processes that share the cores of this CPU, so compare memory and not time."
    failed = dict.fromkeys(r["status"].splitlines()[-1] for r in record["levels"] if r["status"].startswith(FAILED))
    notes += "".join(f" Failed, because: {reason}" for reason in failed)
    return TextTable(headings, rows, title, notes, marks=_marks(record["levels"]))


def _steps_table(record: dict[str, Any]) -> TextTable:
    about = record["steps_of"]
    rows = []
    for r in record["steps"]:
        pace = ratio(r["batch"], r["seconds"], ",.0f") if r["status"] == OK else SHORT.get(r["status"], r["status"])
        peak = "" if r["seconds"] is None else f"{r['peak'] / MIB:.0f}"
        rows.append([f"{r['batch']:,}", r["system"], pace, peak, cell(r["error"], ".0e"), cell(r["scale_ratio"], ".4f")])
    headings = ["batch", "system", "pairs/s", "peak MiB", "grad. error", "scale grad. ÷ correct"]
    notes = (
        "Plain step: one graph for the whole batch. Cached: megabatch.cached_backward, which keeps no graphs (budget 0) or as "
        "many graphs as fit (auto). accum-freq: gradient accumulation of open_clip, which adds the gradient of the scale once "
        "for every chunk. GradCache: its method with a dense loss. Towers alone: both forward passes and the backward "
        "pass, without a loss. Peak: memory in addition to weights and gradients. All gradients, including the gradient of the "
        f"scale, are compared with the plain step in float32 on a small batch. {WRONG}: the gradients differ, so the step has "
        "no time."
    )
    title = f"A training step: {about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    return TextTable(headings, rows, title, notes, names=(1,), marks=_marks(record["steps"]))


# ----------------------------------------------------------------------------------------------------------------------
# The record as plots, and as an HTML page with sentences, plots, tables, machine and command.


COLORS = dict(zip(NAMES, (plots.GREEN, plots.GREY, plots.ORANGE, plots.BLUE, plots.OCHRE, plots.VIOLET), strict=True))
MARKERS = dict(zip(NAMES, "oDsv^<", strict=True))
STEP_COLORS = {
    "plain step": plots.INK,
    "cached, budget 0": plots.GREEN,
    "cached, auto": plots.MINT,
    "accum-freq": plots.ORANGE,
    "GradCache": plots.VIOLET,
    "towers alone": plots.GREY,
}
PLOTS_OF = {  # plots above the table of each part
    "losses": ("loss_memory", "loss_time", "split", "products"),
    "levels": ("levels",),
    "steps": ("step_memory", "step_speed"),
}


def figures(record: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns the title and the figure of each plot, by file name, for the parts that have a correct result."""
    drawn: dict[str, tuple[str, Callable[[str], Any]]] = {}
    if any(r["forward"] for r in record["losses"]):
        drawn["loss_memory"] = "Memory of the loss", partial(_draw_losses, record, memory=True)
        drawn["loss_time"] = "Time of the loss, forward and backward", partial(_draw_losses, record, memory=False)
        drawn["split"] = "Forward and backward at the largest batch", partial(_draw_split, record)
        drawn["products"] = "Time of only the matmuls ÷ time of the loss", partial(_draw_products, record)
    if any(r["peak"] for r in record["levels"]):
        drawn["levels"] = "Levels of tiling: memory of a rank", partial(_draw_levels, record)
    if any(r["seconds"] for r in record["steps"]):
        drawn["step_memory"] = "Memory of a training step", partial(_draw_steps, record, memory=True)
        drawn["step_speed"] = "Speed of a training step", partial(_draw_steps, record, memory=False)
    return {name: (title, draw(title)) for name, (title, draw) in drawn.items()}


def page(record: dict[str, Any], drawn: dict[str, tuple[str, Any]]) -> str:
    """Returns the HTML of a record and its `figures`."""
    sections = [plots.paragraph(sentence) for sentence in verdict(record)]
    for part, table in tables(record).items():
        above = plots.figures(drawn[name] for name in PLOTS_OF[part] if name in drawn)
        sections.append(plots.section(table.title, above, plots.table(table)))
    machine_line = plots.faint(f"{machine.summary(record['machine'])}.")
    sections.append(plots.section("Machine and command", machine_line, plots.code(record["command"])))
    return plots.page("megabatch bench", sections)


def _loss_title(record: dict[str, Any]) -> str:
    return f"CLIP, {record['dtype']}, D = {record['width']}"


def _draw_losses(record: dict[str, Any], title: str, memory: bool) -> Any:
    figure, (axes,) = plots.panels(title, 1, height=3.6, about=_loss_title(record))
    draw_losses(axes, record, memory=memory)
    return figure


def draw_losses(axes: Any, record: dict[str, Any], *, memory: bool) -> None:
    """Draws the peak memory or the time of each loss against the batch size."""
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system]
        stopped = next((r["batch"] for r in rows if r["status"] == MEMORY), None)
        name = f"{system} (no memory at {stopped:,})" if stopped else system
        width = 2.4 if system == MEGABATCH else 1.4
        points = [(r["batch"], r["peak"] / MIB if memory else _seconds(r)) for r in rows if r["peak"] and r["forward"]]
        plots.line(axes, points, name, COLORS[system], marker=MARKERS[system], markersize=6, linewidth=width)
    if not memory:
        bare = [(p["batch"], p["seconds"]) for p in record["products"]]
        plots.line(axes, bare, "matmuls only", plots.INK, marker=None, linestyle="--", linewidth=1)
    axes.set_ylabel("peak memory beyond inputs, MiB" if memory else "seconds")
    plots.batch_axis(axes, [r["batch"] for r in record["losses"]])
    plots.log_axis(axes)
    plots.label_lines(axes)


def _draw_split(record: dict[str, Any], title: str) -> Any:
    batch = max(r["batch"] for r in record["losses"] if r["forward"])
    rows = [r for r in record["losses"] if r["batch"] == batch and r["forward"]]
    figure, ((axes,),) = plots.figure(title, about=f"{batch:,} pairs; {_loss_title(record)}")
    names, forward = [r["system"] for r in rows], [r["forward"] for r in rows]
    axes.barh(names, forward, color=plots.MINT, label="forward")
    axes.barh(names, [r["backward"] for r in rows], left=forward, color=plots.BLUE, label="backward")
    axes.set(xlabel="seconds")
    axes.invert_yaxis()
    plots.legend(axes)
    return figure


def _draw_products(record: dict[str, Any], title: str) -> Any:
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    about = f"1 is the speed of the four matmuls that every exact loss needs; {_loss_title(record)}"
    figure, (axes,) = plots.panels(title, 1, height=3.6, about=about)
    for system in NAMES:
        rows = [r for r in record["losses"] if r["system"] == system and r["forward"]]
        points = [(r["batch"], bare[r["batch"]] / _seconds(r)) for r in rows]
        plots.line(axes, points, system, COLORS[system], marker=MARKERS[system], markersize=6)
    axes.axhline(1, color=plots.INK, linewidth=1)
    axes.set(ylabel="matmuls ÷ loss", ylim=(0, None))
    plots.batch_axis(axes, list(bare))
    plots.label_lines(axes)
    return figure


def _draw_levels(record: dict[str, Any], title: str) -> Any:
    about = record["levels_of"]
    subtitle = f"{about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    figure, ((axes,),) = plots.figure(title, about=subtitle)
    plots.bars(axes, [(r["system"], r["peak"] / MIB) for r in record["levels"] if r["peak"]])
    axes.set(xlabel="peak memory beyond inputs, MiB")
    return figure


def _draw_steps(record: dict[str, Any], title: str, memory: bool) -> Any:
    about = record["steps_of"]
    subtitle = f"{about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    figure, (axes,) = plots.panels(title, 1, height=3.6, about=subtitle)
    for name, color in STEP_COLORS.items():
        rows = [r for r in record["steps"] if r["system"] == name and r["seconds"]]
        if not (memory and name == "towers alone"):
            points = [(r["batch"], r["peak"] / MIB if memory else r["batch"] / r["seconds"]) for r in rows]
            plots.line(axes, points, name, color)
    plots.batch_axis(axes, [r["batch"] for r in record["steps"]])
    if memory:
        axes.set_ylabel("peak beyond weights and gradients, MiB")
        plots.log_axis(axes)
    else:
        axes.set(ylabel="pairs per second", ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    plots.label_lines(axes)
    return figure
