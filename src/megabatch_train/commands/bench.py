"""`megabatch bench`: measures losses, levels of tiling and training steps, and compares them with installed baselines."""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import extras
from megabatch_train.commands import describe, parse_positive_int

if TYPE_CHECKING:
    from megabatch_train.bench.measure import Record
    from megabatch_train.bench.report import Sizes

LINE_SECONDS = 5.0  # interval of progress lines if the output is not a terminal
PARTS = ("losses", "levels", "steps")
DESCRIPTION = """
Measures memory and time of losses, of the loss over ranks with fewer levels of tiling, and of
training steps. Compares them with the installed baselines (open_clip, Inf-CL, Liger,
cut-cross-entropy). Before the timing, losses are compared with float64, and steps with a plain
step. A wrong result is not timed. The exit status is 1 if a result of megabatch is wrong.

  megabatch bench --quick                       takes less than a minute on a CPU, two on a GPU
  megabatch bench --parts losses --batches 4096 16384 --width 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch bench`."""
    describe(parser, DESCRIPTION)
    add = parser.add_argument
    add("--quick", action="store_true", help="measure small sizes, in less than a minute on a CPU, or two minutes on a GPU")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)")
    add(
        "--batches",
        nargs="+",
        type=parse_positive_int,
        metavar="B",
        help="batch sizes of the losses, in pairs (default: by device)",
    )
    add(
        "--width",
        type=parse_positive_int,
        metavar="D",
        help="embedding dimension of losses and levels (default: 512, or 256 for --quick on a CPU)",
    )
    add("--cpu", action="store_true", help="use the CPU even if a CUDA device is available")
    files = "folder for bench.html, bench.json and the plots (default: %(default)s)"
    add("--output", type=Path, default=Path("megabatch-bench"), metavar="FOLDER", help=files)


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes the results. Returns 1 if a result of megabatch is wrong, and 2 if a package is missing."""
    import importlib.util

    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        command = extras.install_command(missing[0])
        print(f"megabatch bench needs {' and '.join(missing)}; {command} installs them", file=sys.stderr)
        return 2
    import torch

    from megabatch_train.bench.report import SIZES

    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    sizes = SIZES[device, args.quick]
    sizes = replace(sizes, batches=args.batches or sizes.batches, width=args.width or sizes.width)
    start = time.perf_counter()
    try:
        record = _measure(args, sizes, device)
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C. No file was written.", file=sys.stderr)
        return 130
    _show(record.contents)
    names = _write(record)
    print(f"{time.perf_counter() - start:.0f} s. Written to {args.output}: {', '.join(names)}")
    return 0 if _ours_is_right(record.contents) else 1


def _measure(args: argparse.Namespace, sizes: "Sizes", device: str) -> "Record":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from megabatch_train import machine
    from megabatch_train.bench import report
    from megabatch_train.bench.measure import Record

    record = Record(args.output / "bench.json", _quote_command(args))
    record.contents |= {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32", "width": sizes.width}
    record.contents |= {"losses": [], "products": [], "levels": [], "steps": []}
    run_part: dict[str, Callable[..., dict[str, Any]]] = {
        "losses": report.run_losses,
        "levels": report.run_levels,
        "steps": report.run_steps,
    }
    other_programs = machine.OtherPrograms()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TimeElapsedColumn())
    start = last_printed = time.perf_counter()
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=len(args.parts))
        for name in args.parts:

            def say(text: str, share: float, name: str = name) -> None:
                nonlocal last_printed
                progress.update(task, description=f"{name}: {text}", completed=args.parts.index(name) + share)
                now = time.perf_counter()
                if progress.disable and (share == 0.0 or now - last_printed >= LINE_SECONDS):
                    last_printed = now
                    print(f"{now - start:4.0f} s  {name}: {text}", flush=True)

            say("starting", 0.0)
            record.contents |= run_part[name](sizes, device, say)
        progress.update(task, description="done", completed=len(args.parts))
    record.contents["others"] = other_programs.share()
    return record


def _quote_command(args: argparse.Namespace) -> str:
    """Returns the command line that repeats the measurement."""
    words = ["--quick"] * args.quick + ["--cpu"] * args.cpu
    if tuple(args.parts) != PARTS:
        words += ["--parts", *args.parts]
    if args.batches:
        words += ["--batches", *map(str, args.batches)]
    if args.width:
        words += ["--width", str(args.width)]
    return " ".join(["megabatch bench", *words])


def _show(record: dict[str, Any]) -> None:
    from megabatch_train.bench.report import tables, verdict

    for table in tables(record).values():
        print()
        table.print()
    print()
    for sentence in verdict(record):
        print(textwrap.fill(sentence, 80))


def _write(record: "Record") -> list[str]:
    from megabatch_train.bench.report import figures, page
    from megabatch_train.display import plots

    record.save()
    folder, drawn = record.path.parent, figures(record.contents)
    for name, (_, figure) in drawn.items():
        plots.save(figure, folder / f"{name}.png", folder / f"{name}.svg")
    (folder / "bench.html").write_text(page(record.contents, drawn), "utf-8")
    return ["bench.html", "bench.json", f"{len(drawn)} plots as PNG and SVG"]


def _ours_is_right(record: dict[str, Any]) -> bool:
    from megabatch_train.bench.measure import LATE, MEMORY, OK
    from megabatch_train.bench.report import OURS

    ours = [r for part in PARTS for r in record[part] if r["system"] in OURS]
    return all(r["status"] in (OK, MEMORY, LATE) for r in ours)
