"""The scripts in benchmarks/: what they compare is comparable, and their tiny runs end well."""

import argparse
import importlib
import json
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from helpers import PATIENCE

FOLDER = Path(__file__).parents[2] / "benchmarks"
OWN_PROCESS = ("sentence_transformers_gpu", "train_speed")  # change settings of libraries, or the environment


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


def test_the_first_rows_of_decoders_are_the_compiled_systems_of_all_models():
    from decoders_gpu import Model, stages
    from decoders_gpu_systems import COMPILED, SYSTEMS, THEIRS_COMPILED, TINY

    first, second, rest = stages([Model(shape) for shape in TINY])
    assert [(model.shape, batch, name) for model, batch, name in first] == [
        (shape, 0, name) for shape in TINY for name in (COMPILED, THEIRS_COMPILED)
    ]
    assert [(model.shape, batch, name) for model, batch, name in second] == [(shape, 1, COMPILED) for shape in TINY]
    assert len(first + second + rest) == len(TINY) * sum(min(system.batches, 2) for system in SYSTEMS.values())


def test_a_step_of_decoders_that_compiled_is_timed_again(tmp_path, monkeypatch):
    import decoders_gpu
    from decoders_gpu_systems import OURS, SYSTEMS, TINY, Setting, decoder, texts

    pytest.importorskip("transformers")
    args = argparse.Namespace(tiny=True, output=tmp_path, name="decoders_gpu", seconds=60.0)
    bench = decoders_gpu.Bench(args)
    s = Setting(decoder(TINY[0], bench.device, half=False)[0], texts(3, 500, bench.device, 16), 64, bench.device)
    counts = iter([0, 2, 2, 2])
    monkeypatch.setattr(decoders_gpu, "compilations", lambda: next(counts, 2))
    said = []
    monkeypatch.setattr(bench.record, "say", said.append)
    assert bench.step(SYSTEMS[OURS], s)["seconds"] > 0
    assert len(said) == 1
    assert "compilations" in said[0]
    endless = iter(range(100))
    monkeypatch.setattr(decoders_gpu, "compilations", lambda: next(endless))
    with pytest.raises(RuntimeError, match="compiles in every step"):
        bench.step(SYSTEMS[OURS], s)


def test_padding_for_the_compiler_changes_no_embedding():
    from decoders_gpu_systems import TINY, Texts, decoder, texts

    pytest.importorskip("transformers")
    encoder = decoder(TINY[0], "cpu", half=False)[0]
    for rows in (1, 5):
        features = {name: part[:rows] for name, part in texts(5, 500, "cpu", 32)[1].items()}
        wanted, found = (Texts(encoder, multiple)(features)["sentence_embedding"] for multiple in (0, 8))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_work_that_takes_too_long_is_given_up():
    from timing import TimeUp, time_limit

    with pytest.raises(TimeUp), time_limit(0.05):
        time.sleep(PATIENCE)
    with time_limit(PATIENCE):
        pass


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


def image_study_line(setting, recall):
    from image_study_report import METRICS

    figures = {"pairs_per_second": 100.0, "beside": 2, "machine": "here", "losses": [2.0, 1.0], "scale": 20.0}
    return setting._asdict() | dict.fromkeys(METRICS, recall) | figures


def test_runs_of_the_image_study_follow_from_those_before(tmp_path):
    """Of made-up results: two blocks are better, 2e-3 is the best rate and 5e-4 nearly as good, 4,096 the best batch."""
    pytest.importorskip("matplotlib")
    import image_study_report
    import image_study_settings

    from megabatch.evaluation import results

    sizes, options = image_study_settings.Sizes(), mock.Mock(lr=None, seeds=[0, 1], sizes=None)
    with pytest.raises(SystemExit, match="rate needs the results of choose"):
        image_study_settings.wanted("rate", [], sizes, options)
    lines = [
        image_study_line(one, 0.3 if one.tower == "conv2@64" and one.flip else 0.2)
        for one in image_study_settings.wanted("choose", [], sizes, options)
    ]
    with pytest.raises(SystemExit, match="study needs the results of rate, or --lr"):
        image_study_settings.wanted("study", lines, sizes, options)
    by_rate = {2.5e-4: 0.25, 5e-4: 0.395, 1e-3: 0.3, 2e-3: 0.4, 4e-3: 0.1}
    rates = image_study_settings.wanted("rate", lines, sizes, options)
    lines += [
        image_study_line(one, by_rate[one.lr]) for one in rates if one.lr != image_study_settings.FIRST_RATE
    ]  # it is known
    study = image_study_settings.wanted("study", lines, sizes, options)
    assert {(one.tower, one.flip, one.lr) for one in study} == {("conv2@64", True, 5e-4)}
    assert len(study) == len(set(study)) == 2 * (5 * 3 + 1)
    assert {one.batch_size * one.steps for one in study} == {2**20}
    assert {one.seed for one in study[: len(study) // 2]} == {0}  # each seed after the other
    lines += [
        image_study_line(one, 0.4 + 0.05 * (one.batch_size == 4096) + 0.02 * (one.rule == "linear") + 0.002 * one.seed)
        for one in study
    ]
    longer = image_study_settings.wanted("steps", lines, sizes, options)
    assert {(one.batch_size, one.rule, one.steps) for one in longer} == {(size, "linear", 256) for size in (8192, 16384, 32768)}
    lines += [image_study_line(one, 0.6) for one in longer]
    losses = image_study_settings.wanted("losses", lines, sizes, options)
    assert [(one.loss, one.ids) for one in losses[:3]] == [("megabatch", False), ("open_clip", False), ("inf_cl", False)]
    lines += [image_study_line(one, {"inf_cl": 0.1}.get(one.loss, 0.4) + 0.002 * one.seed) for one in losses]
    siglip = image_study_settings.wanted("siglip", lines, sizes, options)
    assert [(one.batch_size, one.loss) for one in siglip[:2]] == [(1024, "siglip"), (8192, "siglip")]
    lines += [image_study_line(one, 0.4) for one in siglip]
    for line in lines:
        results.append(tmp_path / "image_study.jsonl", line)
    image_study_report.report(tmp_path / "image_study.jsonl")
    text = (tmp_path / "image_study.md").read_text()
    for words in (
        "the best mean recall is 47.1 ± 0.1 % with 4,096 pairs in a batch (rate: linear).",
        "With 32,768 pairs, and so 32 steps, it is 42.1 ± 0.1 %.",
        "8,192 pairs with 256 steps reach 60.0 ± 0.0 %, more than the best at equal samples.",
        "with the loss of open_clip reaches 40.1 ± 0.1 %, which is within seed noise of ours",
        "with the loss of inf_cl reaches 10.1 ± 0.1 %, which differs from ours",
        "| 4,096 | 256 | 45.1 ± 0.1 | 45.1 ± 0.1 | 47.1 ± 0.1 | 200 |",
        "| 1,024 | SigLIP |",
    ):
        assert words in text, words
    assert (tmp_path / "image_study.png").read_bytes().startswith(b"\x89PNG")


def test_a_mined_table_with_a_text_of_its_own_is_refused(tmp_path):
    from mining_study import FLICKR, SIZES, Prepared, counted

    given = Prepared(FLICKR, SIZES[FLICKR, "tiny"], tmp_path, tmp_path / "train.jsonl", tmp_path, "", None)
    pairs = [("images/1.png", "a cat"), ("images/1.png", "a pet"), ("images/2.png", "a dog")]

    def table(name, rows):
        keys = ("image", "caption", "negative_1", "negative_2")
        (tmp_path / name).write_text("".join(json.dumps(dict(zip(keys, row, strict=False))) + "\n" for row in rows))
        return tmp_path / name

    table("train.jsonl", pairs)
    good = [(f"/data/{image}", text, "a pet" if "2" in image else "a dog", None) for image, text in pairs]
    assert counted(given, table("mined.jsonl", good)) == {"found": 3, "missing": 3}
    wrong = {
        "text of its own": [good[0], (*good[1][:2], "a cat", None), good[2]],
        "must have 3 lines": good[:2],
        "in their order": [good[1], good[0], good[2]],
        "must have negatives": [(*row[:2], None, None) for row in good],
    }
    for message, rows in wrong.items():
        with pytest.raises(AssertionError, match=message):
            counted(given, table("mined.jsonl", rows))


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
def test_a_tiny_study_of_images_continues_where_it_was_stopped(tmp_path):
    """Tower and rate are known from lines; a batch size and two losses are missing."""
    pytest.importorskip("open_clip")
    import image_study_settings

    from megabatch.evaluation import results

    sizes, options = image_study_settings.TINY, mock.Mock(lr=None, seeds=[0], sizes=None)
    lines = [image_study_line(one, 0.3) for one in image_study_settings.wanted("choose", [], sizes, options)]
    rates = image_study_settings.wanted("rate", lines, sizes, options)
    for line in [*lines, *(image_study_line(one, 0.2) for one in rates if one.lr != image_study_settings.FIRST_RATE)]:
        results.append(tmp_path / "image_study.jsonl", line)
    call = [sys.executable, str(FOLDER / "image_study.py"), "--tiny", "--beside", "1", "--seeds", "0"]
    call += ["--parts", "choose", "study", "losses", "--output", str(tmp_path), "--best", str(tmp_path / "best")]
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert "choose: 0 runs to do, 4 known" in done.stdout
    lines = results.read(tmp_path / "image_study.jsonl")
    assert len(lines) == 5 + 4 + 2
    ours, theirs = (line for line in lines if not line["ids"])
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-3)
    assert (tmp_path / "image_study_gallery.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in (tmp_path / "image_study.md").read_text()


@pytest.mark.thorough
def test_a_tiny_study_of_mining_continues_where_it_was_stopped(tmp_path):
    for package in ("open_clip", "transformers", "wn"):
        pytest.importorskip(package)
    from mining_study_report import ARMS

    from megabatch.evaluation import results

    call = [sys.executable, str(FOLDER / "mining_study.py"), "--tiny", "--seeds", "0"]
    call += ["--output", str(tmp_path), "--work", str(tmp_path / "work")]
    subprocess.run(call, check=True, capture_output=True, timeout=PATIENCE)
    file = tmp_path / "mining_study.jsonl"
    lines = results.read(file)
    assert [(line["data"], line["arm"]) for line in lines] == [(name, arm) for name in ("wordnet", "flickr8k") for arm in ARMS]
    for control, mined, unfiltered in (lines[1:4], lines[5:8]):
        assert control["first_loss"] < mined["first_loss"] <= unfiltered["first_loss"]  # filtered negatives are less similar
        assert unfiltered["missing"] == 0
    assert lines[0]["query_to_text_R@10"] > 0.2  # 0.1 by chance
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert [line.split()[3] for line in done.stdout.splitlines() if "seed 0" in line] == ["unfiltered"]
    again = results.read(file)
    assert len(again) == len(lines)
    assert again[-1]["first_loss"] == lines[-1]["first_loss"]
    text = (tmp_path / "mining_study.md").read_text()
    assert "### WordNet" in text
    assert "### Flickr8k" in text
    assert str(tmp_path) not in text
    assert (tmp_path / "mining_study.png").read_bytes().startswith(b"\x89PNG")


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
