"""The loss over many ranks on one CPU: memory of each rank, time, and bytes sent, against open_clip's ways and Inf-CL's.

The ablation of Inf-CL's table 4, as it can be run here: ranks are processes that share the cores, so that time says how much
work there is in all, not how it scales. Every measurement is a fresh set of processes; before a number is reported, the loss
and sampled rows of both gradients, averaged as DDP would, are compared with float64. Bytes are counted where they are sent.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megabatch import machine
from megabatch.bench.accuracy import ClipTruth, clip_truth, is_right, pairs, sampled_rows
from megabatch.bench.levels import LOCAL, SYSTEMS, TILES, VANILLA, mean_over_ranks, measure
from megabatch.bench.processes import ProcessError, fresh_process, on_ranks

BATCH, WIDTH, WORLDS = 8192, 256, [1, 2, 4, 8]


@dataclass
class Result:
    """One system on one number of ranks."""

    world: int
    system: str
    status: str = "ok"
    seconds: float | None = None
    peak_bytes: int | None = None  # of the rank that needs most
    sent_bytes: int | None = None  # of a rank, forward and backward
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None


def truth(batch: int, width: int) -> ClipTruth:
    image, text, log_scale = pairs(batch, width)
    return clip_truth(image, text, log_scale.exp(), sampled_rows(batch))


def run_one(result: Result, batch: int, width: int, repeats: int, right: ClipTruth) -> None:
    try:
        answers = [one for (one,) in on_ranks(measure, result.world, [result.system], batch, width, repeats)]
    except ProcessError as error:
        result.status = f"failed: {error}"
        return
    result.loss, dimage, dtext = mean_over_ranks(answers)
    result.loss_error, result.gradient_error = right.errors(result.loss, dimage, dtext)
    if not is_right(result.loss, result.loss_error, result.gradient_error):
        result.status = "WRONG"
        return
    result.seconds = min(max(a.seconds[i] for a in answers) for i in range(repeats))
    result.peak_bytes = max(a.peak for a in answers)
    counted = result.system not in (VANILLA, LOCAL)
    result.sent_bytes = max(a.sent for a in answers) if counted else None


def run(worlds: list[int], batch: int, width: int, repeats: int) -> list[Result]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    shown = (BarColumn(bar_width=None), TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("to go"))
    results = [Result(world, system) for world in worlds for system in SYSTEMS]
    with Progress(TextColumn("{task.description}"), *shown, speed_estimate_period=math.inf) as progress:
        task = progress.add_task("float64 truth", total=sum(3 + result.world * 3 for result in results))
        right = fresh_process(truth, batch, width)
        for result in results:
            progress.update(task, description=f"{result.world} ranks: {result.system}")
            run_one(result, batch, width, repeats, right)
            progress.advance(task, 3 + result.world * 3)
        progress.update(task, description="done")
    return results


def text(value: float | None, form: str, unit: float = 1.0) -> str:
    return "–" if value is None else format(value / unit, form)


COLUMNS: dict[str, Callable[[Result], str]] = {
    "ranks": lambda r: str(r.world),
    "system": lambda r: r.system,
    "peak MiB of a rank": lambda r: text(r.peak_bytes, ".0f", 2**20),
    "s, all ranks on these cores": lambda r: text(r.seconds, ".2f") if r.status == "ok" else r.status.split(":")[0],
    "MiB sent by a rank": lambda r: text(r.sent_bytes, ".2f", 2**20),
    "loss error": lambda r: text(r.loss_error, ".0e"),
    "grad. error": lambda r: text(r.gradient_error, ".0e"),
}


def markdown(results: list[Result], title: str, about: dict[str, Any], command: str) -> str:
    rules = ("---" if heading == "system" else "---:" for heading in COLUMNS)
    rows = ([cell(result) for cell in COLUMNS.values()] for result in results)
    table = "\n".join("| " + " | ".join(row) + " |" for row in (COLUMNS, rules, *rows))
    systems = "\n".join(f"- {system}: {how}" for system, how in SYSTEMS.items())
    notes = (
        "Peak: resident memory beyond the inputs, with the gradients, of the rank that needs most. Sent: counted, forward and "
        "backward, without the small messages in which ranks agree; open_clip's collectives are not counted. Errors: of the "
        "mean over ranks, relative to float64."
    )
    return (
        "\n\n".join((f"{title}.", table, notes, systems, f"Machine: {machine.summary(about)}.", f"Command: `{command}`")) + "\n"
    )


def draw(results: list[Result], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 3)
    shown = (("peak memory of a rank, MiB", "peak_bytes", 2**20), ("seconds, all ranks on the same cores", "seconds", 1))
    shown = (*shown, ("MiB sent by a rank", "sent_bytes", 2**20))
    for axes, (label, name, unit) in zip(panels, shown, strict=True):
        for i, (system, marker) in enumerate(zip(SYSTEMS, "sDvP<>o", strict=True)):
            points = [(r.world, getattr(r, name) / unit) for r in results if r.system == system and getattr(r, name)]
            if points:
                width = 2.5 if system == TILES else 1.2
                axes.plot(*zip(*points, strict=True), marker=marker, color=f"C{i}", label=system, linewidth=width)
        worlds = sorted({r.world for r in results})
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label, xticks=worlds)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, metavar="R", help="numbers of ranks (1 2 4 8)")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="B", help=f"pairs of all ranks together ({BATCH})")
    parser.add_argument("--width", type=int, default=WIDTH, metavar="D", help=f"of the embeddings ({WIDTH})")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed steps, the best of them counts (3)")
    files = "where ring.json, ring.md and ring.png go (benchmarks/results)"
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "results", metavar="FOLDER", help=files
    )
    args = parser.parse_args()
    missing = [name for name in ("rich", "matplotlib", "open_clip") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'{", ".join(missing)} missing; to install what the benchmarks need: pip install "megabatch[bench]"')
    results = run(args.worlds, args.batch, args.width, args.repeats)
    title = f"CLIP loss over ranks, forward + backward, float32, {args.batch} pairs in all, D = {args.width}"
    about = machine.describe()
    command = f"python benchmarks/ring.py --worlds {' '.join(map(str, args.worlds))} --batch {args.batch} --width {args.width}"
    record = {"command": command, "machine": about, "batch": args.batch, "width": args.width}
    args.output.mkdir(parents=True, exist_ok=True)
    record["results"] = [asdict(result) for result in results]
    (args.output / "ring.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "ring.md").write_text(markdown(results, title, about, command))
    draw(results, title, args.output / "ring.png")
    print(f"Written to {os.path.relpath(args.output)}: ring.json, ring.md, ring.png")
    print("\n".join(line for line in markdown(results, title, about, command).splitlines() if line.startswith("|")))
    for result in results:
        if result.status != "ok":
            print(f"{result.system} on {result.world} ranks: {result.status}")
    return 0 if all(result.status == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
