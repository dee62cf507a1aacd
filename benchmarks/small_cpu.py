"""Small batches on a CPU: five losses beside their dense forms in PyTorch, with one thread and with two.

Each system has a process of its own for each number of threads. The processes take turns, so that a slow moment of the machine
does not affect only one of them, and the median of the rounds counts. Value and gradients of both are compared with float64
first; the run fails if ours are wrong. Other programs affect every number, so leave the machine alone.

Writes a JSON file; `small_cpu_report.py` makes the table and the plot of it.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from dense_losses import LOSSES, data, relative_errors, truth_of
from record import Record, arguments
from small_cpu_report import DENSE, OURS, report
from small_cpu_worker import Worker

from megabatch.commands.arguments.options import whole

SIZES, WIDTH, THREADS = [64, 256, 1024, 4096], 256, [1, 2]
ROUNDS, LEAST_ROUNDS = 25, 3
SECONDS = 6.0  # for the rounds of a loss at one size, of which there are at least LEAST_ROUNDS
MOST_ERROR = {"loss": 1e-6, "dx": 2e-5, "dy": 2e-5, "dscale": 1e-4}  # relative to float64


def measure(workers: dict[str, Worker], name: str, B: int, D: int, truth: list[torch.Tensor], seconds: float) -> dict[str, Any]:
    """Errors and times of both systems."""
    errors = {system: relative_errors(worker.prepare(name, B, D), truth) for system, worker in workers.items()}
    rounds: dict[str, list[float]] = {system: [] for system in workers}
    begun = time.perf_counter()
    while len(rounds[OURS]) < LEAST_ROUNDS or (len(rounds[OURS]) < ROUNDS and time.perf_counter() - begun < seconds):
        for system, worker in workers.items():
            rounds[system].append(worker.time())
    ms = {system: statistics.median(times) for system, times in rounds.items()}
    right = all(error <= most for error, most in zip(errors[OURS], MOST_ERROR.values(), strict=True))
    return {"loss": name, "B": B, "D": D, "ms": ms, "rounds": len(rounds[OURS]), "errors": errors, "right": right}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=whole, default=SIZES, metavar="B", help="pairs (64 256 1024 4096)")
    parser.add_argument("--width", type=whole, default=WIDTH, metavar="D", help=f"embedding width ({WIDTH})")
    parser.add_argument("--threads", nargs="+", type=whole, default=THREADS, metavar="T", help="threads (1 2)")
    parser.add_argument("--tiny", action="store_true", help="the same code at small sizes")
    arguments(parser, "small_cpu")
    args = parser.parse_args()
    sizes, width, threads = ([8, 16], 8, [1]) if args.tiny else (args.sizes, args.width, args.threads)
    record = Record("small_cpu", args)
    workers = {count: {system: Worker(system, count) for system in (OURS, DENSE)} for count in threads}
    for B in sizes:
        for name, (_, dense) in LOSSES.items():
            truth = truth_of(dense, data(B, width, torch.float32, "cpu"))
            for count, both in workers.items():
                row = measure(both, name, B, width, truth, 0.0 if args.tiny else SECONDS) | {"threads": count}
                record["results"].append(row)
                ms, right = row["ms"], "" if row["right"] else ", WRONG"
                record.say(
                    f"{name}, {B:,} pairs, threads: {count}: {ms[OURS]:.3f} ms, dense ÷ time {ms[DENSE] / ms[OURS]:.2f}{right}"
                )
            record.save()
    for both in workers.values():
        for worker in both.values():
            worker.close()
    report(record.path)
    print(record.path.with_suffix(".md").read_text())
    return 0 if all(row["right"] for row in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
