"""`megabatch config`: lists the settings of a training run."""

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import Any

from megabatch_train import settings
from megabatch_train.commands import describe
from megabatch_train.names import redact, tell
from megabatch_train.settings import Setting

NAME_WIDTH = 27
PAGE = """# Settings

This page lists all settings of `megabatch train`. `megabatch config` prints the same list.
Set a setting in a TOML file (`--config`) or by `--set KEY=VALUE`.
The most common settings have a [flag](command_line.md#train).

- A setting with an empty default has no value, unless its description names a default.
- The model `small`, the demos, trained weights and LoRA have other defaults for some settings
  ([Learning rate](training.md#learning-rate-and-batch-size)).
- `config.toml` in the run directory contains the values of a run.

`megabatch config --markdown` writes this page.
"""
DESCRIPTION = """
Lists the settings of `megabatch train` with their defaults. Set them in a TOML file (--config) or
with --set KEY=VALUE. The most common settings have a flag, too (megabatch train --help).

  megabatch config                     list all settings
  megabatch config optimizer           list the settings that contain a word
  megabatch config --of runs/emoji-1   list the values of a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch config`."""
    describe(parser, DESCRIPTION)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="list only settings whose name or description contains all words"
    )
    parser.add_argument("--of", metavar="RUN", help="folder of a run; lists its values instead of the defaults")
    parser.add_argument("--markdown", action="store_true", help="print the list as Markdown, as in docs/settings.md")


def run(args: argparse.Namespace) -> int:
    """Prints the settings that contain all words."""
    from megabatch_train.trainer.config import TrainConfig
    from megabatch_train.trainer.run import CONFIG

    all_settings = settings.describe_fields(TrainConfig)
    if args.markdown:
        print(page(all_settings), end="")
        return 0
    if args.of is not None:
        values = settings.read(Path(args.of) / CONFIG)
        all_settings = [setting._replace(default=redact(_format_value_of(values, setting))) for setting in all_settings]
    words = [word.lower() for word in args.words]
    matching = [setting for setting in all_settings if all(word in f"{setting.key} {setting.text}".lower() for word in words)]
    if not matching:
        raise ValueError(
            f"no setting contains {' and '.join(args.words)} in its name or description; `megabatch config` lists all"
        )
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for setting in matching:
        lines = textwrap.wrap(f"{setting.default or '(none)'}  {setting.text}", width - NAME_WIDTH - 2)
        tell(f"{setting.key:{NAME_WIDTH}}  {lines[0]}")
        for line in lines[1:]:
            tell(" " * (NAME_WIDTH + 2) + line)
    return 0


def page(all_settings: list[Setting]) -> str:
    """Returns the page docs/settings.md."""
    parts, last_group = [PAGE], None
    for setting in all_settings:
        group = setting.key.partition(".")[0] if "." in setting.key else "general"
        if group != last_group:
            parts.append(f"\n## {group.capitalize()}\n\n| setting | value | default | meaning |\n|---|---|---|---|\n")
        last_group = group
        default = f"`{setting.default}`" if setting.default else ""
        parts.append(f"| `{setting.key}` | {setting.kind} | {default} | {setting.text} |\n")
    return "".join(parts)


def _format_value_of(values: Any, setting: Setting) -> str:
    for part in setting.key.split("."):
        if not isinstance(values, dict) or part not in values:
            return ""
        values = values[part]
    return settings.format_value(values) if not isinstance(values, dict) else str(values)
