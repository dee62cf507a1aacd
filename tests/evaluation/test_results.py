"""Results as JSON lines: any character, half a line at the end, and a full disk."""

import json
import math

import pytest

from megabatch_train.evaluation import results


def test_results_may_hold_any_character_and_be_cut_off_in_one(tmp_path):
    path = tmp_path / "results.jsonl"
    for name in ("a\u2028b\x85c", "Curaçao"):
        results.append(path, {"name": name})
    assert [line["name"] for line in results.read(path)] == ["a\u2028b\x85c", "Curaçao"]
    path.write_bytes(path.read_bytes()[: -len(b'ao"}\n') - 1])  # in the middle of the ç
    assert len(results.read(path)) == 1
    path.write_bytes(b"")
    assert results.read(path) == []


def test_results_are_json_lines(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results.append(path, {"step": 1, "image_to_text_R@1": 0.5, "loss": math.nan})
    results.append(path, {"step": 2, "name": "Curaçao"})
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == results.read(path)
    assert results.read(path) == [{"step": 1, "image_to_text_R@1": 0.5, "loss": None}, {"step": 2, "name": "Curaçao"}]
    with path.open("a") as file:
        file.write('{"step": 3, "na')
    assert len(results.read(path)) == 2
    with path.open("a") as file:
        file.write('\n{"step": 4}\n')
    with pytest.raises(ValueError, match="line 3, must be a JSON object"):
        results.read(path)


def test_a_full_disk_leaves_no_half_line(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of a process are Unix")
    path = tmp_path / "results.jsonl"
    results.append(path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            results.append(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    results.append(path, {"step": 3})
    assert results.read(path) == [{"step": 1}, {"step": 3}]
