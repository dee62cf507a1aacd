"""The command line: imports the module of the given command, which defines the arguments and runs.

Help and version do not import torch. Each function of a command imports what it needs, so `megabatch info` does not need the
packages for training.
"""

import argparse
import difflib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import megabatch
import megabatch_train
from megabatch_train.commands import HelpFormatter
from megabatch_train.machine import let_threads_sleep
from megabatch_train.names import nearest, sanitize, tell

COMMANDS = {
    "train": "train a model on pairs, on a CPU or on many GPUs",
    "eval": "recall and ranks of a model, and zero-shot classification",
    "search": "the best matches of a text or an image, with a contact sheet",
    "embed": "embeddings of data, as a NumPy or Parquet file",
    "export": "a trained model for transformers, open_clip or onnxruntime, with a model card",
    "mine": "hard negatives of a trained model, as a table",
    "report": "a run on one HTML page: curves, search results, configuration",
    "config": "all settings of a training run, with their defaults",
    "bench": "time and memory of losses and training steps",
    "plan": "largest batch, memory and time of a model on given GPUs",
    "info": "versions, devices, backends and installed extras",
    "help": "what --data and MODEL can be",
}
OTHER_NAMES = {  # of options, for suggestions
    **dict.fromkeys(("--learning-rate", "--max-lr", "--base-lr"), "--lr"),
    **dict.fromkeys(("--wd", "--decay"), "--weight-decay"),
    **dict.fromkeys(("--warm-up", "--warmup-steps", "--warmup-ratio"), "--warmup"),
    **dict.fromkeys(("--grad-clip", "--grad-clip-norm", "--max-grad-norm"), "--clip-norm"),
    **dict.fromkeys(("--eval-every", "--eval-steps", "--val-frequency"), "--evaluate-every"),
    **dict.fromkeys(("--num-workers", "--readers"), "--workers"),
    **dict.fromkeys(("--train-data", "--dataset"), "--data"),
    **dict.fromkeys(("--val", "--val-data", "--eval-data"), "--validation"),
    **dict.fromkeys(("--max-steps", "--iterations"), "--steps"),
    **dict.fromkeys(("--num-epochs", "--max-epochs"), "--epochs"),
    **dict.fromkeys(("--output-dir", "--save-dir", "--logs"), "--output"),
    **dict.fromkeys(("--top-k", "--topk"), "-k"),
}
DESCRIPTION = """
Contrastive training with batches of any size.

  megabatch train                                 a demo: emoji and their names, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384
  megabatch search runs/emoji-1 "smiling cat"     search the test data with a trained model
  megabatch COMMAND --help                        options and examples of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status. An error that the user can fix is one line, other errors have a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.excepthook = _print_traceback
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    try:
        return _run(arguments, chosen)
    except BrokenPipeError:  # the reader of our output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        if os.environ.get("MEGABATCH_TRACEBACK"):
            raise
        tell(f"megabatch {chosen}: {_sentence(error)}", sys.stderr)
        if not _is_expected(error):
            print("set MEGABATCH_TRACEBACK=1 for the traceback", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"megabatch {chosen or ''}".rstrip() + ": stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: prints the traceback without credentials and control characters."""
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


def _sentence(error: BaseException) -> str:
    """The message; of the system's errors without their number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _is_expected(error: BaseException) -> bool:
    """Whether the message is meant for the user: raised by this package, or by the system about a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    packages = [Path(package.__file__).parent for package in (megabatch, megabatch_train) if package.__file__]
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(package) for package in packages)


def _run(arguments: list[str], chosen: str | None) -> int:
    parser, subparser = _parser(chosen)
    if chosen is None:
        if arguments and not arguments[0].startswith("-"):
            parser.error(f"no such command: {arguments[0]}{nearest(arguments[0], COMMANDS)}; there are: {', '.join(COMMANDS)}")
        parser.parse_args(arguments or ["--help"])
        return 0
    command = importlib.import_module(f"megabatch_train.commands.{chosen}")
    command.add_arguments(subparser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparser.error(_unknown(unknown, subparser))
    _log_to_terminal()
    if chosen != "bench":  # it measures PyTorch as other programs run it
        let_threads_sleep()
    status: int = command.run(args)
    return status


def _unknown(words: list[str], parser: argparse.ArgumentParser) -> str:
    """What is wrong, and the nearest option."""
    told = f"unrecognized arguments: {sanitize(' '.join(words))}"
    known = {**{option: option for action in parser._actions for option in action.option_strings}, **OTHER_NAMES}
    word = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    near = difflib.get_close_matches(word.replace("_", "-"), known, n=1, cutoff=0.75)
    if near and known[near[0]] in parser._option_string_actions:
        return f"{told}; did you mean {known[near[0]]}?"
    return f"{told}; --set KEY=VALUE sets what has no option, and `megabatch config` lists it" if "--set" in known else told


def _parser(chosen: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The main parser, and the parser of the command; without a command, the main parser twice."""
    parser = argparse.ArgumentParser(prog="megabatch", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"megabatch {megabatch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    made = {name: commands.add_parser(name, help=text, formatter_class=HelpFormatter) for name, text in COMMANDS.items()}
    return parser, made[chosen] if chosen is not None else parser


class _Terminal(logging.Handler):
    """Writes to the present `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record), sys.stderr)


def _has_no_handler(record: logging.LogRecord) -> bool:
    """Whether no logger below the root shows the record."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger is not logging.getLogger():
        if logger.handlers:
            return False
        logger = logger.parent
    return True


def _log_to_terminal() -> None:
    log = logging.getLogger("megabatch")
    if not log.handlers:
        log.addHandler(_Terminal())
        log.setLevel(logging.INFO)
        # open_clip logs by `logging.info`, which would give the root logger a second handler for our lines.
        others = _Terminal(logging.WARNING)
        others.addFilter(_has_no_handler)
        logging.getLogger().addHandler(others)
