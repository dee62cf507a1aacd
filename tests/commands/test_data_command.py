"""`megabatch data`, and `--json` of the commands: one document on standard output, messages on standard error."""

import json

import pytest
from PIL import Image

import recordings
from megabatch_train.cli import main
from megabatch_train.commands import data, print_json


@pytest.fixture
def photos(tmp_path):
    """Six captioned images: 0 and 1 have the same bytes and caption, 2 has their caption, and 4 is damaged."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, caption in enumerate(["a red cat", "a red cat", "a red cat", "one dog", "two", "three"]):
        color = 0 if i == 1 else 40 * i
        Image.new("RGB", (30 if i < 2 else 30 + i, 20), (color, 5, 9)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(caption)
    (folder / "4.png").write_bytes(b"\x89PNG damaged")
    return folder


def call(capsys, *words):
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("workers", [1, 3])
def test_every_number_of_the_report(photos, capsys, monkeypatch, workers):
    monkeypatch.setattr(data, "BLOCK", 2)
    status, out, _ = call(capsys, "data", photos, "--json", "--workers", workers)
    report = json.loads(out)
    assert status == data.BROKEN
    assert (report["samples"], report["broken"], report["duplicate_pairs"]) == (6, 1, 1)
    (broken,) = report["first_broken"]
    assert broken["name"] == "4.png"
    assert "not an image that can be read" in broken["reason"]
    images, texts = report["sides"]
    assert images == {
        "kind": "image",
        "duplicates": 1,
        "width": {"min": 30, "median": 32, "p95": 33, "max": 35},
        "height": {"min": 20, "median": 20, "p95": 20, "max": 20},
    }
    assert (texts["kind"], texts["duplicates"], texts["empty"]) == ("text", 2, 0)
    assert texts["words"] == {"min": 1, "median": 3, "p95": 3, "max": 3}
    assert report["pairs_per_second_of_a_worker"] > 0


def test_recordings_values_and_files(tmp_path, capsys):
    """The third recording has the bytes of the second one, and the last one is cut off."""
    for number in range(4):
        seconds = 0.2 if number in (1, 2) else 0.4
        (tmp_path / f"{number}.wav").write_bytes(recordings.wav(recordings.tone(440, seconds, rate=8000), rate=8000))
    (tmp_path / "3.wav").write_bytes((tmp_path / "3.wav").read_bytes()[:90])
    rows = [{"audio": f"{number}.wav", "caption": f"tone {number}", "shape": [number // 2]} for number in range(4)]
    (tmp_path / "tones.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = call(capsys, "data", tmp_path / "tones.jsonl", "--json")
    report = json.loads(out)
    assert (status, report["broken"]) == (data.BROKEN, 1)
    assert report["sides"][0] == {
        "kind": "audio",
        "duplicates": 1,
        "milliseconds": {"min": 200, "median": 200, "p95": 200, "max": 400},
        "samples per second": dict.fromkeys(("min", "median", "p95", "max"), 8000),
    }
    columns = ["--columns", "file=audio", "second_value=shape"]
    status, out, _ = call(capsys, "data", tmp_path / "tones.jsonl", *columns, "--json")
    first, second = json.loads(out)["sides"]
    assert (status, first["kind"], first["duplicates"], first["bytes"]["min"]) == (0, "file", 1, 90)
    assert second == {"kind": "value", "duplicates": 2}
    assert "recordings, 1 duplicates; milliseconds 200 to 400" in call(capsys, "data", tmp_path / "tones.jsonl")[1]


def test_sides_with_texts_and_images(photos, capsys):
    rows = [
        {"query": "a", "document_image": "0.png"},
        {"query": "b", "document": "two words", "document_image": "0.png"},
        {"query": "c", "document": "two words"},
        {"query": "d", "document": "two words"},
    ]
    (photos / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = call(capsys, "data", photos / "pairs.jsonl", "--json")
    side = json.loads(out)["sides"][1]
    assert (status, side["kind"], side["duplicates"]) == (0, "image+text", 1)
    assert [side[name]["max"] for name in ("characters", "words", "width", "height")] == [9, 2, 30, 20]
    assert [side[name]["min"] for name in ("characters", "words", "width", "height")] == [0] * 4


def test_the_report_in_words(photos, capsys):
    status, out, _ = call(capsys, "data", photos)
    assert status == data.BROKEN
    assert out.startswith("samples:     6, 1 of them broken\n             sample 4, 4.png: ")
    assert "texts, 2 duplicates" in out
    (photos / "4.png").unlink()
    (photos / "4.txt").unlink()
    status, out, _ = call(capsys, "data", photos)
    assert status == 0
    assert "samples:     5, 0 of them broken" in out


def test_texts_by_columns(tmp_path, capsys):
    lines = [{"a": f"word {i % 3}", "b": "é" * (i + 1)} for i in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    status, out, _ = call(capsys, "data", tmp_path / "pairs.jsonl", "--columns", "query=a", "document=b", "--json")
    report = json.loads(out)
    assert (status, report["broken"]) == (0, 0)
    assert [side["duplicates"] for side in report["sides"]] == [2, 0]
    assert report["sides"][1]["characters"] == {"min": 1, "median": 3, "p95": 4, "max": 5}


def test_a_missing_file_is_an_error_on_standard_error(tmp_path, capsys):
    status, out, err = call(capsys, "data", tmp_path / "missing.csv", "--json")
    assert status == 1
    assert not out
    assert err.startswith("megabatch data: ")


def test_numbers_that_json_lacks_are_null(capsys):
    print_json({"loss": float("nan"), "parts": [float("inf"), 1.5, {"é": -float("inf")}], "path": "a\x1bb"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"loss": None, "parts": [None, 1.5, {"é": None}], "path": "a\x1bb"}
    assert out.isascii()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["info"], lambda value: set(value) == {"machine", "backends", "extras", "rules"} and len(value["rules"]) > 4),
        (["config", "optimizer.lr"], lambda value: value[-1]["setting"] == "optimizer.lr" and value[-1]["value"] == "auto"),
        (["plan", "--model", "1M:4x64", "--gpus", "2xH100"], lambda value: value["parameters"] > 0),
    ],
)
def test_json_of_commands_without_data(capsys, words, shown):
    status, out, err = call(capsys, *words, "--json")
    assert (status, err) == (0, "")
    assert shown(json.loads(out))


def test_json_of_an_evaluation_and_a_plan_that_write_files(tmp_path, capsys):
    lines = [{"query": f"word {i}", "document": f"a word {i}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file = tmp_path / "result.jsonl"
    status, out, err = call(capsys, "eval", "small", "--data", tmp_path / "pairs.jsonl", "--json", "--output", file)
    assert status == 0, err
    value = json.loads(out)
    assert value["num_samples"] == 8
    assert {key: value[key] for key in json.loads(file.read_text())} == json.loads(file.read_text())
    assert "appended the result to" in err
    status, out, err = call(capsys, "plan", "--model", "1M:4x64", "--gpus", "2xH100", "--json", "--output", tmp_path / "plan")
    assert json.loads(out) == json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert "Written to" in err
