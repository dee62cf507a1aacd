"""Measures time and memory of the CLIP loss on a CPU: megabatch, the dense loss of open_clip, and chunks with checkpointing.

Every measurement is a fresh process with inputs from a fixed seed. First, the loss and sampled rows of both gradients are
compared with float64. A wrong result is not timed. The systems take turns, so that a slow moment of the machine does not affect
only one of them. Other programs affect every number, so do not use the machine while the benchmark runs.

    python benchmarks/loss_cpu.py --batches 1024 2048 4096 --rounds 1 --output demo        a quick run
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from megabatch.world import available_memory
from megabatch_train.bench.losses import CHUNKS, DENSE, MEGABATCH, ClipTruth, LossResult, measure_one, pairs, truth_of
from megabatch_train.bench.measure import FAILED, MEMORY, OK, ProcessError, Record, arguments, fresh_process, number_options
from megabatch_train.bench.report import draw_losses, losses_table
from megabatch_train.display import plots

SYSTEMS = (MEGABATCH, DENSE, CHUNKS)
BATCHES, WIDTH = [64, 256, 1024, 2048, 4096, 8192, 16384, 32768], 512
REPEAT_SECONDS = 2.0  # time to measure in one process; at least one step is timed
MEMORY_SHARE = 0.9  # fraction of the available memory; a loss that needs more is out of memory


def measure(system: str, batch: int, width: int, right: ClipTruth) -> LossResult:
    """Measures a system. Runs in a fresh process."""
    return measure_one(system, pairs(batch, width), right, "cpu", REPEAT_SECONDS)


def truth(batch: int, width: int) -> ClipTruth:
    """Returns the reference. Runs in a fresh process."""
    return truth_of(*pairs(batch, width))


def one_round(system: str, batch: int, width: int, right: ClipTruth) -> LossResult:
    available = available_memory()
    limit = None if available is None else int(MEMORY_SHARE * available)
    try:
        return fresh_process(measure, system, batch, width, right, memory_limit=limit)
    except ProcessError as error:  # the operating system may have killed it for its memory; the others are still measured
        return LossResult(system, batch, f"{FAILED}: {error}")


def best(rounds: list[LossResult]) -> LossResult:
    """Returns the first failure, or else the fastest round with the largest peak of all rounds."""
    failures = [result for result in rounds if result.status != OK]
    if failures:
        return failures[0]
    fastest = min(rounds, key=lambda result: result.seconds)
    fastest.peak = max(result.peak for result in rounds)
    return fastest


def _as_bench(record: dict[str, Any]) -> dict[str, Any]:
    """Converts the record to the form of `megabatch bench`."""
    return record | {"device": "cpu", "dtype": "float32", "losses": record["results"], "products": []}


def markdown(record: dict[str, Any]) -> str:
    """Returns the table of `megabatch bench`."""
    return losses_table(_as_bench(record)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Draws time and memory against the batch size."""
    about = f"{record['machine']['cpu']}, {record['machine']['cores']} cores"
    title = f"CLIP loss, forward and backward, float32, D = {record['width']}; {about}"
    figure, panels = plots.panels(title, 2)
    for axes, memory in zip(panels, (False, True), strict=True):
        draw_losses(axes, _as_bench(record), memory=memory)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number_options(parser, batches=(BATCHES, "batch sizes, in pairs"), width=(WIDTH, "embedding dimension"))
    number_options(parser, rounds=(None, "fresh processes for each number (default: 3, or 1 above 16384 pairs)"))
    arguments(parser, "loss_cpu")
    args = parser.parse_args()
    record = Record.of_script("loss_cpu", args, width=args.width)
    for batch in sorted(set(args.batches)):
        record.say(f"{batch:,} pairs: float64 reference")
        right = fresh_process(truth, batch, args.width)
        rounds: dict[str, list[LossResult]] = {system: [] for system in SYSTEMS}
        for i in range(args.rounds or (3 if batch <= 16384 else 1)):
            for system in SYSTEMS:
                record.say(f"{batch:,} pairs, round {i + 1}: {system}")
                rounds[system].append(one_round(system, batch, args.width, right))
        record["results"].extend(asdict(best(results)) for results in rounds.values())
        record.save()
    record.finish(markdown, draw)
    return 0 if all(result["status"] in (OK, MEMORY) for result in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
