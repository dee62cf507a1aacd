"""Packages that come with an extra: imported where they are used, and when missing, named with the command that brings them."""

import importlib
import importlib.util
from types import ModuleType


def load(module: str, *, extra: str, purpose: str) -> ModuleType:
    """The module; an ImportError that says what it is for and how to get it where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is there, and misses something itself
        raise ModuleNotFoundError(
            f'{purpose} needs the package "{module.split(".")[0]}", which is not installed; '
            f'pip install "megabatch[{extra}]" brings it',
            name=error.name,
        ) from error


def installed(module: str) -> bool:
    """Whether there is such a package, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # something else stands in its way, which importing it would name
        return False
