"""`megabatch info`: prints versions, devices, backends, installed extras, and the rules that choose the path of a loss."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from typing import TYPE_CHECKING

from megabatch import __version__
from megabatch_train import machine
from megabatch_train.commands import describe

if TYPE_CHECKING:
    import torch

    from megabatch_train.display import tables


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
DESCRIPTION = """
Prints versions, devices, the default backend of each device, the installed extras, and the rules
that choose how a loss is computed. Include the output in a bug report. It contains no names of
hosts or users, and no paths.

  megabatch info
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sets the description. `megabatch info` has no arguments."""
    describe(parser, DESCRIPTION)


def run(args: argparse.Namespace) -> int:
    """Prints the information in two columns, then the rules."""
    sections = [_describe_machine(), _list_backends(), _list_extras()]
    width = max(len(name) for rows in sections for name, _ in rows)
    print("\n\n".join("\n".join(f"{name:{width}}  {value}" for name, value in rows) for rows in sections))
    print(f"\n{rules().text()}")
    return 0


def rules() -> tables.TextTable:
    """Returns the table of the rules that choose the path of a loss."""
    from megabatch import dispatch
    from megabatch_train.display import tables

    return tables.TextTable(
        list(dispatch.RULE_COLUMNS),
        [list(row) for row in dispatch.describe_rules()],
        title="How a loss is computed: the first row that applies is used",
        notes='Other options are reduction="none", label smoothing, a bias, further negatives and a guide.',
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

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [(f"backend of {device}", _describe_backend(torch.device(device))) for device in devices]


def _list_extras() -> list[tuple[str, str]]:
    """Returns each extra with its missing packages."""
    if machine.version("megabatch") is None:
        return [("extras", "unknown, because megabatch is not installed (pip install -e .)")]
    rows = []
    for extra, packages in sorted(extras().items()):
        missing = [package for package in packages if machine.version(package) is None]
        rows.append((extra, f"missing: {', '.join(missing)}" if missing else "installed"))
    return rows


def extras() -> dict[str, list[str]]:
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
