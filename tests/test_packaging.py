"""The package's metadata, workflows and citation agree with one another."""

import re
import sys
from pathlib import Path

import pytest

import megabatch
from megabatch.extras import REQUIREMENTS

ROOT = Path(__file__).parents[1]
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_version_is_in_one_place(project):
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megabatch.__version__"}
    written = re.findall(r'^__version__ = "([\d.]+)"$', (ROOT / "src/megabatch/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert written == [megabatch.__version__]
    assert f"## {megabatch.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_workflows_test_what_the_metadata_promise(project):
    yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
    found = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert {"checks.yml", "release.yml"} <= set(found)
    for name, workflow in found.items():
        assert {"name", True, "permissions", "jobs"} <= set(workflow), name  # YAML reads "on" as true
        for job in workflow["jobs"].values():
            assert "runs-on" in job, name
            assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
    matrix = found["checks.yml"]["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = [line.rpartition(" ")[2] for line in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert matrix["python"] == classifiers
    assert project["project"]["requires-python"] == f">={classifiers[0]}"
    (torch,) = project["project"]["dependencies"]
    assert {entry["torch"] for entry in matrix["include"]} == {f"{torch.replace('>=', '==')}.*"}
    commands = [step["run"] for job in found["checks.yml"]["jobs"].values() for step in job["steps"] if "run" in step]
    scripts = re.findall(r"tools/\w+\.py", " ".join(commands))
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_citation_is_yaml_with_the_licence_of_the_project(project):
    yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == project["project"]["license"]
    assert citation["repository-code"] == project["project"]["urls"]["Homepage"]


DISTRIBUTIONS = {  # of modules with another name, or which come with another package
    "PIL": "pillow",
    "aiohttp": "fsspec",
    "huggingface_hub": "transformers",
    "open_clip": "open_clip_torch",
    "tokenizers": "transformers",
}


def spell(name):
    """A name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_extras_have_one_spelling(project):
    extras = list(project["project"]["optional-dependencies"])
    assert extras == [spell(extra) for extra in extras]


def test_install_commands_name_what_the_metadata_contain(project):
    extras = project["project"]["optional-dependencies"]
    packages = {
        extra: [spell(re.split(r"[>=<;]", line)[0].partition("[")[0]) for line in lines] for extra, lines in extras.items()
    }
    for module, requirement in REQUIREMENTS.items():
        name = spell(DISTRIBUTIONS.get(module, module))
        extra = re.fullmatch(r"megabatch\[([\w-]+)\]", requirement)
        if extra is None:
            assert spell(re.split(r"[>=]", requirement)[0]) == name
        else:
            assert name in packages[extra[1]], f"{module} is not installed by {requirement}"


def test_every_optional_module_has_an_install_command():
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    loaded = {name for text in sources for name in re.findall(r'extras\.load\(\s*f?"(\w+)', text)}
    assert {"PIL", "transformers", "wn"} <= loaded
    assert loaded - {"torch"} <= set(REQUIREMENTS)
    written = {extra for text in sources for extra in re.findall(r'pip install "megabatch\[([^"{]*)\]"', text)}
    assert written <= {"train"}  # an example in a docstring


def test_every_page_names_extras_that_exist(project):
    known = set(project["project"]["optional-dependencies"])
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.*"),
        ROOT / "Makefile",
        *ROOT.glob("tools/*.py"),
    ]
    for page in pages:
        if page.name in ("log.md", "CHANGELOG.md"):
            continue
        for named in re.findall(r"(?:megabatch|\.)\[([a-z][\w,-]*)\]", page.read_text("utf-8")):
            assert set(named.split(",")) <= known, page.name
