"""Parts of the scripts in benchmarks/: what they compare is comparable."""

import argparse
import sys
from pathlib import Path

import pytest
import torch


def test_losses_of_the_family_are_their_formulas():
    from family_gpu import OK, errors, verdict
    from family_losses import CASES, case

    for name in CASES:
        made = case(name, 96, 24, "cpu")
        assert verdict(*errors(made, made.ours, made.dense), "cpu") == OK, name
        broken = errors(made, lambda *leaves, loss=made.ours: loss(*leaves) + 1e-3 * leaves[0].square().sum(), made.dense)
        assert verdict(*broken, "cpu") != OK, name


def test_products_of_losses():
    from family_losses import case

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


def test_decoders_are_measured_batch_by_batch():
    from decoders_gpu import Model, rows_of
    from decoders_gpu_systems import SYSTEMS, TINY

    rows = rows_of([Model(shape) for shape in TINY])
    assert [batch for _, batch, _ in rows] == sorted(batch for _, batch, _ in rows)
    assert len(set(rows)) == len(rows) == len(TINY) * sum(min(system.batches, 2) for system in SYSTEMS.values())


@pytest.mark.thorough
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
    with pytest.raises(RuntimeError, match="every step compiles"):
        bench.step(SYSTEMS[OURS], s)


def test_padding_for_the_compiler_changes_no_embedding():
    from decoders_gpu_systems import TINY, Texts, decoder, texts

    pytest.importorskip("transformers")
    encoder = decoder(TINY[0], "cpu", half=False)[0]
    for rows in (1, 5):
        features = {name: part[:rows] for name, part in texts(5, 500, "cpu", 32)[1].items()}
        wanted, found = (Texts(encoder, multiple)(features)["sentence_embedding"] for multiple in (0, 8))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_part_of_a_step_has_the_gradient_of_the_whole():
    """Some chunks encoded, and the loss of all: what an extended time is made of."""
    from megabatch_train.bench.steps import SIZES, StepSetting, SyntheticImages, step_with_caching, tokens, towers

    size = SIZES["tiny"]
    image, text, _ = towers(size, "cpu")
    words, log_scale = tokens(12, "cpu"), torch.nn.Parameter(torch.tensor(2.0))
    pictures = SyntheticImages(12, size, "cpu")
    with torch.no_grad():
        rest = image(pictures.all()[8:]), text(words[8:])
    part = StepSetting(
        image, text, log_scale, SyntheticImages(8, size, "cpu"), words[:8], 4, "cpu", autocast=False, further=rest
    )
    value = step_with_caching(part)
    whole = StepSetting(image, text, log_scale, pictures, words, 4, "cpu", autocast=False)
    torch.testing.assert_close(value, step_with_caching(whole))


def test_paths_stay_out_of_a_command(monkeypatch, tmp_path):
    from megabatch_train.bench.measure import Record

    monkeypatch.setattr(
        sys, "argv", ["x", "--data", "/here", "--tiny", "--peers=/x", "--output=/there", "--output", "/there", "--seconds", "5"]
    )
    record = Record.of_script("some", argparse.Namespace(output=tmp_path, name="some"), 5.0)
    assert record["command"] == "python benchmarks/some.py --data FOLDER --tiny --peers FOLDER --seconds 5"


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
    records[0]["start"] = {"imports": 2.0}
    found = from_metrics([*records, {"evaluation": {}}], "")
    phases = {"data": 1.5, "forward": 4.5}
    expected = {"rate": 4.0, "steps": 3, "data_share": 0.25, "phases": phases, "peak_bytes": 5, "start": {"imports": 2.0}}
    assert found == expected
    assert from_metrics(records[:2], "ValueError: no") == {"failed": "ValueError: no"}


def test_shards_have_every_pair_once(tmp_path):
    pytest.importorskip("PIL", reason="images are made with Pillow")
    from train_speed import make_shards

    from megabatch_train.data.shards import Shards

    pattern = make_shards(tmp_path / "shards", 11, 3, None)
    data = Shards(str(tmp_path / "shards" / "*.tar"), cache_folder=tmp_path)
    assert data.groups == (4, 4, 3)
    assert {data.read(i, 1) for i in range(11)} == {f"picture {i} in words" for i in range(11)}
    assert data.read(10, 0).shape == (3, 64, 64)
    assert make_shards(tmp_path / "shards", 11, 3, Path("not read again")) == pattern
