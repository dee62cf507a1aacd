"""The scripts in benchmarks/: what they compare is comparable, and their tiny runs end well."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import PATIENCE

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def test_losses_of_the_family_are_their_formulas():
    from family_cases import CASES, case
    from family_gpu import OK, errors, verdict

    for name in CASES:
        made = case(name, 96, 24, "cpu")
        assert verdict(*errors(made, made.ours, made.dense), "cpu") == OK, name
        broken = errors(made, lambda *leaves, loss=made.ours: loss(*leaves) + 1e-3 * leaves[0].square().sum(), made.dense)
        assert verdict(*broken, "cpu") != OK, name


def test_products_of_losses():
    from family_cases import case

    counts = {
        "info_nce_loss": 4,
        "info_nce_loss, hard negatives": 8,
        "info_nce_loss, memory bank": 7,
        "info_nce_loss, GTE": 8,
        "info_nce_loss, guide": 5,
    }
    counts |= {
        "nt_xent_loss, 2 × B/2 rows": 2,
        "nt_xent_loss, 2 × B rows": 8,
        "sup_con_loss, out": 2,
        "siglip, several positives": 3,
    }
    for name, count in counts.items():
        assert sum(case(name, 64, 24, "cpu").products) == count, name


def test_a_wrong_loss_is_called_wrong():
    from family_gpu import OK, WRONG, verdict

    assert verdict(0.0, 0.0, "cpu") == OK
    for errors in ((float("nan"), 0.0), (0.0, float("nan")), (1.0, 0.0), (0.0, 1.0)):
        assert verdict(*errors, "cpu") == verdict(*errors, "cuda") == WRONG


def test_jobs_of_the_cached_step():
    import cached_step

    found = cached_step.jobs(["ViT-B/32:4096,16384:cached,towers", "tiny:8:all"])
    assert found[:3] == [
        ("ViT-B/32", 4096, "cached, budget 0"),
        ("ViT-B/32", 4096, "towers alone"),
        ("ViT-B/32", 16384, "cached, budget 0"),
    ]
    assert [job.system for job in found[4:]] == list(cached_step.SYSTEMS)
    for wrong in ("ViT-B/32:4096", "ViT-B/32:4096:nothing", "ViT-X:4096:all", "tiny:many:all"):
        with pytest.raises(SystemExit, match=wrong):
            cached_step.jobs([wrong])


def test_a_part_of_a_step_has_the_gradient_of_the_whole():
    """Some chunks encoded, and the loss of all: what an extended time is made of."""
    from megabatch.bench.steps import Setting, cached
    from megabatch.bench.towers import SIZES, SyntheticImages, tokens, towers

    size = SIZES["tiny"]
    image, text, _ = towers(size, "cpu")
    words, log_scale = tokens(12, "cpu"), torch.nn.Parameter(torch.tensor(2.0))
    pictures = SyntheticImages(12, size, "cpu")
    with torch.no_grad():
        rest = image(pictures.all()[8:]), text(words[8:])
    part = Setting(image, text, log_scale, SyntheticImages(8, size, "cpu"), words[:8], 4, "cpu", autocast=False, beside=rest)
    value = cached(part)
    whole = Setting(image, text, log_scale, pictures, words, 4, "cpu", autocast=False)
    torch.testing.assert_close(value, cached(whole))


def test_paths_stay_out_of_a_command(monkeypatch, tmp_path):
    import argparse

    from record import Record

    monkeypatch.setattr(
        sys, "argv", ["x", "--data", "/here", "--tiny", "--output=/there", "--output", "/there", "--seconds", "5"]
    )
    record = Record("some", argparse.Namespace(output=tmp_path, name="some"), 5.0)
    assert record["command"] == "python benchmarks/some.py --tiny --seconds 5"


def test_images_are_those_of_their_captions():
    from flickr8k_data import Data, Images, invented

    pictures = invented(9)
    numbers = {text: i for i, texts in enumerate(pictures.captions) for text in texts}
    data = Data.of(pictures, lambda texts: torch.tensor([[numbers[text]] for text in texts]), "cpu", held_out=3)
    assert data.trained == 30
    assert (data.pixels[data.owners] == pictures.pixels[data.tokens[:, 0]]).all()
    assert not set(data.owners[:30].tolist()) & set(data.owners[30:].tolist())
    chosen = torch.tensor([4, 4, 1])
    (found,) = Images(data, chosen, 128, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)).chunks([(1, 3)], None)
    torch.testing.assert_close(found["image"], data.pixels[[4, 1]] / 255)
    (larger,) = Images(data, chosen, 200, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)).chunks([(0, 3)], None)
    assert larger["image"].shape == (3, 3, 200, 200)
    assert (
        F.avg_pool2d(larger["image"], 200).sub(data.pixels[chosen].float().mean((2, 3), keepdim=True) / 255).abs().max() < 0.01
    )


def test_rates_of_training_runs_by_hand():
    from train_speed import from_log, from_metrics

    line = "Train Epoch: 0 [16/64] Data (t): {} Batch (t): {}, 10.1688/s, 10.1688/s/gpu LR: 0.00001\n"
    told = "".join(line.format(*times) for times in ((5, 9), (3, 4), (0.5, 2), (1, 4))) + "peak bytes: 77\n"
    assert from_log(told, 12) == {"rate": 4.0, "steps": 2, "data_share": 0.25, "peak_bytes": 77}
    assert from_log("…\ntorch.OutOfMemoryError: CUDA out of memory. Tried…", 12) == {"failed": "out of memory"}
    assert from_log("KeyError: 'fname'\nI1116 cache_misses: 0", 12) == {"failed": "KeyError: 'fname'"}
    records = [
        {"loss": 1.0, "pairs": 8 * i, "seconds": 10.0 + 2 * i, "memory_bytes": i, "phases": {"data": 0.5, "forward": 1.5}}
        for i in range(1, 6)
    ]
    found = from_metrics([*records, {"evaluation": {}}], "")
    assert found == {"rate": 4.0, "steps": 3, "data_share": 0.25, "phases": {"data": 1.5, "forward": 4.5}, "peak_bytes": 5}
    assert from_metrics(records[:2], "ValueError: no") == {"failed": "ValueError: no"}


def test_shards_have_every_pair_once(tmp_path):
    pytest.importorskip("PIL", reason="images are made with Pillow")
    from train_speed_data import make

    from megabatch.data.shards import Shards

    pattern = make(tmp_path / "shards", 11, 3, None)
    data = Shards(str(tmp_path / "shards" / "*.tar"), cache_folder=tmp_path)
    assert data.groups == (4, 4, 3)
    assert {data.read(i, 1) for i in range(11)} == {f"picture {i} in words" for i in range(11)}
    assert data.read(10, 0).shape == (3, 64, 64)
    assert make(tmp_path / "shards", 11, 3, Path("not read again")) == pattern


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
        "sentence_transformers_gpu",
        "small_gpu",
        "topk_gpu",
        "train_speed",
    ],
)
def test_tiny_runs(script, tmp_path):
    packages = {
        "decoders_gpu": "sentence_transformers",
        "flickr8k": "open_clip",
        "sentence_transformers_gpu": "sentence_transformers",
        "train_speed": "open_clip",
    }
    if script in packages:
        pytest.importorskip(packages[script])
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--tiny", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
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
