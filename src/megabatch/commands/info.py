"""`megabatch info`: versions, devices, backends and installed extras."""

import argparse
import importlib.metadata
import re
import sys

import torch

from megabatch import __version__, machine
from megabatch.tiles import backends
from megabatch.tiles.precision import BFLOAT16

_OLDER_PYTHON = re.compile(r"""python_version < ["']([\d.]+)["']""")
_REQUIREMENT = re.compile(r"""^([\w.-]+)(?:\[[^\]]*\])?[^;]*;\s*.*extra == ["']([\w-]+)["']""")


def run(args: argparse.Namespace) -> int:
    """Prints the information."""
    for name, value in (machine.describe() | {"megabatch": __version__}).items():
        if value is not None:
            print(f"{name:18} {value}")
    print()
    for device in ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]:
        print(f"{device:18} {_served(torch.device(device))}")
    print()
    if machine.version("megabatch") is None:
        print(f"{'extras':18} not known: megabatch runs from its source without being installed (pip install -e .)")
        return 0
    for extra, packages in sorted(extras().items()):
        missing = [package for package in packages if machine.version(package) is None]
        print(f"{extra:18} {'installed' if not missing else 'without ' + ', '.join(missing)}")
    return 0


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


def _served(device: torch.device) -> str:
    reason = backends.why_not_triton(BFLOAT16, device)
    return str(backends.default(BFLOAT16, device)) + ("" if reason is None else f"; no triton, because {reason}")
