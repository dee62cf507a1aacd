"""Stages of a run: patch dropout and its end, over ranks, and runs that continue in any stage."""

import multiprocessing
import signal

import pytest
import torch

import pictures
import runs
from helpers import PATIENCE
from megabatch_train import settings
from megabatch_train.settings import SettingsError
from megabatch_train.towers import models, tokens, tower
from megabatch_train.trainer.config import ScheduleConfig, StageConfig, TrainConfig, differences, learning_rate, resolve

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


STAGES = [
    {"steps": 3, "image_size": 16, "patch_dropout": 0.5, "lr": 2e-2},
    {"steps": 4, "batch_size": 8, "lr": "auto"},
]
TWO = {"stage": STAGES, "ema": 0.9, "checkpoint": {"every": 1, "keep": 9}, "memory": {"graphs": 0.0, "inputs": 0.0}}
CROPS = {"crops": True}


def test_each_stage_has_its_own_images_batches_and_schedule(tmp_path, name):
    made = pictures.trainer(tmp_path, name, TWO, **CROPS)
    memory, module, sizes = runs.Memory(), made.pair.first.module, {}
    made._observers._observers.append(memory)
    forward = module.forward

    def recorded(pixel_values, kept_patches=None):
        kept = None if kept_patches is None else kept_patches.shape[1]
        sizes.setdefault(made.step, set()).add((pixel_values.shape[2], kept))
        return forward(pixel_values, kept_patches)

    module.forward = recorded
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    made.fit()
    assert sizes == {step: {(16, 8) if step < 3 else (24, None)} for step in range(7)}
    assert {key: value.shape for key, value in module.state_dict().items()} == shapes
    assert [record["pairs"] for record in memory.records] == [6, 12, 18, 26, 34, 42, 50]
    schedule = ScheduleConfig()
    highest = [2e-2, 5e-6 * schedule.warm_up(4)]
    wanted = [learning_rate(schedule, highest[0], step, 3) for step in range(3)]
    wanted += [learning_rate(schedule, highest[1], step, 4) for step in range(4)]
    assert [record["learning_rate"] for record in memory.records] == pytest.approx(wanted)
    assert [record["epoch"] for record in memory.records] == [0, 1, 2, 3, 4, 5, 6]  # an epoch is one batch
    assert made.describe()["stage 1"].startswith("3 steps of 6 pairs, images of 16 pixels, 50% of the patches dropped, ")
    assert made.describe()["stage 2"].startswith("4 steps of 8 pairs, a learning rate up to 1e-05 after 2 of them")


def test_stages_by_epochs_begin_new_epochs(tmp_path, name):
    stages = [{"epochs": 1.5, "batch_size": 2}, {"epochs": 2.0, "batch_size": 4}]
    made = pictures.trainer(tmp_path, name, {"stage": stages}, **CROPS)
    assert [(stage.first, stage.stop) for stage in made.stages] == [(0, 8), (8, 12)]
    first, second = (list(stage.batches(stage.first)) for stage in made.stages)
    assert [batch.number for batch in first + second] == list(range(12))
    assert [batch.epoch for batch in first + second] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert {len(batch.indices) for batch in first} == {2}
    assert {len(batch.indices) for batch in second} == {4}
    again = list(made.stages[1].batches(10))
    assert all(torch.equal(one.indices, two.indices) for one, two in zip(again, second[2:], strict=True))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_run_continues_in_the_middle_of_every_stage(tmp_path, name, stop):
    wanted = finished(tmp_path / "run", name, TWO, **CROPS)
    made = pictures.trainer(tmp_path / "again", name, TWO, **CROPS)
    assert made.resume(tmp_path / "run" / "checkpoints" / f"step_{stop:08d}")
    made.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    assert runs.same_bits(made.average.values, wanted.average.values) == []


@pytest.mark.parametrize("killed_at", [35, 80])
@pytest.mark.thorough
def test_a_run_that_is_killed_in_a_stage_ends_with_the_same_bits(tmp_path, name, killed_at):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = finished(tmp_path / "whole", name, TWO, **CROPS)
        process = multiprocessing.get_context("spawn").Process(
            target=pictures.train, args=(tmp_path / "run", name, TWO, {**CROPS, "killed_at": killed_at})
        )
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
        made = pictures.trainer(tmp_path / "run", name, TWO, **CROPS)
        assert made.resume()
        assert (0 < made.step < 3) if killed_at == 35 else (3 < made.step < 7)
        made.fit()
        assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("model", "parallel"), [("siglip", "fsdp"), (pictures.OPEN_CLIP, "ddp")], ids=["fsdp", "ddp"])
def test_two_ranks_train_two_stages_as_one_process(pool, tmp_path, model, parallel):
    pytest.importorskip("transformers")
    pytest.importorskip("open_clip")
    name = pictures.spec(tmp_path, model)
    changes = {"stage": STAGES, "optimizer": {"eps": 1e-2}, "chunk_size": 2, "collapse": "warn"}
    wanted = runs.weights(finished(tmp_path / "one", name, changes, **CROPS))
    changes["parallel"] = parallel
    for found in pool.run(pictures.on_rank, 2, tmp_path / "two", name, changes, CROPS):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-9, msg=key)


def test_compiled_stages_train_as_plain_ones(tmp_path, name, monkeypatch):
    monkeypatch.setattr(tower, "COMPILER_OPTIONS", {"backend": "aot_eager"})
    changes = {"stage": STAGES, "optimizer": {"eps": 1e-2}}
    wanted = runs.weights(finished(tmp_path / "plain", name, changes, **CROPS))
    try:
        made = finished(tmp_path / "compiled", name, {**changes, "compile": "on"}, **CROPS)
    finally:
        torch._dynamo.reset()
    assert made._trained.compiled
    for key, value in runs.weights(made).items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-6, atol=1e-7, msg=key)


def test_stages_in_a_file_and_their_errors(tmp_path, name):
    config = resolve(
        settings.read(_write(tmp_path / "a.toml", "[[stage]]\nimage_size = 16\nepochs = 2\n[[stage]]\nsteps = 3\nlr = 'auto'"))
    )
    assert config.stage == (StageConfig(epochs=2.0, image_size=16), StageConfig(steps=3, lr="auto"))
    assert settings.build(TrainConfig, settings.table(config)) == config
    text = settings.to_toml(settings.table(config))
    assert resolve(settings.read(_write(tmp_path / "b.toml", text))) == config
    for stage, message in [
        ({"steps": 1, "size": 3}, r"stage\[0\]\.size is not a setting"),
        ({"steps": 1.5}, r"stage\[0\]\.steps must be a whole number, got 1\.5"),
        ({}, r"stage\.steps or stage\.epochs must be more than 0, and not both, got 0 and 0"),
        ({"steps": 1, "epochs": 1.0}, r"stage\.steps or stage\.epochs must be more than 0, and not both, got 1 and 1"),
        ({"steps": 1, "batch_size": 1}, r"stage\.batch_size must be at least 2, got 1"),
        ({"steps": 1, "image_size": 0}, r"stage\.image_size must be at least 1, got 0"),
        ({"steps": 1, "lr": 0.0}, r"stage\.lr must be \"auto\" or a finite number above 0"),
    ]:
        with pytest.raises(SettingsError, match=message):
            resolve({"stage": [stage]})
    with pytest.raises(SettingsError, match=r"stage must be a list of tables \(\[\[stage\]\]\), got 3"):
        resolve({"stage": 3})
    with pytest.raises(SettingsError, match=r"steps must be 0 for a run with stages, .*, got 7"):
        resolve({"stage": [{"steps": 1}], "steps": 7})
    with pytest.raises(ValueError, match=r"epochs must not be set for a run with stages, which have their own lengths, got 7"):
        resolve({"stage": [{"steps": 1}], "epochs": 7})
    with pytest.raises(SettingsError, match=r"schedule.unmask_fraction must be 0 for a run with stages"):
        resolve({"stage": [{"steps": 1}], "schedule": {"unmask_fraction": 0.5}})
    for stage, changes, message in [
        ({"image_size": 18}, {}, r"stage\[0\]\.image_size must be a multiple of the size of a patch, 4 pixels, got 18"),
        (
            {"image_size": 16},
            {"augment": False},
            r"image_size must not be set for .* with augment = false, got 16",
        ),
        ({"image_size": 16}, {"freeze": "first"}, r"stage\[0\]\.image_size must not be set with freeze = 'first', got 16"),
        ({"patch_dropout": 0.5}, {"freeze": "first"}, r"patch_dropout must be 0 with freeze = 'first'"),
        ({"patch_dropout": 1.0}, {}, r"stage\[0\]\.patch_dropout must be at least 0 and less than 1, got 1\.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            pictures.trainer(tmp_path / "run", name, {"stage": [{"steps": 1, **stage}], **changes}, **CROPS)


def test_stages_stay_the_same_in_a_run(tmp_path, name):
    finished(tmp_path, name, {"stage": [{"steps": 1}]}, **CROPS)
    with pytest.raises(ValueError, match=r"stage was \[.*'steps': 1.*\] and is \[.*'steps': 2"):
        pictures.trainer(tmp_path, name, {"stage": [{"steps": 2}]}, **CROPS).resume()


def test_settings_that_an_older_run_does_not_have_are_the_defaults():
    now = settings.table(runs.config())
    before = {key: value for key, value in now.items() if key != "stage"}
    before["optimizer"] = {key: value for key, value in now["optimizer"].items() if key != "layer_decay"}
    assert differences(before, now) == []
    assert differences(before, settings.merge(now, {"optimizer": {"layer_decay": 0.5}})) == [
        "optimizer.layer_decay was 1.0 and is 0.5"
    ]


def _write(path, text):
    path.write_text(text)
    return path


def test_settings_that_cannot_be(tmp_path, name):
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"schedule.unmask_fraction must be from 0 to 1"):
            ScheduleConfig(unmask_fraction=value)
    with pytest.raises(ValueError, match=r"schedule.unmask_fraction must be 0 for a run that drops no patches"):
        pictures.trainer(tmp_path, name, {"schedule": {"unmask_fraction": 0.5}})
    with pytest.raises(ValueError, match=r"model_options.patch_dropout must be 0 with freeze = 'first'"):
        pictures.trainer(tmp_path, name, {"freeze": "first"}, **DROPOUT)
