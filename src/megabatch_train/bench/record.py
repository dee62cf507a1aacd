"""The record of a benchmark and its report, for `megabatch bench` and for the scripts in benchmarks/.

A record is a JSON file with the command, the machine, the versions of all packages and the results. It is saved after every
measurement. A script defines `markdown(record)`, and `draw(record)` if it has a plot; `write_report` writes both beside the
record, and `benchmarks/report.py` rebuilds them on any machine.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megabatch_train import machine
from megabatch_train.display import plots

PATHS = ("--data", "--shards", "--peers")  # "FOLDER" in the recorded command
RESULTS = Path("benchmarks/results")
Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser, name: str, seconds: float | None = None) -> None:
    """Adds the arguments that all benchmarks share; with a time limit in seconds, also the arguments of GPU benchmarks."""
    if seconds is not None:
        told = f"time limit; measurements beyond it are skipped ({seconds:.0f})"
        parser.add_argument("--seconds", type=float, default=seconds, help=told)
        parser.add_argument("--tiny", action="store_true", help="the same code at small sizes: less than a minute on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", default=name, help=f"name of the files ({name})")


def device_of(args: argparse.Namespace) -> str:
    """The GPU, or the CPU for a tiny run; exits with a message otherwise."""
    if torch.cuda.is_available():
        return "cuda"
    if not args.tiny:
        sys.exit("This benchmark needs a CUDA device; --tiny runs anywhere.")
    return "cpu"


class Record:
    """One run: its results so far, and the time that is left."""

    def __init__(self, path: Path, command: str, seconds: float = math.inf, **beginning: Any) -> None:
        self.path, self.seconds, self.started = path, seconds, time.perf_counter()
        about = machine.describe(*machine.PEERS)
        self.contents: dict[str, Any] = {"command": command, "machine": about, "results": [], **beginning}

    @classmethod
    def of_script(cls, script: str, args: argparse.Namespace, seconds: float = math.inf, **beginning: Any) -> "Record":
        """The record of a script in benchmarks/, whose arguments are of `arguments`."""
        command = " ".join(["python", f"benchmarks/{script}.py", *_without_paths(sys.argv[1:])])
        return cls(args.output / f"{args.name}.json", command, seconds, **beginning)

    def __getitem__(self, key: str) -> Any:
        """A part of the record."""
        return self.contents[key]

    def say(self, text: str) -> None:
        """Prints progress, with the time."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def seconds_left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.perf_counter() - self.started)

    def save(self) -> None:
        """Writes the results so far."""
        self.contents["seconds"] = time.perf_counter() - self.started
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.contents, indent=1) + "\n")

    def finish(self, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
        """Saves, writes the report and prints the table."""
        self.save()
        write_report(self.path, text, draw)
        print(text(self.contents))


def _without_paths(words: Sequence[str]) -> list[str]:
    """The arguments of a command that anybody can repeat: no folder of this machine, and no --output."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name = word.partition("=")[0]
        if name in (*PATHS, "--output"):
            if name == word:
                next(left, None)  # its folder
            kept += [name, "FOLDER"] if name in PATHS else []
        else:
            kept.append(word)
    return kept


def write_report(path: Path, text: Callable[[Row], str], draw: Callable[[Row], Any] | None = None) -> None:
    """Writes `.md` and `.svg` beside the record, with the machine and the command. Without matplotlib there is no plot.

    Args:
        path: of the JSON record.
        text: the Markdown of a record.
        draw: the matplotlib figure of a record; None if it would show nothing.
    """
    record = json.loads(path.read_text())
    about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
    path.with_suffix(".md").write_text(f"{text(record)}\n\n{about}")
    if draw is None:
        return
    if not plots.available():
        print("No plot: matplotlib is not installed")
    elif (figure := draw(record)) is not None:
        plots.save(figure, path.with_suffix(".svg"))


def groups(rows: list[Row], *keys: str) -> dict[Hashable, list[Row]]:
    """{values of the keys: rows that have them}, in the order of the rows."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def chip(record: Row) -> str:
    """The GPU, or the CPU of a machine without one."""
    return str(record["machine"]["gpu"] or record["machine"]["cpu"])


def paragraphs(*parts: str) -> str:
    """Markdown paragraphs without the empty ones."""
    return "\n\n".join(part for part in parts if part)


def draw_systems(
    title: str,
    rows: list[Row],
    panels: Mapping[str, Callable[[Row], float | None]],
    colours: Mapping[str, str],
    dashed: Iterable[str] = (),
) -> Any:
    """A figure of the systems against the batch, one panel for each value.

    Args:
        title: of the figure.
        rows: results with a "system" and a batch "B".
        panels: {label of the vertical axis: the value of a row}; a row whose value is None is not drawn.
        colours: {system: colour}, in the order of the lines; systems without a colour get the next free one.
        dashed: systems that are bounds rather than alternatives.
    """
    figure, axes_of = plots.panels(title, len(panels))
    free = iter([colour for colour in plots.PALETTE if colour not in colours.values()])
    names = dict.fromkeys([*(name for name in colours), *(r["system"] for r in rows)])
    chosen = {name: colours.get(name) or next(free, plots.GREY) for name in names if any(r["system"] == name for r in rows)}
    for axes, (label, value) in zip(axes_of, panels.items(), strict=True):
        for name, colour in chosen.items():
            found = [(r["B"], value(r)) for r in rows if r["system"] == name]
            points = sorted((batch, y) for batch, y in found if y is not None)
            plots.line(axes, points, name, colour, linestyle="--" if name in dashed else "-")
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["B"] for r in rows])
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure
