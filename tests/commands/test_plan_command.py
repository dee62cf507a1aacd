"""The command as a user meets it."""

import argparse
import json
import sys

import pytest

from megabatch_train.commands import plan


def run(*words):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.run(parser.parse_args(words))


@pytest.mark.thorough
def test_a_plan_is_printed_and_written(tmp_path, capsys):
    assert (
        run("--model", "small", "--gpus", "8xA800-80GB", "--nodes", "2", "--batch-size", "1M", "--output", str(tmp_path)) == 0
    )
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "With 1,048,576 pairs the loss does not fit; the encoder does."
    for words in ("Largest batch, pairs", "cached, GPU", "activations of a chunk", "waiting for messages", "2 × 8 × A800-80GB"):
        assert words in out
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["batch"] == 2**20
    assert record["largest"]["megabatch"]["replay"] > record["largest"]["OpenCLIP, local loss"]["host"]
    assert (tmp_path / "plan.txt").read_text() in out
    assert {path.name for path in tmp_path.iterdir()} == {"plan.txt", "plan.json", "plan.png", "plan.svg"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "tiny", "--gpus", "H200"), "megabatch plan: No such model: tiny. Possible are: small"),
        (("--model", "small", "--gpus", "8xA100"), "which could be A100-40GB or A100-80GB"),
    ],
)
def test_a_mistake_is_explained(capsys, words, message):
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "none"), "must be a number of 1 or more, such as 32768 or 1M, got 'none'"),
        (("--nodes", "0"), "must be a whole number of at least 1, got '0'"),
        (("--loss-efficiency", "1.5"), "must be a number above 0 and at most 1, got '1.5'"),
        (("--inside", "0"), "must be a number above 0, got '0'"),
        (("--between", "fast"), "must be a number above 0, got 'fast'"),
        (("--host-memory", "nan"), "must be a number above 0, got 'nan'"),
        (("--loss-efficiency", "half"), "must be a number above 0 and at most 1, got 'half'"),
    ],
)
def test_a_wrong_number_is_explained(capsys, words, message):
    with pytest.raises(SystemExit):
        run("--model", "small", "--gpus", "H200", *words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "pairs"), [("1M", 2**20), ("1.5M", 3 * 2**19), ("0.5k", 512), ("1,024k", 2**20), ("32768", 32768)]
)
def test_a_batch(text, pairs):
    assert plan._parse_batch_size(text) == pairs


@pytest.mark.thorough
def test_a_gpu_with_a_link_to_each_other_and_one_with_codes_in_its_memory(tmp_path, capsys):
    assert run("--model", "small", "--gpus", "8xMI300X") == 0
    assert "80% of 448 GB/s inside a node, 64 to one GPU, and of 50 GB/s for each GPU between nodes" in capsys.readouterr().out
    assert run("--model", "small", "--gpus", "8xMI300X", "--inside", "300") == 0
    assert "80% of 300 GB/s inside a node, and" in capsys.readouterr().out
    assert run("--model", "small", "--gpus", "L40S") == 0
    assert "94% of the memory that error correction leaves usable" in capsys.readouterr().out


@pytest.mark.thorough
def test_links_and_rates_are_taken(tmp_path):
    words = ("--model", "small", "--gpus", "4x24GB@100TFLOPS", "--nodes", "2", "--inside", "20", "--between", "1", "--one-link")
    assert run(*words, "--host-memory", "64", "--precision", "tf32", "--sharding", "fsdp", "--output", str(tmp_path)) == 0
    setup = json.loads((tmp_path / "plan.json").read_text())["setup"]
    assert (setup["gpu"]["inside"], setup["gpu"]["between"], setup["gpu"]["rail_each"]) == (20, 1, False)
    assert setup["host_memory"] == 64 * 2**30


@pytest.mark.thorough
def test_without_matplotlib_the_plan_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--model", "small", "--gpus", "H200", "--output", str(tmp_path)) == 0
    assert 'matplotlib is not installed (pip install "megabatch[train]")' in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"plan.txt", "plan.json"}
