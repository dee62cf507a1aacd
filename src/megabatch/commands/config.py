"""`megabatch config`: all settings of a training run, from the comments beside their definitions."""

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import Any

from megabatch import settings
from megabatch.settings import Setting
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.run import CONFIG

NAME_WIDTH = 27
PAGE = """# Settings

All settings of `megabatch train`, as `megabatch config` prints them; `megabatch config --markdown` makes this page. Set them in
a TOML file (`--config`) or by `--set KEY=VALUE`; the most common have a flag of their own ([training](training.md)). A setting
with an empty default is left out. For the model `small` and the demo data, a recipe changes some defaults; `config.toml` in a
run's folder has the values of that run.
"""


def run(args: argparse.Namespace) -> int:
    """Prints the settings."""
    known = settings.described(TrainConfig)
    if args.markdown:
        print(page(known), end="")
        return 0
    if args.of is not None:
        values = settings.read(Path(args.of) / CONFIG)
        known = [setting._replace(default=_value(values, setting)) for setting in known]
    words = [word.lower() for word in args.words]
    found = [setting for setting in known if all(word in f"{setting.key} {setting.text}".lower() for word in words)]
    if not found:
        raise ValueError(f"no setting has {' and '.join(args.words)} in its name or description; `megabatch config` lists all")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for setting in found:
        lines = textwrap.wrap(f"{setting.default or '(none)'}  {setting.text}", width - NAME_WIDTH - 2)
        print(f"{setting.key:{NAME_WIDTH}}  {lines[0]}")
        for line in lines[1:]:
            print(" " * (NAME_WIDTH + 2) + line)
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
    return settings.written(values) if not isinstance(values, dict) else str(values)
