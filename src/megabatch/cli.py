"""The command line: imports the module of the given command, which defines its arguments and runs it.

No other command's module is imported, so that `megabatch info` does not need the packages for training.
"""

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import megabatch

COMMANDS = {
    "train": "train a model on pairs, on a CPU or on many GPUs",
    "eval": "recall and ranks of a model, and zero-shot classification",
    "search": "the best matches of a text or an image, with a contact sheet",
    "mine": "hard negatives of a trained model, as a table",
    "report": "a run on one HTML page: curves, search results, configuration",
    "bench": "time and memory of losses and training steps",
    "plan": "largest batch, memory and time of a model on given GPUs",
    "info": "versions, devices, backends and installed extras",
}
DESCRIPTION = """
Contrastive training with batches of any size.

  megabatch train                                 two small towers learn emoji and their names: 1 to 2 minutes, two cores
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384
  megabatch search runs/emoji-1 "smiling cat"     search the test data with a trained model
  megabatch COMMAND --help                        options and examples of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status. An error that the user can fix is one line, other errors have a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser, subparser = _parser(chosen)
    if chosen is None:
        parser.parse_args(arguments or ["--help"])
        return 0
    module = importlib.import_module(f"megabatch.commands.{chosen}")
    module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    _log_to_terminal()
    try:
        status: int = module.run(args)
        return status
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        if os.environ.get("MEGABATCH_TRACEBACK"):
            raise
        print(f"megabatch {chosen}: {error}", file=sys.stderr)
        print("set MEGABATCH_TRACEBACK=1 for the traceback", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"megabatch {chosen}: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser(chosen: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The main parser, and the parser of the command; without a command, the main parser twice."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megabatch", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"megabatch {megabatch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    made = {name: commands.add_parser(name, help=text, formatter_class=raw) for name, text in COMMANDS.items()}
    return parser, made[chosen] if chosen is not None else parser


class _Terminal(logging.Handler):
    """Writes to the present `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _log_to_terminal() -> None:
    log = logging.getLogger("megabatch")
    if not log.handlers:
        log.addHandler(_Terminal())
        log.setLevel(logging.INFO)
