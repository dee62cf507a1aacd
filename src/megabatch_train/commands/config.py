"""`megabatch config`: all settings of a training run, from the comments beside their definitions."""

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import Any

from megabatch_train import settings
from megabatch_train.names import redact, tell
from megabatch_train.settings import Setting

NAME_WIDTH = 27
PAGE = """# Settings

All settings of `megabatch train`, as `megabatch config` prints them; `megabatch config --markdown` makes this page. Set them in
a TOML file (`--config`) or by `--set KEY=VALUE`; the most common have a flag of their own ([training](training.md)). A setting
with an empty default is left out. For the model `small` and the demo data, a recipe changes some defaults; `config.toml` in a
run's folder has the values of that run.
"""
DESCRIPTION = """
Lists the settings of `megabatch train`, with their defaults. Set them in a TOML file (--config) or
by --set KEY=VALUE; many have a flag of their own.

  megabatch config                     all settings
  megabatch config optimizer           settings with this word in their name or description
  megabatch config --of runs/emoji-1   the values of a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch config`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="WORD", help="show settings with all of these words")
    parser.add_argument("--of", metavar="RUN", help="folder of a run whose values are shown instead of the defaults")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/settings.md")


def run(args: argparse.Namespace) -> int:
    """Prints the settings."""
    from megabatch_train.trainer.config import TrainConfig
    from megabatch_train.trainer.run import CONFIG

    known = settings.describe_fields(TrainConfig)
    if args.markdown:
        print(page(known), end="")
        return 0
    if args.of is not None:
        values = settings.read(Path(args.of) / CONFIG)
        known = [setting._replace(default=redact(_value(values, setting))) for setting in known]
    words = [word.lower() for word in args.words]
    found = [setting for setting in known if all(word in f"{setting.key} {setting.text}".lower() for word in words)]
    if not found:
        raise ValueError(f"no setting has {' and '.join(args.words)} in its name or description; `megabatch config` lists all")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for setting in found:
        lines = textwrap.wrap(f"{setting.default or '(none)'}  {setting.text}", width - NAME_WIDTH - 2)
        tell(f"{setting.key:{NAME_WIDTH}}  {lines[0]}")
        for line in lines[1:]:
            tell(" " * (NAME_WIDTH + 2) + line)
    return 0


def page(known: list[Setting]) -> str:
    """The page of the documentation."""
    parts, before = [PAGE], None
    for setting in known:
        group = setting.key.partition(".")[0] if "." in setting.key else "general"
        if group != before:
            parts.append(f"\n## {group.capitalize()}\n\n| setting | value | default | |\n|---|---|---|---|\n")
        before = group
        default = f"`{setting.default}`" if setting.default else ""
        parts.append(f"| `{setting.key}` | {setting.kind} | {default} | {setting.text} |\n")
    return "".join(parts)


def _value(values: Any, setting: Setting) -> str:
    for part in setting.key.split("."):
        if not isinstance(values, dict) or part not in values:
            return ""
        values = values[part]
    return settings.format_value(values) if not isinstance(values, dict) else str(values)
