"""The scripts in benchmarks/: their tiny runs end well, and the tables in results/ are theirs."""

import importlib
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
OWN_PROCESS = ("sentence_transformers_gpu", "train_speed")  # change settings of libraries, or the environment


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["cached_step", "family_gpu", "flickr8k", "loss_cpu", "loss_gpu", "plan_validation", "ring", "sentence_transformers_gpu"],
)
def test_the_tables_in_results_are_made_from_their_records(name, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(FOLDER / "results" / f"{name}.json", tmp_path)
    importlib.import_module(f"{name}_report").report(tmp_path / f"{name}.json")
    assert (tmp_path / f"{name}.md").read_text() == (FOLDER / "results" / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


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
def test_reading_over_http(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "remote_reading.py"),
        "--samples",
        "40",
        "--readers",
        "2",
        "--rounds",
        "1",
        "--pauses",
        "0",
    ]
    subprocess.run([*command, "--output", str(tmp_path)], check=True, capture_output=True, timeout=PATIENCE)
    assert len(json.loads((tmp_path / "remote_reading.json").read_text())["results"]) == 4
    assert "| local files | 2 |" in (tmp_path / "remote_reading.md").read_text()


@pytest.mark.thorough
def test_a_run_over_http_whose_server_is_killed(tmp_path):
    """The script ends with an error if weights differ. S3 is left out, if it is installed: its server takes a minute."""
    command = [sys.executable, str(FOLDER / "remote_runs.py"), "--samples", "256", "--steps", "4", "--places", "HTTP"]
    subprocess.run([*command, "--output", str(tmp_path)], check=True, capture_output=True, timeout=PATIENCE)
    results = json.loads((tmp_path / "remote_runs.json").read_text())["results"]
    assert [result["place"] for result in results] == [
        "local files",
        "HTTP, empty cache",
        "HTTP, filled cache",
        "HTTP, no cache, server killed",
    ]
    assert len({result["weights"] for result in results}) == 1


@pytest.mark.thorough
def test_texts_of_different_lengths(tmp_path):
    pytest.importorskip("transformers")
    command = [
        sys.executable,
        str(FOLDER / "lengths.py"),
        "--pairs",
        "24",
        "--chunk",
        "4",
        "--turns",
        "1",
        "--output",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    record = json.loads((tmp_path / "lengths_cpu.json").read_text())
    padded, by_length, *_ = record["results"]
    assert record["tokens"] < by_length["tokens"] < 0.5 * padded["tokens"]
    assert (tmp_path / "lengths_cpu.md").read_text().startswith("| system |")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script",
    [
        "family_gpu",
        "cached_step",
        "decoders_gpu",
        "flickr8k",
        "late_interaction_gpu",
        "million",
        "sentence_transformers_gpu",
        "small_cpu",
        "small_gpu",
        "topk_gpu",
        "train_speed",
    ],
)
def test_tiny_runs(script, tmp_path):
    packages = {
        "decoders_gpu": "sentence_transformers",
        "flickr8k": "open_clip",
        "million": "open_clip",
        "sentence_transformers_gpu": "sentence_transformers",
        "train_speed": "open_clip",
    }
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
    assert record["results"] or record["runs"]
    failed = {row["system"] for row in record["results"] if "failed" in row}
    assert failed <= {"open_clip"}  # its trainer needs another version of webdataset
    assert str(tmp_path) not in json.dumps(record)
    assert (tmp_path / f"{script}.md").read_text()
