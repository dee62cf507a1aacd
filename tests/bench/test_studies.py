"""The studies in benchmarks/."""

import json
import sys

import pytest


def test_photographs_that_are_held_out_are_not_trained_on():
    from flickr8k_data import TEST, TRAIN, Captioned, make_noise

    pictures = make_noise(48)
    train, test = (set(Captioned(pictures, 12, part).items().tolist()) for part in (TRAIN, TEST))
    assert (len(train), len(test)) == (36, 12)
    assert not train & test


@pytest.mark.thorough
def test_the_study_of_batch_sizes_continues_and_reports(tmp_path, monkeypatch):
    pytest.importorskip("wn")
    pytest.importorskip("matplotlib")
    import batch_size_study

    command = ["batch_size_study.py", "--samples", "64", "--batch-sizes", "64", "1024", "--seeds", "0", "--lr", "0.01"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    batch_size_study.main()
    written = (tmp_path / "batch_size_study.jsonl").read_text()
    assert {json.loads(line)["batch_size"] for line in written.splitlines()} == {64, 1024}
    assert "| 1,024 | 1 | 1.0e-02," in (tmp_path / "batch_size_study.md").read_text()
    batch_size_study.main()  # nothing is left to do
    assert (tmp_path / "batch_size_study.jsonl").read_text() == written


@pytest.mark.thorough
def test_the_study_of_default_settings_continues_and_reports(tmp_path, monkeypatch):
    pytest.importorskip("open_clip")
    pytest.importorskip("matplotlib")
    import defaults_study

    monkeypatch.setattr(sys, "argv", ["defaults_study.py", "--tiny", "--output", str(tmp_path)])
    defaults_study.main()
    written = (tmp_path / "defaults_study.jsonl").read_text()
    first, second = map(json.loads, written.splitlines())
    assert {first["settings"], second["settings"]} == {"defaults", "fast"}
    assert [len(line["losses"]) for line in (first, second)] == [6, 6]
    assert "| tiny | defaults | 32 |" in (tmp_path / "defaults_study.md").read_text()
    assert (tmp_path / "defaults_study.svg").is_file()
    defaults_study.main()  # nothing is left to do
    assert (tmp_path / "defaults_study.jsonl").read_text() == written
    options = ["--tiny", "--output", str(tmp_path), "--name", "tokens", "--settings", "dropped", "small", "both"]
    monkeypatch.setattr(sys, "argv", ["defaults_study.py", *options])
    defaults_study.main()
    lines = map(json.loads, (tmp_path / "tokens.jsonl").read_text().splitlines())
    assert {line["settings"]: len(line["losses"]) for line in lines} == {"dropped": 6, "small": 6, "both": 6}
    assert (tmp_path / "tokens.svg").is_file()
