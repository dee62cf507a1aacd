"""The public surface against snapshots in tests/surface: names, settings, options of the commands, files of a run.

`.venv/bin/python tests/test_surface.py --write` rewrites the snapshots after a deliberate change. No snapshot contains the
module that defines a name or a class, because modules may move.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import sys
import tempfile
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch

import megabatch
from megabatch import integrations
from megabatch_train import cli
from megabatch_train.trainer.config import TrainConfig

FOLDER = Path(__file__).parent / "surface"
WRITE = ".venv/bin/python tests/test_surface.py --write"
# Special methods that users call by syntax. Others are generated, and their number depends on the version of Python.
SPECIAL = ("__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")
PLAIN_TYPES = (int, float, str, Path)  # of options; other types are functions, whose names are private


# Names


def describe_names():
    """The public names with their signatures."""
    parts = [_describe_names("megabatch", megabatch, megabatch.__all__)]
    for name in sorted(found.name for found in pkgutil.iter_modules(integrations.__path__)):
        with _import_integration(name) as module:
            listed = getattr(module, "__all__", None) or [key for key, value in vars(module).items() if _is_own(module, value)]
            parts.append(_describe_names(module.__name__, module, [key for key in listed if not key.startswith("_")]))
    return "\n".join(parts)


def _is_own(module, value):
    return inspect.isroutine(value) | inspect.isclass(value) and value.__module__ == module.__name__


@contextlib.contextmanager
def _import_integration(name):
    """Imports the module. PyLate excludes sentence-transformers 6, so empty classes replace its classes if it is missing."""
    path = f"{integrations.__name__}.{name}"
    if name != "pylate" or importlib.util.find_spec("pylate") is not None:
        yield importlib.import_module(path)
        return
    sys.modules["pylate"] = _Empty("pylate", (), {})
    try:
        yield importlib.import_module(path)
    finally:  # other tests must not find the replacement
        del sys.modules["pylate"]
        sys.modules.pop(path, None)
        vars(integrations).pop(name, None)


class _Empty(type):
    """The type of empty classes. Each public attribute of such a class is an empty class of this name."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return _Empty(name, (), {"__module__": "pylate"})


def _describe_names(title, module, names):
    return f"# {title}\n\n" + "".join(f"{_describe_name(name, getattr(module, name))}\n" for name in sorted(names))


def _describe_name(name, value):
    if not inspect.isclass(value):
        return f"def {_describe_signature(name, value)}"
    own = [kind for kind in value.__mro__ if kind.__module__.split(".")[0] == "megabatch"]
    lines = [f"class {name}({', '.join(_foreign_bases(value))})"]
    if any(method in vars(kind) for kind in own for method in ("__init__", "__new__")):
        lines.append(_describe_signature("__init__", value))
    members = {key: member for kind in reversed(own) for key, member in vars(kind).items()}
    constructed = {*getattr(value, "_fields", ()), *getattr(value, "__dataclass_fields__", ())}
    for key, member in sorted(members.items()):
        if key in SPECIAL or not (key.startswith("_") or key in constructed):
            lines.append(_describe_member(key, member))
    return "\n".join(lines).replace("\n", "\n    ")


def _foreign_bases(kind):
    """The names of the nearest bases that other packages define."""
    found = []
    for base in kind.__bases__:
        found += _foreign_bases(base) if base.__module__.split(".")[0] == "megabatch" else [base.__name__]
    return list(dict.fromkeys(name for name in found if name != "object"))


def _describe_member(name, member):
    if isinstance(member, property):
        return f"property {name}"
    if not callable(getattr(member, "__func__", member)):
        return f"{name} = {_describe_value(member)}"
    decorator = f"{type(member).__name__} " if isinstance(member, classmethod | staticmethod) else ""
    abstract = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
    return f"{abstract}{decorator}def {_describe_signature(name, getattr(member, '__func__', member))}"


def _describe_signature(name, function):
    signature = inspect.signature(function, eval_str=True)
    parts, kinds = [], inspect.Parameter
    before = None
    for parameter in signature.parameters.values():
        if before == kinds.POSITIONAL_ONLY != parameter.kind:
            parts.append("/")
        if parameter.kind == kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            parts.append("*")
        before = parameter.kind
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        hint = "" if parameter.annotation is kinds.empty else f": {_describe_hint(parameter.annotation)}"
        default = "" if parameter.default is kinds.empty else f" = {_describe_value(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{hint}{default}")
    returned = signature.return_annotation
    end = "" if returned is inspect.Signature.empty or name == "__init__" else f" -> {_describe_hint(returned)}"
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){end}"


def _describe_hint(hint):
    """The annotation without modules, and with its aliases expanded: the printed form depends on the version of Python."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_describe_hint(argument) for argument in arguments)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is collections.abc.Callable:
        taken = "..." if arguments[0] is Ellipsis else f"[{', '.join(map(_describe_hint, arguments[0]))}]"
        return f"Callable[{taken}, {_describe_hint(arguments[1])}]"
    if origin is not None:
        return f"{_describe_hint(origin)}[{', '.join(map(_describe_hint, arguments))}]"
    if hint is Ellipsis:
        return "..."
    if hint in (None, types.NoneType):
        return "None"
    if isinstance(hint, str | typing.ForwardRef):
        return getattr(hint, "__forward_arg__", hint)
    name = getattr(hint, "__name__", None) or repr(hint).rpartition(".")[2]  # Any has no name in Python 3.10
    fields = getattr(hint, "_fields", None) or list(getattr(hint, "__dataclass_fields__", ()))
    # A result has fields that users read, even if its class is not a public name.
    return f"{name}({', '.join(fields)})" if fields and name not in megabatch.__all__ else name


def _describe_value(value):
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Path):
        return repr(str(value))
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else shown


# Settings


def describe_settings():
    """All settings of a training run with type and default."""
    return "".join(f"{line}\n" for line in sorted(_list_settings(TrainConfig)))


def _list_settings(kind, prefix=""):
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _list_settings(hint, f"{key}.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield f"{key}: {_describe_hint(hint)}" + (
                "" if default is dataclasses.MISSING else f" = {_describe_value(default)}"
            )


# Help


def describe_help():
    """The descriptions and options of all commands, read from their parsers because each Python formats help differently."""
    return "\n".join(_describe_parser(_find_parser(*command)) for command in [(), *((name,) for name in cli.COMMANDS)])


def _find_parser(*command):
    """The parser that prints the help of the command."""
    found = []
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser, file=None: found.append(parser)),
        contextlib.suppress(SystemExit),
    ):
        cli.main([*command, "--help"])
    return found[0]


def _describe_parser(parser):
    positional = [action for action in parser._actions if not action.option_strings]
    options = sorted((action for action in parser._actions if action.option_strings), key=lambda a: a.option_strings)
    described = "".join(_describe_option(action, parser) for action in [*positional, *options])
    return f"# {parser.prog}\n\n{(parser.description or '').strip()}\n\n{described}"


def _describe_option(action, parser):
    if isinstance(action, argparse._SubParsersAction):
        return "".join(f"{choice.dest}\n    {choice.help}\n" for choice in action._choices_actions)
    name = ", ".join(action.option_strings) or action.dest
    metavar = action.metavar if action.metavar is not None or action.nargs == 0 else action.dest.upper()
    unset = action.default is None or action.default is False or action.default is argparse.SUPPRESS
    about = {
        "metavar": None if action.choices or action.nargs == 0 else metavar,
        "nargs": None if action.nargs == 0 else action.nargs,
        "type": None if action.type is None else action.type.__name__ if action.type in PLAIN_TYPES else "other",
        "choices": None if action.choices is None else ", ".join(map(str, action.choices)),
        "default": None if unset else _describe_value(action.default),
        "required": True if action.option_strings and action.required else None,
        "repeated": True if isinstance(action, argparse._AppendAction) else None,
        "flag": True if isinstance(action, argparse._StoreTrueAction) else None,
    }
    told = (action.help or "") % {**vars(action), "prog": parser.prog}
    lines = [f"{key}: {value}" for key, value in about.items() if value is not None]
    return "".join(f"{line}\n" for line in [name, *(f"    {line}" for line in [*lines, told])])


# Files of a run


def describe_run():
    """The files of a run's folder, and the keys in them."""
    with tempfile.TemporaryDirectory() as name:
        run = _train(Path(name))
        (last,) = (run / "checkpoints").glob("*2")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        evaluations = [record for record in records if "evaluation" in record]
        steps = [record for record in records if "evaluation" not in record]
        header, _ = _read_header(run / "model.safetensors")
        _, weights = _read_header(last / "weights.safetensors")
        parts = {
            "files": sorted({_without_numbers(path, run) for path in run.rglob("*")}),
            "best/best.json": _keys(json.loads((run / "best/best.json").read_text("utf-8"))),
            "environment.json": _keys(json.loads((run / "environment.json").read_text("utf-8")), levels=1),
            "checkpoints/step_N/checkpoint.json": _keys(json.loads((last / "checkpoint.json").read_text("utf-8")), levels=1),
            "checkpoints/step_N/state.pt": _keys(torch.load(last / "state.pt", weights_only=True)),
            "checkpoints/step_N/generators_N.pt": _keys(torch.load(last / "generators_00000.pt", weights_only=True)),
            "checkpoints/step_N/weights.safetensors, the first two parts of the names": sorted(
                {".".join(name.split(".")[:2]) for name in weights}
            ),
            "model.safetensors, metadata": _keys(header),
            "metrics.jsonl, after a step": sorted({key for record in steps for key in _keys(record)}),
            "metrics.jsonl, after an evaluation": sorted({key for record in evaluations for key in _keys(record)}),
        }
    return "\n".join(f"# {title}\n\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts.items())


def _train(folder):
    """Trains two tiny towers on twelve pairs, with everything that writes files: averaged weights, evaluations, a report."""
    pairs, run = folder / "pairs.jsonl", folder / "run"
    pairs.write_text("".join(json.dumps({"query": f"number {i}", "document": f"after {i - 1}"}) + "\n" for i in range(12)))
    values = ("ema=0.9", "model_options.width=16", "model_options.buckets=256", "device=cpu", "collapse=warn")
    places = ["--data", str(pairs), "--validation", str(pairs), "--output", str(run)]
    sizes = ["--batch-size", "6", "--steps", "2", "--evaluate-every", "1"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = cli.main(["train", *places, *sizes, *(word for value in values for word in ("--set", value))])
    assert status == 0, told.getvalue()
    return run


def _without_numbers(path, run):
    name = path.relative_to(run).as_posix() + ("/" if path.is_dir() else "")
    return re.sub(r"(events\.out\.tfevents)\.[^/]*", r"\1.N", re.sub(r"_\d+", "_N", name))


def _read_header(path):
    """Metadata and names of the tensors of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    about = header.pop("__metadata__", {})
    return {key: json.loads(value) if value.startswith("{") else value for key, value in about.items()}, header


def _keys(values, levels=2):
    """The keys of a dict, as "key" and "key.below"."""
    found = []
    for key, value in values.items():
        found.append(str(key))
        if levels > 1 and isinstance(value, dict):
            found += [f"{key}.{below}" for below in _keys(value, levels - 1)]
    return sorted(found)


# Snapshots

KINDS = {
    "public_names": describe_names,
    "settings": describe_settings,
    "help": describe_help,
    "checkpoint_keys": describe_run,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that are imported
@pytest.mark.parametrize("kind", KINDS)
def test_surface_matches_its_snapshot(kind):
    path = FOLDER / f"{kind}.txt"
    wanted, found = path.read_text("utf-8"), KINDS[kind]()
    shown = path.relative_to(FOLDER.parents[1])
    difference = difflib.unified_diff(wanted.splitlines(), found.splitlines(), str(shown), "the code", lineterm="")
    if found != wanted:
        text = "\n".join(difference)
        pytest.fail(f"{shown} differs from the code. If this is meant, run `{WRITE}`.\n{text}", pytrace=False)


def main():
    parser = argparse.ArgumentParser(description="Prints the public surface, or rewrites its snapshots.")
    parser.add_argument("--write", action="store_true", help=f"rewrite the files in {FOLDER}")
    write = parser.parse_args().write
    for name, describe in KINDS.items():
        text = describe()
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.txt").write_text(text, "utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
