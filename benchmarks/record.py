"""The record of a benchmark: command, machine and results, saved after every measurement."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megabatch import machine

PATHS = ("--data", "--shards", "--peers")  # "FOLDER" in the recorded command
RESULTS = Path(__file__).resolve().parent / "results"


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

    def __init__(self, script: str, args: argparse.Namespace, seconds: float = math.inf, **beginning: Any) -> None:
        self.path = args.output / f"{args.name}.json"
        self.seconds, self.started = seconds, time.perf_counter()
        command = " ".join(["python", f"benchmarks/{script}.py", *_without_paths(sys.argv[1:])])
        about = machine.describe(*machine.PEERS)
        self.contents: dict[str, Any] = {"command": command, "machine": about, "results": [], **beginning}

    def __getitem__(self, key: str) -> Any:
        """A part of the record."""
        return self.contents[key]

    def say(self, text: str) -> None:
        """Progress, with the time."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.perf_counter() - self.started)

    def save(self) -> None:
        """Writes the results so far."""
        self.contents["seconds"] = time.perf_counter() - self.started
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.contents, indent=1) + "\n")


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
