"""Which package may import which. A module that breaks a rule is named, with the line."""

import ast
from functools import cache
from pathlib import Path

import pytest

import megabatch

ROOT = Path(megabatch.__file__).parent

# Needs torch alone, and any package may import it.
FOUNDATIONS = {"extras", "flops", "machine", "names", "settings", "tracing", "world"}

# Package: the packages it may import, beside foundations.
RULES: dict[str, set[str]] = {
    # The losses: `import megabatch` loads these and nothing else.
    "tiles": set(),  # one device; knows nothing of ranks
    "ring": {"tiles"},  # many devices; knows no kernels (below)
    "operators": {"ring", "tiles"},
    "checks": {"tiles"},
    "primitives": {"checks", "operators", "ring", "tiles"},
    "pairwise": {"checks", "primitives"},
    "late": {"checks", "operators", "pairwise", "primitives"},
    "losses": {"checks", "late", "primitives"},
    "cached": set(),  # takes any loss
    "__init__": {"late", "losses", "pairwise", "ring", "cached"},
    # The application
    "data": {"cached"},
    "towers": {"data", "cached"},
    "evaluation": {"data", "towers", "cached", "losses", "pairwise", "primitives", "tiles"},
    "trainer": {"data", "towers", "evaluation", "cached", "losses"},
    "display": {"__init__"},  # its version
    "report": {"__init__", "data", "towers", "evaluation", "display"},
    "export": {"data", "towers", "display", "report"},
    "planning": {"ring", "tiles", "towers", "display"},
    "integrations": {"__init__", "late", "losses", "pairwise", "primitives", "cached", "data", "towers"},
    "bench": {"__init__", "losses", "pairwise", "primitives", "cached", "ring", "tiles", "display"},
    "commands": {
        *("bench", "data", "display", "evaluation", "export", "planning", "report", "tiles", "towers", "trainer", "cached"),
        *("__init__", "pairwise", "losses"),
    },
    "cli": {"__init__", "commands"},
    # On its own
    "reference": set(),
}


def package_of(module: str) -> str:
    """`megabatch.ring.lap` is of "ring", `megabatch.pairwise` of "pairwise", `megabatch` itself of "__init__"."""
    _, _, inside = module.partition(".")
    first = inside.split(".")[0] or "__init__"
    return "cli" if first == "__main__" else first


def modules() -> dict[str, Path]:
    """Every module of the library with its file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("megabatch", *(part for part in parts if part != "__init__")))] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> list[tuple[int, str]]:
    """(line, module) of everything of the library that a file imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports must be absolute"
            name = node.module or ""
            inside = [f"{name}.{alias.name}" for alias in node.names]
            found += [(node.lineno, module if module in known else name) for module in inside]
    return [(line, name) for line, name in found if name.split(".")[0] == "megabatch"]


@cache
def dependencies() -> dict[str, dict[str, list[str]]]:
    """Package: the packages it imports, each with the places."""
    known = modules()
    found: dict[str, dict[str, list[str]]] = {}
    for module, path in known.items():
        own = package_of(module)
        for line, name in imports(path, known):
            other = package_of(name)
            if other != own:
                places = found.setdefault(own, {}).setdefault(other, [])
                places.append(f"{path.relative_to(ROOT.parent)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", sorted(RULES))
def test_a_package_imports_what_its_rule_allows(package):
    for other, places in dependencies().get(package, {}).items():
        assert other in RULES[package] | FOUNDATIONS, "\n".join(places)


def test_every_package_has_a_rule():
    for package in {package_of(module) for module in modules()}:
        assert package in RULES or package in FOUNDATIONS, f"{package} must have a rule in {Path(__file__).name}"


def test_foundations_import_only_foundations():
    for package in FOUNDATIONS:
        assert set(dependencies().get(package, {})) <= FOUNDATIONS


def test_no_cycle_between_packages():
    waiting = {package: set(found) - {package} for package, found in dependencies().items()}
    while waiting:
        free = [package for package, needed in waiting.items() if not needed & set(waiting)]
        assert free, f"packages that import one another in a circle, or wait for one that does: {sorted(waiting)}"
        for package in free:
            del waiting[package]


def test_importing_the_losses_loads_no_application():
    found, reached = dependencies(), {"__init__"}
    for _ in range(len(RULES)):
        reached |= {other for package in reached for other in found.get(package, {})}
    losses = {"losses", "late", "pairwise", "primitives", "checks", "operators", "ring", "tiles"}
    assert reached <= {"__init__", "cached"} | losses | FOUNDATIONS


def test_only_the_command_line_imports_benchmarks():
    for package, found in dependencies().items():
        assert package in ("commands", "bench") or "bench" not in found, "\n".join(found["bench"])


def test_the_ring_knows_no_kernels():
    known = modules()
    for module, path in known.items():
        if package_of(module) == "ring":
            for line, name in imports(path, known):
                assert "triton" not in name, f"{path}:{line} imports {name}"
                assert "gluon" not in name, f"{path}:{line} imports {name}"
