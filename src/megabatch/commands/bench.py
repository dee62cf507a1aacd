"""Is it really better than what I have? Losses and training steps on this machine, beside whichever peers are installed."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.commands.options import whole

if TYPE_CHECKING:
    from megabatch.bench.parts import Sizes

PARTS = ("losses", "levels", "steps")
LINE_SECONDS = 5.0  # between lines where output is no terminal
SYSTEM_WIDTH = 9  # of a column that a narrow terminal may fold
DESCRIPTION = """
Is it really better than what you have? Losses, levels of tiling and training steps on this
machine, beside whichever peers are installed. A result is compared with float64 before it is
timed; a wrong one gets no speed.

  megabatch bench --quick                       small sizes: under a minute on a CPU, two on a GPU
  megabatch bench --parts losses --batches 4096 16384 --width 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `megabatch bench`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: under a minute on a CPU, two on a GPU")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these (all)")
    add("--batches", nargs="+", type=whole, metavar="B", help="pairs, for the losses")
    add("--width", type=whole, metavar="D", help="of the embeddings, for losses and levels")
    add("--cpu", action="store_true", help="also where there is a CUDA device")
    files = "for bench.html, bench.json and plots (%(default)s)"
    add("--output", type=Path, default=Path("megabatch-bench"), metavar="FOLDER", help=files)


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes; 1 if a result of ours is wrong, 2 if something is missing."""
    import importlib.util

    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'megabatch bench: {" and ".join(missing)} missing; pip install "megabatch[bench]" brings them', file=sys.stderr)
        return 2
    import torch

    from megabatch.bench.parts import SIZES

    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    sizes = SIZES[device, args.quick]
    sizes = replace(sizes, batches=args.batches or sizes.batches, width=args.width or sizes.width)
    begun = time.perf_counter()
    try:
        record = _measure(args, sizes, device)
    except KeyboardInterrupt:
        print("Stopped; nothing was written.", file=sys.stderr)
        return 130
    _show(record)
    names = _write(record, args.output)
    print(f"{time.perf_counter() - begun:.0f} s. Written to {args.output}: {', '.join(names)}")
    return 0 if _ours_is_right(record) else 1


def _measure(args: argparse.Namespace, sizes: "Sizes", device: str) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from megabatch import machine
    from megabatch.bench import parts

    record: dict[str, Any] = {"command": _said(args), "machine": machine.describe(), "device": device}
    record |= {"dtype": "bfloat16" if device == "cuda" else "float32", "width": sizes.width}
    record |= {"losses": [], "products": [], "levels": [], "steps": []}
    work: dict[str, Callable[..., dict[str, Any]]] = {"losses": parts.losses, "levels": parts.levels, "steps": parts.steps}
    others = machine.Others()
    shown = (TextColumn("{task.description}"), BarColumn(bar_width=None), TimeElapsedColumn())
    begun = last_line = time.perf_counter()
    with Progress(*shown, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=len(args.parts))
        for name in args.parts:

            def say(text: str, share: float, name: str = name) -> None:
                nonlocal last_line
                progress.update(task, description=f"{name}: {text}", completed=args.parts.index(name) + share)
                now = time.perf_counter()
                if progress.disable and (share == 0.0 or now - last_line >= LINE_SECONDS):
                    last_line = now
                    print(f"{now - begun:4.0f} s  {name}: {text}", flush=True)

            say("starting", 0.0)
            record |= work[name](sizes, device, say)
        progress.update(task, description="done", completed=len(args.parts))
    return record | {"others": others.share()}


def _said(args: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["--quick"] * args.quick + ["--cpu"] * args.cpu
    if tuple(args.parts) != PARTS:
        words += ["--parts", *args.parts]
    if args.batches:
        words += ["--batches", *map(str, args.batches)]
    if args.width:
        words += ["--width", str(args.width)]
    return " ".join(["megabatch bench", *words])


def _show(record: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from megabatch.bench.tables import kind, tables, verdict

    console = Console(highlight=False, markup=False)
    wide = Console(highlight=False, markup=False, width=1000)  # a file has room; and a number is rather wrapped than cut
    styles = {"wrong": "red", "ours": "bold", "": None}
    for table in tables(record):
        console.print(f"\n{table.title}", style="bold")
        shown = Table(box=box.SIMPLE_HEAD, padding=0)
        least = 1  # columns of a terminal
        for column, heading in enumerate(table.headings):
            words = heading.split(" ", 1)
            longest = max(len(text) for text in (*words, *(cells[column] for cells in table.rows)))
            if heading == "system":  # gives way
                longest = min(longest, SYSTEM_WIDTH)
                shown.add_column(heading, overflow="fold", min_width=longest)
            else:
                shown.add_column("\n".join(words), justify="right", no_wrap=True, min_width=longest)
            least += longest + 1
        for cells in table.rows:
            shown.add_row(*cells, style=styles[kind(cells)])
        (console if sys.stdout.isatty() and least <= console.width else wide).print(shown)
        console.print(table.notes)
    console.print("", *verdict(record), sep="\n")


def _write(record: dict[str, Any], folder: Path) -> list[str]:
    from megabatch.bench.figures import figures
    from megabatch.bench.page import page

    folder.mkdir(parents=True, exist_ok=True)
    made = figures(record)
    for name, (_, figure) in made.items():
        for kind in ("png", "svg"):
            figure.savefig(folder / f"{name}.{kind}", dpi=140)
    (folder / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "bench.html").write_text(page(record, made))
    return ["bench.html", "bench.json", f"{len(made)} plots as PNG and SVG"]


def _ours_is_right(record: dict[str, Any]) -> bool:
    from megabatch.bench.losses import LATE, MEMORY, OK
    from megabatch.bench.tables import OURS

    ours = [r for part in PARTS for r in record[part] if r["system"] in OURS]
    return all(r["status"] in (OK, MEMORY, LATE) for r in ours)
