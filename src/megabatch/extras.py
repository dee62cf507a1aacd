"""Optional packages: imported where they are used. If one is missing, the error names the extra that installs it."""

import importlib
import importlib.util
from types import ModuleType


def load(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports the module. If it is not installed, the error names its purpose and the `pip install` command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is installed, and one of its own imports is missing
        raise ModuleNotFoundError(
            f'{purpose} needs the package "{module.split(".")[0]}", which is not installed; '
            f'pip install "megabatch[{extra}]" installs it',
            name=error.name,
        ) from error


def is_installed(module: str) -> bool:
    """Whether the package is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # such as a broken parent package
        return False
