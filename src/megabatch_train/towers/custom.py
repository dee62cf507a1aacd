"""Towers of the user: "python:package.module:function" names a function that returns a `Pair` of two `Tower` objects.

The options of the model are the keyword arguments of the function. It is called again when a saved model is loaded, and the
saved weights then replace the weights that it has made.

Importing a module runs its code. A module that the user names is imported. A module that only the files of a run name is
imported if the user allows it (`--trust-remote-code`), or if the user has named it in this process already.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from megabatch_train.data.dataset import AUDIO, FILE, IMAGE, TEXT, VALUE
from megabatch_train.names import PYTHON
from megabatch_train.towers.tower import LoraConfig, Pair, Tower, allows_remote_code

KINDS = (IMAGE, TEXT, AUDIO, VALUE, FILE)
_NAMED: set[str] = set()  # names that the user has given in this process


def load(name: str, options: Mapping[str, Any], lora: LoraConfig | None = None) -> Pair:
    """Calls the function of the user, and checks what it returns.

    Args:
        name: the module and the function, as in "package.module:function". The module can be in the working directory.
        options: keyword arguments of the function.
        lora: must have the rank 0.
    """
    spec = PYTHON + name
    if lora is not None and lora.rank:
        raise ValueError(f"lora.rank must be 0 for {spec!r}, whose function can add adapters itself, got {lora.rank}")
    _NAMED.add(spec)
    function = _find(name)
    _check_options(function, spec, options)
    pair: Pair = function(**options)
    _check(pair, spec)
    return replace(pair, name=spec, options=dict(options))


def check(spec: str, place: str | Path) -> None:
    """Raises an error if the files of a run name a module that the user has neither named nor allowed."""
    if spec.startswith(PYTHON) and not allows_remote_code() and spec not in _NAMED:
        raise ValueError(
            f"{place} must be a model without custom code, got a model of the function {spec.removeprefix(PYTHON)!r}: "
            "--trust-remote-code imports its module and runs it with all rights of your user account"
        )


def find_modules(spec: str) -> list[str]:
    """Returns the module of a model, so that it can be imported early. Makes modules in the working directory importable."""
    if not spec.startswith(PYTHON):
        return []
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a console script has only the folder of the script there
    return [spec.removeprefix(PYTHON).partition(":")[0]]


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier() or not all(map(str.isidentifier, module_name.split("."))):
        raise ValueError(f"model must be python:MODULE:FUNCTION, as in python:package.module:build, got {PYTHON + name!r}")
    find_modules(PYTHON + name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and one of its own imports is missing
        raise ValueError(
            f"model must name a module that can be imported, got {PYTHON + name!r} without a module {error.name!r} in "
            f"{Path.cwd()} or in the Python path; PYTHONPATH=FOLDER adds a folder"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"model must name a function of {module_name}, got {function_name!r}, which is {function!r}")
    return function  # type: ignore[no-any-return]


def _check_options(function: Callable[..., Any], spec: str, options: Mapping[str, Any]) -> None:
    """Raises an error if an option is not an argument of the function, or if an argument has no value."""
    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(
            f"model_options must be arguments of {spec.removeprefix(PYTHON)}{signature}, got {dict(options)}: {error}"
        ) from error


def _check(pair: Any, spec: str) -> None:
    """Raises an error if the result of the function is not a pair of towers."""
    if not isinstance(pair, Pair):
        raise ValueError(f"{spec} must return a megabatch_train.towers.Pair, got {type(pair).__name__}")
    for side, tower in zip(("first", "second"), pair.towers, strict=True):
        if not isinstance(tower, Tower):
            raise ValueError(f"{spec}: the {side} tower must be a megabatch_train.towers.Tower, got {type(tower).__name__}")
        if not isinstance(tower.module, nn.Module):
            raise ValueError(f"{spec}: the module of the {side} tower must be an nn.Module, got {type(tower.module).__name__}")
        if tower.kind not in KINDS:
            raise ValueError(f"{spec}: the kind of the {side} tower must be one of {', '.join(KINDS)}, got {tower.kind!r}")
        for name in ("prepare", "collate"):
            if not callable(getattr(tower, name)):
                raise ValueError(f"{spec}: {name} of the {side} tower must be a function, got {getattr(tower, name)!r}")
    scale, bias = pair.logit_scale, pair.logit_bias
    if not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{spec}: logit_scale must be a positive number, got {scale!r}")
    if bias is not None and not (isinstance(bias, int | float) and math.isfinite(bias)):
        raise ValueError(f"{spec}: logit_bias must be a number or None, got {bias!r}")
