"""The arguments of `megabatch bench`."""

import argparse
from pathlib import Path

from megabatch.commands.arguments.options import whole

PARTS = ("losses", "levels", "steps")
DESCRIPTION = """
Measures memory and time of losses, of the loss over ranks with fewer levels of tiling, and of
training steps, beside the installed peers (open_clip, Inf-CL, Liger, cut-cross-entropy). Losses
are compared with float64 first, steps with a plain step; a wrong result is not timed. The exit
status is 1 if a result of megabatch is wrong.

  megabatch bench --quick                       small sizes: under a minute on a CPU, two on a GPU
  megabatch bench --parts losses --batches 4096 16384 --width 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch bench`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes: under a minute on a CPU, two on a GPU")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    add("--batches", nargs="+", type=whole, metavar="B", help="batch sizes of the losses, in pairs")
    add("--width", type=whole, metavar="D", help="embedding width of losses and levels")
    add("--cpu", action="store_true", help="use the CPU even if there is a CUDA device")
    files = "folder for bench.html, bench.json and the plots (default: %(default)s)"
    add("--output", type=Path, default=Path("megabatch-bench"), metavar="FOLDER", help=files)
