"""The tables of `megabatch bench` as rows of text, and what they say in a few sentences: for the terminal, for a page."""

from typing import Any, NamedTuple

from megabatch.bench.cached import CACHED, PLAIN
from megabatch.bench.levels import BLOCKS, LOCAL, TILES, VANILLA
from megabatch.bench.levels import SYSTEMS as LEVELS
from megabatch.bench.loss_systems import ABOUT, MEGABATCH
from megabatch.bench.losses import FAILED, LATE, MEMORY, MISSING, OK, WRONG

MIB = 2**20
OURS = (MEGABATCH, TILES, *CACHED)
BUSY = 0.1  # of the cores, used by others: times are further off than the differences they are to show
SHORT = {MEMORY: "no memory", LATE: "no time"}  # a table has no room for more


class Table(NamedTuple):
    """Rows beneath headings, with what has to be known to read them."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: str


def tables(record: dict[str, Any]) -> list[Table]:
    """Those of the parts that were run."""
    made = []
    if record["losses"]:
        made.append(_losses(record))
    if record["levels"]:
        made.append(_levels(record))
    if record["steps"]:
        made.append(_steps(record))
    return made


def verdict(record: dict[str, Any]) -> list[str]:
    """What was measured, a sentence for each part that was run; and whether it was alone on the machine."""
    about = {"losses": _of_losses, "levels": _of_levels, "steps": _of_steps}
    said = [sentence(record) for part, sentence in about.items() if record[part]]
    others = record["others"] or 0.0
    if record["device"] == "cpu" and others > BUSY:
        said.append(f"Other programs used {others:.0%} of the cores meanwhile: memory and errors hold, times do not.")
    return said


def kind(cells: list[str]) -> str:
    """Of a row: "wrong", "ours", or neither."""
    return "wrong" if WRONG in cells else "ours" if any(cell in OURS for cell in cells) else ""


def _of_losses(record: dict[str, Any]) -> str:
    """Megabatch against the fastest and the leanest other, at the largest batch that several managed."""
    right = [r for r in record["losses"] if r["status"] == OK]
    ours = {r["batch"]: r for r in right if r["system"] == MEGABATCH}
    if not ours:
        return f"There is no loss of megabatch's to compare: {_why(record['losses'], MEGABATCH)}."
    others = [r for r in right if r["system"] != MEGABATCH and r["batch"] in ours]
    batch = max(r["batch"] for r in others) if others else max(ours)
    own = ours[batch]
    took = f"Loss: at {batch:,} pairs megabatch takes {_seconds(own):.3g} s and {own['peak'] / MIB:.0f} MiB"
    if not others:
        return f"{took}; there was no other right loss to compare it with."
    rows = [r for r in others if r["batch"] == batch]
    fastest, leanest = min(rows, key=_seconds), min(rows, key=lambda r: r["peak"])
    return (
        f"{took}; the fastest other, {fastest['system']}, {_seconds(fastest) / _seconds(own):.2f} times as long, the leanest, "
        f"{leanest['system']}, {leanest['peak'] / max(1, own['peak']):.1f} times as much."
    )


def _of_levels(record: dict[str, Any]) -> str:
    """The memory of a rank, with all levels and without any."""
    peaks = {r["system"]: r["peak"] for r in record["levels"] if r["status"] == OK}
    if TILES not in peaks:
        return f"There is no ring of megabatch's to compare: {_why(record['levels'], TILES)}."
    about = record["levels_of"]
    took = (
        f"Levels: at {about['batch']:,} pairs on {about['world']} ranks megabatch takes {peaks[TILES] / MIB:.0f} MiB of a rank"
    )
    without = [
        f"{phrase} {peaks[name] / max(1, peaks[TILES]):.1f} times that"
        for name, phrase in ((BLOCKS, "without tiles"), (LOCAL, "without the ring"), (VANILLA, "with all logits"))
        if name in peaks
    ]
    return ", ".join([took, *without]) + "."


def _of_steps(record: dict[str, Any]) -> str:
    """A cached step beside the plain one, at the largest batch that both managed."""
    right = {(r["system"], r["batch"]): r for r in record["steps"] if r["status"] == OK}
    batches = [batch for system, batch in right if system == CACHED[0]]
    if not batches:
        return f"There is no cached step to compare: {_why(record['steps'], CACHED[0])}."
    both = [batch for batch in batches if (PLAIN, batch) in right]
    batch = max(both or batches)
    own, plain = right[CACHED[0], batch], right.get((PLAIN, batch))
    took = f"Step: at {batch:,} pairs a cached step takes {own['peak'] / MIB:.0f} MiB and {own['seconds']:.3g} s"
    if plain is None:
        return f"{took}; a plain one could not be measured."
    return f"{took}, a plain one {plain['peak'] / MIB:.0f} MiB and {plain['seconds']:.3g} s."


def _why(rows: list[dict[str, Any]], system: str) -> str:
    return ", ".join(dict.fromkeys(_first_line(r["status"]) for r in rows if r["system"] == system)) or "it was not run"


def _first_line(status: str) -> str:
    return status.split(":")[0]


def _seconds(r: dict[str, Any]) -> float:
    return float(r["forward"] + r["backward"])


def _losses(record: dict[str, Any]) -> Table:
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    ours = {r["batch"]: r for r in record["losses"] if r["system"] == MEGABATCH and r["status"] == OK}
    unit = "ms" if record["device"] == "cuda" else "s"

    def shown(seconds: float) -> str:
        return f"{1000 * seconds:.1f}" if unit == "ms" else f"{seconds:.3f}"

    rows = []
    for r in record["losses"]:
        if r["status"] == MISSING:
            continue
        cells = [f"{r['batch']:,}", r["system"]]
        if r["status"] == OK:
            base, seconds = ours.get(r["batch"]), _seconds(r)
            cells += [shown(r["forward"]), shown(r["backward"]), shown(seconds), f"{bare[r['batch']] / seconds:.2f}"]
            cells += [f"{seconds / _seconds(base):.2f}" if base else "", f"{r['peak'] / MIB:.0f}"]
            cells.append(f"{r['peak'] / base['peak']:.1f}" if base and base["peak"] else "")
        else:
            cells += [SHORT.get(r["status"], _first_line(r["status"])), "", "", "", "", "", ""]
        cells += [_error(r["loss_error"]), _error(r["gradient_error"])]
        rows.append(cells)
    missing = ", ".join(dict.fromkeys(r["system"] for r in record["losses"] if r["status"] == MISSING))
    headings = ["batch", "system", f"forward {unit}", f"backward {unit}", f"total {unit}", "bare ÷ total"]
    headings += ["× time", "peak MiB", "× memory", "loss error", "grad. error"]
    compared = dict.fromkeys(r["system"] for r in record["losses"] if r["status"] != MISSING)
    which = "; ".join(f"{name}: {ABOUT[name]}" for name in compared)
    notes = (
        f"{which}. Bare ÷ total: time of the four matrix products that no exact loss can avoid ÷ time. × time, × memory: how "
        "many times what megabatch takes. Peak: beyond the inputs, gradients included. Errors: relative to float64, of the "
        "gradients on sampled rows; what is further off than its precision explains is WRONG and has no speed."
        + (f" Not installed, or not for this device: {missing}." if missing else "")
    )
    failed = {r["system"]: r["status"] for r in record["losses"] if r["status"].startswith(FAILED)}
    notes += "".join(f" {name} {status}." for name, status in failed.items())
    return Table(f"CLIP loss, forward and backward, {record['dtype']}, D = {record['width']}", headings, rows, notes)


def _levels(record: dict[str, Any]) -> Table:
    rows = []
    for r in record["levels"]:
        speed = [f"{r['peak'] / MIB:.0f}", f"{r['seconds']:.3f}"] if r["status"] == OK else [_first_line(r["status"]), ""]
        rows.append([r["system"], *speed, _error(r["loss_error"]), _error(r["gradient_error"])])
    about = record["levels_of"]
    title = f"Levels of tiling: {about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    headings = ["system", "peak MiB of a rank", "seconds", "loss error", "grad. error"]
    which = "; ".join(f"{name}: {LEVELS[name]}" for name in (r["system"] for r in record["levels"]))
    notes = f"{which}. Ranks are processes on this CPU and share its cores: memory is what it shows, not speed."
    failed = dict.fromkeys(r["status"].splitlines()[-1] for r in record["levels"] if r["status"].startswith(FAILED))
    notes += "".join(f" Failed, because: {reason}" for reason in failed)
    return Table(title, headings, rows, notes)


def _steps(record: dict[str, Any]) -> Table:
    about = record["steps_of"]
    rows = []
    for r in record["steps"]:
        pace, peak = ("", "") if r["seconds"] is None else (f"{r['batch'] / r['seconds']:,.0f}", f"{r['peak'] / MIB:.0f}")
        off = "" if r["scale_ratio"] is None else f"{r['scale_ratio']:.4f}"
        rows.append(
            [
                f"{r['batch']:,}",
                r["system"],
                pace if r["status"] == OK else SHORT.get(r["status"], r["status"]),
                peak,
                _error(r["error"]),
                off,
            ]
        )
    headings = ["batch", "system", "pairs/s", "peak MiB", "grad. error", "scale's grad. ÷ right"]
    notes = (
        "Plain step: one graph over the whole batch. Cached: megabatch.cached_backward, keeping no graphs, or those that fit "
        "(auto). accum-freq: open_clip's way of making a large batch of small ones, which adds the gradient of the learned "
        "scale once for every chunk. GradCache: its scheme, with a dense loss. Towers alone: encoding twice and going back, "
        "without any loss. Peak: beyond weights and gradients. Gradients, that of the scale too, are compared with the plain "
        "step's in float32 on a small batch; "
        f"{WRONG} ones have no speed."
    )
    title = f"A training step: {about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    return Table(title, headings, rows, notes)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
