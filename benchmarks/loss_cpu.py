"""Time and memory of the CLIP loss on a CPU: megabatch against open_clip's dense loss and against checkpointed chunks of rows.

Each measurement is a fresh process: inputs from a fixed seed, one forward and backward whose peak memory is watched, then
repeats for the time. Before a speed is reported, the loss and sampled rows of both gradients are compared with float64; a wrong
result gets no speed. The systems take turns, so that a slow moment of the machine does not fall on one of them alone.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megabatch import machine
from megabatch.bench.accuracy import ClipTruth, clip_truth, is_right, pairs, sampled_rows
from megabatch.bench.loss_systems import CHUNKS, DENSE, MEGABATCH, loss_of
from megabatch.bench.measure import peak_memory
from megabatch.bench.processes import ProcessError, fresh_process
from megabatch.machine import available_memory

SYSTEMS = {MEGABATCH: "tiles", DENSE: "dense", CHUNKS: "chunks of rows"}  # MEGABATCH first: the others are compared with it

BATCHES, WIDTH = [2048, 4096, 8192, 16384, 32768], 512
REPEATS, REPEAT_SECONDS = 10, 5.0  # at most, for one process; one repeat there always is
MEMORY_SHARE = 0.9  # of what is available; a loss that needs more is out of memory


class Measured(NamedTuple):
    """What a process of its own sends back."""

    seconds: list[tuple[float, float]]  # forward, backward
    peak: int
    loss: float
    dimage: Tensor  # (S, D)
    dtext: Tensor  # (S, D)


@dataclass
class Result:
    """One system at one batch, over all rounds."""

    batch: int
    system: str
    status: str = "ok"  # or "WRONG", "out of memory", "failed: …"
    seconds: list[tuple[float, float]] = field(default_factory=list)
    forward_s: float | None = None
    backward_s: float | None = None
    total_s: float | None = None
    time_ratio: float | None = None  # to megabatch
    peak_bytes: int | None = None
    memory_ratio: float | None = None
    loss: float | None = None
    loss_error: float | None = None  # relative; the inputs are the same in every round, and so is this
    gradient_error: float | None = None


def measure(system: str, batch: int, width: int) -> Measured:
    """Runs in a process of its own."""
    function = loss_of(system, "cpu")

    def step(image: Tensor, text: Tensor, log_scale: Tensor) -> tuple[float, float, float]:
        image.grad = text.grad = log_scale.grad = None
        start = time.perf_counter()
        loss = function(image, text, log_scale.exp())
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle, loss.item()

    step(*pairs(64, width))  # starts threads and libraries, which are nobody's time or memory
    inputs = pairs(batch, width)
    started = time.perf_counter()
    (forward, backward, loss), peak = peak_memory(lambda: step(*inputs))
    seconds = [(forward, backward)]
    while len(seconds) < 2 or (len(seconds) <= REPEATS and time.perf_counter() - started < REPEAT_SECONDS):
        seconds.append(step(*inputs)[:2])
    rows = sampled_rows(batch)
    image, text, _ = inputs
    return Measured(seconds, peak, loss, image.grad[rows], text.grad[rows])


def truth(batch: int, width: int) -> ClipTruth:
    """Runs in a process of its own."""
    image, text, log_scale = pairs(batch, width)
    return clip_truth(image, text, log_scale.exp(), sampled_rows(batch))


def add_round(result: Result, width: int, right: ClipTruth) -> None:
    """One more measurement of a system at a batch; after a failure there are no more."""
    if result.status != "ok":
        return
    available = available_memory()
    limit = None if available is None else int(MEMORY_SHARE * available)
    try:
        got = fresh_process(measure, result.system, result.batch, width, memory_limit=limit)
    except MemoryError:
        result.status = "out of memory"
        return
    except ProcessError as error:  # killed, by a system short of memory perhaps: the other systems can go on
        result.status = f"failed: {error}"
        return
    result.loss = got.loss
    result.loss_error, result.gradient_error = right.errors(got.loss, got.dimage, got.dtext)
    if not is_right(got.loss, result.loss_error, result.gradient_error):
        result.status = "WRONG"
    result.seconds += got.seconds
    result.peak_bytes = max(got.peak, result.peak_bytes or 0)


def conclude(results: list[Result]) -> None:
    """Best times and ratios; what was wrong has no speed."""
    ours = {result.batch: result for result in results if result.system == MEGABATCH}
    for result in results:
        if result.status != "ok":
            result.seconds, result.peak_bytes = [], None
            continue
        result.forward_s, result.backward_s = min(result.seconds, key=sum)
        result.total_s = result.forward_s + result.backward_s
        base = ours[result.batch]
        if base.total_s and base.peak_bytes and result.peak_bytes:
            result.time_ratio = result.total_s / base.total_s
            result.memory_ratio = result.peak_bytes / base.peak_bytes


def run(batches: list[int], width: int, rounds: int | None) -> list[Result]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    def rounds_of(batch: int) -> int:
        return rounds or (3 if batch <= 16384 else 1)

    def weight(batch: int) -> float:
        return 6 + batch**2 * width / 6e9  # seconds, very roughly: starting a process, and the products

    shown = (BarColumn(bar_width=None), TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("to go"))
    results = []
    # The speed is that of the whole run so far: a window would hold no finished step when steps take minutes.
    with Progress(TextColumn("{task.description}"), *shown, speed_estimate_period=math.inf) as progress:
        everything = sum(weight(batch) * (1 + len(SYSTEMS) * rounds_of(batch)) for batch in batches)
        task = progress.add_task("", total=everything)
        for batch in batches:
            progress.update(task, description=f"{batch} pairs: float64 truth")
            right = fresh_process(truth, batch, width)
            progress.advance(task, weight(batch))
            row = [Result(batch, system) for system in SYSTEMS]
            for i in range(rounds_of(batch)):
                for result in row:
                    progress.update(task, description=f"{batch} pairs, round {i + 1}: {result.system}")
                    add_round(result, width, right)
                    progress.advance(task, weight(batch))
            results += row
        progress.update(task, description="done", completed=everything)
    conclude(results)
    return results


def text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def mebibytes(result: Result) -> float | None:
    return None if result.peak_bytes is None else result.peak_bytes / 2**20


COLUMNS: dict[str, Callable[[Result], str]] = {
    "batch": lambda r: str(r.batch),
    "system": lambda r: r.system,
    "forward s": lambda r: text(r.forward_s, ".3f"),
    "backward s": lambda r: text(r.backward_s, ".3f"),
    "total s": lambda r: text(r.total_s, ".3f") if r.status == "ok" else r.status.split(":")[0],
    "× time": lambda r: text(r.time_ratio, ".2f"),
    "peak MiB": lambda r: text(mebibytes(r), ".0f"),
    "× memory": lambda r: text(r.memory_ratio, ".1f"),
    "loss": lambda r: text(r.loss, ".4f"),
    "loss error": lambda r: text(r.loss_error, ".0e"),
    "grad. error": lambda r: text(r.gradient_error, ".0e"),
}
NOTES = (
    "× time, × memory: how many times what megabatch takes.",
    "Time: the best of all repeats.",
    "Peak: resident memory beyond the inputs, with the gradients.",
    "Errors: relative to float64, that of the gradients on sampled rows.",
)


def cells(result: Result) -> list[str]:
    return [cell(result) for cell in COLUMNS.values()]


def print_table(results: list[Result], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="\n".join(NOTES), box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    for heading in COLUMNS:
        name = heading == "system"
        table.add_column(heading.replace(" ", "\n"), justify="left" if name else "right", no_wrap=name)
    for result in results:
        style = "red" if result.status != "ok" else "bold" if result.system == MEGABATCH else None
        table.add_row(*cells(result), style=style, end_section=result.system == CHUNKS)
    Console().print(table)
    for result in results:
        if result.status.startswith("failed"):
            print(f"{result.system} at {result.batch} {result.status}")


def markdown(results: list[Result], title: str, about: dict[str, Any], command: str) -> str:
    rules = ("---" if heading == "system" else "---:" for heading in COLUMNS)
    table = "\n".join("| " + " | ".join(row) + " |" for row in (COLUMNS, rules, *map(cells, results)))
    systems = "; ".join(f"{system}, {how}" for system, how in SYSTEMS.items())
    sections = (
        f"{title}.",
        table,
        " ".join((*NOTES, f"Systems: {systems}.")),
        f"Machine: {machine.summary(about)}.",
        f"Command: `{command}`",
    )
    return "\n\n".join(sections) + "\n"


def draw(results: list[Result], title: str, about: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(f"{title}; {about['cpu']}, {about['cores']} cores")
    panels = figure.subplots(1, 2)
    shown = (("time, seconds", lambda r: r.total_s), ("peak memory, MiB", mebibytes))
    for axes, (label, value) in zip(panels, shown, strict=True):
        for system, colour, marker in zip(SYSTEMS, ("#0b6e4f", "#c1440e", "#7a7a7a"), "osD", strict=True):
            points = [(r.batch, value(r)) for r in results if r.system == system and value(r)]
            missing = [str(r.batch) for r in results if r.system == system and r.status == "out of memory"]
            name = f"{system}, {SYSTEMS[system]}" + (f"; out of memory at {', '.join(missing)}" if missing else "")
            axes.plot(*zip(*points, strict=True) if points else ((), ()), color=colour, marker=marker, label=name)
        annotate_ratio(axes, results, value)
        axes.set(xscale="log", yscale="log", xlabel="batch, pairs", ylabel=label)
        axes.set_xticks(sorted({r.batch for r in results}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)


def annotate_ratio(axes: Any, results: list[Result], value: Callable[[Result], float | None]) -> None:
    """An arrow from megabatch to the dense loss at 16384, or at the largest batch that has both."""
    ours, dense = ({r.batch: value(r) for r in results if r.system == s and value(r)} for s in (MEGABATCH, DENSE))
    both = sorted(ours.keys() & dense.keys())
    if not both:
        return
    batch = 16384 if 16384 in both else both[-1]
    low, high = ours[batch], dense[batch]
    axes.annotate("", (batch, high), (batch, low), arrowprops={"arrowstyle": "<->", "color": "#444444"})
    # Below the lowest line, where nothing else is.
    axes.annotate(f"{high / low:.{0 if high > 10 * low else 1}f}×", (batch, low), (6, -6), textcoords="offset points", va="top")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="For a quick look: python benchmarks/loss_cpu.py --batches 1024 2048 4096 --rounds 1 --output demo. "
        "Leave the machine alone while it runs: the load of other programs shows in every number.",
    )

    def option(name: str, help: str, **how: Any) -> None:
        parser.add_argument(f"--{name}", help=help, **how)

    several = " ".join(map(str, BATCHES))
    square = f"pairs in a batch, one number or more ({several}); time, and dense memory, grow with the square"
    option("batches", square, type=positive, nargs="+", default=BATCHES, metavar="N")
    option("width", f"of the embeddings ({WIDTH})", type=positive, default=WIDTH, metavar="D")
    option("rounds", "fresh processes for each number, best time of all (3; above 16384 one)", type=positive, metavar="R")
    files = "where loss_cpu.json, loss_cpu.md and loss_cpu.png go (benchmarks/results)"
    option("output", files, type=Path, default=Path(__file__).resolve().parent / "results", metavar="FOLDER")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def command_of(args: argparse.Namespace) -> str:
    """What to type for the same numbers; where the files go does not change them."""
    batches = "" if args.batches == BATCHES else " --batches " + " ".join(map(str, args.batches))
    width = "" if args.width == WIDTH else f" --width {args.width}"
    rounds = "" if args.rounds is None else f" --rounds {args.rounds}"
    return f"python benchmarks/loss_cpu.py{batches}{width}{rounds}"


def main() -> int:
    args = parse()
    missing = [name for name in ("rich", "matplotlib", "open_clip") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'{", ".join(missing)} missing; to install what the benchmarks need: pip install "megabatch[bench]"')
    try:
        results = run(sorted(set(args.batches)), args.width, args.rounds)
    except KeyboardInterrupt:
        sys.exit("Stopped; nothing was written.")
    title = f"CLIP loss, forward + backward, float32, D = {args.width}"
    about, command = machine.describe(), command_of(args)
    record = {"command": command, "machine": about, "width": args.width, "results": [asdict(result) for result in results]}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "loss_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "loss_cpu.md").write_text(markdown(results, title, about, command))
    draw(results, title, about, args.output / "loss_cpu.png")
    print(f"Written to {os.path.relpath(args.output)}: loss_cpu.json, loss_cpu.md, loss_cpu.png")
    print_table(results, title)
    return 0 if all(result.status in ("ok", "out of memory") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
