"""Settings as dataclasses, from TOML files and `key=value`, with checks of every key and the type of every value.

A config is a dataclass whose fields are numbers, strings, lists, tables or dataclasses again. Errors name the key as a user
writes it ("optimizer.lr") and, for a key or a choice that does not exist, the nearest that does.
"""

import dataclasses
import difflib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megabatch import extras

T = TypeVar("T")
Table = dict[str, Any]


class SettingsError(ValueError):
    """A key that does not exist, or a value of the wrong kind."""


def build(kind: type[T], values: Mapping[str, Any], name: str = "", meanings: Mapping[str, str] | None = None) -> T:
    """The dataclass with these values, and defaults for the others. `meanings` suggests settings for words that are none."""
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    made = {}
    for key, value in values.items():
        if key not in fields:
            meant = (meanings or {}).get(key.lower().replace("-", "_"))
            near = f'; did you mean "{meant}"?' if meant else _nearest(key, fields)
            raise SettingsError(f"{_join(name, key)} is no setting{near}")
        made[key] = _check(hints[key], value, _join(name, key), meanings)
    try:
        return kind(**made)
    except ValueError as error:
        raise error if isinstance(error, SettingsError) else SettingsError(str(error)) from error


class Setting(typing.NamedTuple):
    """A setting as users see it."""

    key: str  # "optimizer.lr"
    kind: str  # what its value may be
    default: str  # as `format_value`
    text: str  # the comment beside it


def describe_fields(kind: type[Any], name: str = "") -> list[Setting]:
    """All settings of a dataclass and of those in it. Descriptions are the comments beside the fields."""
    hints, comments = typing.get_type_hints(kind), _comments(kind)
    found: list[Setting] = []
    for field in dataclasses.fields(kind):
        key, hint = _join(name, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += describe_fields(typing.cast(type[Any], hint), key)
            continue
        default = field.default if field.default is not dataclasses.MISSING else {}
        options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        told = " or ".join(_describe_type(option) for option in options if option is not type(None))
        shown = "" if default is None else "{}" if default == {} else format_value(default)
        found.append(Setting(key, told, shown, comments.get(field.name, "")))
    return found


def keys(kind: type[Any]) -> list[str]:
    """The names of all settings, as users write them."""
    return [setting.key for setting in describe_fields(kind)]


def _comments(kind: type[Any]) -> dict[str, str]:
    try:
        lines = inspect.getsource(kind).splitlines()
    except OSError:  # installed without sources
        return {}
    found = (re.fullmatch(r"    (\w+): [^#]*[^ #]  # (.*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None}


def table(config: Any) -> Table:
    """The values as a TOML table; None is left out, because TOML has no null."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """The value as reading it from a file returns it, so that saved and given settings can be compared."""
    if dataclasses.is_dataclass(value):
        return table(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def merge(*tables: Mapping[str, Any]) -> Table:
    """Merges tables recursively; later values win."""
    result: Table = {}
    for one in tables:
        for key, value in one.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merge(result[key], value) if both else value
    return result


def assignment(text: str) -> Table:
    """`optimizer.lr=3e-3` as a table; the value is a number, true, false, JSON, or else a string.

    A string keeps its spaces, because prompts end with one. In `key = value`, the space after the equals sign is none of it.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise SettingsError(f"--set takes key=value, as in --set optimizer.lr=3e-3, got {text!r}")
    return nest(key.strip(), _parse(value.lstrip() if key.endswith(" ") else value))


def nest(key: str, value: Any) -> Table:
    """A table with one entry: `optimizer.lr` and a number as {"optimizer": {"lr": number}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def read(path: str | Path) -> Table:
    """A TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = extras.load("tomli", purpose="Reading TOML with Python 3.10")
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise SettingsError(f"No such file: {path}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error


def to_toml(values: Mapping[str, Any]) -> str:
    """The text of a TOML file."""
    text: str = extras.load("tomli_w", purpose="Writing settings").dumps(values)
    return text


def _check(hint: Any, value: Any, name: str, meanings: Mapping[str, str] | None = None) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} must be a table of settings ({name}.KEY), got {value!r}")
        return build(typing.cast(type[Any], hint), value, name, meanings)
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        found = _as(option, value)
        if found is not None:
            return found[0]
    choices = [
        choice for option in options if typing.get_origin(option) is typing.Literal for choice in typing.get_args(option)
    ]
    near = _nearest(value, choices) if isinstance(value, str) and choices else ""
    raise SettingsError(f"{name} must be {' or '.join(_describe_type(option) for option in options)}, got {value!r}{near}")


def _as(hint: Any, value: Any) -> tuple[Any] | None:
    """The value converted to this type, in a tuple; None if it has another type."""
    if typing.get_origin(hint) is typing.Literal:
        return (value,) if isinstance(value, str) and value in typing.get_args(hint) else None
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list | tuple) or (kinds[-1] is not Ellipsis and len(kinds) != len(value)):
            return None
        found = [_as(kinds[0], entry) for entry in value]
        return None if None in found else (tuple(entry[0] for entry in found if entry is not None),)
    if typing.get_origin(hint) is dict or hint is dict:
        return (dict(value),) if isinstance(value, Mapping) else None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return (float(value),)
    if hint in (int, float) and isinstance(value, bool):
        return None
    return (value,) if isinstance(value, hint) else None


def _describe_type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {'strings' if typing.get_args(hint)[0] is str else 'numbers'}"
    if typing.get_origin(hint) is dict:
        return "a table"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(hint, "left out")


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f'; did you mean "{near[0]}"?' if near else f"; there are: {', '.join(known)}"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _parse(text: str) -> Any:
    """A number or JSON; any other text as it is."""
    for kind in (int, float, json.loads):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_value(value: Any) -> str:
    """A plain value on one line. `assignment` reads it back."""
    return json.dumps(value, ensure_ascii=False)
