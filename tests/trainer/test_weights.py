"""The model of a run that has not come to its end, from its checkpoints."""

import pytest
import torch

import runs
from megabatch import towers
from megabatch.trainer.weights import load_checkpoint


@pytest.fixture(autouse=True)
def tiny_by_name(monkeypatch):
    load = towers.load
    monkeypatch.setattr(
        towers, "load", lambda spec, *more, **options: runs.tiny() if spec == "tiny" else load(spec, *more, **options)
    )


@pytest.mark.parametrize("changes", [{}, {"ema": 0.5}, {"loss": {"name": "siglip"}}])
def test_a_checkpoint_has_the_model_that_the_run_saves(tmp_path, changes):
    made = runs.trainer(tmp_path, changes)
    made.fit()
    pair, step = load_checkpoint(tmp_path)
    assert step == 7
    saved = towers.saved._read(tmp_path / "model.safetensors")
    for side, tower in zip(("first", "second"), pair.towers, strict=True):
        assert not tower.module.training
        for name, value in tower.module.state_dict().items():
            assert torch.equal(value, saved[1][f"{side}.{name}"]), name
    assert pair.logit_scale == pytest.approx(saved[0]["logit_scale"], rel=1e-12)
    assert pair.logit_bias == saved[0]["logit_bias"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step_00000006")[1] == 6


def test_a_checkpoint_in_parts_too(pool, tmp_path):
    found = pool.run(runs.on_rank, 2, tmp_path, {"parallel": "fsdp"}, {})[0]
    pair, _ = load_checkpoint(tmp_path)
    for side, tower in enumerate(pair.towers):
        for name, value in tower.module.state_dict().items():
            assert torch.equal(value, found[f"{side}.{name}"]), name


def test_a_run_that_has_saved_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors and no checkpoint: the run has saved nothing yet"):
        load_checkpoint(tmp_path)
