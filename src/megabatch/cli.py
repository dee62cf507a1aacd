"""The command line: finds the command's module, which says what its arguments are and does the work.

Only the module of the command that is asked for is imported, so that `megabatch info` needs nothing that training does.
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
    "train": "train a model on pairs, on one processor or many GPUs",
    "eval": "recall and ranks of a model on data, and zero-shot classification",
    "search": "the best matches of a text or an image, as a contact sheet",
    "report": "a run on one HTML page: curves, what it finds, configuration",
    "bench": "time and memory of losses and training steps",
    "plan": "the batch that fits, and where the memory goes",
    "info": "versions, devices, backends, and which extras are installed",
}
DESCRIPTION = """
Contrastive training with batches of any size.

  megabatch train                                 two small towers learn emoji and their names: 1 to 2 minutes, two cores
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384
  megabatch search runs/emoji-1 "smiling cat"     what a trained model finds
  megabatch COMMAND --help                        all about a command, with examples
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; mistakes of a user are told in a line, others with their traceback."""
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
        print("MEGABATCH_TRACEBACK=1 shows where it comes from", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"megabatch {chosen}: ended by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser(chosen: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of everything, and that of the command, or of everything again where none was chosen."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megabatch", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"megabatch {megabatch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    made = {name: commands.add_parser(name, help=text, formatter_class=raw) for name, text in COMMANDS.items()}
    return parser, made[chosen] if chosen is not None else parser


class _Terminal(logging.Handler):
    """Standard error as it is when something is said: a progress bar may have put itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _log_to_terminal() -> None:
    log = logging.getLogger("megabatch")
    if not log.handlers:
        log.addHandler(_Terminal())
        log.setLevel(logging.INFO)
