"""Measures small batches on a CPU: five losses and their dense formulas in PyTorch, with one thread and with two threads.

Each system has its own process for each number of threads. The processes take turns, so that a slow moment of the machine does
not affect only one of them, and the median of the rounds counts. First, value and gradients of both systems are compared with
float64. The run fails if a result of megabatch is wrong. Other programs affect every number, so do not use the machine.
"""

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from dense_losses import LOSSES, inputs_of, relative_errors, step_of, truth_of
from torch import Tensor

from megabatch_train.bench.measure import Record, arguments, groups, milliseconds, number_options, paragraphs, with_gradients
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, ratio

OURS, DENSE = "megabatch", "dense PyTorch"

SIZES, WIDTH, THREADS = [64, 256, 1024, 4096], 256, [1, 2]
ROUNDS, LEAST_ROUNDS = 25, 3
SECONDS_A_ROUND = 0.03
SECONDS = 6.0  # for the rounds of a loss at one size; there are at least LEAST_ROUNDS
MOST_ERROR = {"loss": 1e-6, "dx": 2e-5, "dy": 2e-5, "dscale": 1e-4}  # relative to float64


class Worker:
    """A process for one system. Systems do not share a process, because in PyTorch a call can make another call faster."""

    def __init__(self, system: str, threads: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, system, threads), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process raises an EOFError in this process

    def prepare(self, loss: str, B: int, D: int) -> tuple[Tensor, ...]:
        """Returns the value and all gradients of a loss. `time` then measures this loss."""
        self._pipe.send((loss, B, D))
        result: tuple[Tensor, ...] = pickle.loads(self._pipe.recv())
        return result

    def time(self) -> float:
        """Returns the milliseconds of forward and backward."""
        self._pipe.send("time")
        return float(self._pipe.recv())

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, system: str, threads: int) -> None:
    torch.set_num_threads(threads)
    step: Callable[[], Any] = int  # until the first loss is prepared
    while (request := pipe.recv()) is not None:
        if request == "time":
            pipe.send(milliseconds(step, "cpu", SECONDS_A_ROUND))
        else:
            name, B, D = request
            loss, inputs = LOSSES[name][(OURS, DENSE).index(system)], inputs_of(B, D, "cpu")
            step = step_of(loss, inputs)
            pipe.send(pickle.dumps(with_gradients(loss, inputs)))  # the pipe would put tensors in shared memory


def measure(workers: dict[str, Worker], name: str, B: int, D: int, truth: tuple[Tensor, ...], seconds: float) -> dict[str, Any]:
    """Measures errors and times of both systems."""
    errors = {system: relative_errors(worker.prepare(name, B, D), truth) for system, worker in workers.items()}
    rounds: dict[str, list[float]] = {system: [] for system in workers}
    start = time.perf_counter()
    while len(rounds[OURS]) < LEAST_ROUNDS or (len(rounds[OURS]) < ROUNDS and time.perf_counter() - start < seconds):
        for system, worker in workers.items():
            rounds[system].append(worker.time())
    ms = {system: statistics.median(times) for system, times in rounds.items()}
    right = all(error <= most for error, most in zip(errors[OURS], MOST_ERROR.values(), strict=True))
    return {"loss": name, "B": B, "D": D, "ms": ms, "rounds": len(rounds[OURS]), "errors": errors, "right": right}


COLORS = (plots.GREEN, plots.ORANGE, plots.BLUE, plots.VIOLET, plots.OCHRE)
LEGEND = (
    "ms: forward + backward, the median of rounds in which both systems take turns, each in its own process. Dense: all "
    "logits, and F.cross_entropy, F.logsigmoid or logsumexp. Errors: relative to float64."
)


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    rows = record["results"]
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    headings = ["loss", "B"]
    for count in counts:
        headings += [f"megabatch, ms, {_threads(count)}", "dense PyTorch, ms", "dense ÷ time"]
    headings += ["loss error", "dense", "largest gradient error", "dense"]
    table = []
    for (loss, B), by_threads in groups(rows, "loss", "B").items():  # type: ignore[misc]
        cells: list[object] = [loss, f"{B:,}"]
        for row in by_threads:
            ms = row["ms"]
            cells += [f"{ms[OURS]:.3f}", f"{ms[DENSE]:.3f}", ratio(ms[DENSE], ms[OURS])]
        errors = [row["errors"] for row in by_threads]
        cells += [cell(max(e[system][0] for e in errors), ".0e") for system in (OURS, DENSE)]
        cells += [cell(max(max(e[system][1:]) for e in errors), ".0e") for system in (OURS, DENSE)]
        table.append(cells)
    wrong = [f"{row['loss']} at {row['B']:,}" for row in rows if not row["right"]]
    check_sentence = (
        f"{len(rows)} results of megabatch were compared with float64. Wrong results: {', '.join(wrong) or 'none'}."
    )
    title = f"Small batches on a CPU, in float32, for B pairs of embeddings with {rows[0]['D']} dimensions."
    return paragraphs(title, TextTable(headings, table).markdown(), LEGEND, check_sentence)


def draw(record: dict[str, Any]) -> Any:
    """Draws the time of dense PyTorch ÷ the time of megabatch, against the batch size."""
    rows = record["results"]
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    title = f"Small batches, float32, D = {rows[0]['D']}; {record['machine']['cpu']}"
    figure, panels = plots.panels(title, len(counts))
    for axes, count in zip(panels, counts, strict=True):
        measured = [row for row in rows if row["threads"] == count]
        for (loss,), color in zip(groups(measured, "loss"), COLORS, strict=True):  # type: ignore[misc]
            points = [(row["B"], row["ms"][DENSE] / row["ms"][OURS]) for row in measured if row["loss"] == loss]
            plots.line(axes, points, loss, color)
        axes.axhline(1, color=plots.INK, linewidth=1)
        axes.set(ylabel=f"dense ÷ time, {_threads(count)}", ylim=(0, None))
        plots.batch_axis(axes, [row["B"] for row in measured])
        plots.label_lines(axes)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number_options(parser, sizes=(SIZES, "batch sizes, in pairs"), width=(WIDTH, "embedding dimension"))
    number_options(parser, threads=(THREADS, "numbers of threads"))
    parser.add_argument("--tiny", action="store_true", help="run the same code with small sizes")
    arguments(parser, "small_cpu")
    args = parser.parse_args()
    sizes, width, threads = ([8, 16], 8, [1]) if args.tiny else (args.sizes, args.width, args.threads)
    record = Record.of_script("small_cpu", args)
    workers = {count: {system: Worker(system, count) for system in (OURS, DENSE)} for count in threads}
    for B in sizes:
        for name, (_, dense) in LOSSES.items():
            truth = truth_of(dense, inputs_of(B, width, "cpu"))
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
    record.finish(markdown, draw)
    return 0 if all(row["right"] for row in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
