"""The record of `megabatch bench` as tables and as a few sentences, for the terminal and for the page."""

from typing import Any

from megabatch.bench.levels import ABOUT as LEVELS
from megabatch.bench.levels import BLOCKS, LOCAL, TILES, VANILLA
from megabatch.bench.loss_systems import ABOUT, MEGABATCH
from megabatch.bench.measure import FAILED, LATE, MEMORY, MISSING, OK, WRONG
from megabatch.bench.steps import CACHED, PLAIN
from megabatch.display import tables as display
from megabatch.display.numbers import cell, ratio
from megabatch.display.tables import Table

MIB = 2**20
OURS = (MEGABATCH, TILES, *CACHED)
BUSY = 0.1  # share of the cores that other programs may use before the page says that times are unreliable
SHORT = {MEMORY: "no memory", LATE: "no time"}


def tables(record: dict[str, Any]) -> dict[str, Table]:
    """{part: table} of the parts that were run: "losses", "levels", "steps"."""
    made = {"losses": losses_table, "levels": _levels, "steps": _steps}
    return {part: make(record) for part, make in made.items() if record[part]}


def verdict(record: dict[str, Any]) -> list[str]:
    """A sentence for each part that was run, and a warning if other programs used the machine."""
    about = {"losses": _of_losses, "levels": _of_levels, "steps": _of_steps}
    said = [sentence(record) for part, sentence in about.items() if record[part]]
    others = record["others"] or 0.0
    if record["device"] == "cpu" and others > BUSY:
        said.append(f"Other programs used {others:.0%} of the cores: memory and errors are valid, times are not.")
    return said


def _marks(rows: list[dict[str, Any]]) -> dict[int, str]:
    wrong = {i: display.WRONG for i, r in enumerate(rows) if r["status"] == WRONG}
    return {i: display.OURS for i, r in enumerate(rows) if r["system"] in OURS} | wrong


def _of_losses(record: dict[str, Any]) -> str:
    """megabatch beside the fastest and the leanest peer, at the largest batch with a right peer."""
    right = [r for r in record["losses"] if r["status"] == OK]
    ours = {r["batch"]: r for r in right if r["system"] == MEGABATCH}
    if not ours:
        return f"No loss of megabatch to compare: {_why(record['losses'], MEGABATCH)}."
    others = [r for r in right if r["system"] != MEGABATCH and r["batch"] in ours]
    batch = max(r["batch"] for r in others) if others else max(ours)
    own = ours[batch]
    took = f"Loss: at {batch:,} pairs megabatch takes {_seconds(own):.3g} s and {own['peak'] / MIB:.0f} MiB"
    if not others:
        return f"{took}; no peer gave a right result."
    rows = [r for r in others if r["batch"] == batch]
    fastest, leanest = min(rows, key=_seconds), min(rows, key=lambda r: r["peak"])
    return (
        f"{took}; the fastest peer, {fastest['system']}, takes {_seconds(fastest) / _seconds(own):.2f} times the time, "
        f"the leanest, {leanest['system']}, {leanest['peak'] / max(1, own['peak']):.1f} times the memory."
    )


def _of_levels(record: dict[str, Any]) -> str:
    """Memory of a rank with all levels of tiling, and with fewer."""
    peaks = {r["system"]: r["peak"] for r in record["levels"] if r["status"] == OK}
    if TILES not in peaks:
        return f"No ring of megabatch to compare: {_why(record['levels'], TILES)}."
    about = record["levels_of"]
    took = f"Levels: at {about['batch']:,} pairs on {about['world']} ranks megabatch takes {peaks[TILES] / MIB:.0f} MiB a rank"
    without = [
        f"{phrase} {peaks[name] / max(1, peaks[TILES]):.1f} times that"
        for name, phrase in ((BLOCKS, "without tiles"), (LOCAL, "without the ring"), (VANILLA, "with all logits"))
        if name in peaks
    ]
    return ", ".join([took, *without]) + "."


def _of_steps(record: dict[str, Any]) -> str:
    """The cached step beside the plain step, at the largest batch that both could run."""
    right = {(r["system"], r["batch"]): r for r in record["steps"] if r["status"] == OK}
    batches = [batch for system, batch in right if system == CACHED[0]]
    if not batches:
        return f"No cached step to compare: {_why(record['steps'], CACHED[0])}."
    both = [batch for batch in batches if (PLAIN, batch) in right]
    batch = max(both or batches)
    own, plain = right[CACHED[0], batch], right.get((PLAIN, batch))
    took = f"Step: at {batch:,} pairs a cached step takes {own['peak'] / MIB:.0f} MiB and {own['seconds']:.3g} s"
    if plain is None:
        return f"{took}; the plain step could not be measured."
    return f"{took}, the plain step {plain['peak'] / MIB:.0f} MiB and {plain['seconds']:.3g} s."


def _why(rows: list[dict[str, Any]], system: str) -> str:
    return ", ".join(dict.fromkeys(_first_line(r["status"]) for r in rows if r["system"] == system)) or "it was not run"


def _first_line(status: str) -> str:
    return status.split(":")[0]


def _seconds(r: dict[str, Any]) -> float:
    return float(r["forward"] + r["backward"])


def _three_digits(value: float) -> str:
    """0.287, 2.87, 28.7, 287, 2,870."""
    digits = sum(value < bound for bound in (1, 10, 100))
    return f"{value:,.{digits}f}"


def losses_table(record: dict[str, Any]) -> Table:
    """Time, memory and errors of each loss at each batch; without measured products, no column for them."""
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    ours = {r["batch"]: r for r in record["losses"] if r["system"] == MEGABATCH and r["status"] == OK}
    run = [r for r in record["losses"] if r["status"] != MISSING]
    rows = []
    for r in run:
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
    missing = ", ".join(dict.fromkeys(r["system"] for r in record["losses"] if r["status"] == MISSING))
    headings = ["batch", "system", "forward ms", "backward ms", "total ms", "bare ÷ total"]
    headings += ["× time", "peak MiB", "× memory", "loss error", "grad. error"]
    if not bare:
        for cells in (headings, *rows):
            del cells[5]
    which = "; ".join(f"{name}: {ABOUT[name]}" for name in dict.fromkeys(r["system"] for r in run))
    products = "Bare ÷ total: time of the four matrix products that every exact loss needs ÷ time of the loss. " if bare else ""
    notes = (
        f"{which}. {products}× time, × memory: multiples of megabatch's. Peak: memory beyond the inputs, gradients included. "
        "Errors: relative to float64, for gradients on sampled rows. WRONG: the error is larger than the precision explains; "
        "the loss is not timed." + (f" Not installed, or not for this device: {missing}." if missing else "")
    )
    failed = {r["system"]: r["status"] for r in record["losses"] if r["status"].startswith(FAILED)}
    notes += "".join(f" {name} {status}." for name, status in failed.items())
    title = f"CLIP loss, forward and backward, {record['dtype']}, D = {record['width']}"
    return Table(headings, rows, title, notes, names=(1,), marks=_marks(run))


def _levels(record: dict[str, Any]) -> Table:
    rows = []
    for r in record["levels"]:
        speed = [f"{r['peak'] / MIB:.0f}", f"{r['seconds']:.3f}"] if r["status"] == OK else [_first_line(r["status"]), ""]
        rows.append([r["system"], *speed, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    about = record["levels_of"]
    title = f"Levels of tiling: {about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    headings = ["system", "peak MiB of a rank", "seconds", "loss error", "grad. error"]
    which = "; ".join(f"{name}: {LEVELS[name]}" for name in (r["system"] for r in record["levels"]))
    notes = f"{which}. The ranks are processes that share this CPU's cores: compare memory, not time."
    failed = dict.fromkeys(r["status"].splitlines()[-1] for r in record["levels"] if r["status"].startswith(FAILED))
    notes += "".join(f" Failed, because: {reason}" for reason in failed)
    return Table(headings, rows, title, notes, marks=_marks(record["levels"]))


def _steps(record: dict[str, Any]) -> Table:
    about = record["steps_of"]
    rows = []
    for r in record["steps"]:
        pace = ratio(r["batch"], r["seconds"], ",.0f") if r["status"] == OK else SHORT.get(r["status"], r["status"])
        peak = "" if r["seconds"] is None else f"{r['peak'] / MIB:.0f}"
        rows.append([f"{r['batch']:,}", r["system"], pace, peak, cell(r["error"], ".0e"), cell(r["scale_ratio"], ".4f")])
    headings = ["batch", "system", "pairs/s", "peak MiB", "grad. error", "scale's grad. ÷ right"]
    notes = (
        "Plain step: one graph over the whole batch. Cached: megabatch.cached_backward, keeping no graphs (budget 0) or as "
        "many as fit (auto). accum-freq: open_clip's gradient accumulation, which adds the gradient of the learned scale once "
        "for every chunk. GradCache: its scheme, with a dense loss. Towers alone: both forward passes and the backward pass, "
        "without a loss. Peak: memory beyond weights and gradients. Gradients, the scale's included, are compared with the "
        f"plain step's in float32 on a small batch. {WRONG}: the gradients differ; the step is not timed."
    )
    title = f"A training step: {about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    return Table(headings, rows, title, notes, names=(1,), marks=_marks(record["steps"]))
