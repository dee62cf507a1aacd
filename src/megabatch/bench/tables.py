"""The tables of `megabatch bench`, as rows of text: for the terminal, for a page."""

from typing import Any, NamedTuple

from megabatch.bench.levels import SYSTEMS as LEVELS
from megabatch.bench.loss_systems import MEGABATCH
from megabatch.bench.losses import LATE, MEMORY, MISSING, OK, WRONG

MIB = 2**20
SHORT = {MEMORY: "no memory", LATE: "no time"}  # a table of 80 columns has no room for more


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


def verdict(record: dict[str, Any]) -> str:
    """What was measured in one sentence: megabatch against the fastest and the leanest other at the largest common batch."""
    right = [r for r in record["losses"] if r["status"] == OK]
    ours = {r["batch"]: r for r in right if r["system"] == MEGABATCH}
    others = [r for r in right if r["system"] != MEGABATCH and r["batch"] in ours]
    if not others:
        return "No other loss could be compared."
    batch = max(r["batch"] for r in others)
    rows, own = [r for r in others if r["batch"] == batch], ours[batch]
    fastest, leanest = min(rows, key=_seconds), min(rows, key=lambda r: r["peak"])
    return (
        f"At {batch:,} pairs megabatch takes {_seconds(own):.3g} s and {own['peak'] / MIB:.0f} MiB; the fastest other, "
        f"{fastest['system']}, {_seconds(fastest) / _seconds(own):.2f} times as long, the leanest, {leanest['system']}, "
        f"{leanest['peak'] / max(1, own['peak']):.1f} times as much."
    )


def _seconds(r: dict[str, Any]) -> float:
    return float(r["forward"] + r["backward"])


def _losses(record: dict[str, Any]) -> Table:
    bare = {p["batch"]: p["seconds"] for p in record["products"]}
    ours = {r["batch"]: r for r in record["losses"] if r["system"] == MEGABATCH and r["status"] == OK}
    rows = []
    for r in record["losses"]:
        if r["status"] == MISSING:
            continue
        cells = [f"{r['batch']:,}", r["system"]]
        if r["status"] == OK:
            base, seconds = ours.get(r["batch"]), _seconds(r)
            cells += [f"{r['forward']:.3f}", f"{r['backward']:.3f}", f"{seconds:.3f}", f"{bare[r['batch']] / seconds:.2f}"]
            cells += [f"{seconds / _seconds(base):.2f}" if base else "", f"{r['peak'] / MIB:.0f}"]
            cells.append(f"{r['peak'] / base['peak']:.1f}" if base and base["peak"] else "")
        else:
            cells += [SHORT.get(r["status"], r["status"]), "", "", "", "", "", ""]
        cells += [_error(r["loss_error"]), _error(r["gradient_error"])]
        rows.append(cells)
    missing = ", ".join(dict.fromkeys(r["system"] for r in record["losses"] if r["status"] == MISSING))
    headings = ["batch", "system", "forward s", "backward s", "total s", "bare ÷ total", "× time", "peak MiB", "× memory"]
    headings += ["loss error", "grad. error"]
    notes = (
        "Bare ÷ total: time of the four matrix products that no exact loss can avoid ÷ time. × time, × memory: how many times "
        "what megabatch takes. Peak: beyond the inputs, gradients included. Errors: relative to float64, of the gradients on "
        "sampled rows; what is further off than its precision explains is WRONG and has no speed."
        + (f" Not installed, or not for this device: {missing}." if missing else "")
    )
    return Table(f"CLIP loss, forward and backward, {record['dtype']}, D = {record['width']}", headings, rows, notes)


def _levels(record: dict[str, Any]) -> Table:
    rows = []
    for r in record["levels"]:
        speed = [f"{r['peak'] / MIB:.0f}", f"{r['seconds']:.3f}"] if r["status"] == OK else [r["status"].split(":")[0], ""]
        rows.append([r["system"], *speed, _error(r["loss_error"]), _error(r["gradient_error"])])
    about = record["levels_of"]
    title = f"Levels of tiling: {about['batch']:,} pairs on {about['world']} ranks, float32, D = {about['width']}"
    headings = ["system", "peak MiB of a rank", "seconds", "loss error", "grad. error"]
    which = "; ".join(f"{name}: {LEVELS[name]}" for name in (r["system"] for r in record["levels"]))
    notes = f"{which}. Ranks are processes on this CPU and share its cores: memory is what it shows, not speed."
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
    headings = ["batch", "system", "pairs/s", "peak MiB", "gradient error", "scale's gradient ÷ right"]
    notes = (
        "Peak: beyond weights and gradients. Gradients are compared with the plain step's in float32 on a small batch; "
        f"{WRONG} ones have no speed. Towers alone: encoding twice and going back, without any loss."
    )
    title = f"A training step: {about['model']} towers, chunks of {about['chunk']}, {about['precision']}"
    return Table(title, headings, rows, notes)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
