"""The command line. Imports the module of the given command, which defines the arguments and runs the command.

`--help` and `--version` do not import torch. Each function of a command imports what it needs, so `megabatch info` does not
need the packages for training.
"""

import argparse
import difflib
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
from megabatch_train.commands import HelpFormatter, find_command
from megabatch_train.machine import let_threads_sleep
from megabatch_train.names import nearest, sanitize, tell

COMMANDS = {
    "train": "train a model on pairs, on a CPU or on many GPUs",
    "eval": "measure recall and ranks of a model, or its zero-shot accuracy",
    "search": "find the best matches of a text or an image",
    "data": "read data once, and report broken samples, sizes, duplicates and the reading speed",
    "embed": "write embeddings of data to a NumPy or Parquet file",
    "export": "convert a trained model for transformers, open_clip or onnxruntime",
    "mine": "find hard negatives with a trained model, and write them to a table",
    "report": "write a report of a run: one HTML page with curves and search results",
    "config": "list the settings of a training run with their defaults",
    "bench": "measure time and memory of losses and training steps",
    "plan": "estimate the largest batch, the memory and the time of a model on given GPUs",
    "info": "print versions, devices, backends and installed extras",
    "help": "describe the values of --data and MODEL",
}
OTHER_NAMES = {  # option of another program → option of megabatch, which an error message suggests
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

  megabatch train                                 train the demo on emoji, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384
  megabatch search runs/emoji-1 "smiling cat"     search the test data with a trained model
  megabatch COMMAND --help                        options and examples of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Expected exceptions, such as a `ValueError`, are printed in one line. Other exceptions print a traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.excepthook = _print_traceback
    command_name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    try:
        return _run(arguments, command_name)
    except BrokenPipeError:  # the process that reads the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        if os.environ.get("MEGABATCH_TRACEBACK"):
            raise
        tell(f"megabatch {command_name}: {_message_of(error)}", sys.stderr)
        if not _is_expected(error):
            print("set MEGABATCH_TRACEBACK=1 for the traceback", file=sys.stderr)
        return 1
    except RecursionError:
        if os.environ.get("MEGABATCH_TRACEBACK"):
            raise
        tell(
            f"megabatch {command_name}: a JSON or TOML file is nested too deeply; MEGABATCH_TRACEBACK=1 shows where", sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print(f"megabatch {command_name or ''}".rstrip() + ": stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the traceback without credentials and control characters. It replaces `sys.excepthook`."""
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


def _message_of(error: BaseException) -> str:
    """Returns the message of an error. For an error of the operating system, the message does not include the error number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _is_expected(error: BaseException) -> bool:
    """Whether the message is written for users, because this package raised the error, or the operating system for a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    packages = [Path(package.__file__).parent for package in (megabatch, megabatch_train) if package.__file__]
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(package) for package in packages)


def _run(arguments: list[str], command_name: str | None) -> int:
    parser, subparser = _parser(command_name)
    if command_name is None:
        if arguments and not arguments[0].startswith("-"):
            parser.error(f"no such command: {arguments[0]}{nearest(arguments[0], COMMANDS)}; commands: {', '.join(COMMANDS)}")
        parser.parse_args(arguments or ["--help"])
        return 0
    command = find_command(command_name)
    command.add_arguments(subparser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparser.error(_describe_unknown(unknown, subparser))
    _log_to_terminal()
    if command_name != "bench":  # the benchmark measures PyTorch with the default waiting policy
        let_threads_sleep()
    status: int = command.run(args)
    return status


def _describe_unknown(words: list[str], parser: argparse.ArgumentParser) -> str:
    """Returns the message for unknown arguments, with the most similar option."""
    message = f"unrecognized arguments: {sanitize(' '.join(words))}"
    names = {**{option: option for action in parser._actions for option in action.option_strings}, **OTHER_NAMES}
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    similar = difflib.get_close_matches(option.replace("_", "-"), names, n=1, cutoff=0.75)
    if similar and names[similar[0]] in parser._option_string_actions:
        return f"{message}; did you mean {names[similar[0]]}?"
    return f"{message}; other settings need --set KEY=VALUE (see `megabatch config`)" if "--set" in names else message


def _parser(command_name: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Returns the main parser and the parser of the command. Without a command, it returns the main parser twice."""
    parser = argparse.ArgumentParser(prog="megabatch", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"megabatch {megabatch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    subparsers = {name: commands.add_parser(name, help=text, formatter_class=HelpFormatter) for name, text in COMMANDS.items()}
    return parser, subparsers[command_name] if command_name is not None else parser


class _Terminal(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record), sys.stderr)


def _has_no_handler(record: logging.LogRecord) -> bool:
    """Whether no logger below the root logger has a handler for the record."""
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
        # open_clip calls `logging.info`. If the root logger had no handler, this call would add one that repeats our lines.
        root_handler = _Terminal(logging.WARNING)
        root_handler.addFilter(_has_no_handler)
        logging.getLogger().addHandler(root_handler)
