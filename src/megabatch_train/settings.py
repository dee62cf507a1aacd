"""Builds config dataclasses from TOML files and `key=value`, and checks every key and the type of every value.

A config is a dataclass whose fields are numbers, strings, lists, tables or other dataclasses. An error names the key as users
write it ("optimizer.lr"). If a key or a choice does not exist, the error suggests the most similar one.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from megabatch import extras

T = TypeVar("T")
Table = dict[str, Any]


class SettingsError(ValueError):
    """A key does not exist, or a value has the wrong type."""


def build(kind: type[T], values: Mapping[str, Any], name: str = "", meanings: Mapping[str, str] | None = None) -> T:
    """Builds a dataclass from these values, with defaults for the other fields.

    Args:
        kind: the dataclass.
        values: a table as TOML defines it.
        name: key of this table, for errors.
        meanings: words that are not settings, and the settings that an error suggests for them.
    """
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            meaning = (meanings or {}).get(key.lower().replace("-", "_"))
            suggestion = f'; did you mean "{meaning}"?' if meaning else _suggest(key, fields)
            raise SettingsError(f"{_join(name, key)} is not a setting{suggestion}")
        arguments[key] = _check_value(hints[key], value, _join(name, key), meanings)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise error if isinstance(error, SettingsError) else SettingsError(str(error)) from error


class Setting(typing.NamedTuple):
    """Describes a setting for users."""

    key: str  # "optimizer.lr"
    kind: str  # type of the value, in words
    default: str  # formatted by `format_value`
    text: str  # description: the comment behind the field


def describe_fields(kind: type[Any], name: str = "") -> list[Setting]:
    """Returns all settings of a dataclass and of nested dataclasses. Their descriptions are the comments behind the fields."""
    hints, comments = typing.get_type_hints(kind), _read_comments(kind)
    described: list[Setting] = []
    for field in dataclasses.fields(kind):
        key, hint = _join(name, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            described += describe_fields(typing.cast(type[Any], hint), key)
            continue
        if (entry := _entry_class(hint)) is not None:
            described.append(Setting(key, "a list of tables", "[]", comments.get(field.name, "")))
            described += describe_fields(entry, key)
            continue
        default = field.default if field.default is not dataclasses.MISSING else {}
        options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        types_in_words = " or ".join(_describe_type(option) for option in options if option is not type(None))
        default_text = "" if default is None else "{}" if default == {} else format_value(default)
        described.append(Setting(key, types_in_words, default_text, comments.get(field.name, "")))
    return described


def keys(kind: type[Any]) -> list[str]:
    """Returns the keys of all settings, as users write them."""
    return [setting.key for setting in describe_fields(kind)]


def _read_comments(kind: type[Any]) -> dict[str, str]:
    try:
        lines = inspect.getsource(kind).splitlines()
    except OSError:  # installed without sources
        return {}
    matches = (re.fullmatch(r"    (\w+): [^#]*[^ #]  # (.*)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match is not None}


def table(config: Any) -> Table:
    """Returns the values as a TOML table. The table does not contain fields that are None, because TOML has no null."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """Converts a value to the types that a TOML file returns, so that new settings can be compared with saved settings."""
    if dataclasses.is_dataclass(value):
        return table(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def merge(*tables: Mapping[str, Any]) -> Table:
    """Merges tables recursively. A later value replaces an earlier one."""
    result: Table = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merge(result[key], value) if both else value
    return result


def assignment(text: str) -> Table:
    """Parses an assignment such as `optimizer.lr=3e-3` and returns a table.

    The value is a number, true, false or JSON, or else a string. A string keeps its spaces, because a prompt can end with a
    space. In `key = value`, the space after the equals sign is not part of the value.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise SettingsError(f"--set must have the form KEY=VALUE, such as --set optimizer.lr=3e-3, got {text!r}")
    return nest(key.strip(), _parse(value.lstrip() if key.endswith(" ") else value))


def nest(key: str, value: Any) -> Table:
    """Returns a nested table with one entry: "optimizer.lr" and a number become {"optimizer": {"lr": number}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def read(path: str | Path) -> Table:
    """Reads a TOML file."""
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
    """Returns the values as the text of a TOML file."""
    text: str = extras.load("tomli_w", purpose="Writing settings").dumps(values)
    return text


def _check_value(hint: Any, value: Any, name: str, meanings: Mapping[str, str] | None = None) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} must be a table of settings ({name}.KEY), got {value!r}")
        return build(typing.cast(type[Any], hint), value, name, meanings)
    if (entry := _entry_class(hint)) is not None:
        if not isinstance(value, list | tuple):
            raise SettingsError(f"{name} must be a list of tables ([[{name}]]), got {value!r}")
        return tuple(_check_value(entry, table, f"{name}[{number}]", meanings) for number, table in enumerate(value))
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        converted = _convert(option, value)
        if converted is not None:
            return converted[0]
    choices = [
        choice for option in options if typing.get_origin(option) is typing.Literal for choice in typing.get_args(option)
    ]
    advice = _suggest(value, choices) if isinstance(value, str) and choices else ""
    raise SettingsError(f"{name} must be {' or '.join(_describe_type(option) for option in options)}, got {value!r}{advice}")


def _entry_class(hint: Any) -> type[Any] | None:
    """Returns the dataclass of the entries of a list of tables, or None for another type."""
    entry = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return entry if isinstance(entry, type) and dataclasses.is_dataclass(entry) else None


def _convert(hint: Any, value: Any) -> tuple[Any] | None:
    """Converts a value to a type and returns it in a tuple, or returns None if the value has another type."""
    if typing.get_origin(hint) is typing.Literal:
        return (value,) if isinstance(value, str) and value in typing.get_args(hint) else None
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list | tuple) or (kinds[-1] is not Ellipsis and len(kinds) != len(value)):
            return None
        entries = [_convert(kinds[0], entry) for entry in value]
        return None if None in entries else (tuple(entry[0] for entry in entries if entry is not None),)
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
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(hint, "not set")


def _suggest(word: str, known: list[str]) -> str:
    similar = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f'; did you mean "{similar[0]}"?' if similar else f"; valid names: {', '.join(known)}"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _parse(text: str) -> Any:
    """Parses a number or JSON, and returns any other text unchanged."""
    for kind in (int, float, json.loads):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_value(value: Any) -> str:
    """Formats a plain value on one line. `assignment` can parse the result."""
    return json.dumps(value, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------------------------
# Settings for `megabatch train --help`. They are read from the source of the dataclasses, because their import needs torch.


class SourceField(typing.NamedTuple):
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
        for entry in ast.walk(hint):  # the dataclass of the entries of a list
            if isinstance(entry, ast.Name) and entry.id in classes:
                source_fields |= read_fields(module, entry.id, prefix=f"{key}.")
    return source_fields
