"""`megabatch config`: all settings of a training run. The settings are also read here for the flags of `megabatch train`."""

import argparse
import ast
import shutil
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from megabatch_train import settings
from megabatch_train.commands import describe
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
    describe(parser, DESCRIPTION)
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


# ----------------------------------------------------------------------------------------------------------------------
# Settings for `megabatch train --help`. They are read from the source of the dataclasses, because an import would import torch.


class SourceField(NamedTuple):
    """A setting as its dataclass defines it."""

    annotation: ast.expr
    default: Any  # None for a table
    text: str  # the comment beside it


def read_fields(
    module: str = "megabatch_train.trainer.config", name: str = "TrainConfig", prefix: str = ""
) -> dict[str, SourceField]:
    """Reads all settings of a dataclass and of the dataclasses in it, by their keys, such as "optimizer.lr"."""
    path = resources.files("megabatch_train").joinpath(*module.split(".")[1:])
    source = Path(f"{path}.py").read_text("utf-8")
    lines, classes, origins, aliases = source.splitlines(), {}, {}, {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name], origins[node.name] = node, (module, node.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            origins |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            aliases[node.targets[0].id] = node.value
    found: dict[str, SourceField] = {}
    for field in classes[name].body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or field.value is None:
            continue
        key, hint = f"{prefix}{field.target.id}", field.annotation
        if isinstance(hint, ast.Name) and hint.id in origins:  # a dataclass
            found |= read_fields(*origins[hint.id], prefix=f"{key}.")
            continue
        default = None if isinstance(field.value, ast.Call) else ast.literal_eval(field.value)
        text = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
        found[key] = SourceField(aliases.get(hint.id, hint) if isinstance(hint, ast.Name) else hint, default, text)
    return found
