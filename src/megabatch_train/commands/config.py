"""`megabatch config`: lists the settings of a training run. `read_fields` reads them for the flags of `megabatch train`."""

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


# ----------------------------------------------------------------------------------------------------------------------
# Settings for `megabatch train --help`. They are read from the source of the dataclasses, because their import needs torch.


class SourceField(NamedTuple):
    """The definition of a setting in the source code of its dataclass."""

    annotation: ast.expr
    default: Any  # None for a table
    text: str  # description: the comment behind the field


def read_fields(
    module: str = "megabatch_train.trainer.config", name: str = "TrainConfig", prefix: str = ""
) -> dict[str, SourceField]:
    """Reads the settings of a dataclass and of nested dataclasses. Returns them by key, such as "optimizer.lr"."""
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
    source_fields: dict[str, SourceField] = {}
    for field in classes[name].body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or field.value is None:
            continue
        key, hint = f"{prefix}{field.target.id}", field.annotation
        if isinstance(hint, ast.Name) and hint.id in origins:  # a dataclass
            source_fields |= read_fields(*origins[hint.id], prefix=f"{key}.")
            continue
        default = None if isinstance(field.value, ast.Call) else ast.literal_eval(field.value)
        text = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
        source_fields[key] = SourceField(aliases.get(hint.id, hint) if isinstance(hint, ast.Name) else hint, default, text)
    return source_fields
