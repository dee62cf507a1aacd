"""The commands that need only a page of code: `megabatch info`, `help`, `config`, `report` and `export`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import __version__
from megabatch_train import commands, machine, settings
from megabatch_train.commands import MODEL_HELP, Command, add_json, add_trust, describe, print_json
from megabatch_train.names import redact, tell
from megabatch_train.settings import Setting

if TYPE_CHECKING:
    import torch

    from megabatch_train.display import tables
    from megabatch_train.towers import Pair

# ----------------------------------------------------------------------------------------------------------------------
# `megabatch info`: prints versions, devices, backends, installed extras, and the rules that choose the path of a loss.

LABELS = {  # labels for keys of `machine.describe`
    "cpu": "CPU",
    "cpu_instructions": "CPU instructions",
    "memory_bytes": "memory",
    "gpu": "GPU",
    "gpus": "GPUs",
    "gpu_memory_bytes": "GPU memory",
    "python": "Python",
    "cuda": "CUDA",
}
_OLDER_PYTHON = re.compile(r"""python_version < ["']([\d.]+)["']""")
_REQUIREMENT = re.compile(r"""^([\w.-]+)(?:\[[^\]]*\])?[^;]*;\s*.*extra == ["']([\w-]+)["']""")
INFO_DESCRIPTION = """
Prints versions, devices, the default backend of each device, the installed extras, and the rules
that choose how a loss is computed. Include the output in a bug report. It contains no names of
hosts or users, and no paths.

  megabatch info
"""


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch info`."""
    describe(parser, INFO_DESCRIPTION)
    add_json(parser, "the information")


def run_info(args: argparse.Namespace) -> int:
    """Prints the information in two columns, then the rules."""
    if args.json:
        rules = describe_paths()
        print_json(
            {
                "machine": machine.describe() | {"megabatch": __version__},
                "backends": {name.removeprefix("backend of "): text for name, text in _list_backends()},
                "extras": dict(_list_extras()),
                "rules": [dict(zip(rules.headings, row, strict=True)) for row in rules.rows],
            }
        )
        return 0
    sections = [_describe_machine(), _list_backends(), _list_extras()]
    width = max(len(name) for rows in sections for name, _ in rows)
    print("\n\n".join("\n".join(f"{name:{width}}  {value}" for name, value in rows) for rows in sections))
    print(f"\n{describe_paths().text()}")
    return 0


def describe_paths() -> tables.TextTable:
    """Returns the table of the rules that choose the path of a loss."""
    from megabatch import dispatch
    from megabatch_train.display import tables

    return tables.TextTable(
        list(dispatch.RULE_COLUMNS),
        [list(row) for row in dispatch.describe_rules()],
        title="How a loss is computed: the first row that applies is used",
        notes='Options: reduction="none" (over ranks also "sum"), label smoothing, negatives, margin, log_q, guide, contrasts.',
        names=tuple(range(len(dispatch.RULE_COLUMNS))),
    )


def _describe_machine() -> list[tuple[str, str]]:
    """Returns the hardware and the versions that are known."""
    values = machine.describe() | {"megabatch": __version__}
    return [(LABELS.get(name, name), _format_value(name, value)) for name, value in values.items() if value is not None]


def _format_value(name: str, value: str | int) -> str:
    from megabatch_train.display import tables

    return tables.size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _list_backends() -> list[tuple[str, str]]:
    """Returns the default backend of each device."""
    import torch

    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        devices += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return [(f"backend of {device}", _describe_backend(torch.device(device))) for device in devices]


def _list_extras() -> list[tuple[str, str]]:
    """Returns each extra with its missing packages."""
    if machine.version("megabatch") is None:
        return [("extras", "unknown, because megabatch is not installed (pip install -e .)")]
    rows = []
    for extra, packages in sorted(read_extras().items()):
        missing = [package for package in packages if machine.version(package) is None]
        rows.append((extra, f"missing: {', '.join(missing)}" if missing else "installed"))
    return rows


def read_extras() -> dict[str, list[str]]:
    """Returns the packages of each extra, from the metadata of the installed package."""
    packages: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("megabatch") or []:
        match, python_limit = _REQUIREMENT.match(line), _OLDER_PYTHON.search(line)
        if python_limit is not None and sys.version_info >= tuple(map(int, python_limit[1].split("."))):
            continue  # the standard library of this Python contains it
        if match is not None and match[1] != "megabatch":
            packages.setdefault(match[2], []).append(match[1])
    return packages


def _describe_backend(device: torch.device) -> str:
    from megabatch import dispatch
    from megabatch.tiles.block import BFLOAT16

    if device.type == "cpu":
        return f"{dispatch.default_engine(BFLOAT16, device)}; the Triton kernels need an NVIDIA GPU"
    reason = dispatch.why_not_triton(BFLOAT16, device)
    return str(dispatch.default_engine(BFLOAT16, device)) + ("" if reason is None else f"; no triton, because {reason}")


# ----------------------------------------------------------------------------------------------------------------------
# `megabatch help`: describes the values of --data and MODEL.

DATA_TOPIC = """
--data names the pairs. Possible values are:

  pairs.csv                   a table with one pair per row (.csv, .tsv, .jsonl, .parquet), a folder
                              with a table, or a pattern such as "data/train-*.parquet"
  tones.csv                   a table of recordings and texts, with the columns audio and caption
  photos/                     a folder with a caption file for each image (dog.jpg and dog.txt, or
                              dog.jpg and dog.json)
  flowers/                    one subfolder per class; the name of the subfolder is the caption
  "data/{00000..00099}.tar"   webdataset shards, a pattern such as "data/*.tar", or their folder
  s3://bucket/pairs.csv       tables and shards by URL: s3://, gs://, hf://, https://
  datasets:PATH@SPLIT         a Hugging Face dataset (default split: train), or a folder that
                              Dataset.save_to_disk wrote
  "3 * a.csv + 1 * b/*.tar"   a mixture: three pairs of the first source for one pair of the second
  emoji                       demo data: drawings by two artists and their names
  wordnet                     demo data: words and their definitions

`megabatch embed` and `megabatch search` also accept a folder of images without captions.

--columns assigns columns of a table to roles. By default, megabatch recognizes common names of
columns, such as image and caption, or query and document.

  image=NAME text=NAME        pairs of an image and a text
  query=NAME document=NAME    pairs of two texts
  negative=NAME               hard negatives for training; repeat it for each column
  label=NAME                  class of a pair, for training with --loss sup_con
  score=NAME                  similarity of two texts, for evaluation
  query_image=NAME            image of a query, of a document or of a hard negative, for
  document_image=NAME         vision-language models; a side can have a text, an image
  negative_image=NAME         or both
  negative=                   do not read a column of this role (negative, label, score)

  megabatch train --data pairs.csv --columns image=file text=description
  megabatch train --data triples.csv --loss info_nce --columns query=q document=a negative=worse

More: https://github.com/megabatch/megabatch/blob/main/docs/data.md
"""
MODELS_TOPIC = """
MODEL and --model name a pair of encoders (towers), for images and texts or for texts and texts:

  small                           a convolutional network and a bag of n-grams, for a CPU
  open_clip:ViT-B-32              a model of open_clip with random weights, for images and texts
  open_clip:ViT-B-32@WEIGHTS      a model of open_clip with trained weights
  open_clip:FILE.json             a model of open_clip from its config file
  hf:NAME                         one transformers encoder with its weights, for both texts,
                                  or a transformers model of images and texts, such as CLIP,
                                  or of recordings and texts (CLAP),
                                  or a vision-language model, such as Qwen3-VL
  hf:IMAGES+TEXTS                 two transformers encoders, for images and texts
  hf-config:FOLDER                like hf:NAME, but with random weights, from FOLDER/config.json
  python:MODULE:FUNCTION          towers of your own, for any data: the result of a function, such
                                  as python:package.module:build
  hf-config:IMAGES+TEXTS          like hf:IMAGES+TEXTS, but with random weights, from two folders

Commands that use a trained model also accept:

  runs/emoji-1                    the last weights of a run
  runs/emoji-1/best               the weights with the best evaluation
  runs/emoji-1/checkpoints/step_00000100   a checkpoint

  megabatch train --data pairs.csv --model open_clip:ViT-B-32
  megabatch eval open_clip:ViT-B-32@laion2b_s34b_b79k --data pairs.csv

More: https://github.com/megabatch/megabatch/blob/main/docs/training.md
"""
TOPICS = {"data": DATA_TOPIC, "models": MODELS_TOPIC}
HELP_DESCRIPTION = """
Describes the values of --data, --columns, MODEL and --model.

  megabatch help data
  megabatch help models
"""


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch help`."""
    describe(parser, HELP_DESCRIPTION)
    parser.add_argument("topic", nargs="?", choices=TOPICS, metavar="TOPIC", help="data or models (default: print both)")


def run_help(args: argparse.Namespace) -> int:
    """Prints the topic."""
    texts = [TOPICS[args.topic]] if args.topic else list(TOPICS.values())
    print("\n".join(text.strip("\n") + "\n" for text in texts), end="")
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# `megabatch config`: lists the settings of a training run.

NAME_WIDTH = 27
SETTINGS_PAGE = """# Settings

This page lists all settings of `megabatch train`. `megabatch config` prints the same list.
Set a setting in a TOML file (`--config`) or by `--set KEY=VALUE`.
The most common settings have a [flag](command_line.md#train).

- A setting with an empty default has no value, unless its description names a default.
- The model `small`, the demos, trained weights and LoRA have other defaults for some settings
  ([Learning rate](training.md#learning-rate-and-batch-size)).
- `config.toml` in the run directory contains the values of a run.

`megabatch config --markdown` writes this page.
"""
CONFIG_DESCRIPTION = """
Lists the settings of `megabatch train` with their defaults. Set them in a TOML file (--config) or
with --set KEY=VALUE. The most common settings have a flag, too (megabatch train --help).

  megabatch config                     list all settings
  megabatch config optimizer           list the settings that contain a word
  megabatch config --of runs/emoji-1   list the values of a run
"""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch config`."""
    describe(parser, CONFIG_DESCRIPTION)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="list only settings whose name or description contains all words"
    )
    parser.add_argument("--of", metavar="RUN", help="folder of a run; lists its values instead of the defaults")
    parser.add_argument("--markdown", action="store_true", help="print the list as Markdown, as in docs/settings.md")
    add_json(parser, "the settings")


def run_config(args: argparse.Namespace) -> int:
    """Prints the settings that contain all words."""
    from megabatch_train.trainer.config import TrainConfig
    from megabatch_train.trainer.run import CONFIG

    all_settings = settings.describe_fields(TrainConfig)
    if args.markdown:
        print(format_page(all_settings), end="")
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
    if args.json:
        print_json([{"setting": s.key, "kind": s.kind, "value": _parse_default(s.default), "text": s.text} for s in matching])
        return 0
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for setting in matching:
        lines = textwrap.wrap(f"{setting.default or '(none)'}  {setting.text}", width - NAME_WIDTH - 2)
        tell(f"{setting.key:{NAME_WIDTH}}  {lines[0]}")
        for line in lines[1:]:
            tell(" " * (NAME_WIDTH + 2) + line)
    return 0


def _parse_default(text: str) -> Any:
    """Returns the value that a list of settings shows as text; None for a setting without a value."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def format_page(all_settings: list[Setting]) -> str:
    """Returns the page docs/settings.md."""
    parts, last_group = [SETTINGS_PAGE], None
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
# `megabatch report`: writes the report.html of a run.

REPORT_DESCRIPTION = """
Writes report.html into the folder of a run. The page shows curves, the last evaluation, search
results for a few queries, the command and the configuration. It is one file without external
resources. The command also works while the run continues.

  megabatch report runs/emoji --query "smiling cat" --query "red heart"
"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch report`."""
    describe(parser, REPORT_DESCRIPTION)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to search for in the test data; can be repeated (default: texts of the test data)",
    )
    add_trust(parser)


def run_report(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    import torch

    from megabatch_train.display.report import write_report

    if not all(text.strip() for text in args.query):
        raise ValueError("--query must not be empty")

    def load(folder: Path) -> Pair:
        return commands.load_pair(str(folder), torch.device("cpu"), trust=args.trust_remote_code)

    tell(f"wrote {write_report(args.folder, args.query, load=load)}")
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# `megabatch export`: converts a model for transformers, sentence-transformers, open_clip or onnxruntime.

EXPORT_DESCRIPTION = """
Writes a trained model in the format of another library. The folder also contains a model card
(README.md) with code that loads the model, the data, the evaluation, curves and all settings.

  megabatch export runs/photos --to open_clip photos-clip     open_clip.create_model("local-dir:…")
  megabatch export runs/photos --to hf photos-clip            transformers' CLIPModel
  megabatch export runs/qa --to hf qa-encoder                 SentenceTransformer, AutoModel
  megabatch export runs/photos --to onnx photos-onnx          image.onnx and text.onnx
  megabatch export runs/qa --to hf qa-encoder --push me/qa-encoder

  --to        models that can be exported
  hf          hf: and hf-config: (two encoders become two folders, image and text; CLIP, SigLIP and
              similar models stay one model), open_clip: CLIP
  open_clip   open_clip:
  onnx        all models; if onnxruntime is installed, the command compares the embeddings

--push uploads the folder to the Hugging Face hub. A new model is private. The upload needs a token,
from `hf auth login` or HF_TOKEN. Read the model card before you push it, because it contains the
paths of the data and all settings.
"""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch export`."""
    describe(parser, EXPORT_DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="folder to write; it must be empty or not exist")
    parser.add_argument("--to", required=True, choices=("hf", "open_clip", "onnx"), help="format of the exported model")
    parser.add_argument(
        "--push", metavar="NAME", help="upload the folder to the Hugging Face hub with this name, such as me/qa-encoder"
    )
    add_trust(parser)


def run_export(args: argparse.Namespace) -> int:
    """Writes the folder with the model card. Uploads it if `--push` is given."""
    import torch

    from megabatch_train.export import check_token, export, push, write_card

    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"FOLDER must be empty or not exist, got {folder}")
    if args.push:
        check_token()
    run_folder = commands.run_of(args.model)
    device, step = torch.device("cpu"), None
    if run_folder is None:
        pair = commands.load_pair(args.model, device, None, trust=args.trust_remote_code)
    else:
        pair, step = commands.load_run(Path(args.model), device, trust=args.trust_remote_code)
    export(pair, args.to, folder)
    card = write_card(pair, args.to, folder, run=run_folder, step=step, name=args.push)
    tell(f"wrote {folder}; the model card {card.name} contains code that loads the model, the data and all settings")
    if args.push:
        tell(f"pushed to {push(folder, args.push)} (a new model is private)")
    return 0


COMMANDS = {
    "info": Command(add_info_arguments, run_info),
    "help": Command(add_help_arguments, run_help),
    "config": Command(add_config_arguments, run_config),
    "report": Command(add_report_arguments, run_report),
    "export": Command(add_export_arguments, run_export),
}
