"""Stages of a run: patch dropout and its end, over ranks, and runs that continue in any stage."""

import pytest
import torch

import pictures
import runs
from megabatch_train.towers import models, tokens
from megabatch_train.trainer.config import ScheduleConfig

DROPOUT = {"patch_dropout": 0.5}


@pytest.fixture
def name(tmp_path):
    pytest.importorskip("transformers")
    return pictures.spec(tmp_path, "siglip")


def finished(folder, name, changes, **options):
    made = pictures.trainer(folder, name, changes, **options)
    made.fit()
    return made


def watch(made):
    """The number of patches that the images of each step keep; None for all."""
    seen = {}
    module = made.pair.first.module
    forward = module.forward

    def recorded(pixel_values, kept_patches=None):
        if module.training:
            seen.setdefault(made.step, set()).add(None if kept_patches is None else kept_patches.shape[1])
        return forward(pixel_values, kept_patches)

    module.forward = recorded
    return seen


def test_the_last_steps_keep_all_patches(tmp_path, name):
    schedule = {"unmask_fraction": 0.4, "warmup_steps": 2}
    made = pictures.trainer(tmp_path / "run", name, {"schedule": schedule}, **DROPOUT)
    seen = watch(made)
    memory = runs.Memory()
    made._observers._observers.append(memory)
    made.fit()
    half = tokens.count_kept(pictures.PATCHES, 0.5)
    assert seen == {0: {half}, 1: {half}, 2: {half}, 3: {None}, 4: {None}}
    whole = finished(tmp_path / "whole", name, {"schedule": {"warmup_steps": 2}}, **DROPOUT)
    rates = [whole.stages[0].learning_rate(step) for step in range(5)]
    assert [record["learning_rate"] for record in memory.records] == rates  # one schedule for both parts
    assert [stage.stop for stage in made.stages] == [3, 5]


def test_chunks_change_nothing_and_dropout_does(tmp_path, name):
    wanted = runs.weights(finished(tmp_path / "whole", name, {"chunk_size": 6}, **DROPOUT))
    found = runs.weights(finished(tmp_path / "parts", name, {"chunk_size": 2}, **DROPOUT))
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7, msg=key)  # Adam divides by small gradients
    without = runs.weights(finished(tmp_path / "without", name, {"chunk_size": 6}))
    difference = max((without[key] - wanted[key]).abs().max() for key in wanted)
    assert difference > 1e-3


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_two_ranks_train_as_one_process(pool, tmp_path, name, parallel):
    changes = {"schedule": {"unmask_fraction": 0.4}, "optimizer": {"eps": 1e-2}, "chunk_size": 2}
    wanted = runs.weights(finished(tmp_path / "one", name, changes, **DROPOUT))
    changes["parallel"] = parallel
    for found in pool.run(pictures.on_rank, 2, tmp_path / "two", name, changes, DROPOUT):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10, msg=key)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_run_continues_in_every_stage_with_the_same_bits(tmp_path, name, stop):
    changes = {"schedule": {"unmask_fraction": 0.4}, "checkpoint": {"every": 1, "keep": 9}, "ema": 0.9}
    wanted = finished(tmp_path / "run", name, changes, **DROPOUT)
    made = pictures.trainer(tmp_path / "again", name, changes, **DROPOUT)
    assert made.resume(tmp_path / "run" / "checkpoints" / f"step_{stop:08d}")
    assert made.step == stop
    made.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    assert runs.same_bits(made.average.values, wanted.average.values) == []


@pytest.mark.parametrize("optimizer", [{"name": "muon"}, {"layer_decay": 0.5}, {"name": "muon", "layer_decay": 0.5}])
def test_optimizers_continue_with_the_same_bits(tmp_path, name, optimizer):
    if "name" in optimizer:
        pytest.importorskip("timm", reason="Muon comes with timm")
    changes = {"optimizer": optimizer, "checkpoint": {"every": 1, "keep": 9}, "schedule": {"name": "wsd"}}
    wanted = finished(tmp_path / "run", name, changes)
    made = pictures.trainer(tmp_path / "again", name, changes)
    assert made.resume(tmp_path / "run" / "checkpoints" / "step_00000002")
    made.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    changes["optimizer"] = {**optimizer, "layer_decay": 0.9}
    with pytest.raises(ValueError, match=r"optimizer.layer_decay was (0.5|1.0) and is 0.9"):
        pictures.trainer(tmp_path / "run", name, changes).resume()


def test_the_first_step_is_smaller_for_earlier_layers(tmp_path, name):
    optimizer = {"lr": 0.01, "layer_decay": 0.5, "weight_decay": 0.0, "eps": 0.0}
    changes = {"optimizer": optimizer, "steps": 1, "schedule": {"warmup_steps": 0}}
    made = pictures.trainer(tmp_path, name, changes)
    before = runs.weights(made)
    made.fit()
    after = runs.weights(made)
    vision = "0.model.encoder.layers"
    for key, scale in {
        "0.head.weight": 1.0,
        f"{vision}.1.mlp.fc1.weight": 0.5,
        f"{vision}.0.mlp.fc1.weight": 0.25,
        "0.model.embeddings.patch_embedding.weight": 0.125,
        "1.model.encoder.layer.0.attention.output.dense.weight": 0.25,
    }.items():
        # The first step of Adam has the size of the learning rate.
        torch.testing.assert_close((after[key] - before[key]).abs(), torch.full_like(after[key], 0.01 * scale), msg=key)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_with_muon_as_one_process(pool, tmp_path, name, parallel):
    pytest.importorskip("timm", reason="Muon comes with timm")
    changes = {"optimizer": {"name": "muon", "lr": 0.01, "layer_decay": 0.8, "eps": 1e-2}, "steps": 2}
    changes["schedule"] = {"warmup_steps": 0, "name": "constant"}
    with pictures.exact_muon():
        wanted = runs.weights(finished(tmp_path / "one", name, changes))
    for found in pool.run(pictures.on_rank, 2, tmp_path / "two", name, changes | {"parallel": parallel}, {}):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-8, msg=key)


def test_evaluation_and_saved_weights_keep_all_patches(tmp_path, name):
    made = pictures.trainer(tmp_path / "run", name, {"steps": 1}, **DROPOUT)
    made.validation = {"": pictures.Pictures()}
    seen = watch(made)
    assert made.fit()["num_samples"] == 10
    assert seen == {0: {18}}
    loaded = models.load_saved(tmp_path / "run")
    assert loaded.options["patch_dropout"] == 0.5


def test_settings_that_cannot_be(tmp_path, name):
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"schedule.unmask_fraction must be from 0 to 1"):
            ScheduleConfig(unmask_fraction=value)
    with pytest.raises(ValueError, match=r"schedule.unmask_fraction must be 0 for a run that drops no patches"):
        pictures.trainer(tmp_path, name, {"schedule": {"unmask_fraction": 0.5}})
    with pytest.raises(ValueError, match=r"model_options.patch_dropout must be 0 with freeze = 'first'"):
        pictures.trainer(tmp_path, name, {"freeze": "first"}, **DROPOUT)
