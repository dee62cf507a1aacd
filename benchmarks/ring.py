"""The loss over ranks on one CPU: memory of each rank, time and bytes sent, beside open_clip's losses and Inf-CL's exchange.

This is the ablation of Inf-CL's table 4. Ranks are processes that share the cores, so the time shows how much work there is
in all, not how it scales. Every measurement starts fresh processes. The loss and sampled rows of both gradients, averaged over
ranks as DDP would, are compared with float64 first. Bytes are counted where they are sent.
"""

import argparse
import sys
from dataclasses import asdict

from record import Record, arguments
from ring_report import markdown, report
from ring_systems import ABOUT, SYSTEMS

from megabatch.bench import levels
from megabatch.bench.accuracy import ClipTruth, pairs, truth_of
from megabatch.bench.measure import OK
from megabatch.bench.processes import fresh_process
from megabatch.commands.arguments.options import whole

BATCH, WIDTH, WORLDS = 8192, 256, [1, 2, 4, 8]


def truth(batch: int, width: int) -> ClipTruth:
    """Runs in a process of its own."""
    return truth_of(*pairs(batch, width))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=whole, nargs="+", default=WORLDS, metavar="R", help="numbers of ranks (1 2 4 8)")
    parser.add_argument("--batch", type=whole, default=BATCH, metavar="B", help=f"pairs of all ranks together ({BATCH})")
    parser.add_argument("--width", type=whole, default=WIDTH, metavar="D", help=f"embedding width ({WIDTH})")
    parser.add_argument("--repeats", type=whole, default=3, metavar="N", help="timed steps; the fastest counts (3)")
    arguments(parser, "ring")
    args = parser.parse_args()
    record = Record("ring", args, batch=args.batch, width=args.width)
    record.say("float64 reference")
    right = fresh_process(truth, args.batch, args.width)
    for world in args.worlds:
        for name in ABOUT:
            record.say(f"{world} ranks: {name}")
            (result,) = levels.measure({name: SYSTEMS[name]}, world, args.batch, args.width, args.repeats, right)
            if name in (levels.VANILLA, levels.LOCAL):
                result.sent = None  # collectives are not counted
            record["results"].append({"world": world, **asdict(result)})
            record.save()
    report(record.path)
    print(markdown(record.contents))
    return 0 if all(result["status"] == OK for result in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
