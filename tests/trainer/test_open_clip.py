"""An open_clip model from the command line: locked or not, and what open_clip then loads."""

import json
from pathlib import Path

import pytest
import torch

import pictures
from megabatch_train import cli, towers
from megabatch_train.commands import train
from megabatch_train.evaluation import results
from megabatch_train.trainer.checkpoints import read_weights
from megabatch_train.trainer.run import MetricsFile

pytestmark = pytest.mark.thorough


@pytest.fixture
def photos(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="images are made with Pillow")
    lines = []
    for number, colour in enumerate(("red", "green", "blue", "white", "black", "yellow")):
        image.new("RGB", (40, 30), colour).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "caption": f"something {colour}"}))
    lines.append(json.dumps({"image": "missing.png", "caption": "nothing"}))
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_list_observers", lambda args: [MetricsFile()])
    return tmp_path


def test_two_stages_with_fewer_tokens_train_evaluate_and_export(photos):
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    (photos / "model.json").write_text(json.dumps(pictures.OPEN_CLIP))
    settings = """
        data = "photos.jsonl"
        model = "open_clip:model.json"
        batch_size = 4
        collapse = "warn"
        model_options = { image_size = 32, context_length = 20, patch_dropout = 0.25 }
        checkpoint = { every = 1, keep = 9 }
        [[stage]]
        steps = 2
        image_size = 16
        patch_dropout = 0.5
        [[stage]]
        epochs = 2
        batch_size = 6
    """
    (photos / "run.toml").write_text(settings)
    assert cli.main(["train", "--config", "run.toml", "--output", "run", "--no-report"]) == 0
    assert [line["step"] for line in results.read(photos / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert cli.main(["train", "--resume", "run/checkpoints/step_00000003", "--output", "again", "--no-report"]) == 0
    weights = [read_weights(Path(f"{run}/checkpoints/step_00000004"))[0] for run in ("run", "again")]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert cli.main(["eval", "run", "--data", "photos.jsonl"]) == 0
    assert cli.main(["export", "run", "--to", "open_clip", "exported"]) == 0
    exported = open_clip.create_model("local-dir:exported")
    assert (exported.visual.image_size, exported.context_length) == ((32, 32), 20)


@pytest.mark.parametrize("lock", ["none", "first"])
def test_open_clip_trains_and_loads_the_result(photos, lock):
    open_clip = pytest.importorskip("open_clip", reason='pip install "megabatch[open-clip]"')
    model = ["--data", "photos.jsonl", "--model", "open_clip:ViT-S-32-alt", "--batch-size", "7", "--chunk-size", "3"]
    settings = [
        "--set",
        "steps=2",
        "--set",
        f"freeze={lock}",
        "--set",
        "checkpoint.keep=1",
        "--set",
        "optimizer.name=adafactor",
    ]
    assert cli.main(["train", *model, *settings, "--output", "run", "--no-report"]) == 0
    lines = results.read(photos / "run" / "metrics.jsonl")
    assert [line["pairs"] for line in lines] == [6, 12]  # the missing one is left out
    loaded = open_clip.create_model("local-dir:run")
    state = read_weights(Path("run/checkpoints/step_00000002"))[0]
    for name, value in loaded.state_dict().items():
        if name != "logit_scale":
            assert torch.equal(value, state[f"first.model.{name}"]), name
    assert loaded.logit_scale.exp().item() == pytest.approx(lines[-1]["scale"], rel=1e-5)
    torch.manual_seed(0)
    start = towers.load("open_clip:ViT-S-32-alt").first.module.model.state_dict()
    changed = {name.split(".")[0] for name, value in loaded.state_dict().items() if not torch.equal(value, start[name])}
    assert ("visual" in changed) == (lock == "none")
    assert "token_embedding" in changed
