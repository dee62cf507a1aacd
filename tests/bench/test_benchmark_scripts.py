"""The scripts in benchmarks/: their tiny runs end well, and the tables in results/ are theirs."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from helpers import PATIENCE

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = FOLDER / "results"
OWN_PROCESS = ("small_cpu", "train_speed")  # start processes of their own, or change the environment


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json*")))
def test_the_tables_and_plots_in_results_are_made_from_their_records(name, tmp_path):
    pytest.importorskip("matplotlib")
    from report import rebuild

    shutil.copy(RESULTS / name, tmp_path)
    rebuild(tmp_path / name)
    table, plot = (Path(name).with_suffix(suffix) for suffix in (".md", ".svg"))
    assert (tmp_path / table).read_text() == (RESULTS / table).read_text()
    assert (tmp_path / plot).exists() == (RESULTS / plot).exists()


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        ["loss_cpu", "--batches", "64", "--width", "16", "--rounds", "1"],
        ["ring", "--worlds", "2", "--batch", "64", "--width", "16", "--repeats", "1"],
    ],
)
def test_small_runs_on_a_cpu(command, tmp_path):
    pytest.importorskip("open_clip")
    script = [sys.executable, str(FOLDER / f"{command[0]}.py"), *command[1:], "--output", str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True, timeout=PATIENCE)
    results = json.loads((tmp_path / f"{command[0]}.json").read_text())["results"]
    assert {result["status"] for result in results} == {"ok"}
    assert all(result["peak"] is not None for result in results)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script",
    [
        "cached_step",
        "decoders_gpu",
        "encoders_gpu",
        "family_gpu",
        "late_interaction_gpu",
        "loss_gpu",
        "mining_gpu",
        "plan_validation",
        "small_cpu",
        "small_gpu",
        "topk_gpu",
        "tower_time",
        "train_speed",
        "vision_language_gpu",
    ],
)
def test_tiny_runs(script, tmp_path):
    theirs = ("decoders_gpu", "encoders_gpu", "vision_language_gpu")
    packages = dict.fromkeys(theirs, "sentence_transformers")
    packages |= dict.fromkeys(("tower_time", "train_speed"), "open_clip")
    if script in packages:
        pytest.importorskip(packages[script])
    command = [str(FOLDER / f"{script}.py"), "--tiny", "--output", str(tmp_path)]
    if script in OWN_PROCESS:
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=PATIENCE)
    else:  # several seconds less
        with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as ended:
            runpy.run_path(command[0], run_name="__main__")
        assert ended.value.code == 0
    record = json.loads((tmp_path / f"{script}.json").read_text())
    checks = {c.get("system"): c.get("status", "ok" if c.get("ok") else "WRONG") for c in record.get("checks", ())}
    assert (
        checks.get("megabatch, packed", "ok") == checks.get("megabatch", "ok") == checks.get("cached, budget 0", "ok") == "ok"
    )
    assert record["results"]
    failed = {row["system"] for row in record["results"] if "failed" in row}
    assert failed <= {"open_clip"}  # its trainer needs another version of webdataset
    assert str(tmp_path) not in json.dumps(record)
    assert (tmp_path / f"{script}.md").read_text()
