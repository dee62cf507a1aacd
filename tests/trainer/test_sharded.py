"""Checkpoint files: safetensors that the library reads, and no pickle that a reading command could execute."""

import json
import logging
import pickle
import shutil

import pytest
import safetensors.torch
import torch

import runs
from megabatch_train import cli, settings, towers
from megabatch_train.trainer import checkpoints as sharded
from megabatch_train.trainer.checkpoints import read_weights
from megabatch_train.trainer.config import TrainConfig
from megabatch_train.trainer.run import load_checkpoint

TINY = {"width": 16, "buckets": 64}


def test_safetensors_reads_what_is_written(tmp_path):
    made = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(3, 5).bfloat16().T,
        "step": torch.tensor(7.0),
        "truth": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "long": torch.arange(6).view(2, 3),
    }
    sharded.write_tensors(tmp_path / "x.safetensors", made)
    for found in (sharded.read_tensors(tmp_path / "x.safetensors"), safetensors.torch.load_file(tmp_path / "x.safetensors")):
        assert set(found) == set(made)
        assert all(found[name].dtype == made[name].dtype and torch.equal(found[name], made[name]) for name in made)
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"x\.safetensors must be a complete safetensors file"):
        sharded.read_tensors(tmp_path / "x.safetensors")


def test_a_checkpoint_in_one_file_of_an_earlier_version_is_resumed_and_not_evaluated(tmp_path):
    made = runs.trainer(tmp_path, {"steps": 2})
    made.fit()
    folder = tmp_path / "checkpoints" / "step_00000002"
    model, average = read_weights(folder)
    state = torch.load(folder / "state.pt")
    (folder / "weights.safetensors").unlink()
    torch.save({"model": model, "average": average, **state}, folder / "state.pt")
    with pytest.raises(ValueError, match=r"must have a weights\.safetensors, got a checkpoint of an older version"):
        read_weights(folder)
    again = runs.trainer(tmp_path / "again", {"steps": 2})
    sign(folder)
    assert again.resume(folder)
    assert runs.same_bits(runs.weights(again), runs.weights(made)) == []


class Exploit:
    """A pickle that creates a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def sign(folder):
    """Writes the manifest that makes a folder look like an intact checkpoint."""
    from megabatch_train.trainer import checkpoints

    about = json.loads((folder / "checkpoint.json").read_text()) if (folder / "checkpoint.json").is_file() else {}
    (folder / "checkpoint.json").unlink(missing_ok=True)
    checkpoints.finish(folder, folder.with_name("signed"), {name: about[name] for name in about if name != "files"})
    shutil.rmtree(folder.with_name(f".deleted_{folder.name}"), ignore_errors=True)
    folder.with_name("signed").rename(folder)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A run from somebody else, with a pickle for every file that a command could look for."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"query": f"number {number}", "document": f"after {number}"}) for number in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    run, mark = tmp_path / "run", tmp_path / "executed"
    towers.save(towers.load("small", ("text", "text"), **TINY), run, step=1)
    (run / "config.toml").write_text('data = "pairs.jsonl"\nmodel = "small"\n')
    config = settings.table(TrainConfig(data="pairs.jsonl", model="small", model_options=TINY))
    planted = pickle.dumps(Exploit(mark))
    for step, names in ((2, ["state.pt", "weights.safetensors"]), (3, [".metadata", "__0_0.distcp"])):
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        for name in (*names, "generators_00000.pt"):
            (folder / name).write_bytes(planted)
        (folder / "checkpoint.json").write_text(json.dumps({"step": step, "sides": ["text", "text"], "config": config}))
        sign(folder)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "model.pt", "rows.npy"):
        (run / name).write_bytes(planted)
    for name in ("rows.json", "rows.jsonl"):
        (run / name).write_text('{"weights": 0, "sides": ["text", "text"], "side": 1}\n')
    return run, mark


@pytest.mark.parametrize("place", ["run", "run/checkpoints/step_00000002", "run/checkpoints/step_00000003"])
def test_commands_that_read_a_model_unpickle_nothing(hostile, place, capsys, monkeypatch):
    run, mark = hostile
    monkeypatch.setattr(logging.getLogger("megabatch"), "handlers", [])
    for command in (
        ["eval", place],
        ["search", place, "number 3", "--json"],
        ["search", place, "number 3", "--embeddings", "run/rows.npy"],
        ["embed", place, "--output", "made.npy"],
        ["mine", place, "--output", "mined.jsonl"],
        ["report", place],
        ["export", place, "exported", "--to", "hf"],
        ["train", "--model", f"hf:{place}", "--data", "pairs.jsonl", "--output", "new", "--no-report"],
        ["train", "--resume", place, "--output", "other", "--no-report"] if "step" in place else ["train", "--resume", place],
    ):
        cli.main([*command])
        assert not mark.exists(), command
    assert mark.name not in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints")
    assert cli.main(["eval", "run"]) == 0  # the model itself is good


def test_a_pickled_manifest_is_named_and_not_read(hostile):
    run, mark = hostile
    with pytest.raises(
        ValueError, match=r"must have a manifest\.json, got a checkpoint of an older version with a pickle \(\.metadata"
    ):
        load_checkpoint(run)
    assert not mark.exists()
