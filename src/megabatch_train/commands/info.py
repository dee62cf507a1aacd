"""`megabatch info`: versions, devices, backends, installed extras, and the rules by which a loss takes its path."""

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


LABELS = {  # of the keys of `machine.describe` that are no words
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
Prints versions, devices, the default backend of each device, and the installed extras.

  megabatch info                 for bug reports: contains no names of hosts or users, and no paths
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`megabatch info` has no arguments."""
    describe(parser, DESCRIPTION)


def run(args: argparse.Namespace) -> int:
    """Prints the information in two columns."""
    sections = [_machine(), _backends(), _list_extras()]
    width = max(len(name) for rows in sections for name, _ in rows)
    print("\n\n".join("\n".join(f"{name:{width}}  {told}" for name, told in rows) for rows in sections))
    print(f"\n{rules().text()}")
    return 0


def rules() -> tables.TextTable:
    """The table by which a loss takes its path."""
    from megabatch import dispatch
    from megabatch_train.display import tables

    return tables.TextTable(
        list(dispatch.RULE_COLUMNS),
        [list(row) for row in dispatch.describe_rules()],
        title="How a loss is computed: the first row that applies",
        notes='reduction="none", label smoothing, biases, further negatives and guides always take two passes.',
        names=tuple(range(len(dispatch.RULE_COLUMNS))),
    )


def _machine() -> list[tuple[str, str]]:
    """Hardware and versions, as far as they are known."""
    found = machine.describe() | {"megabatch": __version__}
    return [(LABELS.get(name, name), _readable(name, value)) for name, value in found.items() if value is not None]


def _readable(name: str, value: str | int) -> str:
    from megabatch_train.display import tables

    return tables.size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _backends() -> list[tuple[str, str]]:
    """The default backend of each device."""
    import torch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [(f"backend of {device}", _describe_backend(torch.device(device))) for device in devices]


def _list_extras() -> list[tuple[str, str]]:
    """Each extra, with the packages that are missing."""
    if machine.version("megabatch") is None:
        return [("extras", "not known: megabatch runs from its source without being installed (pip install -e .)")]
    found = []
    for extra, packages in sorted(extras().items()):
        missing = [package for package in packages if machine.version(package) is None]
        found.append((extra, f"missing: {', '.join(missing)}" if missing else "installed"))
    return found


def extras() -> dict[str, list[str]]:
    """The packages of each extra, from the metadata of the installed package."""
    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("megabatch") or []:
        match, newer = _REQUIREMENT.match(line), _OLDER_PYTHON.search(line)
        if newer is not None and sys.version_info >= tuple(map(int, newer[1].split("."))):
            continue  # part of this Python
        if match is not None and match[1] != "megabatch":
            found.setdefault(match[2], []).append(match[1])
    return found


def _describe_backend(device: torch.device) -> str:
    from megabatch import dispatch
    from megabatch.tiles.block import BFLOAT16

    if device.type == "cpu":
        return f"{dispatch.default_engine(BFLOAT16, device)}; the Triton kernels need an NVIDIA GPU"
    reason = dispatch.why_not_triton(BFLOAT16, device)
    return str(dispatch.default_engine(BFLOAT16, device)) + ("" if reason is None else f"; no triton, because {reason}")
