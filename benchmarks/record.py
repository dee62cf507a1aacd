"""What a benchmark writes down while it runs: the command, the machine, and results after every measurement."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megabatch import machine

PATHS = ("--output", "--data")  # where things are is nobody's matter
RESULTS = Path(__file__).resolve().parent / "results"


def arguments(parser: argparse.ArgumentParser, name: str, seconds: float) -> None:
    """Those that all of these benchmarks have."""
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of all of it; what is left is skipped ({seconds:.0f})")
    parser.add_argument(
        "--tiny", action="store_true", help="less than a minute on a CPU: the same code on little of everything"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", default=name, help=f"of the files written there ({name})")


def device_of(args: argparse.Namespace) -> str:
    """The GPU, or a CPU for a tiny run; ends the program where neither will do."""
    if torch.cuda.is_available():
        return "cuda"
    if not args.tiny:
        sys.exit("This benchmark needs a CUDA device; --tiny runs anywhere.")
    return "cpu"


class Record:
    """One run: what it has measured, and how much time is left."""

    def __init__(self, script: str, args: argparse.Namespace, seconds: float, **beginning: Any) -> None:
        self.path = args.output / f"{args.name}.json"
        self.seconds, self.started = seconds, time.perf_counter()
        command = " ".join(["python", f"benchmarks/{script}.py", *_without_paths(sys.argv[1:])])
        about = machine.describe(*machine.PEERS)
        self.contents: dict[str, Any] = {"command": command, "machine": about, "results": [], **beginning}

    def __getitem__(self, key: str) -> Any:
        """A part of what has been written down."""
        return self.contents[key]

    def say(self, text: str) -> None:
        """Progress, with the time."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        """Seconds of the budget."""
        return self.seconds - (time.perf_counter() - self.started)

    def save(self) -> None:
        """What there is so far."""
        self.contents["seconds"] = time.perf_counter() - self.started
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.contents, indent=1) + "\n")


def _without_paths(words: Sequence[str]) -> list[str]:
    kept, hidden = [], False
    for word in words:
        if not hidden and word.split("=")[0] not in PATHS:
            kept.append(word)
        hidden = word in PATHS
    return kept
