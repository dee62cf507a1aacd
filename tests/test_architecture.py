"""Which package may import which, how large files and folders may be, and that one class name has one meaning."""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import megabatch
import megabatch_train

ROOTS = {"megabatch": Path(megabatch.__file__).parent, "megabatch_train": Path(megabatch_train.__file__).parent}

# Any package may import these. Those of the library need only torch.
FOUNDATIONS = {"extras", "file_io", "world"}
TRAIN_FOUNDATIONS = {"machine", "names", "settings"}

# Package of the library: the packages it may import, in addition to foundations.
LIBRARY: dict[str, set[str]] = {
    "tiles": {"kernels"},  # one device, PyTorch operations; no ranks. Only `backend_for` imports the other engine
    "kernels": {"tiles"},  # one device, Triton
    "ring": {"dispatch", "tiles"},  # several ranks; no kernels
    "operators": {"dispatch", "kernels", "ring", "tiles"},
    "dispatch": {"tiles"},  # only decides: it runs nothing
    "checks": {"dispatch", "tiles"},
    "primitives": {"checks", "dispatch", "operators", "ring", "tiles"},
    "pairwise": {"checks", "dispatch", "primitives"},
    "late": {"checks", "dispatch", "kernels", "operators", "pairwise", "primitives", "ring", "tiles"},
    "losses": {"checks", "dispatch", "late", "primitives"},
    "cached": set(),  # takes any loss
    "integrations": {"__init__", "cached", "dispatch", "late", "losses", "pairwise"},
    "__init__": {"cached", "late", "losses", "pairwise", "ring"},
    "reference": set(),  # shares no code with what it checks
    "__main__": {"cli"},
}

# Package of the command: the packages of the command and of the library that it may import, in addition to foundations.
TRAIN: dict[str, set[str]] = {
    "__init__": set(),
    "data": {"cached"},
    "towers": {"cached", "data", "dispatch", "integrations", "late"},
    "evaluation": {"cached", "data", "dispatch", "late", "losses", "pairwise", "primitives", "tiles", "towers"},
    "trainer": {"cached", "data", "evaluation", "losses", "towers"},
    "display": {"__init__", "data", "evaluation", "towers"},
    "export": {"data", "display", "evaluation", "towers"},
    "planning": {"dispatch", "display", "ring", "tiles", "towers"},
    "bench": {"__init__", "cached", "dispatch", "display", "losses", "pairwise", "ring", "tiles"},
    "commands": {
        *(
            "__init__",
            "bench",
            "cached",
            "data",
            "dispatch",
            "display",
            "evaluation",
            "export",
            "losses",
            "pairwise",
            "planning",
        ),
        *("tiles", "towers", "trainer"),
    },
    "cli": {"__init__", "commands"},
}


def package_of(module: str) -> str:
    """`megabatch.ring.ranks` is of "ring", `megabatch.pairwise` of "pairwise", `megabatch` itself of "__init__"."""
    return (module.split(".")[1:] or ["__init__"])[0]


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages with its file."""
    found = {}
    for name, root in ROOTS.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of everything of both packages that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports must be absolute"
            name = node.module or ""
            inside = [f"{name}.{alias.name}" for alias in node.names]
            found += [(node.lineno, module if module in modules() else name) for module in inside]
    return [(line, name) for line, name in found if name.split(".")[0] in ROOTS]


@cache
def dependencies() -> dict[tuple[str, str], dict[tuple[str, str], list[str]]]:
    """(distribution package, package): those that it imports, each with the places."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for module, path in modules().items():
        own = module.split(".")[0], package_of(module)
        for line, name in imports(path):
            other = name.split(".")[0], package_of(name)
            if other != own:
                found.setdefault(own, {}).setdefault(other, []).append(f"{path}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", sorted(LIBRARY))
def test_a_package_of_the_library_imports_what_its_rule_allows(package):
    for (root, other), places in dependencies().get(("megabatch", package), {}).items():
        assert other in LIBRARY[package] | FOUNDATIONS, "\n".join(places)
        assert root == "megabatch" or package == "__main__", "\n".join(places)


@pytest.mark.parametrize("package", sorted(TRAIN))
def test_a_package_of_the_command_imports_what_its_rule_allows(package):
    for (_, other), places in dependencies().get(("megabatch_train", package), {}).items():
        assert other in TRAIN[package] | FOUNDATIONS | TRAIN_FOUNDATIONS, "\n".join(places)


def test_every_package_has_a_rule():
    ruled = {"megabatch": set(LIBRARY) | FOUNDATIONS, "megabatch_train": set(TRAIN) | TRAIN_FOUNDATIONS}
    for module in modules():
        assert package_of(module) in ruled[module.split(".")[0]], f"{module} must have a rule in {Path(__file__).name}"


def test_foundations_import_only_foundations():
    allowed = {("megabatch", name) for name in FOUNDATIONS}
    for package in FOUNDATIONS:
        assert set(dependencies().get(("megabatch", package), {})) <= allowed
    allowed |= {("megabatch_train", name) for name in TRAIN_FOUNDATIONS}
    for package in TRAIN_FOUNDATIONS:
        assert set(dependencies().get(("megabatch_train", package), {})) <= allowed


# Imports against the direction of the layers.
TOLERATED = {
    # `backend_for` imports the kernels when a call is served by them.
    (("megabatch", "tiles"), ("megabatch", "kernels")),
}


def test_no_cycle_between_packages():
    waiting = {
        package: {other for other in found if (package, other) not in TOLERATED} for package, found in dependencies().items()
    }
    while waiting:
        free = [package for package, needed in waiting.items() if not needed & set(waiting)]
        assert free, f"packages that import one another in a circle, or wait for one that does: {sorted(waiting)}"
        for package in free:
            del waiting[package]


def test_only_the_command_line_imports_benchmarks():
    for (_, package), found in dependencies().items():
        places = found.get(("megabatch_train", "bench"), [])
        assert package in ("commands", "bench") or not places, "\n".join(places)


def test_a_folder_has_at_most_twelve_modules():
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    for folder, count in counts.items():
        assert count <= 12, f"{folder} has {count} modules"


# Each limit leaves little space, so a new module is a decision: it must be an idea that no existing module owns.
@pytest.mark.parametrize(("root", "limit"), [("megabatch", 67), ("megabatch_train", 83)])
def test_a_package_has_few_files(root, limit):
    files = [path for module, path in modules().items() if module.split(".")[0] == root]
    assert len(files) <= limit


def test_the_picture_shows_every_package():
    """docs/architecture_picture.py draws it from the rules above."""
    picture = (Path(__file__).parents[1] / "docs" / "architecture.svg").read_text("utf-8")
    for package in (LIBRARY.keys() | TRAIN.keys()) - {"__init__", "__main__"}:
        assert f">{package}</text>" in picture, f"python docs/architecture_picture.py draws {package}"


def test_a_file_has_at_most_six_hundred_lines():
    for path in modules().values():
        lines = len(path.read_text("utf-8").splitlines())
        assert lines <= 600, f"{path} has {lines} lines"


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for path in modules().values():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in places.items():
        assert len(found) == 1, f"{name}: {', '.join(found)}"


# Questions whose answers choose a path or an engine, and the modules that may ask them.
DECISIONS = {
    "get_device_capability": {"megabatch.dispatch", "megabatch.kernels.plan", "megabatch_train.towers.layers.packed"},
    "choose_module": {"megabatch.dispatch", "megabatch.primitives"},
    "default_engine": {"megabatch.dispatch", "megabatch.primitives", "megabatch_train.commands.small"},
}


@pytest.mark.parametrize("name", DECISIONS)
def test_one_module_decides_how_a_loss_runs(name):
    asking = {module for module, path in modules().items() if name in names_in(path)}
    assert asking <= DECISIONS[name], f"{name}: {sorted(asking - DECISIONS[name])}"
    assert "megabatch.dispatch" in asking


def names_in(path: Path) -> set[str]:
    """All names and attributes of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return (
        defined
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {node.id for node in nodes if isinstance(node, ast.Name)}
    )


# Function names are verbs or nouns, not participles: `round_to_precision` and not `rounded`.
IRREGULAR = {
    *("begun", "bent", "bound", "broken", "brought", "built", "chosen", "drawn", "driven", "eaten", "felt", "found"),
    *("frozen", "given", "gone", "grown", "held", "hidden", "kept", "known", "laid", "left", "lent", "lost"),
    *("made", "meant", "paid", "said", "seen", "sent", "shown", "shrunk", "sold", "spent", "spoken", "stood"),
    *("stuck", "taken", "taught", "thought", "thrown", "told", "torn", "understood", "woken", "won", "worn", "wound"),
    "written",
}
OTHER_WORDS = {
    *("embed", "exceed", "feed", "need", "seed", "speed"),  # verbs
    *("ceiling", "matching", "nothing", "pooling", "ring", "scaling", "setting", "string", "warning"),  # nouns
}
# Names in which the first word describes a noun, as in "learning rate", or which a framework asks for.
DESCRIBING = {
    "bound",  # of a value
    "cached_backward",
    "embedding_loss",
    "guided_tile",
    "learning_rate",
    "negated_exponents",
    "ranking_loss",
    "running_statistics",
    "shared_memory",
    "training_step",
    "weighted_softmax",
}


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith(("ed", "ing")) and word not in OTHER_WORDS)


def test_no_function_has_the_name_of_a_participle():
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name.strip("_")
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                if is_property or name.endswith("kernel") or name in DESCRIBING:
                    continue
                assert not is_participle(name.split("_")[0]), f"{path}:{node.lineno}: {node.name} must be a verb"
