"""`megabatch bench`: losses, levels of tiling and training steps on this machine, beside the installed peers."""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.commands.arguments.bench import PARTS

if TYPE_CHECKING:
    from megabatch.bench.parts import Sizes

LINE_SECONDS = 5.0  # between progress lines if the output is not a terminal


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes. Returns 1 if a result of megabatch is wrong, 2 if a package is missing."""
    import importlib.util

    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'megabatch bench: {" and ".join(missing)} missing; pip install "megabatch[bench]" installs them', file=sys.stderr
        )
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
    """The command line that repeats the measurement."""
    words = ["--quick"] * args.quick + ["--cpu"] * args.cpu
    if tuple(args.parts) != PARTS:
        words += ["--parts", *args.parts]
    if args.batches:
        words += ["--batches", *map(str, args.batches)]
    if args.width:
        words += ["--width", str(args.width)]
    return " ".join(["megabatch bench", *words])


def _show(record: dict[str, Any]) -> None:
    from megabatch.bench.tables import tables, verdict

    for table in tables(record).values():
        print()
        table.print()
    print()
    for sentence in verdict(record):
        print(textwrap.fill(sentence, 80))


def _write(record: dict[str, Any], folder: Path) -> list[str]:
    from megabatch.bench.figures import figures, page
    from megabatch.display import plots

    folder.mkdir(parents=True, exist_ok=True)
    made = figures(record)
    for name, (_, figure) in made.items():
        plots.save(figure, folder / f"{name}.png", folder / f"{name}.svg")
    (folder / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "bench.html").write_text(page(record, made), "utf-8")
    return ["bench.html", "bench.json", f"{len(made)} plots as PNG and SVG"]


def _ours_is_right(record: dict[str, Any]) -> bool:
    from megabatch.bench.measure import LATE, MEMORY, OK
    from megabatch.bench.tables import OURS

    ours = [r for part in PARTS for r in record[part] if r["system"] in OURS]
    return all(r["status"] in (OK, MEMORY, LATE) for r in ours)
